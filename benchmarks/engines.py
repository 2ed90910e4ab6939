"""Time and memory of a training step: hsdp against torch's fully_shard, FSDP1, DDP, and no communication at all.

    python benchmarks/engines.py --size 19m                    # 4 processes, replicate 2 x shard 2
    python benchmarks/engines.py --size 76m --malloc both --json result.json

All engines train the same model on the same batches in the same processes, a few steps each in turn, so that what else
the machine does meets all of them. Memory is measured after that, each engine in fresh processes. Exit status 1 if the
engines do not agree on the loss. README.md in this folder says how to read the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from _engines import WRAP, Decoder, Settings
from _launch import MALLOC, run_ranks
from _rank import Job, Record
from _report import LOSS_TOLERANCE, Row, loss_difference, machine, make_row, text_table

SIZES = {  # layers, width, seq, batch
    "tiny": (2, 64, 16, 2),
    "19m": (6, 512, 64, 2),
    "76m": (6, 1024, 64, 2),
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def number(option: str, default: int | None = None, help: str = "default %(default)s") -> None:
        parser.add_argument(option, type=positive_int, metavar="N", default=default, help=help)

    parser.add_argument("--engines", nargs="+", choices=WRAP, default=list(WRAP), help="default: all")
    number("--replicate", 2)
    number("--shard", 2)
    parser.add_argument("--size", choices=SIZES, default="19m", help="the four numbers below at once (default 19m)")
    number("--layers", help="transformer blocks")
    number("--width", help="a multiple of 64")
    number("--seq", help="tokens a sample")
    number("--batch", help="samples a rank a microbatch")
    number("--accumulate", 1, "microbatches a step, default %(default)s")
    parser.add_argument("--reshard", choices=("yes", "no"), default="yes", help="release parameters after forward")
    number("--rounds", 10, "counted rounds, default %(default)s")
    number("--steps", 2, "steps of an engine in a round, default %(default)s")
    number("--warmup-rounds", 2)
    parser.add_argument("--malloc", choices=(*MALLOC, "both"), default="kept", help="what glibc does with freed memory")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every number")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write a torch.profiler trace of a step each")
    options = parser.parse_args(arguments)
    for value, name in zip(SIZES[options.size], ("layers", "width", "seq", "batch"), strict=True):
        setattr(options, name, getattr(options, name) or value)
    if options.width % 64:
        parser.error(f"argument --width: {options.width} is not a multiple of 64")
    return options


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def choose_engines(wanted: list[str], shard: int) -> list[str]:
    """The engines that can run on this mesh; says which cannot."""
    chosen = list(dict.fromkeys(wanted))
    if shard == 1 and "fsdp1" in chosen:
        print("without fsdp1: with shard 1 it never reduces gradients between rows", file=sys.stderr)
        chosen.remove("fsdp1")
    if not chosen:
        raise ValueError("no engine left to run")
    if "hsdp" in chosen and importlib.util.find_spec("hsdp") is None:
        raise ValueError("hsdp is not installed here; run `pip install -e .` in the repository, or leave it out")
    return chosen


def num_parameters(settings: Settings) -> int:
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(settings).parameters())


def check_memory(engines: list[str], settings: Settings) -> None:
    """ValueError if all engines together would not fit: 16 bytes a parameter, with AdamW, and what is lost between."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return
    available_bytes = 1024 * int(info.read_text().split("MemAvailable:")[1].split()[0])
    whole = sum(1 if name in ("ddp", "alone") else 1 / settings.shard for name in engines)
    needed_bytes = 1.7 * 16 * num_parameters(settings) * whole * settings.world  # 1.7: measured, malloc kept
    if needed_bytes > available_bytes:
        raise ValueError(
            f"{len(engines)} engines on {settings.world} ranks need about {needed_bytes / 2**30:.1f} GiB, "
            f"{available_bytes / 2**30:.1f} GiB are available; choose fewer --engines or a smaller --size"
        )


def measure(job: Job, malloc: str, with_memory: bool) -> list[Row]:
    """One run of all engines under one allocator setting, then their memory."""
    print(f"timing {', '.join(job.engines)} (malloc {malloc})", file=sys.stderr)
    records = launch(job, malloc)
    peaks: dict[str, list[int]] = {name: [] for name in job.engines}
    for name in job.engines if with_memory else []:
        print(f"memory of {name}", file=sys.stderr)
        memory = launch(replace(job, mode="memory", engines=[name], rounds=3, steps=1), malloc)[name]
        peaks[name] = [record.peak_bytes for record in memory]
    return [make_row(name, records[name], job.steps, peaks[name]) for name in job.engines]


def launch(job: Job, malloc: str) -> dict[str, list[Record]]:
    with tempfile.TemporaryDirectory(prefix="hsdp-benchmark-") as folder:
        return run_ranks(replace(job, folder=Path(folder)), malloc)


def print_result(rows: list[Row], job: Job, malloc: str, markdown: bool) -> bool:
    """Print one run; whether the engines agree on the loss."""
    settings, difference = job.settings, loss_difference(rows)
    print(
        f"\n{num_parameters(settings) / 1e6:.1f} M parameters, "
        f"replicate {settings.replicate} x shard {settings.shard}, "
        f"{settings.batch} x {settings.seq} tokens a rank, accumulate {settings.accumulate}, "
        f"reshard {'yes' if settings.reshard else 'no'}, malloc {malloc}, {job.rounds} rounds of {job.steps} steps\n"
    )
    print(text_table(rows, markdown))
    agree = difference <= LOSS_TOLERANCE
    verdict = "equal" if agree else "NOT EQUAL"
    print(f"\nlosses are {verdict}: largest relative difference {difference:.1e}, allowed {LOSS_TOLERANCE:.0e}")
    return agree


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    settings = Settings(
        replicate=options.replicate,
        shard=options.shard,
        layers=options.layers,
        width=options.width,
        seq=options.seq,
        batch=options.batch,
        accumulate=options.accumulate,
        reshard=options.reshard == "yes",
    )
    engines = choose_engines(options.engines, settings.shard)
    check_memory(engines, settings)
    if options.profile:
        options.profile.mkdir(parents=True, exist_ok=True)
    job = Job("time", engines, settings, Path(), options.rounds, options.steps, options.warmup_rounds, options.profile)
    about = machine()
    runs, agree = [], True
    for malloc in MALLOC if options.malloc == "both" else [options.malloc]:
        rows = measure(job, malloc, not options.no_memory)
        agree &= print_result(rows, job, malloc, options.markdown)
        runs.append({"malloc": malloc, "loss_difference": loss_difference(rows), "engines": list(map(vars, rows))})
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if options.json:
        result = {"machine": about, "settings": asdict(settings), "steps_a_round": job.steps, "runs": runs}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if agree else 1


def stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped")
    except (ValueError, RuntimeError) as error:
        sys.exit(f"engines.py: {error}")
