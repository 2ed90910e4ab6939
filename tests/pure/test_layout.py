"""Where parameters lie in the buffers: known layouts, and what must hold for every layout."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch

from hsdp.layout import (
    ALIGN_BYTES,
    PACKED_CHUNK_BYTES,
    SegmentLayout,
    ceil_to,
    plan_buckets,
    plan_gradients,
    plan_segment,
)

SHAPES = [(10, 3), (2,), (1,), (1030, 131), (3, 18_000), (7, 5, 3), (4, 64, 1024), (0, 4), (5, 0), (65_536,)]


def test_ceil_to() -> None:
    assert [ceil_to(value, 4) for value in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert ceil_to(7, 1) == 7


def test_a_known_layout() -> None:
    layout = plan_segment([(10, 3), (2,), (8,)], shard=4, itemsize=4, packed_chunk_bytes=16)
    weight, tiny, bias = layout.slots
    # [10, 3] over 4: chunks of 3 rows, the last rank has one. 36 bytes a chunk: not packed, the others are.
    assert (weight.chunk_rows, weight.chunk, weight.packed) == (3, 9, False)
    assert weight.counts(4) == [9, 9, 9, 3]
    assert [weight.rows_of(rank) for rank in range(4)] == [3, 3, 3, 1]
    assert (tiny.chunk, tiny.packed, tiny.counts(4)) == (1, True, [1, 1, 0, 0])
    assert (bias.chunk, bias.packed, bias.counts(4)) == (2, True, [2, 2, 2, 2])
    # Gathered: slabs of 36, 4 and 8, each a multiple of 4 elements (16 bytes), then the message of 4 x 8.
    assert [slot.slab_offset for slot in layout.slots] == [0, 36, 40]
    assert layout.message_offset == 48
    assert layout.gathered_numel == 48 + 4 * 8
    # Shard: chunks of 9, 1 and 2 rounded up to 4 elements.
    assert [slot.shard_offset for slot in layout.slots] == [0, 12, 16]
    assert (layout.shard_numel, layout.packed_offset, layout.packed_numel) == (20, 12, 8)
    assert (layout.direct, layout.packed) == ([0], [1, 2])


def test_a_known_gradient_layout() -> None:
    layout = plan_segment([(10, 3), (2,), (8,)], shard=4, itemsize=4, packed_chunk_bytes=16)
    everything = plan_gradients(layout, [True, True, True])
    assert everything.offsets == {0: 0, 1: 12, 2: 16}
    assert (everything.packed_offset, everything.flags_offset, everything.numel) == (12, 20, 24)
    assert everything.packed_numel == 8 + 3  # two chunks of 4 elements, three flags
    frozen = plan_gradients(layout, [True, False, True])
    assert frozen.offsets == {0: 0, 2: 12}
    assert (frozen.packed_offset, frozen.flags_offset, frozen.numel) == (12, 16, 20)
    nothing = plan_gradients(layout, [False, False, False])
    assert (nothing.offsets, nothing.numel) == ({}, 0)


def test_one_rank_packs_nothing() -> None:
    layout = plan_segment([(2,), (3, 3)], shard=1, itemsize=4)
    assert layout.packed == []
    assert layout.gathered_numel == layout.shard_numel == 4 + 12


def test_a_scalar_is_on_every_rank() -> None:
    (slot,) = plan_segment([()], shard=2, itemsize=4).slots
    assert (slot.rows, slot.row_numel, slot.numel, slot.counts(2)) == (1, 1, 1, [1, 1])


def test_the_threshold_for_packing() -> None:
    numel = PACKED_CHUNK_BYTES // 4
    at, below = plan_segment([(2 * numel,), (2 * numel - 2,)], shard=2, itemsize=4).slots
    assert (at.packed, below.packed) == (False, True)


LAYOUTS = [
    plan_segment(shapes, shard, itemsize)
    for shapes, shard, itemsize in itertools.product(
        (SHAPES, SHAPES[::-1], SHAPES[:3]), (1, 2, 3, 4, 7, 8), (1, 2, 4, 8)
    )
]
ITEMSIZES = [1, 2, 4, 8] * (len(LAYOUTS) // 4)


@pytest.mark.parametrize(("layout", "itemsize"), list(zip(LAYOUTS, ITEMSIZES, strict=True)))
def test_nothing_overlaps_and_messages_are_aligned(layout: SegmentLayout, itemsize: int) -> None:
    size = layout.shard
    slabs = [(slot.slab_offset, slot.slab_offset + size * slot.chunk) for slot in layout.slots]
    message = [(layout.message_offset, layout.message_offset + size * layout.packed_numel * bool(layout.packed))]
    chunks = [(slot.shard_offset, slot.shard_offset + slot.chunk) for slot in layout.slots]
    for areas, numel in ((slabs + message, layout.gathered_numel), (chunks, layout.shard_numel)):
        areas = sorted(area for area in areas if area[0] < area[1])
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(areas))
        assert areas[0][0] >= 0
        assert areas[-1][1] <= numel
    for start, _ in slabs + message:
        assert start * itemsize % ALIGN_BYTES == 0
    assert layout.packed_numel * itemsize % ALIGN_BYTES == 0  # one rank's part of the packed message
    for i, slot in enumerate(layout.slots):
        assert (slot.shard_offset >= layout.packed_offset) == slot.packed or slot.chunk == 0, i


@pytest.mark.parametrize("layout", LAYOUTS[::5])
def test_chunks_are_those_of_a_dtensor(layout: SegmentLayout) -> None:
    for slot in layout.slots:
        rows = [len(part) for part in torch.arange(slot.rows).chunk(layout.shard)] if slot.rows else []
        rows += [0] * (layout.shard - len(rows))
        assert [slot.rows_of(rank) for rank in range(layout.shard)] == rows
        assert sum(slot.counts(layout.shard)) == slot.numel == prod(slot.shape)


@pytest.mark.parametrize("layout", LAYOUTS[::3])
def test_gradient_layouts_hold_exactly_the_trainable(layout: SegmentLayout) -> None:
    for trainable in ([True] * len(layout.slots), [i % 2 == 0 for i in range(len(layout.slots))]):
        plan = plan_gradients(layout, trainable)
        assert sorted(plan.offsets) == [i for i, wanted in enumerate(trainable) if wanted]
        areas = sorted((start, start + layout.slots[i].chunk) for i, start in plan.offsets.items())
        areas = [area for area in areas if area[0] < area[1]]
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(areas))
        assert areas[-1][1] <= plan.flags_offset
        assert plan.flags_offset + len(plan.offsets) <= plan.numel
        for i, start in plan.offsets.items():
            assert (start >= plan.packed_offset) == layout.slots[i].packed or layout.slots[i].chunk == 0
        # The packed gradients and flags are one message: they lie together at the end.
        packed = sum(ceil_to(layout.slots[i].chunk, 4) for i in plan.offsets if layout.slots[i].packed)
        assert plan.packed_numel == packed + len(plan.offsets)


@pytest.mark.parametrize(
    ("numels", "bucket", "want"),
    [
        ([], 5, []),
        ([3, 3, 10, 1, 1], 5, [[0, 1], [2], [3, 4]]),
        ([9, 9], 5, [[0], [1]]),
        ([1, 1, 1], 100, [[0, 1, 2]]),
        ([5, 5], 5, [[0], [1]]),
        ([0, 0, 1], 1, [[0, 1, 2]]),
    ],
)
def test_buckets(numels: list[int], bucket: int, want: list[list[int]]) -> None:
    assert plan_buckets(numels, bucket) == want
