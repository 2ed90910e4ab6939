"""Run one function on N rank processes (gloo, CPU) and bring the results, or every rank's error, back to the test.

    results = run_ranks(4, fn, 1.5, timeout_s=60)      # fn(rank, world, 1.5) in each rank; [result of rank 0, 1, 2, 3]

`fn` is a module-level function. Importing torch takes seconds, so one *template* process imports it once and every
rank of every run is a new fork of that template: start-up costs milliseconds and no state can leak between runs.

    pytest -- template (torch imported, one thread, runs no torch code)
                 |-- rank 0 --\
                 |-- rank 1 ---+-- default gloo group of exactly N ranks; its store lives in the pytest process
                 `-- rank 2 --/

What a rank prints is printed again by the parent with the rank in front, so `capsys` and pytest's report have it.
A rank ends with its run: one that does not answer is asked where it is, then killed; and all end themselves when the
pytest process is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness_rank import SHOW_STACKS, Job, Outcome, dump, load, rank_main

MAX_WORLD = 8
# What ranks with a default group train on; a fixture sets another one for the tests that it runs once more there.
device_type = "cpu"
# Imported once in the template; whatever is missing here is imported again by each rank that needs it.
_PRELOAD = [
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch._dynamo",
    "torch.testing",
    "torch.utils.checkpoint",
]


class RankError(Exception):
    """At least one rank failed. `errors` maps each failed rank to (exception type name, message), first one first."""

    def __init__(self, text: str, errors: dict[int, tuple[str, str]]) -> None:
        super().__init__(text)
        self.errors = errors


@dataclass
class _Rank:
    process: BaseProcess
    connection: multiprocessing.connection.Connection
    log: Path
    outcome: Outcome | None = None


@dataclass
class _Run:
    ranks: list[_Rank] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # in the order in which the failures arrived


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120,
    group_timeout_s: float = 60,
    grace_s: float = 10,
    fresh: bool = False,
    init_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world, *args, **kwargs)` in `world` processes and return the results in rank order.

    timeout_s        for the whole run; ranks that have not answered by then are killed
    group_timeout_s  timeout of the default gloo process group
    grace_s          after the first failure, and for ending after the results: how long to wait for the other ranks
    fresh            new interpreters instead of forks of the template (slow; for tests of what an import does)
    init_group       False leaves the default group to `fn`; the variables of a launcher are set, so "env://" works

    Raises RankError with every failed rank and its traceback; ValueError for a wrong call.
    """
    _check_call(world, fn)
    arguments = dump((args, kwargs))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    context = _context(fresh)
    run = _Run()
    with tempfile.TemporaryDirectory(prefix="hsdp-ranks-") as folder:
        try:
            for rank in range(world):
                job = Job(
                    rank=rank,
                    world=world,
                    module=fn.__module__,
                    file=str(getattr(sys.modules[fn.__module__], "__file__", "")),
                    qualname=fn.__qualname__,
                    arguments=arguments,
                    environment=_environment(rank, world, store.port),
                    cwd=os.getcwd(),
                    log_path=os.path.join(folder, f"rank{rank}.log"),
                    lifetime_s=timeout_s + grace_s + 60,
                    store_port=store.port,
                    group_timeout_s=group_timeout_s,
                    init_group=init_group,
                    device_type=device_type if init_group else "cpu",
                )
                run.ranks.append(_start(context, job))
            _collect(run, timeout_s, grace_s)
            _close(run, grace_s)
        finally:
            _kill(run)
            logs = _print_logs(run)
    if run.failed:
        raise RankError(*_describe(run, logs))
    return [rank.outcome.value for rank in run.ranks if rank.outcome is not None]


def _check_call(world: int, fn: Callable[..., Any]) -> None:
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"world={world}: run_ranks starts 1 to {MAX_WORLD} ranks")
    qualname = getattr(fn, "__qualname__", None)
    if qualname is None or "<" in qualname:
        raise ValueError(f"{fn!r} must be a module-level function: the rank processes import it by name")


