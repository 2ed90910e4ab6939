"""One rank of `hsdp train`: take the place that a launcher gave it, train, and end with one line when that fails.

Holds: what the environment says about this rank (torchrun's variables, or those of a Slurm job step), the process
group, and the report of an error. Must not know: how to launch ranks, or what the user typed.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT  ------+
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_*_NODELIST --+--> Place --> process group --> train()

Exit status: 0, 2 for bad input, 1 for anything else.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hsdp.options import TrainOptions
from hsdp.train import together, train

BAD_INPUT = 2  # exit status
FAILED = 1
GROUP_TIMEOUT_S = 300  # for ranks to find each other, which on many hosts do not start at one moment
_PEER_GRACE_S = 2.0
_LOST_PEER = re.compile(r"(closed|reset) by peer|Broken pipe|Connection refused|remote process exited|recvValue failed")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


# ---- the place of this rank ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and where rank 0 listens."""

    rank: int
    world: int
    local_rank: int
    master_addr: str
    master_port: int

    def variables(self) -> dict[str, str]:
        """The place as the variables that torch and hsdp read."""
        values = (self.rank, self.world, self.local_rank, self.master_addr, self.master_port)
        return dict(zip(_VARIABLES, map(str, values), strict=True))


def place_from_environment(environment: Mapping[str, str]) -> Place | None:
    """The place that a launcher put into `environment`, or None where no launcher did. Pure.

    Raises:
        ValueError: some of the variables are missing or no numbers.
    """
    values = {name: environment[name] for name in _VARIABLES if name in environment}
    if "RANK" not in values and "WORLD_SIZE" not in values:
        slurm = _slurm_variables(environment)
        if slurm is None:
            return None
        values = {**slurm, **values}
    missing = [name for name in _VARIABLES if name not in values]
    if missing:
        raise ValueError(
            f"the environment has {', '.join(sorted(values))} but not {', '.join(missing)}: a launcher sets all five; "
            "unset them to let hsdp train launch local ranks itself"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not values[name].isdecimal():
            raise ValueError(f"the environment has {name}={values[name]!r}, which is not a whole number")
        numbers[name] = int(values[name])
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ValueError(f"the environment has RANK={values['RANK']}, outside of WORLD_SIZE={values['WORLD_SIZE']}")
    return Place(
        numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], values["MASTER_ADDR"], numbers["MASTER_PORT"]
    )


def _slurm_variables(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The usual variables from those of a Slurm job step with several tasks, or None outside of one."""
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= set(environment):
        return None
    # sbatch sets the same three for its script, which is one process of no step: it has a job but no step.
    in_script = "SLURM_JOB_ID" in environment and not {"SLURM_STEP_ID", "SLURM_STEPID"} & set(environment)
    num_tasks = environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"])
    if in_script or num_tasks == "1":
        return None
    values = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
    }
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if name in environment:
            values["MASTER_ADDR"] = first_host(environment[name])
            break
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    values["MASTER_PORT"] = str(20000 + (job * 7 + step) % 20000)
    return values


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[007-012,20],login1"), first_host("a,b"), first_host("rack2-[3]-n[10-11]")
    ('gpu007', 'a', 'rack2-3-n10')
    """
    depth, end = 0, len(nodelist)
    for index, character in enumerate(nodelist):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            end = index
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodelist[:end])


# ---- running ---------------------------------------------------------------------------------------------------------


def run_rank(place: Place, device_type: str, make_options: Callable[[], TrainOptions]) -> None:
    """Join the other ranks, agree on the options, train.

    Args:
        device_type: "cpu" or the accelerator's type.
        make_options: gives this rank's options, or raises ValueError; a mistake of one rank is one of all.
    """
    os.environ.update(place.variables())
    backend = "gloo"
    if device_type != "cpu":
        torch.accelerator.set_device_index(place.local_rank % torch.accelerator.device_count())
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
    dist.init_process_group(backend, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    options = together(make_options)
    train(options)
    dist.barrier()  # nobody leaves while another one still needs it
    dist.destroy_process_group()


def report(error: Exception, rank: int, out: str) -> tuple[int, str]:
    """Write down why this rank ends, for torch's launcher and for people; returns (exit status, one line).

    Call it while the error is being handled: the traceback is that of the current exception.
    """
    text = " ".join(str(error).split())
    if is_bad_input(error):
        get_error_handler().record_exception(error)
        return BAD_INPUT, text
    if any(_LOST_PEER.search(str(link)) for link in _chain(error)):
        time.sleep(_PEER_GRACE_S)  # the rank that went first is the one to be reported, and it ends this one
    get_error_handler().record_exception(error)
    path = Path(out, "errors", f"rank-{rank}.txt")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
        where = f" [full traceback: {path}]"
    except OSError:
        where = ""
    return FAILED, f"{type(error).__name__}: {text}{where}"


def is_bad_input(error: BaseException) -> bool:
    """Whether it is the user's mistake: a ValueError that hsdp itself raised, not one from the depth of torch."""
    frames = traceback.extract_tb(error.__traceback__)
    return type(error) is ValueError and bool(frames) and Path(frames[-1].filename).parent == Path(__file__).parent


def _chain(error: BaseException | None) -> list[BaseException]:
    links = []
    while error is not None:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def leave(status: int) -> None:
    """End this process at once: after an error, tearing down process groups may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- a rank that hsdp train launched ---------------------------------------------------------------------------------


def main(path: str) -> None:
    """The whole life of a launched rank.

    Args:
        path: JSON file {"launcher_pid": ..., "options": ...}.
    """
    task = json.loads(Path(path).read_text())
    _end_with(task["launcher_pid"])
    options = TrainOptions.from_json(task["options"])
    place = place_from_environment(os.environ)
    assert place is not None, "the launcher sets the variables"
    try:
        run_rank(place, options.device, lambda: options)
    except Exception as error:
        leave(report(error, place.rank, options.out)[0])  # the launcher prints it


def _end_with(launcher_pid: int) -> None:
    """Watch the launcher: a rank must not outlive one that was killed and could not end it."""

    def watch() -> None:
        while os.getppid() == launcher_pid:
            time.sleep(0.5)
        os._exit(FAILED)

    threading.Thread(target=watch, name="watch the launcher", daemon=True).start()
