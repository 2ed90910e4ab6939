"""What `hsdp train` shows and writes while it trains: a bar or plain lines, metrics.jsonl, the loss curve.

Lives on rank 0 only, and knows numbers, not models or meshes. rich and matplotlib are imported where they are used, so
that only who shows a bar or draws a curve needs them.

    a terminal        one rich progress bar, rewritten in place
    anything else     a plain line at the first and last step, at each held-out loss, and after 10 s without one
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from hsdp.data import bits, nats

METRICS = "metrics.jsonl"
LINE_EVERY_S = 10.0
EXTRAS = ("matplotlib", "rich", "typer")


def missing_extras() -> str | None:
    """One line that says which packages of the extra `train` are not installed and what to do, or None."""
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return f"hsdp train needs {', '.join(missing)}, which {verb} not installed: pip install 'hsdp[train]'"


@dataclass(frozen=True)
class StepMetrics:
    """One step, as it is shown and as a line of metrics.jsonl.

    Attributes:
        step: steps done, from 1.
        loss: mean training loss of the global batch, nats a byte.
        lr: learning rate the step was made with.
        grad_norm: global norm of the gradients before clipping.
        tokens_per_s: bytes trained on a second, all ranks together.
        ms: the step's duration in milliseconds.
        peak_memory_bytes: most memory that rank 0 has used so far.
        held_out_loss: nats a byte, None in steps that do not measure it.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    ms: float
    peak_memory_bytes: int
    held_out_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class _Display(Protocol):
    def update(self, metrics: StepMetrics, speed: str) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """Sparse plain lines for a log file or a pipe."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._next_s = 0.0

    def update(self, metrics: StepMetrics, speed: str) -> None:
        if metrics.held_out_loss is not None or time.monotonic() >= self._next_s:
            step = f"step {metrics.step:>{len(str(self._steps))}}/{self._steps}"
            held_out = "" if metrics.held_out_loss is None else f"  held-out {metrics.held_out_loss:.3f}"
            print(f"{step}  loss {metrics.loss:.3f}  {speed}{held_out}", flush=True)
            self._next_s = time.monotonic() + LINE_EVERY_S

    def close(self) -> None:
        pass


class _Bar:
    """A rich progress bar."""

    def __init__(self, first: int, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            expand=True,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first, numbers="")
        self._held_out = ""
        self._bar.start()

    def update(self, metrics: StepMetrics, speed: str) -> None:
        if metrics.held_out_loss is not None:
            self._held_out = f"held-out {metrics.held_out_loss:.3f}  "
        numbers = f"loss {metrics.loss:.3f}  {self._held_out}{speed}"
        self._bar.update(self._task, completed=metrics.step, numbers=numbers)

    def close(self) -> None:
        self._bar.stop()


class Progress:
    """Shows and writes the steps of one run; a context manager, so that a failing run leaves the terminal in order.

    Args:
        out: the run's folder, with the metrics file that is appended to.
        entries: what stands in that file already, one dict a step.
        first_step: steps done before this run.
        steps: steps at the end of it.
    """

    def __init__(self, out: Path, entries: list[dict[str, Any]], first_step: int, steps: int) -> None:
        self.entries = entries
        self._file = (out / METRICS).open("a", encoding="ascii")
        self._display: _Display = _Bar(first_step, steps) if sys.stdout.isatty() else _Lines(steps)
        self._recent_ms: list[float] = []

    def step(self, metrics: StepMetrics) -> None:
        self.entries.append(metrics.to_json())
        self._file.write(json.dumps(self.entries[-1]) + "\n")
        self._file.flush()
        self._recent_ms = [*self._recent_ms[-19:], metrics.ms]
        self._display.update(metrics, self._speed(metrics))

    def _speed(self, metrics: StepMetrics) -> str:
        ms = statistics.median(self._recent_ms)
        tokens_per_s = metrics.tokens_per_s * metrics.ms / ms
        peak_mib = metrics.peak_memory_bytes / 2**20
        return f"{tokens_per_s:,.0f} tokens/s  {ms:,.0f} ms/step  peak {peak_mib:,.0f} MiB"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()
        self._file.close()


def loss_text(loss: float) -> str:
    """A loss in both units: "1.386 nats/byte (2.000 bits/byte)"."""
    return f"{loss:.3f} nats/byte ({bits(loss):.3f} bits/byte)"


def draw_curve(path: Path, entries: Sequence[Mapping[str, Any]], unigram: float) -> None:
    """Draw the training and held-out loss of `entries` (lines of metrics.jsonl) and the unigram entropy into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: that picks a backend for the whole process
    axes = figure.add_subplot()
    steps = [entry["step"] for entry in entries]
    losses = [entry["loss"] for entry in entries]
    measured = [(entry["step"], entry["held_out_loss"]) for entry in entries if "held_out_loss" in entry]
    axes.plot(steps, losses, color="tab:blue", linewidth=0.8, alpha=0.6, label="training loss")
    if measured:
        label = f"held-out loss ({measured[-1][1]:.2f} at the end)"
        axes.plot(*zip(*measured, strict=True), color="tab:orange", marker="o", markersize=4, label=label)
    label = f"unigram entropy of the held-out text ({unigram:.2f})"
    axes.axhline(unigram, color="tab:red", linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats/byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.secondary_yaxis("right", functions=(bits, nats)).set_ylabel("loss (bits/byte)")
    axes.legend()
    figure.savefig(path)