def _context(fresh: bool) -> Any:
    if fresh:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    return {
        **os.environ,
        **{name: str(value) for name, value in ranks.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # "env://" then joins the parent's store as a client; without it rank 0 would try to listen on that port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _start(context: Any, job: Job) -> _Rank:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=rank_main, args=(job, child_end), name=f"hsdp-test-rank{job.rank}")
    process.start()
    child_end.close()  # a dead rank is then the end of the connection
    return _Rank(process, parent_end, Path(job.log_path))


def _collect(run: _Run, timeout_s: float, grace_s: float) -> None:
    """Wait for an outcome of every rank; a rank that gives none gets an outcome that says so."""
    deadline = time.monotonic() + timeout_s
    why = f"no answer within timeout_s={timeout_s:g}"
    waiting = {rank.connection: index for index, rank in enumerate(run.ranks)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, multiprocessing.connection.Connection)
            index = waiting.pop(connection)
            rank = run.ranks[index]
            rank.outcome = _receive(rank)
            if rank.outcome.error is not None:
                run.failed.append(index)
                if len(run.failed) == 1 and time.monotonic() + grace_s < deadline:
                    deadline = time.monotonic() + grace_s
                    why = f"no answer within grace_s={grace_s:g} after the failure of rank {index}"
    hanging = sorted(waiting.values())
    _ask_for_stacks([run.ranks[index] for index in hanging])
    for index in hanging:
        run.ranks[index].outcome = Outcome(error=("TimeoutError", why))
        run.failed.append(index)


def _ask_for_stacks(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, SHOW_STACKS)
    if ranks:
        time.sleep(0.5)  # the time to write them


def _receive(rank: _Rank) -> Outcome:
    try:
        payload = rank.connection.recv_bytes()
    except (EOFError, OSError):
        rank.process.join(10)
        code = rank.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return Outcome(error=("ProcessDied", f"the process ended without an answer: {how}"))
    try:
        return load(payload)
    except Exception as error:
        return Outcome(error=(type(error).__name__, f"the result cannot be loaded here: {error}"))


def _close(run: _Run, grace_s: float) -> None:
    """Let the ranks that answered close their groups and end; one that does not has left a thread or a collective."""
    answered = [index for index in range(len(run.ranks)) if index not in run.failed]
    for index in answered:
        with contextlib.suppress(OSError):
            run.ranks[index].connection.send_bytes(b"end")
    if run.failed:
        return
    deadline = time.monotonic() + grace_s
    for index in answered:
        rank = run.ranks[index]
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode != 0:
            state = "still running" if rank.process.exitcode is None else f"exit status {rank.process.exitcode}"
            why = f"gave its result but did not end within grace_s={grace_s:g} ({state})"
            rank.outcome = Outcome(error=("UncleanEnd", why))
            run.failed.append(index)


def _kill(run: _Run) -> None:
    for rank in run.ranks:
        rank.process.kill()
    for rank in run.ranks:
        rank.process.join()
        rank.connection.close()


def _print_logs(run: _Run) -> list[str]:
    logs = []
    for index, rank in enumerate(run.ranks):
        text = rank.log.read_text(errors="replace") if rank.log.exists() else ""
        logs.append(text)
        for line in text.splitlines():
            print(f"[rank {index}] {line}")
    return logs


def _describe(run: _Run, logs: list[str]) -> tuple[str, dict[int, tuple[str, str]]]:
    parts = []
    errors = {}
    for index in run.failed:
        outcome = run.ranks[index].outcome
        assert outcome is not None
        assert outcome.error is not None
        errors[index] = outcome.error
        text = f"rank {index}: {outcome.error[0]}: {outcome.error[1]}"
        if outcome.trace:
            text += "\n" + outcome.trace.rstrip()
        elif logs[index]:
            text += "\nlast lines it printed:\n" + "\n".join(logs[index].splitlines()[-60:])
        parts.append(text)
    head = f"{len(errors)} of {len(run.ranks)} ranks failed, rank {run.failed[0]} first"
    return head + "\n\n" + "\n\n".join(parts), errors
