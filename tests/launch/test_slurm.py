"""examples/launch/slurm.sbatch: as a job of a real Slurm where one is installed, and with stand-ins for it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import TRAIN, Trained
from namespaces import network, why_not
from slurm import SBATCH, Cluster, Job, no_slurm, real_slurm, stand_in_slurm

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SHOW = """
import os, socket
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
port, threads = int(os.environ["MASTER_PORT"]), os.environ["OMP_NUM_THREADS"]
line = " ".join(os.environ[name] for name in names)
print(f"task {line} on {socket.gethostname()}, port {'ok' if 10000 <= port < 30000 else port}\\n", end="", flush=True)
"""


@pytest.fixture(scope="module", params=["stand-in", "real"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "real" and no_slurm() is not None:
        pytest.skip(str(no_slurm()))
    with tempfile.TemporaryDirectory(prefix="hsdp-slurm-") as folder, network(2) as net:
        if request.param == "real":
            with real_slurm(net, Path(folder)) as run:
                yield run
        else:
            yield stand_in_slurm(net, Path(folder))


@pytest.mark.parametrize("distribution", ["block", "cyclic"])
@pytest.mark.parametrize("counts", [(2, 2), (2, 1)], ids=["equal", "unequal"])
def test_each_task_learns_its_place(
    cluster: Cluster, distribution: str, counts: tuple[int, int], tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    job = Job(distribution, counts)
    expected = {
        f"task {task} {local} {sum(counts)} {len(tasks)} host0 on host{host}, port ok"
        for host, tasks in enumerate(job.tasks())
        for local, task in enumerate(tasks)
    }
    text = cluster(job, [str(tmp_path / "show.py")])
    assert set(re.findall(r"^task .*", text, re.MULTILINE)) == expected, text


def test_training_with_cyclic_numbering(cluster: Cluster) -> None:
    trained = Trained.of(cluster(Job("cyclic", (2, 2)), TRAIN))
    trained.check(
        {"host0": [0, 2], "host1": [1, 3]}, sizes="2 x shard 2, on 2 hosts", sharing="ranks 0, 2", twins="ranks 0, 1"
    )


def test_a_task_that_fails_is_the_job_s_failure(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("import os, sys; sys.exit(os.environ['RANK'] == '3')")
    with pytest.raises(AssertionError, match=r"exit status 1\]|JobState=FAILED"):
        cluster(Job("block", (2, 2)), [str(tmp_path / "fail.py")])


def test_options_are_sbatch_s() -> None:
    lines = SBATCH.read_text().splitlines()
    options = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    given = dict(option.removeprefix("--").split("=") for option in options)
    assert set(given) == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "distribution", "time", "output"}
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    last_option = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH "))
    assert last_option < first_command  # sbatch reads no option after the first command
