"""Gradients: the gradient shards of all units, in flat buffers that the cross-reduction cuts into buckets.

    flat (fp32):  [ last unit's region | ... | first unit's region ]      backward order: full buckets leave early
                    `------- bucket 0 -------'`----- bucket 1 -----'

One flat buffer per dtype of the sums. A buffer is written again in the next step only if nobody kept a gradient in it,
otherwise a new one takes its place: a gradient that a user holds never changes under their hands.

[Note: what .grad is] After a backward that synchronised, `.grad` is final: a DTensor `(Replicate(), Shard(0))` over the
flat buffer. After one that deferred the cross-reduce it is `(Partial(), Shard(0))`, after one that deferred everything
`(Partial(), Partial())`: the sum so far, labelled as such. Setting it to `None` or zeroing it discards that sum, as in
plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Placement

from hsdp.collectives import Column
from hsdp.dtensors import row_sum_placements, unreduced_placements
from hsdp.internals import storage_use_count
from hsdp.layout import plan_buckets
from hsdp.pending import Pending
from hsdp.segment import Segment
from hsdp.unit import Unit


class Flat:
    """One flat buffer of gradient sums, with the place of every segment in it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.numel = 0
        self.starts: dict[Segment, int] = {}
        self._buffer: torch.Tensor | None = None
        self._own_uses = 0

    def add(self, segment: Segment) -> None:
        self.starts[segment] = self.numel
        self.numel += segment.grads.numel

    @property
    def buffer(self) -> torch.Tensor:
        assert self._buffer is not None, "a gradient buffer was used before a backward began"
        return self._buffer

    def renew(self, keep: Sequence[Segment]) -> None:
        """A buffer for new sums: the last one if nobody else holds a part of it. The regions of `keep` stay."""
        if self._buffer is not None and storage_use_count(self._buffer) == self._own_uses:
            return
        kept = [self.region(segment) for segment in keep]
        self._buffer = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self._own_uses = storage_use_count(self._buffer)
        for segment, sums in zip(keep, kept, strict=True):
            self.region(segment).copy_(sums)

    def region(self, segment: Segment) -> torch.Tensor:
        start = self.starts[segment]
        return self.buffer[start : start + segment.grads.numel]


class Bucket:
    """Consecutive regions of one flat buffer that are cross-reduced together."""

    def __init__(self, flat: Flat, segments: list[Segment]) -> None:
        self.flat, self.segments = flat, segments
        self.waiting: set[Segment] = set()
        self.runs: list[list[Segment]] = []
        self.pending: list[Pending] = []

    def begin(self, takes_part: Sequence[bool]) -> None:
        """Get ready for a backward in which only some regions are cross-reduced: usually all or none."""
        self.runs, self.pending = [], []
        previous = False
        for segment, part in zip(self.segments, takes_part, strict=True):
            if part and not previous:
                self.runs.append([])
            if part:
                self.runs[-1].append(segment)
            previous = part
        self.waiting = {segment for run in self.runs for segment in run}

    def send(self, column: Column) -> None:
        starts = self.flat.starts
        for run in self.runs:
            tensor = self.flat.buffer[starts[run[0]] : starts[run[-1]] + run[-1].grads.numel]
            self.pending.append(column.all_reduce(tensor))


