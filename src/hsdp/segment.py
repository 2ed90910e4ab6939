"""Segment: the parameters of one unit that share a dtype, with their memory and the messages that move them.

Holds tensors and layouts, no modules and no order of events. Legend of shapes: S ranks in the row, n = slot.chunk.

    shard      [shard_numel]     this rank's rows, the optimizer's memory; `param.sharded` are DTensors over it
    buffer     [gathered_numel]  exists between `start_gather` and `free`; `param.gathered` are views of it
    sums       [grad_numel]      where reduced gradients land; handed in, a slice of a buffer that spans all units

[Note: one storage for life] Autograd saves gathered parameters (and views of them, `weight.t()`) for backward. They are
freed and filled again by resizing the one storage under them, so that what autograd saved is valid again after the
second gather. The buffer we write through is another tensor over that storage: writing it does not count as an in-place
change of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp.collectives import Pending, ReduceJob, Row
from hsdp.dtensors import final_placements, like, local_of, make_dtensor, placements_of
from hsdp.internals import hooks_of, move_hooks
from hsdp.layout import GradLayout, plan_gradients, plan_segment
from hsdp.precision import Precision, sum_dtype

TIE = "_hsdp_tie"  # on a user's parameter that was sharded: what it became, to find it again in another place


@dataclass(eq=False)
class Param:
    """One parameter: where it stands in the model, and its two forms."""

    name: str  # qualified name from the wrapped module
    owners: list[tuple[nn.Module, str]]  # every module attribute that is this parameter; more than one when tied
    sharded: nn.Parameter  # until the segment is built: the parameter as the user made it
    dim: int = 0  # the dim that is cut; layouts and buffers see it moved to the front
    gathered_dtype: torch.dtype | None = None  # None: its own
    gathered: nn.Parameter = field(init=False)
    whole: torch.Tensor | None = None  # gradient that no rank has reduced yet, summed over backwards
    local: torch.Tensor = field(init=False)  # the local part of the sharded form, a view of the shard
    watched: bool = False  # whether the schedule is told of gradients of the gathered form

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


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy lists of tensors, casting where dtypes differ; one kernel where the device has it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def front(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """`tensor` with `dim` moved to the front, a view."""
    return tensor.movedim(dim, 0) if dim else tensor


def front_shape(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """`shape` with `dim` moved to the front."""
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if dim else tuple(shape)


def back(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The opposite of `front`."""
    return tensor.movedim(0, dim) if dim else tensor


