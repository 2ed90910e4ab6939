"""DTensors over memory that we own: a shard, a gradient shard. The one place that touches DTensor's internals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], placements: tuple[Placement, ...]
) -> DTensor:
    """The DTensor of global `shape` whose local part is `local` itself, not a copy."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def like(template: torch.Tensor, local: torch.Tensor) -> DTensor:
    """A DTensor of the global shape, mesh and placements of `template` over `local`.

    Eight times cheaper than `DTensor.from_local` (3 us against 26), and called for every parameter in every step.
    """
    assert isinstance(template, DTensor), f"expected a DTensor, got {type(template).__name__}"
    return DTensor(local, template._spec, requires_grad=False)


def clone_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of its own with the same values, as plain a one as if it had just been made."""
    with torch.no_grad():
        return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, without the autograd node that `to_local()` records; a plain tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def placements_of(tensor: torch.Tensor) -> tuple[Placement, ...]:
    assert isinstance(tensor, DTensor), f"expected a DTensor, got {type(tensor).__name__}"
    return tensor.placements


def final_placements(mesh: DeviceMesh, shape: Sequence[int], dim: int = 0) -> tuple[Placement, ...]:
    """How parameters and final gradients lie: `(Replicate(), Shard(dim))`, on a 1-D mesh `(Shard(dim),)`.

    A parameter without dims has no rows to share out and is on every rank.
    """
    inside: Placement = Shard(dim) if len(shape) else Replicate()
    return (Replicate(), inside) if mesh.ndim == 2 else (inside,)


def row_sum_placements(mesh: DeviceMesh, shape: Sequence[int], dim: int = 0) -> tuple[Placement, ...]:
    """How a gradient lies that was reduced inside its row only: still a sum over the replicate axis."""
    final = final_placements(mesh, shape, dim)
    return (Partial(), final[1]) if mesh.ndim == 2 else final


def unreduced_placements(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """How a gradient lies that no rank has reduced: a sum over every axis."""
    return (Partial(),) * mesh.ndim
