"""Launch local ranks of `hsdp train` through torch's elastic launcher, and say in one line why they failed.

Runs in the process that the user started, which trains nothing itself. Must not know what a rank does.

    hsdp train -- torch.distributed.launcher -- rank 0    (worker.main)
                                              |- rank 1
                                              `- ...

torch's launcher finds a free port, starts the ranks, and ends all of them when one ends badly or a signal comes. What
it writes about that is replaced by one message of ours.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hsdp.options import TrainOptions
from hsdp.runs import checkpoint_steps
from hsdp.worker import BAD_INPUT, FAILED

_LAUNCHER_LOGS = ("torch.distributed.elastic", "torch.distributed.launcher")
# A signal that comes before torch is imported must end a rank too, and silently: Python would print a traceback.
_RANK = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from hsdp.worker import main; main(sys.argv[1])"
)  # fmt: skip


def launch(options: TrainOptions) -> int:
    """Train on `options.nproc` local ranks; returns the exit status, after one message if it is not 0."""
    assert options.nproc is not None
    with tempfile.TemporaryDirectory(prefix="hsdp-train-") as folder:
        task = Path(folder, "task.json")
        task.write_text(json.dumps({"launcher_pid": os.getpid(), "options": options.to_json()}))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=options.nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        added = rank_environment(os.environ, options.nproc, options.device)
        with _environment(added), _silent_launcher():
            try:
                elastic_launch(config, sys.executable)("-c", _RANK, str(task))
            except ChildFailedError as error:
                return _tell_failure(error.failures, options)
            except SignalException as error:
                return _tell_signal(error.sigval, options)
            except KeyboardInterrupt:
                return _tell_signal(signal.SIGINT, options)
    return 0


# ---- what the ranks run in -------------------------------------------------------------------------------------------


def rank_environment(environment: Mapping[str, str], nproc: int, device_type: str) -> dict[str, str]:
    """Variables to add to `environment` for ranks on this host; none that the user has set. Pure but for the cores.

    OMP_NUM_THREADS: the cores divided by the ranks. On CPU also MALLOC_*: glibc keeps freed memory instead of returning
    it, because getting it again costs more, page by page, than the copy into it. TORCH_CPP_LOG_LEVEL: sockets that
    close when another rank has ended are no news.
    """
    wanted = {"OMP_NUM_THREADS": str(max(1, _num_cores() // nproc)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if device_type == "cpu":
        wanted |= {
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**40),
            "MALLOC_TOP_PAD_": str(2**26),
        }
    return {name: value for name, value in wanted.items() if name not in environment}


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """`added` in os.environ, which the launcher hands on; this process read its own at its start and is unaffected."""
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _silent_launcher() -> Iterator[None]:
    """Keep the launcher's own log away from the terminal. Its loggers exist by now, some with handlers of their own."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(_LAUNCHER_LOGS)]
    were = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was in zip(loggers, were, strict=True):
            logger.disabled = was


# ---- the one message -------------------------------------------------------------------------------------------------


def _tell_failure(failures: Mapping[int, ProcessFailure], options: TrainOptions) -> int:
    rank = root_cause(failures)
    failure = failures[rank]
    text = _error_text(failure)
    if failure.exitcode == BAD_INPUT and text:
        _say(f"error: {text.partition(': ')[2]}")
        return BAD_INPUT
    if text:
        trace = Path(options.out, "errors", f"rank-{rank}.txt")
        where = f"; full traceback: {trace}" if trace.exists() else ""
        reason = f"rank {rank} failed: {text}{where}"
    elif failure.exitcode < 0:
        hint = " (out of memory?)" if failure.exitcode == -signal.SIGKILL else ""
        reason = f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()}{hint}"
    else:
        reason = f"rank {rank} (process {failure.pid}) ended with exit status {failure.exitcode}"
    _say(f"error: {reason}. All {options.nproc} processes have ended.{_resume_hint(options)}")
    return FAILED


def root_cause(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank that failed first.

    `failures` is in the order in which the launcher saw them. One that died of the launcher's own SIGTERM was ended
    because of another; one that was killed otherwise left no note, and made those fail that did.
    """

    def order(rank: int) -> int:
        exitcode = failures[rank].exitcode
        return 2 if exitcode == -signal.SIGTERM else 0 if exitcode < 0 else 1

    return min(failures, key=order)


def _error_text(failure: ProcessFailure) -> str:
    """ "Type: text" of the exception that a rank wrote down, on one line; "" where it wrote none."""
    message: object = failure.message  # declared a str, and a dict where the rank recorded an exception
    return " ".join(str(message["message"]).split()) if isinstance(message, dict) else ""


def _tell_signal(number: signal.Signals, options: TrainOptions) -> int:
    what = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    _say(f"{what}: all {options.nproc} processes have ended.{_resume_hint(options)}")
    return 128 + number


def _resume_hint(options: TrainOptions) -> str:
    steps = checkpoint_steps(Path(options.out))
    return f" To go on from step {steps[-1]}: hsdp train --resume {options.out}" if steps else ""


def _say(message: str) -> None:
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)  # rank 0 ended in its progress bar, which hides the cursor
    print(message, file=sys.stderr, flush=True)