class Segment:
    """See the module's docstring."""

    def __init__(self, params: list[Param], mesh: DeviceMesh, row: Row, precision: Precision, device: torch.device):
        first = params[0].sharded
        self.params, self.row, self.precision, self.mesh = params, row, precision, mesh
        self.dtype, self.gathered_dtype = first.dtype, params[0].gathered_dtype or first.dtype
        self.sum_dtype = sum_dtype(self.dtype)
        shapes = [front_shape(p.sharded.shape, p.dim) for p in params]
        self.layout = plan_segment(shapes, row.size, self.gathered_dtype.itemsize)
        self.shard = torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=device)
        # With one rank in the row and no cast the shard is the gathered buffer: nothing to move, nothing to free.
        self.in_place = row.size == 1 and self.gathered_dtype == self.dtype
        for i, param in enumerate(params):
            self._take(i, param)
        self._build_gathered(device)
        self._build_views()
        self.free()  # the views needed a storage of full size to be made
        self._gathered_version = -1
        self.holds_whole = False  # whether a backward left gradients whole that wait for their reduction
        self.trainable = (False,) * len(params)
        self.grads: GradLayout = plan_gradients(self.layout, [False] * len(params))

    # -- construction ------------------------------------------------------------------------------------------------

    def _build_gathered(self, device: torch.device) -> None:
        numel = self.layout.gathered_numel
        self.gathered_bytes = 0 if self.in_place else numel * self.gathered_dtype.itemsize
        if self.in_place:
            self._storage, self.buffer = self.shard.untyped_storage(), self.shard
        else:
            self._storage = torch.UntypedStorage(self.gathered_bytes, device=device)
            self.buffer = self._view(0, (numel,))
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            view = self._view(slot.slab_offset, slot.shape, param.dim)
            param.gathered = nn.Parameter(view, requires_grad=param.sharded.requires_grad)
            param.gathered.__dict__.update(param.sharded.__dict__)

    def _view(self, offset: int, shape: Sequence[int], dim: int = 0) -> torch.Tensor:
        """A tensor over the gathered storage with a version counter of its own; `shape` has `dim` at the front."""
        tensor = torch.empty(0, dtype=self.gathered_dtype, device=self._storage.device)
        model = back(torch.empty(shape, device="meta"), dim)
        return tensor.set_(self._storage, offset, model.shape, model.stride())

    def _build_views(self) -> None:
        """All views a gather needs, made once: what is cut anew in every step costs more than the messages."""
        layout, size, rank = self.layout, self.row.size, self.row.rank
        self._own: list[torch.Tensor] = []
        self._own_source: list[torch.Tensor] = []
        self._messages: list[torch.Tensor] = []
        self._unpacked: list[torch.Tensor] = []
        self._unpacked_source: list[torch.Tensor] = []
        for i in layout.direct:
            slot = layout.slots[i]
            slab = self.buffer[slot.slab_offset : slot.slab_offset + size * slot.chunk]
            self._own.append(slab.view(size, -1)[rank])
            self._own_source.append(self.shard[slot.shard_offset : slot.shard_offset + slot.chunk])
            self._messages.append(slab)
        if layout.packed:
            message = self.buffer[layout.message_offset :].view(size, layout.packed_numel)
            self._own.append(message[rank])
            self._own_source.append(self.shard[layout.packed_offset :])
            self._messages.append(message.view(-1))
            for i in layout.packed:
                slot = layout.slots[i]
                slab = self.buffer[slot.slab_offset : slot.slab_offset + size * slot.chunk]
                start = slot.shard_offset - layout.packed_offset
                self._unpacked.append(slab.view(size, slot.chunk))
                self._unpacked_source.append(message[:, start : start + slot.chunk])

    def _take(self, i: int, param: Param) -> None:
        """Copy this rank's rows of the user's parameter into the shard, and put the sharded form in its place.

        A parameter that is sharded already, of a model that is being copied, brings its rows along.
        """
        slot, source = self.layout.slots[i], param.sharded
        rank, rows = self.row.rank, front(local_of(source.detach()), param.dim)
        if slot.shape and not isinstance(source, DTensor):
            start = min(rank * slot.chunk_rows, slot.rows)
            rows = rows[start : start + slot.rows_of(rank)]
        local = self.local_rows(i)
        front(local, param.dim).copy_(rows)
        tensor = make_dtensor(local, self.mesh, source.shape, final_placements(self.mesh, source.shape, param.dim))
        param.sharded = nn.Parameter(tensor, requires_grad=source.requires_grad)
        param.sharded.__dict__.update(source.__dict__)  # what users and trainers hang on their parameters
        move_hooks(source, param.sharded)
        param.sharded.__dict__.pop(TIE, None)
        param.local = local_of(param.sharded)
        param.show(param.sharded)  # nothing holds the whole parameter any more

    def local_rows(self, i: int) -> torch.Tensor:
        """This rank's rows of parameter `i`, a view of the shard: `[rows, ...]`, `[0, ...]` where it holds none.

        Rows are along the dim that is cut, which is where it is in the parameter.
        """
        slot = self.layout.slots[i]
        shape = slot.local_shape(self.row.rank)
        rows = self.shard[slot.shard_offset : slot.shard_offset + prod(shape)].view(shape)
        return back(rows, self.params[i].dim)

    def adopt(self) -> None:
        """Take up parameters that a user's call replaced (`load_state_dict(assign=True)`, `_apply`)."""
        for i, param in enumerate(self.params):
            seen = [module._parameters[attribute] for module, attribute in param.owners]
            if all(
                (each is param.sharded and local_of(each) is param.local) or each is param.gathered for each in seen
            ):
                continue
            current = next((each for each in seen if each is not param.sharded), param.sharded)
            if current is None:
                continue
            local, found = self.local_rows(i), local_of(current)
            if not isinstance(current, DTensor) or found.shape != local.shape or found.dtype != local.dtype:
                raise ValueError(
                    f"parameter {param.name!r} was replaced by one that does not fit its shard: expected a DTensor "
                    f"with a local part {tuple(local.shape)} of {local.dtype}, found {type(current).__name__} with one "
                    f"{tuple(found.shape)} of {found.dtype}; change shape, dtype or device before wrapping"
                )
            with torch.no_grad():
                local.copy_(found)
            current._local_tensor = local
            param.sharded, param.local = current, local
            param.show(current)

    # -- gather ------------------------------------------------------------------------------------------------------

    def start_gather(self, tag: int) -> Pending:
        """Give the gathered buffer memory, put this rank's rows in place and start fetching the others'."""
        self._gathered_version = self._version
        if self.in_place:
            return Pending()
        self._storage.resize_(self.gathered_bytes)
        with torch.no_grad():
            copy_all(self._own, self._own_source)
        return self.row.gather(self._messages, tag)

    def finish_gather(self, pending: Pending) -> None:
        pending.wait()
        if self._unpacked:
            with torch.no_grad():
                copy_all(self._unpacked, self._unpacked_source)

    @property
    def is_stale(self) -> bool:
        """Whether the shard was written (an optimizer step) since it was gathered."""
        return self._version != self._gathered_version

    @property
    def _version(self) -> int:
        # Operators on a DTensor count as changes of itself, not of its local part.
        return sum(param.sharded._version for param in self.params)

    def free(self) -> None:
        """Give the gathered buffer's memory back."""
        if not self.in_place:
            self._storage.resize_(0)

    # -- reduce ------------------------------------------------------------------------------------------------------

    def plan_gradients(self) -> bool:
        """Lay out the gradient shard for the parameters that require a gradient now; True when that changed."""
        trainable = tuple(p.sharded.requires_grad for p in self.params)
        if trainable == self.trainable:
            return False
        self.trainable = trainable
        for param in self.params:
            param.gathered.requires_grad_(param.sharded.requires_grad)
        self.grads = plan_gradients(self.layout, trainable, self.sum_dtype.itemsize)
        return True

    def _take_grad(self, i: int) -> torch.Tensor | None:
        """Autograd's gradient of parameter `i` as `[numel]` in the dtype it travels in; the parameter lets go of it."""
        param = self.params[i]
        if param.whole is not None:
            self.keep_whole(i)
        grad = param.gathered.grad if param.whole is None else param.whole
        param.gathered.grad = param.whole = None
        if grad is None:
            return None
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        # Autograd lays a gradient out like its parameter, so this is as it lies in memory, whatever dim is cut.
        return front(grad.to(self._wire), param.dim).contiguous().view(-1)

    @property
    def _wire(self) -> torch.dtype:
        """Dtype in which gradients travel, the same on every rank whatever happened in its backward."""
        grad_dtype = self.sum_dtype if self.holds_whole else self.gathered_dtype
        return self.precision.wire_dtype(grad_dtype, self.row.sums_wide)

    def has_grad(self, i: int) -> bool:
        """Whether parameter `i` has a gradient that was not yet reduced."""
        param = self.params[i]
        return param.gathered.grad is not None or param.whole is not None

    def keep_whole(self, i: int) -> None:
        """Add autograd's gradient of parameter `i` to its unreduced sum, in the dtype of sums."""
        param = self.params[i]
        grad, param.gathered.grad = param.gathered.grad, None
        if grad is None:
            return
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if param.whole is None:
            param.whole = grad.to(self.sum_dtype)
        else:
            param.whole.add_(grad)

    def direct_job(self, i: int, sums: torch.Tensor, add: bool) -> tuple[ReduceJob, bool]:
        """Reduction of a direct slot into `sums`, and whether this rank has a gradient; zeros where it has none."""
        slot, start = self.layout.slots[i], self.grads.offsets[i]
        grad = self._take_grad(i)
        full = torch.zeros(slot.numel, dtype=self._wire, device=self.shard.device) if grad is None else grad
        return ReduceJob(full, slot.counts(self.row.size), sums[start : start + slot.chunk], add), grad is not None

    def packed_job(self, used: Sequence[bool], sums: torch.Tensor, add: bool) -> ReduceJob:
        """Reduction of all packed slots and of the flags that say which parameters got a gradient on this rank.

        `used[i]` is what is known of the direct slots; the packed ones are looked at here.
        """
        size, plan, wire = self.row.size, self.grads, self._wire
        message = torch.zeros(size, plan.packed_numel, dtype=wire, device=self.shard.device)
        targets, sources = [], []
        flags = [0.0] * len(plan.offsets)
        for place, (i, offset) in enumerate(plan.offsets.items()):
            slot = self.layout.slots[i]
            flags[place] = float(used[i])
            if not slot.packed or (grad := self._take_grad(i)) is None:
                continue
            flags[place] = 1.0
            start = offset - plan.packed_offset
            if not slot.shape:
                targets.append(message[:, start])
                sources.append(grad.expand(size))
            elif slot.numel == size * slot.chunk:
                targets.append(message[:, start : start + slot.chunk])
                sources.append(grad.view(size, slot.chunk))
            else:
                for rank, part in enumerate(grad.split(slot.counts(size))):
                    targets.append(message[rank, start : start + part.numel()])
                    sources.append(part)
        copy_all(targets, sources)
        message[:, plan.flags_offset - plan.packed_offset :] = torch.tensor(flags, dtype=wire, device=message.device)
        out = sums[plan.packed_offset : plan.packed_offset + plan.packed_numel]
        # Parameters without dims are on every rank, so their sums must not depend on the rank that makes them.
        return ReduceJob(message.view(-1), [plan.packed_numel] * size, out, add, in_order=True)

    def grad_rows(self, i: int, sums: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the gradient of parameter `i`, a view of `sums`."""
        slot = self.layout.slots[i]
        shape = slot.local_shape(self.row.rank)
        start = sums.storage_offset() + self.grads.offsets[i]
        return back(sums.as_strided(shape, self._stride(slot.shape), start), self.params[i].dim)

    @staticmethod
    def _stride(shape: Sequence[int]) -> tuple[int, ...]:
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return tuple(reversed(stride))
