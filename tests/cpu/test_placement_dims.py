"""Parameters cut along another dim than 0, evenly and unevenly: values, placements, state dicts, copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import RECIPE, check, is_sharded, params_of, step, wrap
from harness import run_ranks
from models import TOLERANCE, Recipe, Trained, assert_same_training, brief, build, full, reference, train
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import hsdp

MESHES = [(2, 2), (1, 4), (4, 1), (1, 3)]


def last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim > 1 else None


def largest_dim(param: nn.Parameter) -> Shard | None:
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim])) if param.ndim else None


def negative_dim(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim == 3 else None


CHOICES = {"last": last_dim, "largest": largest_dim, "negative": negative_dim}


def train_cut(rank: int, world: int, mesh: tuple[int, int], recipe: Recipe, choice: str, defer: Any) -> Trained:
    placement = CHOICES[choice]
    model = build(recipe)
    chosen = {name: placement(param) for name, param in model.named_parameters()}
    hsdp.hybrid_shard(model, mesh=mesh, shard_placement_fn=placement, announce=False)
    for name, param in model.named_parameters():
        wanted = chosen[name]
        dim = 0 if wanted is None else wanted.dim % param.ndim
        assert not param.ndim or param.placements == (Replicate(), Shard(dim)), name
        assert full(param).shape == param.shape

    def context(last: bool) -> Any:
        return hsdp.accumulate(model, defer) if defer and not last else torch.enable_grad()

    def contiguous(module: nn.Module, *_: Any) -> None:
        # Users' kernels and optimizers may take it for granted.
        for param in module.parameters(recurse=False):
            assert param.is_contiguous()
            assert full(param).is_contiguous()
            assert not isinstance(param, DTensor) or param.to_local().is_contiguous()
            assert not isinstance(param.grad, DTensor) or param.grad.to_local().is_contiguous()

    for module in model.modules():
        contiguous(module)
        module.register_forward_pre_hook(contiguous)
    result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_, micro_context=context)
    for module in model.modules():
        contiguous(module)
    assert is_sharded(model) or recipe.model == "scalars"
    hsdp.check_replicas(model)
    return brief(result, rank)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_equals_one_process(mesh: tuple[int, int], choice: str) -> None:
    for model in ("transformer", "scalars"):
        recipe = Recipe(model, torch.float64, steps=3)
        results = run_ranks(mesh[0] * mesh[1], train_cut, mesh, recipe, choice, None)
        assert_same_training(results, reference(recipe), TOLERANCE[recipe.dtype])


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
def test_microbatches(defer: str) -> None:
    recipe = Recipe("awkward", torch.float64, steps=3, micro=3)
    results = run_ranks(4, train_cut, (2, 2), recipe, "largest", defer)
    assert_same_training(results, reference(recipe), TOLERANCE[recipe.dtype])


def per_module(rank: int, world: int) -> dict[str, torch.Tensor]:
    """fully_shard with some modules cut one way and some another; then a state dict into a model cut a third way."""
    model: Any = build(RECIPE)
    if world > 1:
        mesh = hsdp.init_mesh(replicate=2, shard=2)
        for number, block in enumerate(model.blocks):
            hsdp.fully_shard(block, mesh=mesh, shard_placement_fn=last_dim if number % 2 else None)
        hsdp.fully_shard(model, mesh=mesh, shard_placement_fn=largest_dim)
    step(model, rank, world)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state = {name: full(value) for name, value in model.state_dict().items()}
    other: Any = wrap(build(Recipe(dtype=RECIPE.dtype, seed=1)), world, shard_placement_fn=last_dim)
    values = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for name, param in other.named_parameters():
            param.copy_(torch.distributed.tensor.distribute_tensor(values[name], param.device_mesh, param.placements)
                        if world > 1 else values[name])  # fmt: skip
    step(other, rank, world)
    return {**state, **{f"other {name}": value for name, value in params_of(other).items()}}


def test_modules_cut_in_different_ways() -> None:
    check(per_module)


def refuse(rank: int, world: int) -> None:
    for wrong in (Shard(2), Shard(-3), 1, Replicate()):
        with pytest.raises(
            ValueError, match=r"shard_placement_fn returned .* for parameter 'weight' of shape \(3, 2\)"
        ):
            hsdp.hybrid_shard(nn.Linear(2, 3), shard=2, shard_placement_fn=lambda p: wrong if p.ndim > 1 else None)  # noqa: B023
    with pytest.raises(ValueError, match="sharded dim"):
        hsdp.hybrid_shard(nn.Linear(2, 3), shard=2, shard_placement_fn=lambda p: Shard(rank) if p.ndim > 1 else None)


def test_wrong_dims_are_refused_on_every_rank() -> None:
    run_ranks(2, refuse)
