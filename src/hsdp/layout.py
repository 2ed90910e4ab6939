"""Where every parameter of a unit lies: in the shard, in the gathered buffer and in the gradient shard.

Pure integers. Knows nothing of tensors, devices or process groups; sizes are in elements unless a name says bytes.

    W[10, 3] over S = 4: chunk = ceil(10 / 4) = 3 rows

    shard of rank 0   shard of rank 1   shard of rank 2   shard of rank 3
    rows 0 1 2        rows 3 4 5        rows 6 7 8        row 9 and padding
    `-------------------------- slab, S x chunk ---------------------------'

A *direct* slot is gathered in place: the parameter is the head of its slab. *Packed* slots are too small to be worth a
message each, or cut along another dim than 0, so that a rank's chunk is not one run of the parameter: their chunks
travel in one message a rank and are copied into their slabs afterwards.

    gathered buffer:  [slab | slab | ... direct ...][slab | slab ... packed ...][message: S x packed]
    shard:            [chunk | chunk | ... direct ...][chunk | chunk ... packed ...]
    gradient shard:   the same for the trainable slots, and one used-flag a slot behind the packed chunks
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

ALIGN_BYTES = 16  # NCCL drops to element-wise copies when a message is not a multiple of 16 bytes (nccl#413)
PACKED_CHUNK_BYTES = 64 * 1024  # below this a message costs more than the copy that avoids it (measured on loopback)


def ceil_to(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """One parameter of a segment. Offsets are in elements of the buffer they name."""

    shape: tuple[int, ...]  # the dim that is cut first; () has no rows: every rank of the row holds the one element
    chunk_rows: int  # rows of dim 0 a rank holds; the last ranks may hold fewer or none
    packed: bool
    slab_offset: int  # in the gathered buffer
    shard_offset: int  # in the shard

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        return prod(self.shape[1:])

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def chunk(self) -> int:
        return self.chunk_rows * self.row_numel

    def rows_of(self, rank: int) -> int:
        """Rows that shard rank `rank` really holds, 0 <= rows <= chunk_rows."""
        if not self.shape:
            return 1
        return max(0, min(self.rows - rank * self.chunk_rows, self.chunk_rows))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what shard rank `rank` holds."""
        return (self.rows_of(rank), *self.shape[1:]) if self.shape else ()

    def counts(self, shard: int) -> list[int]:
        """Elements each of `shard` ranks holds; they sum to `numel`, but for a parameter without dims."""
        return [self.rows_of(rank) * self.row_numel for rank in range(shard)]


@dataclass(frozen=True)
class SegmentLayout:
    """Layout of the parameters of one unit that share a dtype."""

    shard: int  # S
    slots: tuple[Slot, ...]
    shard_numel: int  # elements of the shard
    packed_offset: int  # where the packed chunks start in the shard; they end it
    gathered_numel: int  # elements of the gathered buffer, message area included
    message_offset: int  # where the packed message starts in the gathered buffer

    @property
    def packed_numel(self) -> int:
        """Elements of one rank's part of the packed message."""
        return self.shard_numel - self.packed_offset

    @property
    def direct(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if not slot.packed]

    @property
    def packed(self) -> list[int]:
        return [i for i, slot in enumerate(self.slots) if slot.packed]


@dataclass(frozen=True)
class GradLayout:
    """Layout of the gradient shard of one segment: only the trainable slots have a place."""

    offsets: dict[int, int]  # slot -> offset from the start of the segment's region
    packed_offset: int
    flags_offset: int  # one element a trainable slot: how many ranks gave it a gradient
    numel: int

    def flag_offset(self, slot: int) -> int:
        """Where the flag of a trainable slot is."""
        return self.flags_offset + list(self.offsets).index(slot)

    @property
    def packed_numel(self) -> int:
        """Elements of one rank's packed gradient message, flags included."""
        return self.flags_offset - self.packed_offset + len(self.offsets)


def plan_segment(
    shapes: Sequence[Sequence[int]],
    shard: int,
    itemsize: int,
    packed_chunk_bytes: int = PACKED_CHUNK_BYTES,
    packed_always: Collection[int] = (),
) -> SegmentLayout:
    """Lay out parameters of `shapes` over `shard` ranks; `itemsize` is that of the gathered dtype, in bytes.

    Args:
        packed_always: parameters that are packed however large they are.

    >>> layout = plan_segment([(10, 3), (2,)], shard=4, itemsize=4, packed_chunk_bytes=16)
    >>> [(slot.packed, slot.chunk, slot.counts(4)) for slot in layout.slots]
    [(False, 9, [9, 9, 9, 3]), (True, 1, [1, 1, 0, 0])]
    """
    align = max(1, ALIGN_BYTES // itemsize)
    chunk_rows = [-(-(shape[0] if shape else 1) // shard) for shape in shapes]
    chunks = [rows * prod(shape[1:]) for rows, shape in zip(chunk_rows, shapes, strict=True)]
    packed = [
        shard > 1 and (i in packed_always or not shape or chunk * itemsize < packed_chunk_bytes)
        for i, (chunk, shape) in enumerate(zip(chunks, shapes, strict=True))
    ]
    slab_offsets, gathered = {}, 0
    shard_offsets, shard_numel, packed_offset = {}, 0, 0
    for want_packed in (False, True):
        if want_packed:
            packed_offset = shard_numel
        for i, chunk in enumerate(chunks):
            if packed[i] != want_packed:
                continue
            slab_offsets[i], shard_offsets[i] = gathered, shard_numel
            gathered += ceil_to(shard * chunk, align)
            shard_numel += ceil_to(chunk, align)
    slots = tuple(
        Slot(tuple(shape), chunk_rows[i], packed[i], slab_offsets[i], shard_offsets[i])
        for i, shape in enumerate(shapes)
    )
    message = gathered
    gathered += shard * (shard_numel - packed_offset) if any(packed) else 0
    return SegmentLayout(shard, slots, shard_numel, packed_offset, gathered, message)


def plan_gradients(layout: SegmentLayout, trainable: Sequence[bool], itemsize: int = 4) -> GradLayout:
    """Lay out the gradient shard for the slots marked in `trainable`; `itemsize` is that of the sums, in bytes."""
    align = max(1, ALIGN_BYTES // itemsize)
    offsets: dict[int, int] = {}
    numel = packed_offset = 0
    for want_packed in (False, True):
        if want_packed:
            packed_offset = numel
        for i, slot in enumerate(layout.slots):
            if trainable[i] and slot.packed == want_packed:
                offsets[i] = numel
                numel += ceil_to(slot.chunk, align)
    flags_offset = numel
    return GradLayout(offsets, packed_offset, flags_offset, ceil_to(flags_offset + len(offsets), align))


def plan_buckets(region_numels: Sequence[int], bucket_numel: int) -> list[list[int]]:
    """Cut consecutive regions into buckets of at least `bucket_numel` elements each; the last may hold fewer.

    >>> plan_buckets([3, 3, 10, 1, 1], 5)
    [[0, 1], [2], [3, 4]]
    """
    buckets: list[list[int]] = []
    filled = bucket_numel
    for i, numel in enumerate(region_numels):
        if filled >= bucket_numel:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += numel
    return buckets
