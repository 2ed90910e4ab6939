"""Stands in for `scontrol show hostnames LIST` and `srun [--options] COMMAND...` where there is no Slurm.

    python stand_in_slurm.py scontrol show hostnames 'host[0-1]'
    python stand_in_slurm.py srun --kill-on-bad-exit=1 bash -c ...

STAND_IN_TASKS has, as JSON, for each host of the job the command line that gets onto it and the numbers of its tasks,
in the order of SLURM_LOCALID. Tasks get the variables that srun(1) describes under OUTPUT ENVIRONMENT VARIABLES; the
same tests compare them with what Slurm 22.05 sets, where that is installed. Python's standard library only.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import groupby


def hostnames(nodelist: str) -> list[str]:
    """host[0-2] -> host0, host1, host2; that form is all that the tests use."""
    found = re.fullmatch(r"(\w+)\[(\d+)-(\d+)\]", nodelist)
    if not found:
        return [nodelist]
    return [f"{found[1]}{number}" for number in range(int(found[2]), int(found[3]) + 1)]


def tasks_per_node(counts: list[int]) -> str:
    """[2, 2, 1] -> "2(x2),1"."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def srun(command: list[str]) -> int:
    hosts = json.loads(os.environ["STAND_IN_TASKS"])
    world = sum(len(tasks) for _, tasks in hosts)
    common = {
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(world),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node([len(tasks) for _, tasks in hosts]),
    }
    processes = []
    for node, (enter, tasks) in enumerate(hosts):
        here = {"SLURM_NODEID": str(node), "SLURM_GTIDS": ",".join(map(str, tasks))}
        for local, task in enumerate(tasks):
            own = {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(local)}
            processes.append(subprocess.Popen([*enter, *command], env={**os.environ, **common, **here, **own}))
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program == "scontrol":
        assert arguments[:2] == ["show", "hostnames"], arguments
        print(*hostnames(arguments[2]), sep="\n")
    else:
        while arguments[0].startswith("--"):
            del arguments[0]
        sys.exit(srun(arguments))
