"""Wrapped modules as modules: FSDP2's methods, ties, frozen and unused parameters, containers, state dicts.

A *case* is a function `(rank, world) -> {name: tensor}` that runs in one plain process on all the data and on the ranks
of a mesh on their parts of it; `check` compares what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    TOLERANCE,
    Block,
    Recipe,
    TiedTransformer,
    Trained,
    Transformer,
    adamw,
    assert_close,
    assert_same_training,
    batch,
    brief,
    build,
    full,
    loss_of,
    reference,
    train,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hsdp
from hsdp.module import state_of
from hsdp.unit import State

F64 = torch.float64
ATOL = TOLERANCE[F64]
RECIPE = Recipe(dtype=F64, steps=3)
Case = Callable[..., dict[str, torch.Tensor]]


def wrap(model: nn.Module, world: int, mesh: tuple[int, int] = (2, 2), **options: Any) -> Any:
    """The model itself in the plain process."""
    return model if world == 1 else hsdp.hybrid_shard(model, mesh=mesh, announce=False, **options)


def data(rank: int, world: int, *shape: int, seed: int = 0, rows: int = 8) -> torch.Tensor:
    """This rank's part of `rows` random rows of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=generator, dtype=F64).chunk(world)[rank]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients; what has none is not in it."""
    return {f"grad {name}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param) for name, param in model.named_parameters()}


def check(case: Case, *args: Any, world: int = 4, atol: float = ATOL) -> None:
    want = run_ranks(1, case, *args, init_group=False)[0]
    assert want
    for got in run_ranks(world, case, *args):
        assert_close(got, want, atol, "value")


def step(model: nn.Module, rank: int, world: int, micro: int = 0) -> None:
    """Forward and backward of a language model on one microbatch."""
    inputs, targets = batch(RECIPE, 0, micro, rank, world)
    loss_of(model(inputs), targets).backward()


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in model.parameters())


# ---- what a wrapped module is ----------------------------------------------------------------------------------------


def identity(rank: int, world: int) -> Any:
    model = build(RECIPE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tagged = model.get_parameter("head.weight")
    tagged.favourite = "yes"  # type: ignore[attr-defined]
    wrapped = hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    assert wrapped is model
    units = [name for name, module in model.named_modules() if isinstance(module, hsdp.HSDPModule)]
    for module in (model, model.get_submodule("blocks.0")):
        assert isinstance(module, FSDPModule)
        assert isinstance(module, hsdp.HSDPModule)
    assert isinstance(model, Transformer)
    assert type(model).__name__ == "HSDPTransformer"
    assert model.head.weight.favourite == "yes"
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    assert all(torch.equal(full(state[name]), tensor) for name, tensor in before.items())
    assert [name for name, _ in model.named_parameters()] == list(before)
    with pytest.raises(ValueError, match="cannot be deep-copied"):
        __import__("copy").deepcopy(model)
    return units


def test_a_wrapped_module_is_its_own_class_and_torchs_fsdp_module() -> None:
    assert run_ranks(4, identity) == [["", "blocks.0", "blocks.1", "blocks.2"]] * 4


def load(rank: int, world: int, assign: bool) -> dict[str, torch.Tensor]:
    """Load another model's state, then train on."""
    source = build(Recipe(dtype=F64, seed=5))
    if world == 1:
        model = build(RECIPE)
        model.load_state_dict(source.state_dict())
    else:
        source = hsdp.hybrid_shard(source, mesh=(2, 2), announce=False)
        model = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
        step(model, rank, world)  # loading must not depend on what was gathered before
        model.zero_grad()
        result = model.load_state_dict(source.state_dict(), assign=assign)
        assert not result.missing_keys
        assert is_sharded(model)
    optimizer = adamw(model.parameters())
    for micro in range(2):
        step(model, rank, world, micro)
        optimizer.step()
    return params_of(model) | grads_of(model)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool) -> None:
    check(load, assign)


def convert(rank: int, world: int) -> None:
    model = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
    before = params_of(model)
    model.to("cpu")
    step(model, rank, world)
    assert_close(params_of(model), before, 0.0)
    with pytest.raises(ValueError, match=r"'.*' was replaced by one that does not fit its shard.*torch.float32"):
        model.float()


