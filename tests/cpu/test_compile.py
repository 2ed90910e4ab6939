"""torch.compile on the blocks, before and after wrapping, trains like the plain model."""

from __future__ import annotations

from typing import Any

import torch
from harness import run_ranks
from models import TOLERANCE, Recipe, Trained, assert_same_training, brief, build, reference, train
from torch._dynamo.utils import counters

import hsdp


def compile_blocks(model: Any, how: str) -> None:
    for i, block in enumerate(model.blocks):
        if how == "in-place":
            block.compile(backend="aot_eager")
        else:
            model.blocks[i] = torch.compile(block, backend="aot_eager")


CASES: list[tuple[str, str, bool | None]] = [
    ("in-place", "before", None),
    ("in-place", "after", False),
    ("replaced", "before", True),
    ("replaced", "after", None),
]


def train_compiled(rank: int, world: int, recipe: Recipe) -> list[tuple[Trained, int]]:
    """Every case, each with the number of graphs that were compiled; in one run, because the first costs seconds."""
    results = []
    for how, when, reshard in CASES:
        torch._dynamo.reset()
        counters.clear()
        model = build(recipe)
        if when == "before":
            compile_blocks(model, how)
        hsdp.hybrid_shard(model, mesh=(2, 2), reshard_after_forward=reshard, announce=False)
        if when == "after":
            compile_blocks(model, how)
        assert hsdp.describe(model).num_units == 4
        result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_)
        hsdp.check_replicas(model)
        results.append((brief(result, rank), counters["stats"]["unique_graphs"]))
    return results


def test_compiled_blocks() -> None:
    recipe = Recipe(dtype=torch.float64, steps=3)
    results = run_ranks(4, train_compiled, recipe)
    for case, of_ranks in zip(CASES, zip(*results, strict=True), strict=True):
        assert_same_training([result for result, _ in of_ranks], reference(recipe), TOLERANCE[recipe.dtype])
        assert all(num_graphs >= 1 for _, num_graphs in of_ranks), f"{case}: nothing was compiled"
