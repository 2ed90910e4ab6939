"""State dicts and checkpoints: saved on one mesh, loaded on another, in one process or by torch's own sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from models import (
    TOLERANCE,
    Recipe,
    TiedTransformer,
    adamw,
    assert_close,
    assert_same_training,
    batch,
    brief,
    build,
    digest,
    full,
    loss_of,
    reference,
    train,
)
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
from torch.distributed.tensor import DTensor, Replicate, Shard

import hsdp

FP64 = torch.float64
BEFORE, AFTER = 2, 2  # steps before and after the checkpoint
MODELS = ["tied", "awkward"]
Flat = dict[str, Tensor]


def make(model: str, mesh: tuple[int, int] | None, engine: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A model on a mesh or, with mesh=None, a plain one; and its optimizer."""
    module = build(Recipe(model, FP64, seed=seed))
    if engine == "hsdp":
        hsdp.hybrid_shard(module, mesh=mesh, announce=False)
    elif engine == "torch":
        assert mesh is not None
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        for block in module.get_submodule("blocks"):
            fully_shard(block, mesh=device_mesh)
        fully_shard(module, mesh=device_mesh)
    return module, adamw(module.parameters())


def steps(model: nn.Module, optimizer: Any, name: str, rank: int, world: int, first: int, count: int) -> None:
    recipe = Recipe(name, FP64)
    for step in range(first, first + count):
        inputs, targets = batch(recipe, step, 0, rank, world)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()


def whole(state: dict[str, Any], prefix: str = "") -> Flat:
    """Every tensor of a nested state dict in full, under its path."""
    found: Flat = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found[prefix + key] = full(value)
        elif isinstance(value, dict):
            found.update(whole(value, f"{prefix}{key}/"))
    return found


def fingerprints(state: Flat) -> dict[str, str]:
    """Equal for bit-equal tensors, and quickly sent to the test's process."""
    return {key: digest({"": tensor}) for key, tensor in state.items()}


def saved_state(model: nn.Module, optimizer: Any) -> Flat:
    return {**whole(get_model_state_dict(model)), **whole(get_optimizer_state_dict(model, optimizer))}


def assert_trained(rank: int, model: nn.Module, name: str) -> None:
    """The model went through all steps, and so it is where one process is after them."""
    params = {key: full(param) for key, param in model.named_parameters()}
    if rank == 0:
        module, optimizer = make(name, None, "plain")
        steps(module, optimizer, name, 0, 1, 0, BEFORE + AFTER)
        assert_close(params, {key: full(param) for key, param in module.named_parameters()}, TOLERANCE[FP64])


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def save_all(rank: int, world: int, folder: str, engine: str, names: list[str]) -> dict[str, dict[str, str]]:
    """Train and save, and return what was saved; training goes on, so that loading too early would be noticed."""
    saved = {}
    for name in names:
        model, optimizer = make(name, (2, 2), engine)
        steps(model, optimizer, name, rank, world, 0, BEFORE)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        state = saved_state(model, optimizer)
        moments = [key for key in state if key.endswith(("/exp_avg", "/exp_avg_sq"))]
        assert len(moments) == 2 * len(dict(build(Recipe(name)).named_parameters()))
        assert all(state[key].abs().max() > 0 for key in moments)
        saved[name] = fingerprints(state)
        steps(model, optimizer, name, rank, world, BEFORE, AFTER)
        assert_trained(rank, model, name)
    return saved


def load_all(rank: int, world: int, folder: str, mesh: tuple[int, int] | None, engine: str, names: list[str]) -> Any:
    """Load into a model of other weights, return what is there then, and train on."""
    loaded = {}
    for name in names:
        model, optimizer = make(name, mesh, engine, seed=1)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=f"{folder}/{name}", no_dist=mesh is None)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loaded[name] = fingerprints(saved_state(model, optimizer))
        steps(model, optimizer, name, rank, world, BEFORE, AFTER)
        assert_trained(rank, model, name)
        if isinstance(model, TiedTransformer):
            assert model.head.weight is model.embed.weight, "the tie broke"
    return loaded


def saved_by(engine: str, folder: Path, names: list[str]) -> tuple[str, dict[str, dict[str, str]]]:
    saved = run_ranks(4, save_all, str(folder), engine, names)[0]
    for name, state in saved.items():
        assert {key for key in state if "/" not in key} == set(build(Recipe(name)).state_dict())
    return str(folder), saved


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, str]]]:
    """A folder with a checkpoint of every model, saved on (2, 2), and what was saved."""
    return saved_by("hsdp", tmp_path_factory.mktemp("hsdp"), MODELS)


@pytest.fixture(scope="module")
def checkpoint_of_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, str]]]:
    return saved_by("torch", tmp_path_factory.mktemp("torch"), MODELS[:1])


def assert_loads(
    checkpoint: tuple[str, dict[str, dict[str, str]]], mesh: tuple[int, int] | None, engine: str, names: list[str]
) -> None:
    folder, saved = checkpoint
    world = 1 if mesh is None else mesh[0] * mesh[1]
    for result in run_ranks(world, load_all, folder, mesh, engine, names, init_group=mesh is not None):
        for name in names:
            assert result[name].keys() == saved[name].keys()
            assert [key for key, value in result[name].items() if value != saved[name][key]] == [], f"differ, {name}"


