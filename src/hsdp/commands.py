"""The commands of `hsdp` as typer sees them: options, their help, and what to do with what was given.

Imports typer, which only the extra `train` installs; cli.py says so where it is missing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from hsdp import runs
from hsdp.data import check_size, find_files
from hsdp.draw import MeshPicture, save, show
from hsdp.options import TrainOptions, with_checkpoint, with_local_mesh
from hsdp.placement import ORDERS, arrange, plan_world, resolve_sizes
from hsdp.progress import missing_extras

CPU_RANKS = 4
D = TrainOptions  # its class attributes are the defaults

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, rich_markup_mode=None,
    help="Hybrid sharded data parallel training: replicate x shard.",
)  # fmt: skip


@app.callback()
def hsdp() -> None:
    """Hybrid sharded data parallel training: replicate x shard."""


def _option(text: str, default: object = None, metavar: str | None = None) -> Any:
    """An option with its default in the help; the default of the function's argument is None, for "not given"."""
    return typer.Option(help=text if default is None else f"{text} [default: {default}]", metavar=metavar)


TRAIN_HELP = """Train a small byte-level transformer on a replicate x shard mesh.

Started plainly, it launches local ranks itself. Under torchrun, in a Slurm job step, or wherever RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set, it is one rank, and the launcher says how many there are.

Ranks that it launches get OMP_NUM_THREADS (cores / ranks), TORCH_CPP_LOG_LEVEL and, on CPU, MALLOC_MMAP_MAX_,
MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ (glibc keeps freed memory, which is faster), each unless it is set already.
"""


# The extra arguments are the second file and so on after --data.
@app.command(help=TRAIN_HELP, short_help="Train a small transformer.", context_settings={"allow_extra_args": True})
def train(
    context: typer.Context,
    data: Annotated[
        list[str] | None,
        _option(
            "Text to learn from, byte by byte; several may follow. In a folder every file counts that is not hidden. "
            "One file in 20 is held out, of fewer files the last 1/20 of the bytes.",
            "this Python's standard library, .py files without tests",
            "FILE_OR_FOLDER ...",
        ),
    ] = None,
    replicate: Annotated[
        int | None, _option("Copies of the model; -1 for the rest.", "world / shard; 2 for an even number of CPU ranks")
    ] = None,
    shard: Annotated[
        int | None,
        _option("Ranks that share one copy; -1 for the rest.", "world / replicate; with neither: the ranks of a host"),
    ] = None,
    nproc: Annotated[
        int | None, _option("Local ranks to launch; not under a launcher.", "4 on CPU, else one an accelerator")
    ] = None,
    layers: Annotated[int | None, _option("Blocks of the transformer.", D.layers)] = None,
    width: Annotated[int | None, _option("Features of a token, a multiple of 2 x --heads.", D.width)] = None,
    heads: Annotated[int | None, _option("Attention heads of a block.", D.heads)] = None,
    seq: Annotated[int | None, _option("Sequence length in bytes.", D.seq)] = None,
    batch: Annotated[int | None, _option("Sequences of one rank in one microbatch.", D.batch)] = None,
    accumulate: Annotated[int | None, _option("Microbatches in one step.", D.accumulate)] = None,
    steps: Annotated[int | None, _option("Optimizer steps in all, those of a resumed run included.", D.steps)] = None,
    lr: Annotated[float | None, _option("Peak learning rate of AdamW; 5 % of the steps warm up to it.", D.lr)] = None,
    precision: Annotated[str | None, _option("Computing in fp32 or bf16; weights stay in fp32.", D.precision)] = None,
    device: Annotated[
        str | None, _option("cpu, or a kind of accelerator such as cuda.", "an accelerator if any")
    ] = None,
    out: Annotated[
        str | None,
        _option("Folder for checkpoints, metrics and the loss curve; an earlier run in it is kept.", D.out, "FOLDER"),
    ] = None,
    resume: Annotated[
        str | None,
        _option("Go on from this checkpoint, or the newest one of this run; on any mesh.", None, "CHECKPOINT_OR_OUT"),
    ] = None,
    seed: Annotated[int | None, _option("Seed of the weights and of the order of the data.", D.seed)] = None,
    save_every: Annotated[int | None, _option("Steps between checkpoints; 0: only at the end.", D.save_every)] = None,
    eval_every: Annotated[
        int | None, _option("Steps between measurements of the held-out loss; 0: only at the end.", D.eval_every)
    ] = None,
) -> None:
    """Train; TRAIN_HELP says more."""
    given = {name: value for name, value in locals().items() if value is not None}
    files = [*given.pop("data", []), *given.pop("context").args]
    if files:
        given["data"] = tuple(str(Path(path).resolve()) for path in files)
    raise typer.Exit(run_train(given))


MESH_HELP = """Draw a replicate x shard mesh before anything runs: which ranks share a copy, and what crosses hosts.

Rows are laid inside hosts as a run would lay them, whatever order the launcher numbers the ranks in. Without
--replicate and --shard a copy is shared by the ranks of a host.
"""


