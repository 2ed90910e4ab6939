"""Tied, frozen, unused and ignored parameters, and units made one by one with `fully_shard`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import ATOL, F64, RECIPE, check, data, grads_of, is_sharded, params_of, step, wrap
from harness import run_ranks
from models import (
    Block,
    Recipe,
    TiedTransformer,
    Trained,
    Transformer,
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
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import hsdp

# ---- ties ------------------------------------------------------------------------------------------------------------


def tied(rank: int, world: int, how: str) -> Trained:
    recipe = Recipe("tied", F64, steps=4)
    model: Any = build(recipe)
    if how == "fully_shard":
        mesh = hsdp.init_mesh(replicate=2, shard=2)
        for module in (model.embed, *model.blocks, model.head, model):
            hsdp.fully_shard(module, mesh=mesh)
    else:
        units = {"root": None, "units": [Block, nn.Embedding, nn.Linear], "one": Transformer}[how]
        hsdp.hybrid_shard(model, mesh=(2, 2), units=units, announce=False)
    assert model.embed.weight is model.head.weight
    assert isinstance(model.embed.weight, DTensor)
    assert sum(name.endswith(("embed.weight", "head.weight")) for name, _ in model.named_parameters()) == 1
    assert set(build(recipe).state_dict()) == set(model.state_dict())
    result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_)
    assert model.embed.weight is model.head.weight
    assert is_sharded(model)
    return brief(result, rank)


@pytest.mark.parametrize("how", ["root", "units", "one", "fully_shard"])
def test_tied_weights(how: str) -> None:
    assert issubclass(TiedTransformer, Transformer)
    assert_same_training(run_ranks(4, tied, how), reference(Recipe("tied", F64, steps=4)), ATOL)


# ---- fully_shard -----------------------------------------------------------------------------------------------------


def bottom_up(rank: int, world: int, how: str) -> Trained:
    model: Any = build(RECIPE)
    mesh = hsdp.init_mesh(replicate=2, shard=2) if how != "default-mesh" else None
    if how == "1d":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("anything",))
    if how == "everything":  # nothing is left for the root; on CPU there is nothing to offload
        for module in (model.embed, model.position, model.norm, model.head):
            hsdp.fully_shard(module, mesh=mesh, reshard_after_forward=2, offload_policy=CPUOffloadPolicy())
    for block in model.blocks:
        assert hsdp.fully_shard(block, mesh=mesh, reshard_after_forward=True) is block
    if how == "group":
        group = [model.norm, model.head]
        assert hsdp.fully_shard(group, mesh=mesh, reshard_after_forward=False) is group
    if how != "no-root":
        hsdp.fully_shard(model, mesh=mesh)
    optimizer = None
    if how == "no-root":
        # Without the root the rest is plain; the user reduces it as with torch's own.
        rest = [model.embed, model.position, model.norm, model.head]
        optimizer = adamw(model.parameters())
        optimizer.register_step_pre_hook(
            lambda *_: [average(param.grad) for part in rest for param in part.parameters()] and None
        )
    result = train(
        model,
        RECIPE,
        part=rank,
        parts=world,
        optimizer=optimizer,
        clip=clip_nothing if how == "no-root" else hsdp.clip_grad_norm_,
    )
    return brief(result, rank)


def average(grad: Any) -> None:
    torch.distributed.all_reduce(grad)
    grad.div_(torch.distributed.get_world_size())


def clip_nothing(params: Any, max_norm: float) -> torch.Tensor:
    return torch.zeros(())


@pytest.mark.parametrize("how", ["2d", "1d", "default-mesh", "group", "everything"])
def test_fully_shard_bottom_up(how: str) -> None:
    assert_same_training(run_ranks(4, bottom_up, how), reference(RECIPE), ATOL)


def train_unclipped(rank: int, world: int) -> Trained:
    return train(build(RECIPE), RECIPE, clip=clip_nothing)


def test_fully_shard_without_the_root() -> None:
    want = run_ranks(1, train_unclipped, init_group=False)[0]
    assert_same_training(run_ranks(4, bottom_up, "no-root"), want, ATOL)


# ---- parameters that are frozen, unused, ignored ---------------------------------------------------------------------


def freeze(rank: int, world: int, which: str) -> dict[str, torch.Tensor]:
    model: Any = build(RECIPE)
    chosen = {
        "one": lambda name: name == "blocks.1.up.weight",
        "biases": lambda name: name.endswith("bias"),
        "unit": lambda name: name.startswith("blocks.0."),
        "all-but-head": lambda name: name != "head.weight",
        "embeddings": lambda name: name.startswith(("embed", "position")),
    }[which]
    for name, param in model.named_parameters():
        param.requires_grad_(not chosen(name))
    wrap(model, world)
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    for micro in range(2):
        step(model, rank, world, micro)
        assert all((param.grad is None) == chosen(name) for name, param in model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    if which == "unit":
        # Thawed between steps: trains from now on.
        model.blocks[0].requires_grad_(True)
        model.blocks[1].up.weight.requires_grad_(False)
        for micro in range(2):
            step(model, rank, world, micro)
    assert world == 1 or is_sharded(model)
    return params_of(model) | grads_of(model)


@pytest.mark.parametrize("which", ["one", "biases", "unit", "all-but-head", "embeddings"])
def test_frozen_parameters(which: str) -> None:
    check(freeze, which)


class Choosy(nn.Module):
    """Uses only the chosen of its branches; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))
        self.small = nn.ParameterList(torch.ones(1, dtype=F64) for _ in range(3))
        self.never = nn.Linear(300, 2)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        for i in chosen:
            x = self.branches[i](x) * self.small[i]
        return x