class Gradients:
    """See the module's docstring.

    Args:
        units: in backward order.
        column: the replicate axis, or None where it has one rank.
        bucket_bytes: least size of a cross-reduce message.
    """

    def __init__(self, units: Sequence[Unit], column: Column | None, bucket_bytes: int) -> None:
        self._column = column
        self._flats: dict[torch.dtype, Flat] = {}
        self._unit_of: dict[Segment, Unit] = {}
        for unit in units:
            for segment in unit.segments:
                if segment.grads.offsets:
                    self._unit_of[segment] = unit
                    dtype = segment.sum_dtype
                    self._flats.setdefault(dtype, Flat(dtype, segment.shard.device)).add(segment)
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Segment, Bucket] = {}
        for flat in self._flats.values():
            segments = list(flat.starts)
            numels = [segment.grads.numel for segment in segments]
            for places in plan_buckets(numels, bucket_bytes // flat.dtype.itemsize):
                bucket = Bucket(flat, [segments[place] for place in places])
                self._buckets.append(bucket)
                self._bucket_of.update(dict.fromkeys(bucket.segments, bucket))
        self._next_bucket = 0
        self._filled: set[Segment] = set()  # segments whose region holds sums of an earlier backward
        self._used: dict[Segment, list[bool]] = {s: [False] * len(s.params) for s in self._unit_of}
        self._left: dict[tuple[Segment, int], _Left] = {}

    @property
    def deferred(self) -> bool:
        """Whether sums of an earlier backward wait for their reduction or cross-reduction."""
        return bool(self._left)

    # -- during a backward -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Get ready for a backward: keep the sums of a deferral, minus what the user has cleared since."""
        if len(self._filled) < len(self._unit_of):
            for flat in self._flats.values():
                flat.renew([segment for segment in flat.starts if segment in self._filled])
        for (segment, i), left in self._left.items():
            self._resume(segment, i, left)
        self._left.clear()
        for bucket in self._buckets:
            units = [self._unit_of[segment] for segment in bucket.segments]
            bucket.begin([unit.reduces and unit.cross_reduces for unit in units])
        self._next_bucket = 0

    def _resume(self, segment: Segment, i: int, left: _Left) -> None:
        """Go on with the sum that a deferral left, in the way the user left it."""
        param = segment.params[i]
        if param.sharded.grad is not left.grad:  # cleared, or replaced by a gradient of the user's own
            param.whole = None
            self._used[segment][i] = False
            if segment in self._filled:
                region = self.region(segment)
                segment.grad_rows(i, region).zero_()
                region[segment.grads.flag_offset(i)] = 0
            return
        if left.shown is None:
            return
        if left.shown._version != left.version and left.sums.data_ptr() != left.shown.data_ptr():
            left.sums.copy_(left.shown)  # changed in place, for example zeroed, in a copy of another dtype
        param.sharded.grad = None

    def region(self, segment: Segment) -> torch.Tensor:
        """The sums of `segment`, `[segment.grads.numel]`."""
        return self._flats[segment.sum_dtype].region(segment)

    def holds_sums(self, segment: Segment) -> bool:
        """Whether new gradients are added to the region, rather than written."""
        return segment in self._filled

    def used(self, segment: Segment) -> list[bool]:
        """Which parameters got a gradient on this rank since the sums began; the schedule marks them."""
        return self._used[segment]

    def segment_reduced(self, segment: Segment) -> None:
        """The row's sum of `segment` is complete: send every bucket that is full, in the same order on every rank."""
        self._bucket_of[segment].waiting.discard(segment)
        self._send_full()

    def _send_full(self) -> None:
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].waiting:
            if self._column is not None:
                self._buckets[self._next_bucket].send(self._column)
            self._next_bucket += 1

    # -- the end of a backward ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the cross-reduction, divide, and give every parameter its gradient."""
        self._send_full()
        assert self._next_bucket == len(self._buckets), "a bucket was not cross-reduced"
        for bucket in self._buckets:
            for pending in bucket.pending:
                pending.drain()
            bucket.pending = []
        for segment, unit in self._unit_of.items():
            if not unit.reduces:
                self._leave_whole(segment)
                continue
            segment.holds_whole = False
            if unit.cross_reduces:
                self._finish_segment(segment, unit)
            else:
                self._leave_row_sum(segment)

    def _finish_segment(self, segment: Segment, unit: Unit) -> None:
        sums = self.region(segment)
        used = self._used_anywhere(segment, sums)
        if unit.divide_factor != 1:
            sums.div_(unit.divide_factor)
        if unit.all_reduce_hook is not None:
            unit.all_reduce_hook(sums)
        if segment.dtype != sums.dtype:
            sums = sums.to(segment.dtype)
        self._filled.discard(segment)
        self._used[segment] = [False] * len(segment.params)
        for i in segment.grads.offsets:
            if used[i]:
                segment.params[i].deliver(segment.grad_rows(i, sums))

    def _used_anywhere(self, segment: Segment, sums: torch.Tensor) -> list[bool]:
        """Whether any rank gave a parameter a gradient. Reads the flags only if this rank missed one: that is a
        synchronisation with the device, and a parameter used here is used."""
        used = self._used[segment]
        if all(used[i] for i in segment.grads.offsets):
            return used
        plan = segment.grads
        flags = sums[plan.flags_offset : plan.flags_offset + len(plan.offsets)].tolist()
        result = list(used)
        for flag, i in zip(flags, plan.offsets, strict=True):
            result[i] = flag != 0
        return result

    def _leave_row_sum(self, segment: Segment) -> None:
        self._filled.add(segment)
        region = self.region(segment)
        for i in segment.grads.offsets:
            self._leave(
                segment,
                i,
                segment.grad_rows(i, region),
                row_sum_placements(segment.mesh, segment.params[i].shape, segment.params[i].dim),
            )

    def _leave_whole(self, segment: Segment) -> None:
        segment.holds_whole = True
        for i in segment.grads.offsets:
            whole = segment.params[i].whole
            if whole is not None:
                self._leave(segment, i, whole, unreduced_placements(segment.mesh))

    def _leave(self, segment: Segment, i: int, sums: torch.Tensor, placements: tuple[Placement, ...]) -> None:
        param = segment.params[i].sharded
        if param.grad is not None:  # an earlier, final gradient stays what it is; clearing it discards the sum too
            self._left[segment, i] = _Left(param.grad, None, sums, 0)
            return
        shown = sums.to(param.dtype)
        param.grad = segment.params[i].label(shown, segment.mesh, placements)
        self._left[segment, i] = _Left(param.grad, shown, sums, shown._version)


@dataclass(frozen=True)
class _Left:
    """What a deferral left in `.grad`, to see at the next backward whether the user has touched it."""

    grad: torch.Tensor
    shown: torch.Tensor | None  # its local part; None when `.grad` is an earlier gradient and not the sum
    sums: torch.Tensor
    version: int
