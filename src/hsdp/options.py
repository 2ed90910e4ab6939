"""The options of `hsdp train`: one frozen set of values, checked, and what a checkpoint adds to it.

Pure: reads no file and knows no process group. What the user gave is kept apart from the defaults, because an option
that was given wins over the checkpoint's, and a default does not.

    given by the user  >  kept in the checkpoint  >  default
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hsdp.model import ModelShape
from hsdp.placement import World, resolve_sizes

PRECISIONS = ("fp32", "bf16")
_SHAPE = ("layers", "width", "heads")
_OF_THIS_START = ("replicate", "shard", "nproc", "device", "out", "resume")  # what a checkpoint has no say in


@dataclass(frozen=True)
class TrainOptions:
    """Everything that `hsdp train` can be told; the help texts in commands.py say what each means.

    Attributes:
        batch: sequences of one rank in one microbatch.
        out: folder for everything the run leaves behind.
        resume: folder of one checkpoint, or None to start afresh.
        save_every: steps between checkpoints; 0 for one at the end only. `eval_every` likewise.

    Raises:
        ValueError: a value that cannot be, whatever the rest; with the name, the value and what would do.
    """

    data: tuple[str, ...] = ()
    replicate: int | None = None
    shard: int | None = None
    nproc: int | None = None
    layers: int = 4
    width: int = 128
    heads: int = 4
    seq: int = 128
    batch: int = 4
    accumulate: int = 1
    steps: int = 250
    lr: float = 6e-3
    precision: str = "fp32"
    device: str = "auto"
    out: str = "runs/hsdp-train"
    resume: str | None = None
    seed: int = 0
    save_every: int = 0
    eval_every: int = 50

    def __post_init__(self) -> None:
        _ = self.shape  # a ModelShape refuses sizes that do not fit
        for name in ("seq", "batch", "accumulate", "steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("save_every", "eval_every"):
            _at_least(name, getattr(self, name), 0)
        if self.nproc is not None:
            _at_least("nproc", self.nproc, 1)
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr is {self.lr}; it must be a number above 0")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; it must be one of {', '.join(PRECISIONS)}")

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.width, self.heads)

    def global_batch(self, world: int) -> int:
        """Sequences of one step over all ranks and microbatches."""
        return self.batch * world * self.accumulate

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainOptions:
        """The opposite of `to_json`; names of an option that this version does not have are left out."""
        known = {field.name for field in fields(cls)} & set(values)
        chosen: dict[str, Any] = {name: values[name] for name in known}
        return cls(**{**chosen, "data": tuple(chosen.get("data", ()))})


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")


def with_checkpoint(given: Mapping[str, Any], kept: TrainOptions, kept_batch: int, world: int) -> TrainOptions:
    """The options of a run that goes on from a checkpoint.

    Args:
        given: what the user gave, by name.
        kept: the options of the run that wrote the checkpoint.
        kept_batch: its global batch, in sequences. It stays what it was, on however many ranks, unless the user gives
            `batch` or `accumulate`.
        world: ranks of the new run.

    Raises:
        ValueError: another model shape was given, or the ranks do not divide the global batch.
    """
    for name in _SHAPE:
        size = getattr(kept, name)
        if given.get(name, size) != size:
            raise ValueError(
                f"--{name} {given[name]} does not go with the checkpoint, whose model has {name} {size}; "
                f"leave --{name} out, or start without --resume"
            )
    afresh = {name: getattr(TrainOptions, name) for name in _OF_THIS_START}
    values: dict[str, Any] = {**kept.to_json(), **afresh, **given}
    if "batch" not in given and "accumulate" not in given:
        a_rank, rest = divmod(kept_batch, world * kept.accumulate)
        if rest:
            raise ValueError(
                f"the checkpoint's global batch of {kept_batch} sequences does not divide over {world} ranks "
                f"x accumulate {kept.accumulate}; give --batch (a rank and microbatch) and --accumulate"
            )
        values["batch"] = a_rank
    return TrainOptions.from_json(values)


def with_local_mesh(options: TrainOptions, nproc: int, on_cpu: bool) -> TrainOptions:
    """The options with the mesh filled in for `nproc` ranks on this host.

    Where neither size was given: on CPU two copies if `nproc` is even and at least 4, so that both axes are at work;
    else `init_mesh`'s own default, one copy on the host.

    Raises:
        ValueError: sizes that do not fit `nproc`, with those that would.
    """
    replicate, shard = options.replicate, options.shard
    if replicate is None and shard is None and on_cpu and nproc >= 4 and nproc % 2 == 0:
        replicate = 2
    world = World(("local",) * nproc, tuple(range(nproc)), ("local",) * nproc)
    replicate, shard = resolve_sizes(world, replicate, shard)
    return replace(options, replicate=replicate, shard=shard, nproc=nproc)
