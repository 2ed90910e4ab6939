"""Param: one parameter, its two forms, and what tensor parallelism made of it before it came here.

plain       W, of which this rank holds all        sharded: (Replicate(), Shard(0)) over ("replicate", "shard")
inner       a DTensor (Shard(0),) over "tensor"    sharded: (Replicate(), _StridedShard(0), Shard(0)) over all three
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hsdp.dtensors import like, local_of, make_dtensor, placements_of
from hsdp.internals import hooks_of, joint_mesh, waited

TIE = "_hsdp_tie"  # on a user's parameter that was sharded: what it became, to find it again in another place


@dataclass(frozen=True)
class Inner:
    """How a parameter was distributed before it came here: over other axes of the same mesh, by tensor parallelism.

    The engine then cuts what this rank holds of it, and labels the pieces with the axes of both.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size  # of the whole parameter
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Inner | None:
        if not isinstance(tensor, DTensor):
            return None
        return Inner(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def wrap(self, local: torch.Tensor) -> DTensor:
        """The DTensor whose part on this rank is `local`, all that this rank has of it."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def unwrap(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient, laid out as the parameter is; a sum over ranks is completed first."""
        if not isinstance(grad, DTensor):
            return grad
        if grad.placements != self.placements:
            grad = grad.redistribute(placements=self.placements)
        return waited(local_of(grad))

    def label(self, local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
        """The DTensor over both meshes whose part on this rank is `local`; `placements` are those over `mesh`."""
        joint = (*(self._beside(place) for place in placements), *self.placements)
        mesh = joint_mesh(mesh, self.mesh)
        return DTensor.from_local(local, mesh, joint, run_check=False, shape=self.shape, stride=self.stride)

    def _beside(self, placement: Placement) -> Placement:
        """`placement` on an outer axis, where the inner ones may have cut the same dim first."""
        if not isinstance(placement, Shard):
            return placement
        parts = prod(
            self.mesh.size(axis) for axis, place in enumerate(self.placements) if place.is_shard(placement.dim)
        )
        return _StridedShard(placement.dim, split_factor=parts) if parts > 1 else placement


@dataclass(eq=False)
class Param:
    """One parameter: where it stands in the model, and its two forms."""

    name: str  # qualified name from the wrapped module
    owners: list[tuple[nn.Module, str]]  # every module attribute that is this parameter; more than one when tied
    sharded: nn.Parameter  # until the segment is built: the parameter as the user made it
    dim: int = 0  # the dim that is cut
    gathered_dtype: torch.dtype | None = None  # None: its own
    _shape: torch.Size | None = None
    inner: Inner | None = None  # how tensor parallelism distributed it before
    gathered: nn.Parameter = field(init=False)
    whole: torch.Tensor | None = None  # gradient that no rank has reduced yet, summed over backwards
    local: torch.Tensor = field(init=False)  # the local part of the sharded form, a view of the shard
    watched: bool = False  # whether the schedule is told of gradients of the gathered form

    def __post_init__(self) -> None:
        if self._shape is None:
            self._shape, self.inner = local_of(self.sharded).shape, Inner.of(self.sharded)

    @property
    def shape(self) -> torch.Size:
        """Of what this rank holds of it before it is cut: all of it, where there is no tensor parallelism."""
        assert self._shape is not None, "set when made"
        return self._shape

    def label(self, local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
        """The DTensor of this parameter, or of its gradient, whose part on this rank is `local`."""
        if self.inner is None:
            return make_dtensor(local, mesh, self.shape, placements)
        return self.inner.label(local, mesh, placements)

    def show(self, form: nn.Parameter) -> None:
        """Make `form` what the owning modules see."""
        for module, attribute in self.owners:
            module._parameters[attribute] = form

    def deliver(self, rows: torch.Tensor) -> None:
        """Hand the reduced gradient to the sharded form as autograd hands one to a leaf: with the user's hooks."""
        before, after = hooks_of(self.sharded)
        if self.sharded.grad is not None and not before:
            local_of(self.sharded.grad).add_(rows)
        else:
            grad = like(self.sharded, rows)
            for hook in before:
                changed = hook(grad)
                grad = grad if changed is None else self._checked(changed)
            if self.sharded.grad is None:
                self.sharded.grad = grad
            else:
                local_of(self.sharded.grad).add_(local_of(grad))
        for hook in after:
            hook(self.sharded)

    def _checked(self, grad: object) -> DTensor:
        wanted = placements_of(self.sharded)
        if isinstance(grad, DTensor) and grad.placements == wanted:
            return grad
        raise ValueError(
            f"a hook on parameter {self.name!r} returned {type(grad).__name__}: the gradient it got and the one it "
            f"returns are DTensors with the placements {wanted}"
        )
