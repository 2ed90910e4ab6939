"""Turns the records of a run into a table, a verdict on the losses, and a file. Starts nothing, measures nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles

import torch
from _rank import Record

MIB = 1 << 20
LOSS_TOLERANCE = 1e-4  # relative, fp32, after some tens of AdamW steps
HEADERS = ("engine", "ms a step", "x fsdp2", "x ddp", "CPU s a step", "CPU x fsdp2", "peak MiB a rank", "last loss")


@dataclass
class Row:
    """One engine in one run, all ranks together."""

    name: str
    step_s: list[float]  # one value a counted round
    step_cpu_s: list[float]  # the same, summed over ranks
    losses: list[float]  # one value a step, mean over ranks
    peak_bytes: int | None  # of the rank that needs most; None: not measured


def make_row(name: str, records: list[Record], steps: int, peaks: list[int]) -> Row:
    # Barriers close every block, so rank 0's clock is as good as any.
    step_s = [seconds / steps for seconds in records[0].block_s]
    step_cpu_s = [sum(seconds) / steps for seconds in zip(*(record.block_cpu_s for record in records), strict=True)]
    losses = [mean(values) for values in zip(*(record.losses for record in records), strict=True)]
    return Row(name, step_s, step_cpu_s, losses, max(peaks, default=None))


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Median and quartiles of the ratios of the same rounds: steadier than a ratio of medians on a busy machine."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}"
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def make_cells(rows: list[Row]) -> list[tuple[str, ...]]:
    by_name = {row.name: row for row in rows}
    fsdp2, ddp = by_name.get("fsdp2"), by_name.get("ddp")
    return [
        (
            row.name,
            f"{median(row.step_s) * 1e3:.1f}",
            paired_ratio(row.step_s, fsdp2.step_s) if fsdp2 else "-",
            paired_ratio(row.step_s, ddp.step_s) if ddp else "-",
            f"{median(row.step_cpu_s):.3f}",
            paired_ratio(row.step_cpu_s, fsdp2.step_cpu_s) if fsdp2 else "-",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.0f}",
            f"{row.losses[-1]:.5f}",
        )
        for row in rows
    ]


def text_table(rows: list[Row], markdown: bool) -> str:
    table = [HEADERS, *make_cells(rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADERS))]
    left, between, right = ("| ", " | ", " |") if markdown else ("", "  ", "")
    table.insert(1, tuple("-" * width for width in widths))
    padded = (between.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "\n".join((left + line + right).rstrip() for line in padded)


def loss_difference(rows: list[Row]) -> float:
    """The largest relative difference of losses between engines: of the first step, and of the last one.

    `alone` never hears from other ranks, so only its first loss is compared.
    """
    first = [row.losses[0] for row in rows]
    last = [row.losses[-1] for row in rows if row.name != "alone"] or [1.0]
    return max(max(values) / min(values) - 1 for values in (first, last))


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine() -> dict[str, object]:
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def commit() -> str | None:
    """The checked-out commit, "+" behind it when files differ from it; None outside a repository."""
    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