@app.command(help=MESH_HELP, short_help="Draw a mesh.")
def mesh(
    hosts: Annotated[int, typer.Option(help="Machines.")] = 2,
    per_host: Annotated[str, _option("Ranks on every host, or on each: 8 or 8,8,4.", None, "N[,N...]")] = "8",
    replicate: Annotated[str | None, _option("Copies of the model; -1: the rest.", "what remains", "N")] = None,
    shard: Annotated[str | None, _option("Ranks that share a copy; -1: the rest.", "a host's ranks", "N|node")] = None,
    order: Annotated[str, typer.Option(help=f"How ranks are numbered over hosts: {' or '.join(ORDERS)}.")] = ORDERS[0],
    svg: Annotated[str | None, _option("Write the picture here instead.", None, "FILE")] = None,
    png: Annotated[str | None, _option("Write the picture here instead.", None, "FILE")] = None,
) -> None:
    """Draw; MESH_HELP says more."""
    try:
        world = plan_world(_ranks_by_host(hosts, per_host), order)
        rows = arrange(world.hosts, *resolve_sizes(world, _size(replicate), _size(shard)))
        picture = MeshPicture(tuple(map(tuple, rows)), dict(enumerate(world.names)))
        files = {".svg": svg, ".png": png}
        for suffix, path in files.items():
            if path is not None and not path.lower().endswith(suffix):
                raise ValueError(f"--{suffix[1:]} {path}: the name has to end with {suffix}")
        for path in filter(None, files.values()):
            print(save(picture, path))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if svg is None and png is None:
        show(picture)


def _size(text: str | None) -> int | str | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else text


def _ranks_by_host(hosts: int, per_host: str) -> list[int]:
    numbers = per_host.split(",")
    if not all(number.strip().isdecimal() for number in numbers) or len(numbers) not in (1, hosts):
        raise ValueError(f"--per-host {per_host}: one number, or one for each of the {hosts} hosts, as in 8,8,4")
    return [int(number) for number in numbers] * (hosts if len(numbers) == 1 else 1)


def run_train(given: Mapping[str, Any]) -> int:
    """`hsdp train` with the options that were given; returns the exit status, after one line where that is not 0."""
    from hsdp import worker  # brings torch.distributed, which `hsdp --help` does without

    place = None
    try:
        device = resolve_device(given.get("device", D.device))
        place = worker.place_from_environment(os.environ)
        if place is None:
            from hsdp.launch import launch

            nproc = resolve_nproc(given.get("nproc"), device)
            return launch(with_local_mesh(resolve(given, nproc, device), nproc, device == "cpu"))
        if "nproc" in given:
            raise ValueError(
                f"--nproc {given['nproc']} is for a plain start; here a launcher has started {place.world} ranks"
            )
        world = place.world
        worker.run_rank(place, device, lambda: resolve(given, world, device))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if place is None and not worker.is_bad_input(error):
            raise
        rank = place.rank if place else 0
        status, line = worker.report(error, rank, given.get("out", D.out))
        print(f"error (rank {rank}): {line}" if place else f"error: {line}", file=sys.stderr, flush=True)
        if dist.is_initialized():
            worker.leave(status)
        return status
    return 0


def resolve(given: Mapping[str, Any], world: int, device: str) -> TrainOptions:
    """All options of a run on `world` ranks, checked as far as one process can; makes the folder --out.

    Raises:
        ValueError: whatever is wrong with them.
    """
    missing = missing_extras()
    if missing:
        raise ValueError(missing)
    if "resume" in given:
        record = runs.find_checkpoint(given["resume"])
        options = with_checkpoint(given, record.options, record.global_batch, world)
        if record.step >= options.steps:
            raise ValueError(
                f"--resume {given['resume']}: that checkpoint is at step {record.step} of {options.steps} already; "
                "give more --steps to go on"
            )
        options = replace(options, resume=str(record.path), out=given.get("out", str(record.path.parent)))
    else:
        options = TrainOptions(**given)
    check_size(find_files(options.data), options.seq)
    runs.make_folder(Path(options.out))
    return replace(options, device=device)


def resolve_device(name: str) -> str:
    """The device type of `name`, which may be "auto".

    Raises:
        ValueError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
    if name == "auto":
        return kinds[-1]
    if name not in kinds:
        raise ValueError(f"device is {name!r}; this machine has {' and '.join(kinds)}")
    return name


def resolve_nproc(nproc: int | None, device: str) -> int:
    """How many local ranks to launch.

    Raises:
        ValueError: more than there are accelerators, or fewer than one.
    """
    available = CPU_RANKS if device == "cpu" else torch.accelerator.device_count()
    if nproc is not None and nproc < 1:
        raise ValueError(f"nproc is {nproc}; it must be 1 or more")
    if nproc is not None and device != "cpu" and nproc > available:
        raise ValueError(f"nproc is {nproc}, this machine has {available} accelerators ({device})")
    return nproc or available
