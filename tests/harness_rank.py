"""What happens inside one rank process of harness.py: take a job, call the function, send the outcome, end.

    job in --> default group --> fn(rank, world, ...) --> outcome out --> wait for all ranks --> close groups, end

Must not know the other ranks: the parent starts, waits and kills.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SHOW_STACKS = signal.SIGUSR1  # a rank that gets it prints where each of its threads is


@dataclass(frozen=True)
class Job:
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
    lifetime_s: float
    store_port: int
    group_timeout_s: float
    init_group: bool
    device_type: str  # "cpu", or a module to import that brings a device type of its name


@dataclass
class Outcome:
    value: Any = None
    error: tuple[str, str] | None = None  # exception type name, message
    trace: str = ""


def dump(value: Any) -> bytes:
    """torch.save, not pickle: tensors travel by value and never through shared memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(payload: bytes) -> Any:
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)


def rank_main(job: Job, connection: multiprocessing.connection.Connection) -> None:
    _redirect_output(job.log_path)
    _end_with_parent(job.lifetime_s)
    faulthandler.enable()
    faulthandler.register(SHOW_STACKS)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.cwd)
    outcome, failed = _run_job(job)
    connection.send_bytes(outcome)
    if not failed:
        # Groups stay open until every rank has its result: another one may still need this end of a connection.
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()
    # After a failure they close at once, so that ranks that wait for this one fail instead of waiting for a timeout.
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()


def _run_job(job: Job) -> tuple[bytes, bool]:
    """(the outcome as bytes, whether it is a failure); a result that cannot become bytes is a failure too."""
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        warnings.resetwarnings()
        warnings.simplefilter("default")
        device = _use_device(job) if job.device_type != "cpu" else None
        if job.init_group:
            _init_group(job, "gloo" if device is None else f"cpu:gloo,{job.device_type}:{device.BACKEND}")
        args, kwargs = load(job.arguments)
        value = _import(job)(job.rank, job.world, *args, **kwargs)
        if device is not None and (races := device.races()):
            raise AssertionError(f"{len(races)} races on {job.device_type}:\n" + "\n".join(races))
        return dump(Outcome(value=value)), False
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers too
        trace = "".join(traceback.format_exception(error))
        return dump(Outcome(error=(type(error).__name__, str(error)), trace=trace)), True


def _use_device(job: Job) -> Any:
    """Let this rank train on a fake device: what the function makes is there unless it says otherwise."""
    device = importlib.import_module(job.device_type)
    module = torch.get_device_module(job.device_type)
    module.set_device(job.rank % module.device_count())
    torch.set_default_device(job.device_type)
    device.race_check(True)
    return device


def _init_group(job: Job, backend: str) -> None:
    timeout = datetime.timedelta(seconds=job.group_timeout_s)
    store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=timeout, use_libuv=True)
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world, timeout=timeout)


def _import(job: Job) -> Callable[..., Any]:
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


def _end_with_parent(lifetime_s: float) -> None:
    """No orphans: a thread ends us with the pytest process, or faulthandler's timer where the GIL is never free."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    faulthandler.dump_traceback_later(lifetime_s, exit=True)


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
