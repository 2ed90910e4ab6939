"""Checkpoints in torch's formats: saved on one mesh, read on another, in a plain process and by torch's own fully_shard.

What is saved is a model and its AdamW after some steps. Whoever reads it must hold equal bits and train on alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from models import TOLERANCE, Recipe, Trained, adamw, assert_close, assert_same_training, brief, build, full, snapshot, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hsdp

FP64 = torch.float64
MODELS = ["transformer", "awkward", "tied"]
# Steps before the checkpoint and after it use other batches: the model alone does not tell how to go on.
BEFORE, AFTER = 2, 2


def make(kind: str, mesh: tuple[int, int], seed: int) -> Any:
    """The wrapped (or plain) model with other weights than what is loaded."""
    model = build(Recipe(kind.split()[1], FP64, seed=seed))
    if kind.startswith("hsdp"):
        return hsdp.hybrid_shard(model, mesh=mesh, announce=False)
    if kind.startswith("fsdp2"):
        torch_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=torch_mesh)
        return fully_shard(model, mesh=torch_mesh)
    return model


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def train_and_save(rank: int, world: int, kind: str, mesh: tuple[int, int], folder: str) -> Trained:
    model = make(kind, mesh, 0)
    optimizer = adamw(model.parameters())
    train(model, Recipe(kind.split()[1], FP64, steps=BEFORE), part=rank, parts=world, optimizer=optimizer)
    saved = snapshot(model)
    if folder:
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    model.zero_grad()
    return brief(saved, rank)


def load_and_train(rank: int, world: int, kind: str, mesh: tuple[int, int], folder: str) -> list[Trained]:
    model = make(kind, mesh, 1)
    optimizer = adamw(model.parameters())
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = snapshot(model)
    if kind.startswith("hsdp"):
        hsdp.check_replicas(model)
    recipe = Recipe(kind.split()[1], FP64, steps=AFTER)
    return [brief(loaded, rank), brief(train(model, recipe, part=rank, parts=world, optimizer=optimizer), rank)]


def train_through(rank: int, world: int, model: str) -> list[Trained]:
    """One plain process that never stopped."""
    plain = make(f"plain {model}", (1, 1), 0)
    optimizer = adamw(plain.parameters())
    first = train(plain, Recipe(model, FP64, steps=BEFORE), optimizer=optimizer)
    return [first, train(plain, Recipe(model, FP64, steps=AFTER), optimizer=optimizer)]


def check_loaded(results: list[list[Trained]], saved: Trained, through: list[Trained]) -> None:
    assert_close(results[0][0].params, saved.params, 0.0)
    assert {result[0].digest for result in results} == {results[0][0].digest}
    assert_same_training([result[1] for result in results], through[1], TOLERANCE[FP64])


@pytest.mark.parametrize("model", MODELS)
def test_save_on_2x2_and_read_everywhere(model: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    through = run_ranks(1, train_through, model, init_group=False)[0]
    saved = run_ranks(4, train_and_save, f"hsdp {model}", (2, 2), folder)
    assert_close(saved[0].params, through[0].params, TOLERANCE[FP64])
    for kind, mesh in (
        ("hsdp", (1, 4)),
        ("hsdp", (4, 1)),
        ("hsdp", (1, 2)),
        ("hsdp", (1, 3)),
        ("plain", (1, 1)),
        ("fsdp2", (1, 2)),
        ("fsdp2", (2, 2)),
    ):
        print(kind, mesh)
        results = run_ranks(mesh[0] * mesh[1], load_and_train, f"{kind} {model}", mesh, folder, init_group=kind != "plain")
        check_loaded(results, saved[0], through)


@pytest.mark.parametrize(("kind", "mesh"), [("fsdp2", (2, 2)), ("plain", (1, 1))], ids=["fsdp2", "plain"])
def test_read_what_others_saved(kind: str, mesh: tuple[int, int], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    through = run_ranks(1, train_through, "awkward", init_group=False)[0]
    world = mesh[0] * mesh[1]
    saved = run_ranks(world, train_and_save, f"{kind} awkward", mesh, folder, init_group=kind != "plain")[0]
    check_loaded(run_ranks(4, load_and_train, "hsdp awkward", (2, 2), folder), saved, through)


# ---- state dicts in memory -------------------------------------------------------------------------------------------


def full_state(rank: int, world: int, model: str) -> dict[str, Any]:
    wrapped = make(f"hsdp {model}", (2, 2), 0)
    optimizer = adamw(wrapped.parameters())
    train(wrapped, Recipe(model, FP64, steps=BEFORE), part=rank, parts=world, optimizer=optimizer)
    options = StateDictOptions(full_state_dict=True)
    results = {"full": get_model_state_dict(wrapped, options=options)}
    results["to rank 0"] = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    results["sharded"] = {name: full(tensor) for name, tensor in get_model_state_dict(wrapped).items()}
    results["own"] = {name: full(tensor) for name, tensor in wrapped.state_dict().items()}
    assert not any(isinstance(tensor, DTensor) for tensor in results["full"].values())
    # And back, broadcast from rank 0, into a model of other weights on another mesh.
    target = make(f"hsdp {model}", (1, 4), 3)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(target, results["full"] if rank == 0 else {}, options=options)
    results["back"] = {name: full(tensor) for name, tensor in target.state_dict().items()}
    state = get_optimizer_state_dict(wrapped, optimizer, options=StateDictOptions(full_state_dict=True))
    target_optimizer = adamw(target.parameters())
    set_optimizer_state_dict(target, target_optimizer, state if rank == 0 else {"state": {}, "param_groups": []}, options=options)
    results["moments"] = {name: param["exp_avg"] for name, param in state["state"].items()}
    back = get_optimizer_state_dict(target, target_optimizer, options=StateDictOptions(full_state_dict=True))
    results["moments back"] = {name: param["exp_avg"] for name, param in back["state"].items()}
    return results


def plain_state(rank: int, world: int, model: str) -> dict[str, dict[str, Tensor]]:
    plain = make(f"plain {model}", (1, 1), 0)
    optimizer = adamw(plain.parameters())
    train(plain, Recipe(model, FP64, steps=BEFORE), optimizer=optimizer)
    moments = {name: optimizer.state[param]["exp_avg"] for name, param in plain.named_parameters()}
    return {"model": {name: full(tensor) for name, tensor in plain.state_dict().items()}, "moments": moments}


@pytest.mark.parametrize("model", MODELS)
def test_full_state_dicts(model: str) -> None:
    want = run_ranks(1, plain_state, model, init_group=False)[0]
    results = run_ranks(4, full_state, model)
    for rank, got in enumerate(results):
        for name in ("full", "sharded", "own", "back"):
            assert_close(got[name], want["model"], TOLERANCE[FP64], f"rank {rank}, {name}:")
        assert_close(got["back"], got["full"], 0.0, f"rank {rank}:")
        if rank == 0:
            assert_close(got["to rank 0"], got["full"], 0.0)
        else:
            assert got["to rank 0"] == {}
        assert_close(got["moments"], want["moments"], TOLERANCE[FP64], f"rank {rank}, moment")
        assert_close(got["moments back"], got["moments"], 0.0, f"rank {rank}, moment")


def save_while_gathered(rank: int, world: int) -> list[bool]:
    """A state dict taken while parameters are gathered holds the shards, and aliases no memory that goes away."""
    model = make("hsdp transformer", (2, 2), 0)
    model.set_reshard_after_forward(False)
    model(torch.zeros(1, 4, dtype=torch.int64)).sum()
    model.unshard()
    state = model.state_dict()
    plain = build(Recipe(dtype=FP64)).state_dict()
    for block in model.blocks:
        block.unshard()
    with torch.no_grad():
        again = model.state_dict()
    return [
        isinstance(tensor, DTensor) and torch.equal(full(tensor), plain[name]) and torch.equal(full(again[name]), plain[name])
        for name, tensor in state.items()
    ]


def test_state_dict_while_gathered() -> None:
    for result in run_ranks(4, save_while_gathered):
        assert all(result)
