"""Any torch optimizer works on the sharded parameters: the same values as in one plain process.

Where torch refuses an optimizer on DTensors, it must refuse it with torch's own `fully_shard` too; that is shown, not
assumed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import TOLERANCE, Recipe, Trained, assert_same_training, brief, build, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hsdp

F32, F64 = torch.float32, torch.float64
RECIPES = [Recipe(dtype=F64, steps=3), Recipe("awkward", F64, steps=3)]

# eps as in models.adamw, see there.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 1e-2, "eps": 1e-3}),
    "AdamW for-loop": ("AdamW", {"lr": 1e-2, "eps": 1e-3, "foreach": False}),
    "AdamW foreach": ("AdamW", {"lr": 1e-2, "eps": 1e-3, "foreach": True}),
    "AdamW fused": ("AdamW", {"lr": 1e-2, "eps": 1e-3, "fused": True}),
    "AdamW amsgrad": ("AdamW", {"lr": 1e-2, "eps": 1e-3, "amsgrad": True}),
    "Adam fused": ("Adam", {"lr": 1e-2, "eps": 1e-3, "fused": True, "weight_decay": 0.1}),
    "SGD": ("SGD", {"lr": 1e-2}),
    "SGD foreach momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    "Adagrad": ("Adagrad", {"lr": 1e-2, "eps": 1e-3}),
    "Adagrad fused": ("Adagrad", {"lr": 1e-2, "eps": 1e-3, "fused": True}),
    "RMSprop foreach": ("RMSprop", {"lr": 1e-2, "eps": 1e-3, "momentum": 0.5, "foreach": True}),
    "Adamax": ("Adamax", {"lr": 1e-2, "eps": 1e-3}),
    "NAdam": ("NAdam", {"lr": 1e-2, "eps": 1e-3}),
    "Adafactor": ("Adafactor", {"lr": 1e-2, "eps": (1e-6, 1e-3)}),
    "Adafactor foreach": ("Adafactor", {"lr": 1e-2, "eps": (1e-6, 1e-3), "foreach": True}),
    "Adafactor for-loop": ("Adafactor", {"lr": 1e-2, "eps": (1e-6, 1e-3), "foreach": False}),
    "Muon": ("Muon", {"lr": 1e-2}),
    "Muon adjusted": ("Muon", {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
}


def optimizer_of(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    # Muon is for matrices only; the rest then stands still.
    params = [param for param in model.parameters() if param.ndim == 2] if kind == "Muon" else model.parameters()
    return getattr(torch.optim, kind)(params, **options)


def train_with(rank: int, world: int, name: str, recipe: Recipe) -> Trained | str:
    model = build(recipe)
    if world > 1:
        hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    try:
        result = train(model, recipe, part=rank, parts=world, optimizer=optimizer_of(model, name))
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    if world > 1:
        hsdp.check_replicas(model)
    return brief(result, rank)


def train_torchs(rank: int, world: int, name: str, recipe: Recipe) -> str:
    """The same with FSDP2; only whether it works."""
    model: Any = build(recipe)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        train(model, recipe, part=rank, parts=world, optimizer=optimizer_of(model, name))
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    for recipe in RECIPES:
        want = run_ranks(1, train_with, name, recipe, init_group=False)[0]
        results = run_ranks(4, train_with, name, recipe)
        if isinstance(results[0], str):
            refusal = run_ranks(4, train_torchs, name, recipe)[0]
            assert refusal, f"{name} works with torch's fully_shard and not here: {results[0]}"
            pytest.skip(f"refused by torch on any DTensor: {refusal.splitlines()[0][:150]}")
        assert_same_training(results, want, TOLERANCE[F64])


def train_groups(rank: int, world: int, recipe: Recipe) -> Trained:
    """Parameter groups, a schedule of the learning rate, and a group added later."""
    model = build(recipe)
    if world > 1:
        hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    decayed = [param for name, param in model.named_parameters() if name.endswith("weight")]
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}], lr=1e-2, eps=1e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    train(model, recipe, part=rank, parts=world, optimizer=optimizer)
    schedule.step()
    optimizer.add_param_group({"params": biases, "lr": 1e-3})
    return brief(train(model, recipe, part=rank, parts=world, optimizer=optimizer), rank)


def test_groups_and_schedules() -> None:
    want = run_ranks(1, train_groups, RECIPES[0], init_group=False)[0]
    assert_same_training(run_ranks(4, train_groups, RECIPES[0]), want, TOLERANCE[F64])


def train_in_backward(rank: int, world: int) -> Trained:
    """The state of an optimizer lies on the shards: a rank holds its part only."""
    recipe = replace(RECIPES[0], steps=1)
    model = hsdp.hybrid_shard(build(recipe), mesh=(1, 4), announce=False)
    optimizer = torch.optim.AdamW(model.parameters())
    result = train(model, recipe, part=rank, parts=world, optimizer=optimizer)
    state_bytes = sum(
        tensor.to_local().nbytes
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name != "step"
    )
    described = hsdp.describe(model)
    whole = 2 * 8 * described.num_parameters
    assert whole / 4 * 0.9 <= state_bytes <= described.optimizer_bytes <= whole / 4 * 1.1
    return brief(result, rank)


def test_optimizer_state_is_sharded() -> None:
    run_ranks(4, train_in_backward)
