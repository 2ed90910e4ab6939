"""The folder that a run leaves behind, and the checkpoints in it.

    OUT/metrics.jsonl          one JSON object a step
    OUT/loss.png               the loss curve
    OUT/checkpoint-<step>/     torch.distributed.checkpoint files and run.json: step, global batch, options
    OUT/errors/rank-<n>.txt    the full traceback of a rank that failed
    OUT/previous-<n>/          what an earlier run left here; nothing is deleted

A checkpoint is written under another name and renamed when it is whole, so a folder named checkpoint-* can be resumed.
Every rank must see the same OUT: on several hosts that is a shared file system.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from hsdp.options import TrainOptions
from hsdp.progress import METRICS

CURVE = "loss.png"
_RECORD = "run.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_PREVIOUS = re.compile(r"previous-(\d+)")


@dataclass(frozen=True)
class Record:
    """What a checkpoint says about itself, readable without torch.

    Attributes:
        path: the checkpoint's folder.
        step: steps done.
        global_batch: sequences in a step of the run that wrote it.
    """

    path: Path
    step: int
    global_batch: int
    options: TrainOptions


# ---- finding a checkpoint --------------------------------------------------------------------------------------------


def find_checkpoint(path: str) -> Record:
    """The checkpoint at `path`: a checkpoint's own folder, or a run's, of which the newest counts.

    Raises:
        ValueError: nothing there, or nothing that `hsdp train` wrote.
    """
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"--resume {path}: does not exist")
    steps = checkpoint_steps(folder) if folder.is_dir() else []
    if steps:
        return _read_record(folder / f"checkpoint-{steps[-1]}")
    if not (folder / _RECORD).is_file() or not (folder / ".metadata").is_file():
        raise ValueError(f"--resume {path}: neither a checkpoint of hsdp train nor a run's folder with one in it")
    return _read_record(folder)


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder, oldest first."""
    names = (_CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir() if (entry / _RECORD).is_file())
    return sorted(int(name[1]) for name in names if name)


def _read_record(folder: Path) -> Record:
    try:
        values = json.loads((folder / _RECORD).read_text())
        options = TrainOptions.from_json(values["options"])
        return Record(folder.resolve(), int(values["step"]), int(values["global_batch"]), options)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"--resume {folder}: its {_RECORD} cannot be read: {error}") from error


# ---- writing and reading one -----------------------------------------------------------------------------------------


def save(
    out: Path, model: nn.Module, optimizer: Optimizer, *, step: int, global_batch: int, options: TrainOptions
) -> Path:
    """Write OUT/checkpoint-<step>; every rank calls this, each writes its own part. Returns the folder."""
    final = out / f"checkpoint-{step}"
    unfinished = out / f"unfinished-{final.name}"
    leads = dist.get_rank() == 0
    if leads:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    state_dict_saver.save(_state(model, optimizer), checkpoint_id=unfinished)
    if leads:
        record = {"step": step, "global_batch": global_batch, "options": options.to_json(), "torch": torch.__version__}
        (unfinished / _RECORD).write_text(json.dumps(record, indent=1) + "\n")
        if final.exists():
            _move_aside(out, [final])
        unfinished.rename(final)
    dist.barrier()
    return final


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Fill model and optimizer, on whatever mesh, from the checkpoint in folder `path`; every rank calls this."""
    state = _state(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


# ---- the folder ------------------------------------------------------------------------------------------------------


def make_folder(out: Path) -> None:
    """Make OUT, or see that it can be used.

    Raises:
        ValueError: OUT is a file, or cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}") from error


def start_in(out: Path, resumed: Record | None) -> list[dict[str, Any]]:
    """Make OUT ready for a run, on one rank: what belongs to an earlier run goes to OUT/previous-<n>.

    A run that goes on from a checkpoint in OUT keeps the metrics up to that checkpoint and the checkpoints up to it.

    Returns:
        the metrics that are kept, one dict a step.
    """
    keeps = resumed is not None and resumed.path.parent == out.resolve()
    limit = resumed.step if resumed is not None and keeps else -1
    entries = _read_metrics(out)
    kept = [entry for entry in entries if entry["step"] <= limit]
    stale = [out / f"checkpoint-{step}" for step in checkpoint_steps(out) if step > limit]
    if not keeps or len(kept) < len(entries):
        stale += [out / METRICS, out / CURVE, out / "errors"]
    _move_aside(out, stale)
    (out / METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    return kept


def _read_metrics(out: Path) -> list[dict[str, Any]]:
    entries = []
    if (out / METRICS).is_file():
        for line in (out / METRICS).read_text().splitlines():
            try:
                entries.append(json.loads(line))
            except ValueError:  # the last line of a run that was killed while writing it
                break
    return entries


def _move_aside(out: Path, paths: list[Path]) -> None:
    paths = [path for path in paths if path.exists()]
    if paths:
        numbers = [int(name[1]) for entry in out.iterdir() if (name := _PREVIOUS.fullmatch(entry.name))]
        folder = out / f"previous-{max(numbers, default=0) + 1}"
        folder.mkdir()
        for path in paths:
            path.rename(folder / path.name)