@pytest.mark.parametrize("mesh", [(1, 4), (4, 1), (1, 2)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_load_on_another_mesh(checkpoint: Any, mesh: tuple[int, int]) -> None:
    assert_loads(checkpoint, mesh, "hsdp", MODELS)


def test_load_in_one_plain_process(checkpoint: Any) -> None:
    assert_loads(checkpoint, None, "plain", MODELS)


def test_load_into_torchs_fully_shard(checkpoint: Any) -> None:
    assert_loads(checkpoint, (2, 2), "torch", MODELS[:1])  # torch shards no parameter without dims


def test_load_what_torchs_fully_shard_saved(checkpoint_of_torch: Any) -> None:
    assert_loads(checkpoint_of_torch, (1, 4), "hsdp", MODELS[:1])


# ---- full state dicts ------------------------------------------------------------------------------------------------


def full_state_dicts(rank: int, world: int, name: str, broadcast: bool) -> Any:
    model, optimizer = make(name, (2, 2), "hsdp")
    steps(model, optimizer, name, rank, world, 0, BEFORE)
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    state = get_model_state_dict(model, options=options)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    if broadcast and rank > 0:
        assert state == {}  # torch gathers to the first rank then
    assert not any(isinstance(value, DTensor) for value in state.values())
    got, want = whole(state), whole(get_model_state_dict(model))  # torch distributes `state` in place below

    other, its_optimizer = make(name, (2, 2), "hsdp", seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(other, state, options=options)
    set_optimizer_state_dict(other, its_optimizer, optimizer_state, options=options)
    assert_close(whole(get_model_state_dict(other)), want, 0.0)
    steps(other, its_optimizer, name, rank, world, BEFORE, AFTER)
    assert_trained(rank, other, name)
    return fingerprints(got), fingerprints(want)


@pytest.mark.parametrize("broadcast", [False, True], ids=["every-rank", "rank0"])
@pytest.mark.parametrize("name", MODELS)
def test_full_state_dict_and_back(name: str, broadcast: bool) -> None:
    for rank, (got, want) in enumerate(run_ranks(4, full_state_dicts, name, broadcast)):
        if rank == 0 or not broadcast:
            assert set(got) == set(build(Recipe(name)).state_dict())
            assert [key for key, value in got.items() if value != want[key]] == []


# ---- state_dict and load_state_dict of the module itself -------------------------------------------------------------


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2, bias=False))
        self.register_buffer("shift", torch.ones(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def keys_of(rank: int, world: int) -> list[Any]:
    """(keys, keys expected, kinds) of whole models and of a unit, sharded and gathered."""
    found = []
    for build_model in (WithBuffers, *(lambda name=name: build(Recipe(name)) for name in MODELS)):
        model: Any = build_model()  # type: ignore[operator]
        want = list(model.state_dict())
        buffers = [name for name, _ in model.named_buffers()]
        hsdp.hybrid_shard(model, mesh=(1, 2), announce=False)
        for gathered in (False, True):
            if gathered:
                model.unshard()
            state = model.state_dict()
            kinds = {isinstance(state[key], DTensor) for key in state if key not in buffers and state[key].ndim > 0}
            found.append((list(state), want, kinds))
    model = hsdp.hybrid_shard(build(Recipe()), mesh=(1, 2), announce=False)
    want = list(build(Recipe()).get_submodule("blocks.1").state_dict())
    model.get_submodule("blocks.1").unshard()  # type: ignore[operator]
    found.append((list(model.get_submodule("blocks.1").state_dict()), want, {True}))
    return found


def test_state_dict_has_the_keys_of_the_unwrapped_model() -> None:
    for result in run_ranks(2, keys_of):
        assert len(result) == 7
        for keys, want, kinds in result:
            assert keys == want
            assert kinds == {True}


def assign_and_train(rank: int, world: int, name: str, assign: bool) -> Any:
    recipe = Recipe(name, FP64, steps=3)
    good = hsdp.hybrid_shard(build(recipe), mesh=(2, 2), announce=False)
    state = {key: value.detach().clone() for key, value in good.state_dict().items()}
    model = hsdp.hybrid_shard(build(Recipe(name, FP64, seed=1)), mesh=(2, 2), announce=False)
    optimizer = None if assign else adamw(model.parameters())
    # One step with the other weights first, and everything gathered when the values change.
    inputs, targets = batch(recipe, 0, 0, rank, world)
    loss_of(model(inputs), targets).backward()
    model.zero_grad()
    for module in hsdp_modules(model):
        module.unshard()
    model.load_state_dict(state, assign=assign)
    if name == "tied":
        assert model.head.weight is model.embed.weight
    result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_, optimizer=optimizer)
    placements = {param.placements for param in model.parameters() if param.ndim}
    assert placements == {(Replicate(), Shard(0))}
    assert len(list(model.parameters())) == len(list(good.parameters()))
    hsdp.check_replicas(model)
    return brief(result, rank)


def hsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, hsdp.HSDPModule)]


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("name", MODELS)
def test_load_state_dict_and_train(name: str, assign: bool) -> None:
    recipe = Recipe(name, FP64, steps=3)
    assert_same_training(run_ranks(4, assign_and_train, name, assign), reference(recipe), TOLERANCE[FP64])


def load_a_unit(rank: int, world: int) -> bool:
    """A unit's own load_state_dict, while it is gathered, is what its next forward computes with."""
    model: Any = hsdp.hybrid_shard(build(Recipe(dtype=FP64)), mesh=(1, 2), announce=False)
    other: Any = hsdp.hybrid_shard(build(Recipe(dtype=FP64, seed=1)), mesh=(1, 2), announce=False)
    tokens, _ = batch(Recipe(), 0)
    before = model(tokens)
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        model.get_submodule(name).unshard()
        model.get_submodule(name).load_state_dict(other.get_submodule(name).state_dict())
    rest = [name for name in other.state_dict() if "blocks" not in name]
    model.load_state_dict({name: other.state_dict()[name] for name in rest}, strict=False)
    assert not torch.equal(model(tokens), before)
    return torch.equal(model(tokens), other(tokens))


def test_load_state_dict_of_a_unit() -> None:
    assert run_ranks(2, load_a_unit) == [True, True]
