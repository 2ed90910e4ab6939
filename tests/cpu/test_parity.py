"""Training on a mesh equals training in one plain process on the whole batch: all meshes, awkward sizes, options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    TOLERANCE,
    Recipe,
    Trained,
    adamw,
    assert_close,
    assert_same_training,
    brief,
    build,
    full,
    reference,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import hsdp

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (1, 3), (3, 1), (2, 4)]
FP32, FP64 = torch.float32, torch.float64


def train_on_mesh(rank: int, world: int, mesh: tuple[int, int], recipe: Recipe, options: dict[str, Any]) -> Trained:
    model = hsdp.hybrid_shard(build(recipe), mesh=mesh, announce=False, **options)
    result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_)
    hsdp.check_replicas(model)
    return brief(result, rank)


def train_all(rank: int, world: int, mesh: tuple[int, int], recipes: list[Recipe], options: dict[str, Any]) -> Any:
    return [train_on_mesh(rank, world, mesh, recipe, options) for recipe in recipes]


@pytest.mark.parametrize(
    ("model", "options"),
    [("transformer", {}), ("awkward", {}), ("scalars", {"units": "Linear"})],
    ids=["transformer", "awkward", "scalars-units"],
)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_every_mesh(mesh: tuple[int, int], model: str, options: dict[str, Any]) -> None:
    recipes = [Recipe(model), Recipe(model, FP64)]
    results = run_ranks(mesh[0] * mesh[1], train_all, mesh, recipes, options)
    for recipe, of_ranks in zip(recipes, zip(*results, strict=True), strict=True):
        assert_same_training(list(of_ranks), reference(recipe), TOLERANCE[recipe.dtype])


def test_the_reference_trains() -> None:
    """What everything is compared with must itself move, and be clipped, in every parameter."""
    for model in ("transformer", "awkward", "scalars"):
        recipe = Recipe(model)
        before, after = dict(build(recipe).named_parameters()), reference(recipe)
        assert min(after.norms) > recipe.max_norm
        assert after.losses[-1] < 0.95 * after.losses[0]
        for name, tensor in after.params.items():
            assert (tensor - before[name]).abs().max() > 1e-3, name


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 2)], ids=["2x2", "1x2"])
def test_reshard_after_forward(mesh: tuple[int, int], reshard: bool | None) -> None:
    recipe = Recipe(dtype=FP64, steps=4)
    results = run_ranks(mesh[0] * mesh[1], train_on_mesh, mesh, recipe, {"reshard_after_forward": reshard})
    assert_same_training(results, reference(recipe), TOLERANCE[FP64])


def _checkpointing(use_reentrant: bool) -> Callable[..., Any]:
    return functools.partial(checkpoint, use_reentrant=use_reentrant)


def train_checkpointed(rank: int, world: int, recipe: Recipe, where: str, use_reentrant: bool) -> list[Trained]:
    """One training for each way of resharding."""
    results = []
    impl = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    for reshard in (None, True, False):
        model: Any = build(recipe)
        if where == "wrapper-before":
            model.blocks = nn.ModuleList(checkpoint_wrapper(block, checkpoint_impl=impl) for block in model.blocks)
        hsdp.hybrid_shard(model, mesh=(2, 2), reshard_after_forward=reshard, announce=False)
        if where == "outside":
            model.run = _checkpointing(use_reentrant)
        elif where == "inside":
            for block in model.blocks:
                block.run = _checkpointing(use_reentrant)
        elif where == "wrapper-after":
            for i in range(len(model.blocks)):
                model.blocks[i] = checkpoint_wrapper(model.blocks[i], checkpoint_impl=impl)
        assert hsdp.describe(model).num_units == 4
        results.append(brief(train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_), rank))
        hsdp.check_replicas(model)
    return results


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("where", ["outside", "inside", "wrapper-before", "wrapper-after"])
def test_activation_checkpointing(where: str, use_reentrant: bool) -> None:
    recipe = Recipe(dtype=FP64, steps=3)
    for of_ranks in zip(*run_ranks(4, train_checkpointed, recipe, where, use_reentrant), strict=True):
        assert_same_training(list(of_ranks), reference(recipe), TOLERANCE[FP64])


# ---- zeroing gradients -----------------------------------------------------------------------------------------------


def train_zeroing(rank: int, world: int, recipe: Recipe, set_to_none: bool | None) -> Trained:
    """`set_to_none=None`: gradients are never cleared."""
    model = build(recipe)
    if world > 1:
        hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    optimizer = adamw(model.parameters())
    if set_to_none is None:
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign,assignment]
    result = train(model, recipe, part=rank, parts=world, optimizer=optimizer, set_to_none=bool(set_to_none))
    return brief(result, rank)


@pytest.mark.parametrize("set_to_none", [True, False, None], ids=["none", "zero", "never"])
def test_zero_grad(set_to_none: bool | None) -> None:
    for recipe in (Recipe(dtype=FP64, steps=4), Recipe("awkward", FP64, steps=4)):
        want = run_ranks(1, train_zeroing, recipe, set_to_none, init_group=False)[0]
        assert_same_training(run_ranks(4, train_zeroing, recipe, set_to_none), want, TOLERANCE[FP64])


def keep_gradients(rank: int, world: int) -> Any:
    recipe = Recipe(dtype=FP64, steps=1)
    model = hsdp.hybrid_shard(build(recipe), mesh=(2, 2), announce=False)
    optimizer = adamw(model.parameters())
    kept: list[dict[str, torch.Tensor]] = []
    then: list[dict[str, torch.Tensor]] = []
    for step in range(4):
        optimizer.zero_grad()
        train(model, Recipe(dtype=FP64, steps=1, seed=step), part=rank, parts=world, optimizer=optimizer)
        # The DTensor itself, its local part, and a view of that: three ways to hold on to it.
        for grads in (
            {name: param.grad for name, param in model.named_parameters()},
            {name: param.grad.to_local() for name, param in model.named_parameters()},
            {name: param.grad.to_local().view(-1)[:1] for name, param in model.named_parameters()},
        )[step % 3 : step % 3 + 1]:
            kept.append(grads)
            then.append({name: full(grad) for name, grad in grads.items()})
    return [(then[i], {name: full(grad) for name, grad in kept[i].items()}) for i in range(len(kept))]


def test_a_kept_gradient_stays_as_it_is() -> None:
    for result in run_ranks(4, keep_gradients):
        for then, now in result:
            assert_close(now, then, 0.0, "gradient")
        assert any((result[0][0][name] - result[3][0][name]).abs().max() > 0 for name in result[0][0])
