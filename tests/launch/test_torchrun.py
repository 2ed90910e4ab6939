"""examples/launch/torchrun.sh on several hosts, and ranks that were started without any launcher."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from launched import LAUNCH, ROOT, TRAIN, Trained, environment, finish
from namespaces import Network, network, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SCRIPT = ["bash", str(LAUNCH / "torchrun.sh"), *TRAIN]


def start_everywhere(net: Network, **variables: str) -> list[subprocess.Popen[str]]:
    """The script on each host, with NODE_RANK={number} filled in."""
    return [
        net.start(host, SCRIPT, environment(**{name: text.format(number=number) for name, text in variables.items()}))
        for number, host in enumerate(net.hosts)
    ]


def test_numbered_hosts_whose_names_resolve_to_loopback() -> None:
    """As Debian sets them up: gloo would listen on 127.0.1.1, but IFACE names the interface between the hosts."""
    with network(2, own_address="127.0.1.1") as net:
        variables = {"HEAD": net.hosts[0].address, "NNODES": "2", "NODE_RANK": "{number}", "NPROC": "2"}
        trained = Trained.of(finish(start_everywhere(net, **variables, IFACE="eth0")))
    trained.check(
        {"host0": [0, 1], "host1": [2, 3]}, sizes="2 x shard 2, on 2 hosts", sharing="ranks 0, 1", twins="ranks 0, 2"
    )


def test_three_hosts_that_number_themselves() -> None:
    with network(3) as net:
        trained = Trained.of(finish(start_everywhere(net, HEAD="host0", NNODES="3", NPROC="2")))
    pairs = sorted(trained.ranks_by_host().values())  # which host is first is up to the rendezvous
    assert pairs == [[0, 1], [2, 3], [4, 5]], trained.text
    trained.check(trained.ranks_by_host(), sizes="3 x shard 2, on 3 hosts", sharing="ranks 0, 1", twins="ranks 0, 2, 4")


def test_ranks_dealt_to_hosts_in_turn() -> None:
    """Rows [0, 2] and [1, 3]: the hosts decide, not the numbers."""
    with network(2) as net:
        everywhere = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        processes = [
            net.start(
                net.hosts[rank % 2], [sys.executable, *TRAIN],
                environment(**everywhere, RANK=str(rank), LOCAL_RANK=str(rank // 2)),
            )
            for rank in range(4)
        ]  # fmt: skip
        trained = Trained.of(finish(processes))
    trained.check(
        {"host0": [0, 2], "host1": [1, 3]}, sizes="2 x shard 2, on 2 hosts", sharing="ranks 0, 2", twins="ranks 0, 1"
    )
    assert "LOCAL_WORLD_SIZE" not in trained.text  # nothing to warn of
    quoted = re.search(r"^HSDP over .*\n(  .*\n)+", (ROOT / "docs" / "launch.md").read_text(), re.MULTILINE)
    assert quoted is not None
    assert quoted[0] in trained.text


def test_what_is_missing_is_said_at_once() -> None:
    run = subprocess.run(SCRIPT, env={"PATH": environment()["PATH"]}, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "HEAD: one of the hosts" in run.stderr


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_bash(name: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n", str(LAUNCH / name)]).returncode == 0
