"""What one rank of `engines.py` does: build the engines, run them, write down clocks, memory and losses.

Started as `python _rank.py JOB.json RANK` with a pipe as stdin; ends by itself when that pipe closes, so no rank
outlives the program that started it. The answer is `rank<RANK>.json` beside the job.

    mode "time"     all engines in this process, interleaved:  round 1: a b c d, round 2: d c b a, round 3: b c d a, ...
    mode "memory"   one engine in a fresh process: highest resident memory of a few steps, less that before building
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _engines import Engine, Settings, build, make_batches
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """One launch: what to run and where the answers go."""

    mode: str
    engines: list[str]
    settings: Settings
    folder: Path
    rounds: int = 1
    steps: int = 1  # a block of this many steps of one engine is timed as one
    warmup_rounds: int = 1
    profile: Path | None = None

    @staticmethod
    def read(path: Path) -> Job:
        values = json.loads(path.read_text())
        profile = values["profile"] and Path(values["profile"])
        settings = Settings(**values["settings"])
        return Job(**{**values, "settings": settings, "folder": Path(values["folder"]), "profile": profile})


@dataclass
class Record:
    """One engine on one rank."""

    block_s: list[float] = field(default_factory=list)  # counted blocks only, as the two below
    block_cpu_s: list[float] = field(default_factory=list)  # user + system time of all threads of this process
    losses: list[float] = field(default_factory=list)  # every step, warm-up included
    peak_bytes: int = 0


def order(engines: list[str], index: int) -> list[str]:
    """The engines' order in round `index`: it rotates, and every second round is reversed."""
    start = (index // 2) % len(engines)
    turned = engines[start:] + engines[:start]
    return turned[::-1] if index % 2 else turned


def run_block(engine: Engine, batches: list[list[Tensor]], num_steps: int, record: Record, counted: bool) -> None:
    """Run `num_steps` steps between two barriers, so that the clock of any rank is the time of the slowest."""
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        record.losses.append(engine.step(batches[len(record.losses) % len(batches)]))
    dist.barrier()
    if counted:
        record.block_s.append(time.perf_counter() - start_s)
        record.block_cpu_s.append(time.process_time() - start_cpu_s)


def time_engines(job: Job) -> dict[str, Record]:
    batches = make_batches(job.settings)
    engines = {name: build(name, job.settings) for name in job.engines}
    records = {name: Record() for name in job.engines}
    for index in range(-job.warmup_rounds, job.rounds):
        if index == 0:
            gc.collect()
            gc.freeze()  # or a collection in one engine's block walks through the objects of all of them
        for name in order(job.engines, index + job.warmup_rounds):
            run_block(engines[name], batches, job.steps, records[name], counted=index >= 0)
        if dist.get_rank() == 0:
            print(f"  round {index + 1} of {job.rounds}" if index >= 0 else "  warm-up", flush=True)
    if job.profile:
        for name, engine in engines.items():
            write_trace(engine, batches, job.profile / f"{name}.json")
    return records


def write_trace(engine: Engine, batches: list[list[Tensor]], path: Path) -> None:
    """A trace of one step on rank 0, for chrome://tracing or ui.perfetto.dev."""
    dist.barrier()
    if dist.get_rank() == 0:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            engine.step(batches[0])
        profiler.export_chrome_trace(str(path))
    else:
        engine.step(batches[0])
    dist.barrier()


def resident_bytes(field_name: str) -> int:
    """Resident memory of this process: "VmRSS" now, "VmHWM" its highest value (elsewhere than Linux always that)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field_name + ":"))
        return int(line.split()[1]) * 1024
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def forget_peak() -> None:
    """Return free memory to the system and start the high-water mark again; where that is refused, the mark stays."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure_memory(job: Job) -> dict[str, Record]:
    (name,) = job.engines
    # A tiny run first: what torch imports or starts at first use is no cost of the engine.
    tiny = replace(job.settings, layers=1, width=64)
    build(name, tiny).step(make_batches(tiny)[0])
    forget_peak()
    before_bytes = resident_bytes("VmRSS")
    batches = make_batches(job.settings)
    engine = build(name, job.settings)
    forget_peak()  # the whole model that wrapping starts from is not what training needs
    record = Record()
    for _ in range(job.rounds):
        run_block(engine, batches, job.steps, record, counted=True)
    record.peak_bytes = resident_bytes("VmHWM") - before_bytes
    return {name: record}


def end_with_parent() -> None:
    """Leave when the pipe from the starting program closes, whatever this process is doing."""

    def watch() -> None:
        os.read(0, 1)  # returns at end of file
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # should memory run out, end this and no bystander
    job, rank = Job.read(Path(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder / 'rendezvous'}",
        rank=rank,
        world_size=job.settings.world,
        timeout=timedelta(seconds=120),
    )
    records = {"time": time_engines, "memory": measure_memory}[job.mode](job)
    answer = json.dumps({name: vars(record) for name, record in records.items()})
    (job.folder / f"rank{rank}.json").write_text(answer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
