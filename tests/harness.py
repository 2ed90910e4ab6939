"""Run one function on N rank processes (gloo, CPU) and bring the results, or every rank's error, back to the test.

    results = run_ranks(4, fn, 1.5, timeout_s=60)      # fn(rank, world, 1.5) in each rank; [result of rank 0, 1, 2, 3]

`fn` is a module-level function. Importing torch takes seconds, so one *template* process imports it once and every
rank of every run is a new fork of that template: start-up costs milliseconds and no state can leak between runs.

    pytest -- template (torch imported, one thread, runs no torch code)
                 |-- rank 0 --\
                 |-- rank 1 ---+-- default gloo group of exactly N ranks; its store lives in the pytest process
                 `-- rank 2 --/

What a rank prints is printed again by the parent with the rank in front, so `capsys` and pytest's report have it.
A rank ends with its run: it is killed when it does not answer, and it ends itself when the pytest process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MAX_WORLD = 8
_PR_SET_PDEATHSIG = 1
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


@dataclass(frozen=True)
class _Job:
    """All that one rank needs to know. Plain values only, so that nothing but the run itself can fail to unpickle."""

    rank: int
    world: int
    module: str
    file: str
    qualname: str
    arguments: bytes  # torch.save of (args, kwargs)
    environment: dict[str, str]
    cwd: str
    log_path: str
    store_port: int
    group_timeout_s: float
    init_group: bool


@dataclass
class _Outcome:
    value: Any = None
    error: tuple[str, str] | None = None  # exception type name, message
    trace: str = ""


@dataclass
class _Rank:
    process: BaseProcess
    connection: multiprocessing.connection.Connection
    log: Path
    outcome: _Outcome | None = None


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
    arguments = _dump((args, kwargs))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
    context = _context(fresh)
    run = _Run()
    with tempfile.TemporaryDirectory(prefix="hsdp-ranks-") as folder:
        try:
            for rank in range(world):
                job = _Job(
                    rank=rank,
                    world=world,
                    module=fn.__module__,
                    file=str(getattr(sys.modules[fn.__module__], "__file__", "")),
                    qualname=fn.__qualname__,
                    arguments=arguments,
                    environment=_environment(rank, world, store.port),
                    cwd=os.getcwd(),
                    log_path=os.path.join(folder, f"rank{rank}.log"),
                    store_port=store.port,
                    group_timeout_s=group_timeout_s,
                    init_group=init_group,
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


# ---------------------------------------------------------------------------------------------------------- parent


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


@contextlib.contextmanager
def _one_thread_environment() -> Iterator[None]:
    """numpy's BLAS must start no threads in the template: a fork copies only the thread that forks."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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


def _start(context: Any, job: _Job) -> _Rank:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_rank_main, args=(job, child_end), name=f"hsdp-test-rank{job.rank}")
    with _one_thread_environment():
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
    for index in sorted(waiting.values()):
        run.ranks[index].outcome = _Outcome(error=("TimeoutError", why))
        run.failed.append(index)


def _receive(rank: _Rank) -> _Outcome:
    try:
        payload = rank.connection.recv_bytes()
    except (EOFError, OSError):
        rank.process.join(10)
        code = rank.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return _Outcome(error=("ProcessDied", f"the process ended without an answer: {how}"))
    try:
        return _load(payload)
    except Exception as error:
        return _Outcome(error=(type(error).__name__, f"the result cannot be loaded here: {error}"))


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
            rank.outcome = _Outcome(error=("UncleanEnd", why))
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
            text += "\nlast lines it printed:\n" + "\n".join(logs[index].splitlines()[-20:])
        parts.append(text)
    head = f"{len(errors)} of {len(run.ranks)} ranks failed, rank {run.failed[0]} first"
    return head + "\n\n" + "\n\n".join(parts), errors


def _dump(value: Any) -> bytes:
    """torch.save, not pickle: tensors travel by value and never through shared memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), weights_only=False)


# ------------------------------------------------------------------------------------------------------------ rank


def _rank_main(job: _Job, connection: multiprocessing.connection.Connection) -> None:
    _end_with_parent()
    _redirect_output(job.log_path)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.cwd)
    payload = _run_job(job)
    connection.send_bytes(payload.getvalue())
    if payload.failed:
        # Closing the groups at once lets ranks that wait for this one fail as well instead of waiting for a timeout.
        _destroy_groups()
        _flush()
        return
    # Groups stay open until every rank has its result: another one may still need this end of a connection.
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    _destroy_groups()
    _flush()


class _Payload(io.BytesIO):
    failed = False


def _run_job(job: _Job) -> _Payload:
    payload = _Payload()
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        warnings.resetwarnings()
        warnings.simplefilter("default")
        if job.init_group:
            _init_group(job)
        args, kwargs = _load(job.arguments)
        value = _import(job)(job.rank, job.world, *args, **kwargs)
        torch.save(_Outcome(value=value), payload)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers too
        payload = _Payload()
        payload.failed = True
        trace = "".join(traceback.format_exception(error))
        torch.save(_Outcome(error=(type(error).__name__, str(error)), trace=trace), payload)
    return payload


def _init_group(job: _Job) -> None:
    timeout = datetime.timedelta(seconds=job.group_timeout_s)
    store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=timeout, use_libuv=True)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world, timeout=timeout)


def _import(job: _Job) -> Callable[..., Any]:
    """The function by name; its module by name or, where another module has that name, by file."""
    try:
        module = importlib.import_module(job.module)
    except ModuleNotFoundError as error:
        if error.name != job.module.split(".")[0]:
            raise
        module = None
    if module is None or (job.file and str(getattr(module, "__file__", "")) != job.file):
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    target: Any = module
    for name in job.qualname.split("."):
        target = getattr(target, name)
    return target


def _end_with_parent() -> None:
    """No orphans: the kernel ends us with the template, the thread ends us with the pytest process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