def unused(rank: int, world: int, units: Any) -> dict[str, torch.Tensor]:
    """Every rank uses branch 0, nobody branch 2; where the unit is one, only ranks 1 and 2 use branch 1."""
    torch.manual_seed(0)
    model: Any = wrap(Choosy().double(), world, units=units)
    everyone = units is nn.Linear
    for seed in range(2):
        for part in range(4) if world == 1 else [rank]:
            x = data(part, 4, 300, seed=seed)
            loss = model(x, [0, 1] if everyone or part in (1, 2) else [0]).pow(2).mean()
            (loss / 4 if world == 1 else loss).backward()
    names = [name for name, param in model.named_parameters() if param.grad is not None]
    assert names == [
        "branches.0.weight",
        "branches.0.bias",
        "branches.1.weight",
        "branches.1.bias",
        "small.0",
        "small.1",
    ]
    assert world == 1 or is_sharded(model)
    return grads_of(model)


@pytest.mark.parametrize("units", [Choosy, nn.Linear], ids=["one-unit", "units"])
def test_unused_parameters(units: Any) -> None:
    check(unused, units)


def ignore(rank: int, world: int) -> Any:
    model: Any = build(RECIPE)
    ignored = {model.head.weight, model.blocks[0].norm1.bias}
    hsdp.hybrid_shard(model, mesh=(2, 2), ignored_params=ignored, announce=False)
    step(model, rank, world)
    kept = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    assert model.head.weight in ignored
    return kept, model.head.weight.grad, full(model.norm.weight.grad)


def test_ignored_parameters_stay_as_they_are_and_unreduced() -> None:
    results = run_ranks(4, ignore)
    assert [kept for kept, _, _ in results] == [["blocks.0.norm1.bias", "head.weight"]] * 4
    heads = [grad for _, grad, _ in results]
    assert not torch.equal(heads[0], heads[1])
    want = run_ranks(1, plain_grads, init_group=False)[0]
    assert_close({"head": sum(heads) / 4, "norm": results[0][2]}, want, ATOL)


def plain_grads(rank: int, world: int) -> dict[str, torch.Tensor]:
    model: Any = build(RECIPE)
    step(model, rank, world)
    return {"head": model.head.weight.grad, "norm": model.norm.weight.grad}
