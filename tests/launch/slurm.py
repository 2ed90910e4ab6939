"""Slurm for tests, on the hosts of a network: the real one where it is installed, and a stand-in that needs nothing.

    with real_slurm(net, folder) as cluster:         # munge-free slurmctld on host0, slurmd on every host
        text = cluster(Job("block", counts=(2, 2)), ["examples/train.py"])

A cluster is a function: it runs examples/launch/slurm.sbatch as a job and returns what the job printed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launched import LAUNCH, ROOT, TIMEOUT_S, environment, finish
from namespaces import Network

SBATCH = LAUNCH / "slurm.sbatch"
START_S = 60.0
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol")
_CONF = """
ClusterName=hsdp
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
NodeName=host[0-{last}] CPUs=4 RealMemory=100 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Job:
    """distribution: "block" or "cyclic"; counts: tasks by host."""

    distribution: str
    counts: tuple[int, ...]

    def tasks(self) -> list[list[int]]:
        """By host, the numbers of its tasks."""
        places = [(host, local) for host, count in enumerate(self.counts) for local in range(count)]
        if self.distribution == "cyclic":
            places.sort(key=lambda place: (place[1], place[0]))
        return [[task for task, place in enumerate(places) if place[0] == host] for host in range(len(self.counts))]


Cluster = Callable[[Job, Sequence[str]], str]


def no_slurm() -> str | None:
    """Why there is no real Slurm here, or None."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"Slurm is not installed (no {', '.join(missing)})" if missing else None


@contextlib.contextmanager
def real_slurm(net: Network, folder: Path) -> Iterator[Cluster]:
    (folder / "state").mkdir()
    for host in net.hosts:
        (folder / f"spool-{host.name}").mkdir()
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, last=len(net.hosts) - 1))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # it asks for one unused too
    variables = environment(SLURM_CONF=str(folder / "slurm.conf"))
    head = net.hosts[0]
    with contextlib.ExitStack() as stack:
        for host, program in [(head, "slurmctld"), *((host, "slurmd") for host in net.hosts)]:
            argv = ["sh", "-c", f"exec {program} -D >/dev/null 2>&1"]  # it has a log file
            process = stack.enter_context(net.start(host, argv, variables))
            stack.callback(process.kill)

        deadline = time.monotonic() + START_S
        idle = f"idle {len(net.hosts)}"
        while (state := net.start(head, ["sinfo", "-h", "-o", "%t %D"], variables).communicate()[0].strip()) != idle:
            assert time.monotonic() < deadline, f"Slurm's hosts are {state!r}, not {idle!r}, after {START_S:g} s"
            time.sleep(0.2)

        numbers = itertools.count()

        def run(job: Job, arguments: Sequence[str]) -> str:
            log = folder / f"job-{next(numbers)}.log"
            size = [f"--nodes={len(job.counts)}", f"--ntasks={sum(job.counts)}"]
            options = [
                f"--ntasks-per-node={max(job.counts)}",
                "--cpus-per-task=1",
                f"--distribution={job.distribution}",
            ]
            where = [f"--chdir={ROOT}", f"--output={log}"]
            argv = ["sbatch", "--parsable", *where, *size, *options, str(SBATCH), *arguments]
            said = net.start(head, argv, variables).communicate()[0].strip()
            assert said.isdecimal(), said
            deadline = time.monotonic() + TIMEOUT_S
            state = ""
            while not re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|NODE_FAIL)", state):
                assert time.monotonic() < deadline, f"the job is not done within {TIMEOUT_S:g} s:\n{state}"
                time.sleep(0.2)
                state = net.start(head, ["scontrol", "show", "job", said], variables).communicate()[0]
            text = log.read_text() if log.exists() else ""
            assert "JobState=COMPLETED" in state, f"{text}{state}"
            return text

        yield run


def stand_in_slurm(net: Network, folder: Path) -> Cluster:
    """Runs the batch script with bash, and `srun` and `scontrol` from stand_in_slurm.py first in PATH."""
    for program in ("srun", "scontrol"):
        command = [sys.executable, str(Path(__file__).with_name("stand_in_slurm.py")), program]
        (folder / program).write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        (folder / program).chmod(0o755)

    def run(job: Job, arguments: Sequence[str]) -> str:
        tasks = [(net.command(host, []), mine) for host, mine in zip(net.hosts, job.tasks(), strict=True)]
        variables = environment(
            SLURM_JOB_ID="4711",
            SLURM_JOB_NODELIST=f"host[0-{len(net.hosts) - 1}]",
            SLURM_NTASKS_PER_NODE=str(max(job.counts)),
            SLURM_CPUS_PER_TASK="1",
            STAND_IN_TASKS=json.dumps(tasks),
        )
        variables["PATH"] = f"{folder}:{variables['PATH']}"
        argv = ["bash", str(SBATCH), *arguments]
        return finish([subprocess.Popen(
            argv, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )])  # fmt: skip

    return run