def test_to_keeps_working_and_another_dtype_is_refused() -> None:
    run_ranks(4, convert)


# ---- unshard and reshard ---------------------------------------------------------------------------------------------


def unshard(rank: int, world: int) -> None:
    plain = dict(build(RECIPE).named_parameters())
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
    for asynchronous in (False, True):
        handle = model.blocks[1].unshard(async_op=asynchronous)
        if asynchronous:
            assert hasattr(handle, "wait")
            handle.wait()
            handle.wait()
        else:
            assert handle is None
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) != name.startswith("blocks.1."), name
            if not isinstance(param, DTensor):
                assert torch.equal(param, plain[name]), name
        model.blocks[1].unshard()  # once more changes nothing
        model.blocks[1].reshard()
        model.blocks[1].reshard()
        assert is_sharded(model)
    # A started gather that nobody waited for.
    model.blocks[0].unshard(async_op=True)
    model.blocks[0].reshard()
    assert is_sharded(model)
    # What was gathered by hand is used by the forward, and a change of a parameter reaches the next gather.
    model.unshard()
    step(model, rank, world)
    with torch.no_grad():
        model.head.weight.mul_(2)
    model.unshard()
    assert torch.equal(model.head.weight, 2 * plain["head.weight"])
    model.reshard()


def test_unshard_and_reshard() -> None:
    run_ranks(4, unshard)
    assert UnshardHandle is not None


def resharding(rank: int, world: int) -> Any:
    """Which of the blocks show full parameters after forward and after backward, for every setting."""
    seen = {}
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)

    def gathered() -> list[bool]:
        return [not is_sharded(block) for block in model.blocks]

    def run() -> list[list[bool]]:
        inputs, targets = batch(RECIPE, 0, 0, rank, world)
        loss = loss_of(model(inputs), targets)
        after_forward = gathered()
        loss.backward()
        return [after_forward, gathered()]

    model.set_reshard_after_forward(True)
    seen["forward=True"] = run()
    model.set_reshard_after_forward(False)
    seen["forward=False"] = run()
    model.set_reshard_after_forward(True)
    model.blocks[1].set_reshard_after_forward(False, recurse=False)
    seen["forward=True but one"] = run()
    model.set_reshard_after_backward(False)
    seen["backward=False"] = run()
    assert not isinstance(model.head.weight, DTensor)
    model.set_reshard_after_backward(True)
    run()
    assert is_sharded(model)
    return seen


def test_resharding_settings() -> None:
    nothing, everything = [False] * 3, [True] * 3
    want = {
        "forward=True": [nothing, nothing],
        "forward=False": [everything, nothing],
        "forward=True but one": [[False, True, False], nothing],
        "backward=False": [[False, True, False], everything],
    }
    assert run_ranks(4, resharding) == [want] * 4


