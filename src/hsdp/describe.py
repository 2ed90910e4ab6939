"""What was set up: the text that a run announces itself with, as data.

HSDP over 8 ranks = replicate 2 x shard 4 on 2 hosts
  rank 0 shares one copy with ranks 0-3, its twin parts are on ranks 0, 4
  ...
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hsdp import draw
from hsdp.control import format_ranks
from hsdp.module import schedules_of
from hsdp.placement import better_rows, describe_rows
from hsdp.precision import Precision
from hsdp.segment import Segment
from hsdp.unit import Unit

_MAX_ROWS = 4  # so many rows are spelled out
_ADAMW_STATES = 2  # exp_avg and exp_avg_sq, in the parameter's own dtype


@dataclass(frozen=True)
class Description:
    """A wrapped model in numbers; `str()` of it is the start-up announcement. Bytes are of one rank, the largest.

    Attributes:
        sharing: ranks that share one copy of the model with `rank`.
        twins: ranks that hold the same part of it as `rank`.
        spanning_rows: shard groups that lie on more than one host.
        rows: the ranks of every shard group, in mesh order.
        hosts: the host's name, by rank.
    """

    rank: int
    world: int
    replicate: int
    shard: int
    sharing: tuple[int, ...]
    twins: tuple[int, ...]
    num_hosts: int
    spanning_rows: int
    rows: tuple[tuple[int, ...], ...]
    hosts: dict[int, str]
    num_units: int
    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    largest_gather_bytes: int
    largest_gather_unit: str
    precision: Precision

    def __str__(self) -> str:
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        inside = "yes" if not self.spanning_rows else f"no, {self.spanning_rows} of {self.replicate} span hosts"
        better = better_rows(self.hosts, self.rows)
        if better is not None:
            some = ", ".join(map(str, better[:_MAX_ROWS])) + (", ..." if len(better) > _MAX_ROWS else "")
            inside += (
                f"\n  better: rows {some}, as hsdp.init_mesh(replicate={self.replicate}, shard={self.shard}) makes them"
            )
        frozen = self.num_parameters - self.num_trainable
        trainable = "" if not frozen else f" ({frozen:,} of them frozen)"
        return "\n".join(
            [
                f"HSDP over {self.world} ranks = replicate {self.replicate} x shard {self.shard}, on {hosts}",
                f"  rank {self.rank} shares one copy of the model with {format_ranks(self.sharing)}, "
                f"and its part has twins on {format_ranks(self.twins)}",
                f"  shard groups stay inside a host: {inside}",
                f"  {self.num_parameters:,} parameters{trainable} in {self.num_units} units; "
                f"precision: {_precision_text(self.precision)}",
                f"  bytes a rank: parameters {_mib(self.parameter_bytes)}, gradients {_mib(self.gradient_bytes)}, "
                f"AdamW {_mib(self.optimizer_bytes)}, largest gather {_mib(self.largest_gather_bytes)}"
                f" ({self.largest_gather_unit})",
            ]
        )

    def draw(self, path: str | Path | None = None) -> None:
        """Draw the mesh: into the file `path`, SVG or PNG by its suffix, or else on this process's standard output.

        Every rank may call it, and draws the same; so one rank should. Needs matplotlib or rich (`hsdp[train]`).

        Raises:
            ValueError: another suffix.
        """
        picture = draw.MeshPicture(self.rows, self.hosts)
        if path is None:
            draw.show(picture)
        else:
            draw.save(picture, path)


def describe(model: nn.Module) -> Description:
    """Describe a wrapped model, as this rank sees it; no communication.

    Raises:
        ValueError: nothing in `model` is wrapped.
    """
    schedule = schedules_of(model)[0]
    units = [unit for each in schedules_of(model) for unit in each.units if unit.params]
    mesh_ranks = schedule.mesh.mesh.flatten().tolist()
    rows = torch.arange(len(mesh_ranks)).view(-1, schedule.mesh.size(schedule.mesh.ndim - 1)).tolist()
    position = mesh_ranks.index(dist.get_rank())
    assert schedule.world is not None, "a schedule without a world"
    place = describe_rows(schedule.world, rows, position)
    largest = max(units, key=_full_bytes)
    segments = [segment for unit in units for segment in unit.segments]
    params = [param for segment in segments for param in segment.params]
    trainable = [param for param in params if param.sharded.requires_grad]
    return Description(
        rank=mesh_ranks[position],
        world=schedule.mesh.size(),
        replicate=schedule.mesh.size(0) if schedule.mesh.ndim == 2 else 1,
        shard=schedule.mesh.size(schedule.mesh.ndim - 1),
        sharing=tuple(mesh_ranks[each] for each in place.copy_ranks),
        twins=tuple(mesh_ranks[each] for each in place.twin_ranks),
        num_hosts=place.num_hosts,
        spanning_rows=place.num_spanning_rows,
        rows=tuple(tuple(mesh_ranks[each] for each in row) for row in rows),
        hosts=dict(zip(mesh_ranks, schedule.world.names, strict=True)),
        num_units=len(units),
        num_parameters=sum(param.sharded.numel() for param in params),
        num_trainable=sum(param.sharded.numel() for param in trainable),
        parameter_bytes=sum(segment.shard.nbytes for segment in segments),
        gradient_bytes=sum(segment.grads.numel * segment.sum_dtype.itemsize for segment in segments),
        optimizer_bytes=_ADAMW_STATES * sum(_trainable_bytes(segment) for segment in segments),
        largest_gather_bytes=_full_bytes(largest),
        largest_gather_unit=largest.name or "the root",
        precision=schedule.units[-1].precision,
    )


def _full_bytes(unit: Unit) -> int:
    """Memory of a unit's full parameters; also where one rank a row holds them all the time."""
    return sum(s.layout.gathered_numel * s.gathered_dtype.itemsize for s in unit.segments)


def _trainable_bytes(segment: Segment) -> int:
    slots = segment.layout.slots
    return sum(slots[i].chunk for i in segment.grads.offsets) * segment.dtype.itemsize


def _precision_text(precision: Precision) -> str:
    chosen = {field.name: getattr(precision, field.name) for field in fields(precision)}
    texts = [
        f"{name} {str(dtype).removeprefix('torch.')}"
        for name, dtype in chosen.items()
        if isinstance(dtype, torch.dtype)
    ]
    return ", ".join(texts) or "as the parameters are"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
