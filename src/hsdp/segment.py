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
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp.collectives import ReduceJob, Row
from hsdp.dtensors import final_placements, local_of, placements_of
from hsdp.internals import move_hooks
from hsdp.layout import GradLayout, plan_gradients, plan_segment
from hsdp.param import TIE, Param
from hsdp.pending import Pending
from hsdp.precision import Precision, sum_dtype


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy lists of tensors, casting where dtypes differ; one kernel where the device has it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def cut_first(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """`shape` with `dim` moved to the front, as layouts see it."""
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if dim else tuple(shape)


class Segment:
    """See the module's docstring."""

    def __init__(self, params: list[Param], mesh: DeviceMesh, row: Row, precision: Precision, device: torch.device):
        first = params[0].sharded
        self.params, self.row, self.precision, self.mesh = params, row, precision, mesh
        self.dtype, self.gathered_dtype = first.dtype, params[0].gathered_dtype or first.dtype
        self.sum_dtype = sum_dtype(self.dtype)
        self._dims = [param.dim if row.size > 1 else 0 for param in params]
        shapes = [cut_first(param.shape, dim) for param, dim in zip(params, self._dims, strict=True)]
        inside = [i for i, dim in enumerate(self._dims) if dim]
        self.layout = plan_segment(shapes, row.size, self.gathered_dtype.itemsize, packed_always=inside)
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
            view = self._view(slot.slab_offset, param.shape)
            whole = view if param.inner is None else param.inner.wrap(view)
            param.gathered = nn.Parameter(whole, requires_grad=param.sharded.requires_grad)
            param.gathered.__dict__.update(param.sharded.__dict__)

    def _view(self, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor over the gathered storage with a version counter of its own."""
        tensor = torch.empty(0, dtype=self.gathered_dtype, device=self._storage.device)
        return tensor.set_(self._storage, offset, torch.Size(shape), self._stride(shape))

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
                start = slot.shard_offset - layout.packed_offset
                if self._dims[i]:
                    whole = self._view(slot.slab_offset, self.params[i].shape)
                    for place in range(size):
                        target = self._cut(i, whole, place)
                        self._unpacked.append(target)
                        self._unpacked_source.append(message[place, start : start + target.numel()].view(target.shape))
                    continue
                slab = self.buffer[slot.slab_offset : slot.slab_offset + size * slot.chunk]
                self._unpacked.append(slab.view(size, slot.chunk))
                self._unpacked_source.append(message[:, start : start + slot.chunk])

    def _cut(self, i: int, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The rows of a whole parameter `i`, or of its gradient, that shard rank `rank` holds; a view."""
        slot = self.layout.slots[i]
        if not slot.shape:
            return whole
        return whole.narrow(self._dims[i], min(rank * slot.chunk_rows, slot.rows), slot.rows_of(rank))

    def _take(self, i: int, param: Param) -> None:
        """Copy this rank's rows of the user's parameter into the shard, and put the sharded form in its place.

        A parameter that is sharded already, of a model that is copied or cast, brings its rows along and stays itself.
        """
        source, is_new = param.sharded, not hasattr(param, "local")
        rows = local_of(source.detach())
        local = self.local_rows(i)
        local.copy_(self._cut(i, rows, self.row.rank) if is_new else rows)
        if not is_new:
            source._local_tensor = local  # type: ignore[attr-defined]
        else:
            tensor = param.label(local, self.mesh, final_placements(self.mesh, param.shape, param.dim))
            param.sharded = nn.Parameter(tensor, requires_grad=source.requires_grad)
            param.sharded.__dict__.update(source.__dict__)  # what users and trainers hang on their parameters
            move_hooks(source, param.sharded)
        param.sharded.__dict__.pop(TIE, None)
        param.local, param.whole, param.watched = local_of(param.sharded), None, False
        param.show(param.sharded)  # nothing holds the whole parameter any more

    def _rows_shape(self, i: int) -> tuple[int, ...]:
        slot, dim = self.layout.slots[i], self._dims[i]
        if not slot.shape:
            return ()
        rows, *rest = slot.local_shape(self.row.rank)
        return (*rest[:dim], rows, *rest[dim:])

    def local_rows(self, i: int) -> torch.Tensor:
        """This rank's rows of parameter `i`, a contiguous view of the shard; of no rows where it holds none.

        Rows are along the dim that is cut, and lie where they lie in the parameter.
        """
        shape, start = self._rows_shape(i), self.layout.slots[i].shard_offset
        return self.shard[start : start + prod(shape)].view(shape)

    def adopt(self) -> bool:
        """Take up parameters that a user's call replaced (`load_state_dict(assign=True)`, `_apply`).

        Returns whether one has another dtype or device now, so that this segment is of no use any more.
        """
        changed = False
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
            wanted = placements_of(param.sharded)
            if not isinstance(current, DTensor) or found.shape != local.shape or current.placements != wanted:
                placements = f" {current.placements}" if isinstance(current, DTensor) else ""
                raise ValueError(
                    f"parameter {param.name!r} was replaced by one that does not fit its shard: expected a DTensor "
                    f"{wanted} with a local part {tuple(local.shape)}, found {type(current).__name__}{placements} with "
                    f"one {tuple(found.shape)}"
                )
            if (found.dtype, found.device) == (local.dtype, local.device):
                with torch.no_grad():
                    local.copy_(found)
                current._local_tensor = local
                param.local = local
            else:
                changed = True
            param.sharded = current
            param.show(current)
        return changed

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
        if param.inner is not None:
            grad = param.inner.unwrap(grad)
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        return grad.to(self._wire).contiguous().view(-1)

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
        if param.inner is not None:
            grad = param.inner.unwrap(grad)
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
            elif self._dims[i]:
                for rank in range(size):
                    part = self._cut(i, grad.view(self.params[i].shape), rank)
                    targets.append(message[rank, start : start + part.numel()].view(part.shape))
                    sources.append(part)
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
        """This rank's rows of the gradient of parameter `i`, a contiguous view of `sums`."""
        shape, start = self._rows_shape(i), sums.storage_offset() + self.grads.offsets[i]
        return sums.as_strided(shape, self._stride(shape), start)

    @staticmethod
    def _stride(shape: Sequence[int]) -> tuple[int, ...]:
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return tuple(reversed(stride))