def keep_gathered_between(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Full parameters stay over two microbatches and go after the third."""
    model: Any = wrap(build(RECIPE), world)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        for micro in range(3):
            if world > 1:
                model.set_reshard_after_backward(micro == 2)
                model.set_requires_all_reduce(micro == 2)
                model.set_reshard_after_forward(False)
            step(model, rank, world, micro)
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


def test_parameters_kept_over_microbatches() -> None:
    check(keep_gathered_between)


# ---- the other settings ----------------------------------------------------------------------------------------------


def two_microbatches(rank: int, world: int, setting: str, recurse: bool) -> dict[str, torch.Tensor]:
    model: Any = wrap(build(RECIPE), world)
    optimizer = adamw(model.parameters())
    modules = [model] if recurse else [model, *model.blocks]
    for _ in range(2):
        for micro in range(2):
            for module in modules if world > 1 else []:
                getattr(module, setting)(micro == 1, recurse=recurse)
            step(model, rank, world, micro)
        optimizer.step()
        optimizer.zero_grad()
    return params_of(model)


@pytest.mark.parametrize("recurse", [True, False], ids=["recursive", "one-by-one"])
@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_deferring_settings(setting: str, recurse: bool) -> None:
    check(two_microbatches, setting, recurse)


def defer_some_units(rank: int, world: int, setting: str) -> dict[str, torch.Tensor]:
    """Only one block defers; the others are reduced in both microbatches."""
    model: Any = wrap(build(RECIPE), world)
    for micro in range(2):
        if world > 1:
            getattr(model.blocks[1], setting)(micro == 1)
        step(model, rank, world, micro)
    return grads_of(model)


@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_one_unit_alone_defers(setting: str) -> None:
    check(defer_some_units, setting)


def divide(rank: int, world: int) -> dict[str, torch.Tensor]:
    model: Any = wrap(build(RECIPE), world)
    if world > 1:
        model.blocks[0].set_gradient_divide_factor(1.0)
        model.blocks[1].set_reduce_scatter_divide_factor(8.0)
        with pytest.raises(ValueError, match="divided by zero"):
            model.set_gradient_divide_factor(0)
    step(model, rank, world)
    factors = {"blocks.0": 4.0, "blocks.1": 0.5} if world == 1 else {}
    return {
        name: grad * next((factor for prefix, factor in factors.items() if prefix in name), 1.0)
        for name, grad in grads_of(model).items()
    }


def test_gradient_divide_factor() -> None:
    """Sums of 4 ranks divided by 1 and by 8 instead of by 4."""
    check(divide)


def watch_blocks(model: Any) -> list[tuple[str, int, list[bool]]]:
    """Filled with (phase, block, which blocks have their memory) whenever a block begins its forward or backward."""
    seen: list[tuple[str, int, list[bool]]] = []

    def note(phase: str, i: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            seen.append((phase, i, [state_of(block).unit.state is not State.SHARDED for block in model.blocks]))

        return hook

    for i, block in enumerate(model.blocks):
        block.norm1.register_forward_pre_hook(note("forward", i))
        block.down.register_full_backward_pre_hook(note("backward", i))
    return seen


def prefetch_by_itself(rank: int, world: int) -> None:
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), reshard_after_forward=True, announce=False)
    seen = watch_blocks(model)
    step(model, rank, world)
    forward = [
        ("forward", 0, [True, False, False]),  # nothing is known yet of what follows
        ("forward", 1, [False, True, False]),
        ("forward", 2, [False, False, True]),
    ]
    backward = [
        ("backward", 2, [False, True, True]),
        ("backward", 1, [True, True, False]),
        ("backward", 0, [True, False, False]),
    ]
    assert seen == forward + backward, seen
    forward = [
        ("forward", 0, [True, True, False]),
        ("forward", 1, [False, True, True]),
        ("forward", 2, [False, False, True]),
    ]
    for _ in range(2):
        seen.clear()
        step(model, rank, world)
        assert seen == forward + backward, seen


def test_the_next_unit_is_gathered_ahead_in_both_directions() -> None:
    run_ranks(4, prefetch_by_itself)


def prefetch(rank: int, world: int) -> Trained:
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch([blocks[0], blocks[1]])
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    blocks[1].set_modules_to_backward_prefetch([])
    with pytest.raises(ValueError, match="Linear: it was not wrapped"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    seen = watch_blocks(model)
    result = train(model, RECIPE, part=rank, parts=world)
    model.set_reshard_after_forward(True)
    seen.clear()
    step(model, rank, world)
    assert seen == [
        ("forward", 0, [True, True, True]),
        ("forward", 1, [False, True, True]),
        ("forward", 2, [False, False, True]),
        ("backward", 2, [True, True, True]),
        ("backward", 1, [True, True, False]),
        ("backward", 0, [True, False, False]),
    ], seen
    return brief(result, rank)


def test_prefetch_settings() -> None:
    assert_same_training(run_ranks(4, prefetch), reference(RECIPE), ATOL)


def two_forwards_then_two_backwards(rank: int, world: int) -> dict[str, torch.Tensor]:
    """As a pipeline does: forwards of several microbatches are under way before the first backward."""
    model: Any = wrap(build(RECIPE), world)
    optimizer = adamw(model.parameters())
    for _ in range(3):
        losses = []
        for micro in range(2):
            inputs, targets = batch(RECIPE, 0, micro, rank, world)
            losses.append(loss_of(model(inputs), targets))
        for last, loss in enumerate(losses):
            if world > 1:
                model.set_is_last_backward(bool(last))
                model.set_requires_gradient_sync(bool(last))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world == 1 or is_sharded(model)
    return params_of(model)


def test_is_last_backward() -> None:
    check(two_forwards_then_two_backwards)


def call_the_rest(rank: int, world: int) -> None:
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model._set_unshard_async_op(True)
    for name in ("set_all_reduce_hook", "set_custom_all_gather", "set_unshard_in_backward", "set_post_optim_event"):
        with pytest.raises(NotImplementedError, match="no counterpart in hsdp"):
            getattr(model, name)(None)
    # Every public method of torch's class is one of ours: none reaches into FSDP2's own state by accident.
    public = {name for name in vars(FSDPModule) if not name.startswith("_") and callable(getattr(FSDPModule, name))}
    assert public <= set(vars(hsdp.HSDPModule)), public - set(vars(hsdp.HSDPModule))


def test_every_method_of_torchs_class_is_ours() -> None:
    run_ranks(4, call_the_rest)


class Encoder(nn.Module):
    """Its entry points are not called forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 301)
        self.outer = nn.Linear(301, 6)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def other_methods(rank: int, world: int, units: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = wrap(Encoder().double(), world, units=units)
    if world > 1:
        hsdp.register_forward_method(model, "encode")
        hsdp.register_forward_method(model, "decode")
        with pytest.raises(ValueError, match="has no method 'nothing'"):
            hsdp.register_forward_method(model, "nothing")
        with pytest.raises(ValueError, match="Linear was not wrapped"):
            hsdp.register_forward_method(nn.Linear(2, 2), "forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        x = data(rank, world, 6, seed=seed)
        model.decode(model.encode(x)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world == 1 or is_sharded(model)
    return params_of(model)


@pytest.mark.parametrize("units", [Encoder, nn.Linear], ids=["root-only", "units"])
def test_register_forward_method(units: Any) -> None:
    check(other_methods, units)


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


@pytest.mark.parametrize("how", ["2d", "1d", "default-mesh", "group"])
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


# ---- shapes of computation -------------------------------------------------------------------------------------------


def nested(rank: int, world: int) -> Trained:
    model: Any = build(RECIPE)
    hsdp.hybrid_shard(model, mesh=(2, 2), units=["Block", "Attention", "Embedding"], announce=False)
    assert hsdp.describe(model).num_units == 3 + 3 + 2 + 1
    return brief(train(model, RECIPE, part=rank, parts=world), rank)


def test_nested_units() -> None:
    assert_same_training(run_ranks(4, nested), reference(RECIPE), ATOL)


def evaluate_between(rank: int, world: int) -> dict[str, torch.Tensor]:
    model: Any = wrap(build(RECIPE), world)
    inputs, _targets = batch(RECIPE, 9)
    outputs = {}

    def evaluate(name: str) -> None:
        model.eval()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                outputs[f"{name} {context.__name__}"] = model(inputs).clone()
            assert world == 1 or is_sharded(model)
        model.train()

    evaluate("before")
    optimizer = adamw(model.parameters())
    for micro in range(3):
        step(model, rank, world, micro)
        evaluate(f"between {micro}")
        optimizer.step()
        optimizer.zero_grad()
        evaluate(f"after {micro}")
    model(inputs)  # a forward whose backward never comes
    evaluate("after a forward alone")
    step(model, rank, world)
    return params_of(model) | grads_of(model) | outputs


def test_evaluation_before_and_between_steps() -> None:
    check(evaluate_between)


@dataclass
class Output:
    first: torch.Tensor
    second: dict[str, Any]


class Containers(nn.Module):
    """Takes and returns containers; keyword arguments too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(6, 301), nn.Linear(301, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> Any:
        hidden = torch.tanh(self.first(x * scale + more["list"][0]))
        out = self.second(hidden)
        if self.kind == "dict":
            return {"hidden": hidden, "deep": {"out": [out]}, "text": "t"}
        if self.kind == "dataclass":
            return Output(hidden, {"out": out, "none": None})
        return (hidden, (out, 3))


def contain(rank: int, world: int, kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": Containers(kind)}).double()
    block: Any = model["block"]
    if world > 1:
        wrap(block, world)
    x = data(rank, world, 6).requires_grad_()
    scale = torch.full((6,), 2.0, dtype=F64, requires_grad=True)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for _ in range(3):
        result = block(x=x, scale=scale, more={"list": [data(rank, world, 6, seed=1)]})
        if kind == "dict":
            hidden, out = result["hidden"], result["deep"]["out"][0]
            assert result["text"] == "t"
        elif kind == "dataclass":
            assert type(result) is Output
            hidden, out = result.first, result.second["out"]
        else:
            hidden, (out, three) = result
            assert three == 3
        (hidden.pow(2).mean() + out.pow(2).mean()).backward()
        optimizer.step()
    assert world == 1 or is_sharded(block)
    grads = {"x": x.grad / world, "scale": scale.grad / world}
    if world > 1:
        torch.distributed.all_reduce(grads["scale"])
        grads["x"] = torch.cat(gather(grads["x"], world))
    return params_of(block) | grads_of(block) | grads


def gather(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(world)]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return parts


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple"])
def test_containers_and_keyword_arguments(kind: str) -> None:
    check(contain, kind)


def use_modules_oddly(rank: int, world: int, how: str) -> dict[str, torch.Tensor]:
    model: Any = wrap(build(RECIPE), world)
    optimizer = adamw(model.parameters())
    for micro in range(3):
        inputs, targets = batch(RECIPE, 0, micro, rank, world)
        others, _ = batch(RECIPE, 1, micro, rank, world)
        if how == "a block twice":
            model.blocks[1].run = lambda inside, x: inside(inside(x))
            x = model.blocks[2](model.blocks[0](model.embed(inputs))) if world == 1 else None
            loss_of(model(inputs), targets).backward()
            del x
        elif how == "one block called twice":
            model.run = lambda block, x: block(block(x))
            loss_of(model(inputs), targets).backward()
        elif how == "two forwards, one backward":
            (loss_of(model(inputs), targets) + loss_of(model(others), targets)).backward()
        elif how == "two backwards through one graph":
            out = model(inputs)
            loss_of(out, targets).backward(retain_graph=True)
            loss_of(2 * out, targets).backward()
        elif how == "two forwards, two backwards":
            first, second = model(inputs), model(others)
            loss_of(second, targets).backward()
            loss_of(first, targets).backward()
        elif how == "no loss on some steps":
            loss = loss_of(model(inputs), targets)
            if micro == 1:
                del loss
                continue
            loss.backward()
        elif how == "skipped block":
            model.run = (lambda block, x: x if block is model.blocks[micro % 3] else block(x)) if micro else model.run  # noqa: B023
            loss_of(model(inputs), targets).backward()
        elif how == "other order":
            model.blocks._modules = dict(reversed(model.blocks._modules.items()))
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world == 1 or is_sharded(model)
    return dict(sorted(params_of(model).items()))


@pytest.mark.parametrize(
    "how",
    [
        "a block twice",
        "one block called twice",
        "two forwards, one backward",
        "two backwards through one graph",
        "two forwards, two backwards",
        "no loss on some steps",
        "skipped block",
        "other order",
    ],
)
def test_unusual_use(how: str) -> None:
    check(use_modules_oddly, how)


def gradient_of_inputs(rank: int, world: int) -> dict[str, torch.Tensor]:
    """torch.autograd.grad touches no .grad and leaves no unit gathered."""
    torch.manual_seed(0)
    model: Any = wrap(Encoder().double(), world, units=nn.Linear)
    x = data(rank, world, 6).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    assert all(param.grad is None for param in model.parameters())
    assert world == 1 or is_sharded(model)
    model(x.detach()).pow(2).mean().backward()
    return grads_of(model) | {"x": grad if world == 1 else torch.cat(gather(grad, world))}


def test_autograd_grad_of_inputs() -> None:
    check(gradient_of_inputs)


def two_models(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Two equal models side by side, one fed by the other, stepped in turn."""
    torch.manual_seed(0)
    first = wrap(Encoder().double(), world, units=nn.Linear)
    torch.manual_seed(0)
    second = wrap(Encoder().double(), world, units=nn.Linear)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for seed in range(4):
        x = data(rank, world, 6, seed=seed)
        second(first(x)).pow(2).mean().backward()
        optimizers[seed % 2].step()
        (first(x).mean() - second(x).pow(2).mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {f"{i} {name}": value for i, model in enumerate((first, second)) for name, value in params_of(model).items()}


def test_two_models() -> None:
    check(two_models)


def fail_and_go_on(rank: int, world: int) -> dict[str, torch.Tensor]:
    """An exception in forward, or in backward, on every rank; the step is then repeated."""
    model: Any = wrap(build(RECIPE), world)
    step(model, rank, world)
    model.zero_grad()
    run = model.run

    def broken(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if block is model.blocks[2]:
            raise KeyError("forward")
        return run(block, x)

    def explode(grad: torch.Tensor) -> None:
        raise KeyError("backward")

    def broken_backward(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = run(block, x)
        if block is model.blocks[1]:
            out.register_hook(explode)
        return out

    if world > 1:
        for wrong in (broken, broken_backward):
            model.run = wrong
            with pytest.raises(KeyError):
                step(model, rank, world)
            model.reset_iter_state()
            assert is_sharded(model)
            model.zero_grad()
        model.run = run
    for micro in range(2):
        step(model, rank, world, micro)
    return grads_of(model)


def test_after_an_exception() -> None:
    check(fail_and_go_on)


# ---- kinds of modules ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 50, num_layers=2, batch_first=True)
        self.head = nn.Linear(50, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 60, sparse=True)
        self.head = nn.Linear(60, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed((x.abs() * 100).long() % 301).mean(1))


class Strided(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(6, 301) / 20).t())
        self.conv = nn.Conv1d(301, 5, 2).to(memory_format=torch.contiguous_format)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv((x @ self.weight.t()).transpose(1, 2))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 301))
        self.attention = nn.MultiheadAttention(301, 7, batch_first=True)
        self.head = nn.Linear(301, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "sparse": SparseEmbedding,
    "strided": Strided,
    "parametrized": Normed,
    "encoder-layer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 301, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
}


def train_kind(rank: int, world: int, kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(KINDS[kind]().double(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        model(data(rank, world, 4, 6, seed=seed)).pow(2).mean().backward()
        optimizer.step()
        if seed < 2:
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        out = model(data(0, 1, 4, 6, seed=9))
    grads = {name: grad.to_dense() for name, grad in grads_of(model).items()}
    return params_of(model) | grads | {"out": out.clone()}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_modules(kind: str) -> None:
    check(train_kind, kind)


def run_statistics(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Buffers that a forward changes stay the rank's own, as with DDP without its broadcast."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 301), nn.BatchNorm1d(301), nn.Linear(301, 3)).double()
    wrap(model, world)
    x = data(0, 1, 6)  # the same on every rank, so that the statistics of the batch are too
    for _ in range(2):
        model.zero_grad()
        model(x).pow(2).mean().backward()
    buffers = {name: buffer.clone().double() for name, buffer in model.named_buffers()}
    assert float(buffers["1.num_batches_tracked"]) == 2
    return grads_of(model) | buffers


def test_batch_norm() -> None:
    check(run_statistics)


def functional(rank: int, world: int) -> dict[str, torch.Tensor]:
    """User hooks on modules and on parameters' use see full tensors."""
    model: Any = wrap(build(RECIPE), world)
    shapes = []
    model.blocks[0].register_forward_hook(lambda module, args, out: shapes.append(tuple(module.up.weight.shape)))
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.blocks[1].register_forward_hook(lambda module, args, out: F.dropout(out, 0.0) * 3)
    step(model, rank, world)
    assert shapes == [(1024, 64)]
    return grads_of(model)


def test_user_hooks() -> None:
    check(functional)


# ---- check_replicas --------------------------------------------------------------------------------------------------


def tamper(rank: int, world: int) -> str:
    model: Any = hsdp.hybrid_shard(build(Recipe("awkward")), mesh=(2, 2), announce=False)
    hsdp.check_replicas(model)
    if rank == 3:
        with torch.no_grad():
            model.out.weight.to_local()[0, 0] += 1e-6
    with pytest.raises(RuntimeError) as error:
        hsdp.check_replicas(model)
    with pytest.raises(ValueError, match="Linear holds no module wrapped"):
        hsdp.check_replicas(nn.Linear(2, 2))
    return str(error.value)


def test_check_replicas_names_what_differs() -> None:
    text = "copies differ: 'out.weight', shard 1: rank 3 do not hold what rank 1 holds"
    assert run_ranks(4, tamper) == [text] * 4
