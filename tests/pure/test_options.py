"""options.py: what is refused, what a checkpoint adds, which mesh a plain start gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hsdp.options import TrainOptions, with_checkpoint, with_local_mesh


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"layers": 0}, "layers is 0; it must be 1 or more"),
        ({"seq": -1}, "seq is -1; it must be 1 or more"),
        (
            {"width": 12, "heads": 4},
            "width 12 does not divide into 4 heads of an even size; .* a multiple of 2 x heads = 8",
        ),
        ({"batch": 0}, "batch is 0; it must be 1 or more"),
        ({"accumulate": 0}, "accumulate is 0; it must be 1 or more"),
        ({"steps": -5}, "steps is -5; it must be 1 or more"),
        ({"nproc": 0}, "nproc is 0; it must be 1 or more"),
        ({"save_every": -1}, "save_every is -1; it must be 0 or more"),
        ({"lr": 0.0}, r"lr is 0\.0; it must be a number above 0"),
        ({"lr": float("nan")}, "lr is nan; it must be a number above 0"),
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of fp32, bf16"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrainOptions(**values)


def test_json_and_back() -> None:
    options = TrainOptions(data=("/a", "/b"), lr=0.25, resume="/c", nproc=3)
    values = json.loads(json.dumps(options.to_json()))
    assert TrainOptions.from_json(values) == options
    assert TrainOptions.from_json({**values, "of_a_later_version": 1}) == options


# ---- from a checkpoint -----------------------------------------------------------------------------------------------

KEPT = TrainOptions(
    data=("/text",), replicate=2, shard=2, nproc=4, layers=2, width=8, heads=2, seq=16, batch=3, accumulate=2,
    steps=90, lr=0.5, precision="bf16", device="cpu", out="/old", seed=7,
)  # fmt: skip


def test_the_checkpoint_fills_in_what_was_not_given_but_not_where_it_ran() -> None:
    options = with_checkpoint({"steps": 120, "shard": 4, "resume": "/c"}, KEPT, kept_batch=24, world=4)
    kept = {"data", "layers", "width", "heads", "seq", "batch", "accumulate", "lr", "precision", "seed"}
    for name in kept:
        assert getattr(options, name) == getattr(KEPT, name), name
    assert (options.steps, options.shard, options.resume) == (120, 4, "/c")
    assert (options.replicate, options.nproc, options.device, options.out) == (None, None, "auto", TrainOptions.out)


@pytest.mark.parametrize(("world", "batch"), [(1, 12), (2, 6), (6, 2), (12, 1)])
def test_other_ranks_keep_the_global_batch(world: int, batch: int) -> None:
    options = with_checkpoint({}, KEPT, kept_batch=24, world=world)
    assert options.batch == batch
    assert options.global_batch(world) == 24


def test_a_global_batch_that_does_not_divide_is_refused_unless_a_batch_is_given() -> None:
    with pytest.raises(ValueError, match="global batch of 24 sequences does not divide over 5 ranks x accumulate 2"):
        with_checkpoint({}, KEPT, kept_batch=24, world=5)
    options = with_checkpoint({"batch": 7}, KEPT, kept_batch=24, world=5)
    assert options.global_batch(5) == 7 * 5 * 2


@pytest.mark.parametrize("name", ["layers", "width", "heads"])
def test_another_shape_than_the_checkpoints_is_refused_with_both(name: str) -> None:
    size = getattr(KEPT, name)
    with pytest.raises(ValueError, match=f"--{name} {2 * size} does not go with .* has {name} {size};"):
        with_checkpoint({name: 2 * size}, KEPT, kept_batch=24, world=4)
    assert with_checkpoint({name: size}, KEPT, kept_batch=24, world=4).shape == KEPT.shape


# ---- the mesh of a plain start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nproc", "on_cpu", "replicate", "shard", "mesh"),
    [
        (4, True, None, None, (2, 2)),
        (8, True, None, None, (2, 4)),
        (1, True, None, None, (1, 1)),
        (2, True, None, None, (1, 2)),
        (5, True, None, None, (1, 5)),
        (4, False, None, None, (1, 4)),
        (4, True, 4, None, (4, 1)),
        (4, True, None, 4, (1, 4)),
        (6, True, -1, 2, (3, 2)),
        (6, True, 2, 3, (2, 3)),
    ],
)
def test_mesh_of_a_plain_start(
    nproc: int, on_cpu: bool, replicate: int | None, shard: int | None, mesh: tuple[int, int]
) -> None:
    options = with_local_mesh(TrainOptions(replicate=replicate, shard=shard), nproc, on_cpu)
    assert (options.replicate, options.shard, options.nproc) == (*mesh, nproc)


@pytest.mark.parametrize(
    ("replicate", "shard", "text"),
    [
        (None, 8, "shard=8 is larger than the world of 4 ranks"),
        (3, None, "replicate=3 does not divide the world of 4 ranks"),
        (3, 2, "replicate=3 x shard=2 needs 6 ranks, the world has 4"),
        (-1, -1, "only one of them can be the rest"),
        (0, None, "replicate=0 is not a mesh size"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(replicate: int | None, shard: int | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        with_local_mesh(TrainOptions(replicate=replicate, shard=shard), nproc=4, on_cpu=True)
