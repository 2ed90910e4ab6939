"""examples/launch/ray_train.py with a Ray that it starts itself, in a network of its own."""

from __future__ import annotations

import importlib.util
import sys
import tempfile

import pytest
from launched import LAUNCH, TRAIN, Trained, environment, finish
from namespaces import network, why_not

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'"
    ),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def test_four_ranks_train() -> None:
    # Everything Ray writes goes into the folder, which has a short name for the sockets in it.
    with tempfile.TemporaryDirectory(prefix="hsdp-ray-", dir="/tmp") as folder, network(1) as net:
        variables = environment(
            HOME=folder,
            RAY_TMPDIR=folder,
            RAY_USAGE_STATS_ENABLED="0",
            RAY_DEDUP_LOGS="0",
            RAY_OVERRIDE_RESOURCES='{"CPU": 4}',  # however many there are
            RAY_raylet_start_wait_time_s="100",  # a busy machine is slow, not broken
            RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="100",
        )
        argv = [
            sys.executable,
            str(LAUNCH / "ray_train.py"),
            "--workers=4",
            f"--steps={TRAIN[1]}",
            f"--storage={folder}",
        ]
        trained = Trained.of(finish([net.start(net.hosts[0], argv, variables)], timeout_s=240))
    text = "\n".join(
        line.partition("\x1b[0m ")[2] or line for line in trained.text.splitlines()
    )  # without Ray's prefix
    Trained(trained.hosts, trained.losses, text).check(
        {"host0": [0, 1, 2, 3]}, sizes="1 x shard 4, on 1 host", sharing="ranks 0-3", twins="rank 0"
    )
