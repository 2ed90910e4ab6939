"""A wrapped module's class, state dict, and the methods of torch's FSDPModule with FSDP2's meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import ATOL, F64, RECIPE, Encoder, check, data, grads_of, is_sharded, params_of, step, wrap
from harness import run_ranks
from models import (
    Recipe,
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

import hsdp
from hsdp.module import state_of
from hsdp.unit import State

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
    return units


def test_a_wrapped_module_is_its_own_class_and_torchs_fsdp_module() -> None:
    assert run_ranks(4, identity) == [["", "blocks.0", "blocks.1", "blocks.2"]] * 4


def names(rank: int, world: int) -> None:
    model: Any = build(RECIPE)
    mesh = hsdp.init_mesh(replicate=2, shard=2)
    for module in (*model.blocks[:2], [model.embed, model.position], model.blocks[2], model):
        hsdp.fully_shard(module, mesh=mesh)
    units = state_of(model).schedule.units
    assert [unit.name for unit in units] == ["embed", "blocks.0", "blocks.1", "blocks.2", ""]
    assert {param.name for unit in units for param in unit.params} == {name for name, _ in model.named_parameters()}


def test_names_are_from_the_root() -> None:
    run_ranks(4, names)


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


def move(rank: int, world: int) -> None:
    model = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
    before = params_of(model)
    model.to("cpu")
    step(model, rank, world)
    assert_close(params_of(model), before, 0.0)
    with pytest.raises(ValueError, match="is sharded on cpu and cannot move to meta"):
        model.to("meta")
    assert_close(params_of(model), before, 0.0)  # nothing was touched
    with hsdp.accumulate(model):
        step(model, rank, world)
    with pytest.raises(
        RuntimeError, match=r"cannot become torch\.float32 while gradients of earlier microbatches wait"
    ):
        model.float()
    step(model, rank, world)


def test_a_move_is_refused_before_anything_is_touched() -> None:
    run_ranks(4, move)


def cast(rank: int, world: int, mesh: tuple[int, int], how: str) -> dict[str, torch.Tensor]:
    """Train in fp32, go on in fp64, with an optimizer made before; all of the model, or parts of it."""
    model: Any = wrap(build(Recipe("tied" if how == "tied" else "transformer")), world, mesh)
    step(model, rank, world)
    parts = {"all": [model], "tied": [model], "a unit": [model.blocks[1]], "outside": [nn.Sequential(model)]}[how]
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1)
    optimizer.step()
    if how == "a unit":  # its neighbours compute in fp32
        model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.blocks[1].register_forward_hook(lambda _, args, output: output.float())
    for part in parts:
        part.double()
    assert all(ours is theirs for ours, theirs in zip(held, model.parameters(), strict=True))
    if world > 1:
        assert is_sharded(model)
        assert all(param.to_local().dtype == param.dtype for param in model.parameters())
    assert model.get_parameter("blocks.1.norm1.weight").grad.dtype == F64  # type: ignore[union-attr]
    for micro in range(3):
        step(model, rank, world, micro)
        optimizer.step()
    values = params_of(model) | grads_of(model)
    assert {value.dtype for value in values.values()} == ({torch.float32, F64} if how == "a unit" else {F64})
    return values


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("how", ["all", "tied", "a unit", "outside"])
def test_parameters_can_be_cast(mesh: tuple[int, int], how: str) -> None:
    check(cast, mesh, how, atol=1e-6)


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
    """Which of the blocks are gathered after forward and after backward, for every setting."""
    seen = {}
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)

    def gathered() -> list[bool]:
        return [state_of(block).unit.state is State.GATHERED for block in model.blocks]

    def run() -> list[list[bool]]:
        inputs, targets = batch(RECIPE, 0, 0, rank, world)
        loss = loss_of(model(inputs), targets)
        after_forward = gathered()
        assert after_forward == [not is_sharded(block) for block in model.blocks]
        loss.backward()
        assert is_sharded(model), "an optimizer, a clip or a zero_grad would miss the gradients"
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
    model.set_reshard_after_backward(True)
    run()
    assert not any(gathered())
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


def one_forward_one_backward(rank: int, world: int, schedule: str) -> dict[str, torch.Tensor]:
    """A pipeline's order: forwards of later microbatches between the backwards of earlier ones."""
    model: Any = wrap(build(RECIPE), world)
    optimizer = adamw(model.parameters())
    num_micro = schedule.count("F")
    for number in range(2):
        losses: dict[int, torch.Tensor] = {}
        for event in schedule.split():
            micro = int(event[1:])
            if event[0] == "F":
                inputs, targets = batch(RECIPE, number, micro, rank, world)
                losses[micro] = loss_of(model(inputs), targets) / num_micro
                continue
            last = len(losses) == 1 and event == schedule.split()[-1]
            if world > 1:
                model.set_is_last_backward(last)
                model.set_requires_gradient_sync(last)
            losses.pop(micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world == 1 or is_sharded(model)
    return params_of(model)


@pytest.mark.parametrize("schedule", ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 F2 B2 B1", "F0 F1 F2 F3 B0 B1 B2 B3"])
def test_one_logical_backward_of_several_calls(schedule: str) -> None:
    check(one_forward_one_backward, schedule)


def release_as_backward_goes(rank: int, world: int) -> None:
    """A backward is not kept from releasing units by forwards that wait for theirs."""
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
    seen: list[int] = []

    def count(_: torch.Tensor) -> None:
        seen.append(sum(state_of(block).unit.state is not State.SHARDED for block in model.blocks))

    def watch(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].register_hook(count)

    model.blocks[0].register_forward_pre_hook(watch)
    losses = []
    for micro in range(3):
        inputs, targets = batch(RECIPE, 0, micro, rank, world)
        losses.append(loss_of(model(inputs), targets))
    for micro, loss in enumerate(losses):
        model.set_is_last_backward(micro == 2)
        loss.backward()
    assert seen == [0, 0, 0], "blocks that are gathered when a backward has gone through all of them"


def test_units_are_released_while_other_forwards_wait() -> None:
    run_ranks(4, release_as_backward_goes)


def clear_between_forward_and_backward(rank: int, world: int, set_to_none: bool) -> dict[str, torch.Tensor]:
    model: Any = wrap(build(RECIPE), world)
    optimizer = adamw(model.parameters())
    for number in range(3):
        inputs, targets = batch(RECIPE, number, 0, rank, world)
        loss = loss_of(model(inputs), targets)
        model.zero_grad(set_to_none)
        loss.backward()
        optimizer.step()
    return params_of(model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_where_full_parameters_are_shown(set_to_none: bool) -> None:
    check(clear_between_forward_and_backward, set_to_none)


class Scaled(nn.Module):
    """Its output is that of its last part, so that gradients reach both at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.rand(6, 301)), nn.Linear(301, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(x @ self.scale))


def wrap_twice(world: int, units: Any) -> Any:
    """A model that calls one part twice."""
    torch.manual_seed(0)
    part = Scaled()
    return wrap(nn.Sequential(nn.Linear(6, 6), part, nn.Tanh(), part).double(), world, units=units)


def use_a_unit_twice(rank: int, world: int, units: Any, num_micro: int, together: bool) -> dict[str, torch.Tensor]:
    model = wrap_twice(world, units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        losses = [model(data(rank, world, 6, seed=3 * number + i)).pow(2).mean() for i in range(num_micro)]
        losses = [torch.stack(losses).sum()] if together else losses
        for micro, loss in enumerate(losses):
            if world > 1:
                model.set_is_last_backward(micro == len(losses) - 1)
                model.set_requires_gradient_sync(micro == len(losses) - 1)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world == 1 or is_sharded(model)
    return params_of(model)


@pytest.mark.parametrize(
    ("units", "num_micro", "together"),
    [
        (nn.Linear, 3, False),
        (nn.Linear, 3, True),
        ([Scaled, nn.Linear], 1, False),
        ([Scaled, nn.Linear], 3, True),
        (Scaled, 2, False),
    ],
)
def test_backward_through_a_unit_used_twice(units: Any, num_micro: int, together: bool) -> None:
    check(use_a_unit_twice, units, num_micro, together)


def use_a_graph_again(rank: int, world: int, units: Any) -> dict[str, torch.Tensor]:
    model = wrap_twice(world, units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        out = model(data(rank, world, 6, seed=number))
        out.pow(2).mean().backward(retain_graph=True)
        out.sin().mean().backward(retain_graph=True)
        out.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world == 1 or is_sharded(model)
    return params_of(model)


@pytest.mark.parametrize("units", [nn.Linear, Scaled, [Scaled, nn.Linear]], ids=["inner", "outer", "both"])
def test_several_backwards_through_a_unit_used_twice(units: Any) -> None:
    check(use_a_graph_again, units)


class Chunked(nn.Module):
    """A body, and a head whose loss is computed chunk by chunk, so that no rank holds all its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 301), nn.Tanh()), nn.Linear(301, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def chunk_the_loss(rank: int, world: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = wrap(Chunked().double(), world, units=lambda module: isinstance(module, nn.Linear))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        hidden = model(data(rank, world, 4, 6, seed=number))
        if world > 1:
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
        grads = []
        for chunk in hidden.detach().chunk(4, dim=1):
            chunk.requires_grad_()
            model.head(chunk).logsumexp(-1).mean().backward()
            grads.append(chunk.grad)
            assert world == 1 or state_of(model.head).unit.state is State.GATHERED
        if world > 1:
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
        hidden.backward(torch.cat(grads, dim=1))
        optimizer.step()
        assert world == 1 or is_sharded(model)
    return params_of(model) | grads_of(model)


def test_a_loss_in_chunks() -> None:
    check(chunk_the_loss)


def call_the_rest(rank: int, world: int) -> None:
    model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
    model.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model._set_unshard_async_op(True)
    model.set_post_optim_event(None)
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_symm_mem_for_comm"):
        with pytest.raises(NotImplementedError, match="no counterpart in hsdp"):
            getattr(model, name)(None)
    with pytest.raises(NotImplementedError, match="stream"):
        model.set_all_reduce_hook(print, stream=object())
    # Every public method of torch's class is one of ours: none reaches into FSDP2's own state by accident.
    public = {name for name in vars(FSDPModule) if not name.startswith("_") and callable(getattr(FSDPModule, name))}
    assert public <= set(vars(hsdp.HSDPModule)), public - set(vars(hsdp.HSDPModule))


def test_every_method_of_torchs_class_is_ours() -> None:
    run_ranks(4, call_the_rest)


def reduce_by_hook(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Rows of two that the user reduces across, as a trainer with links of its own does."""
    model: Any = build(RECIPE)
    if world > 1:
        whole = hsdp.init_mesh(replicate=2, shard=2)
        across = whole.get_group("replicate")

        def average(grads: torch.Tensor) -> None:
            torch.distributed.all_reduce(grads, group=across)
            grads.div_(2)

        for module in (*model.blocks, model):
            hsdp.fully_shard(module, mesh=whole["shard"])
            module.set_all_reduce_hook(average)
    for micro in range(2):
        step(model, rank, world, micro)
    return grads_of(model)


def test_all_reduce_hook() -> None:
    check(reduce_by_hook)


def gather_no_embedding(rank: int, world: int) -> dict[str, torch.Tensor]:
    """An embedding's backward does not read its weights."""
    model: Any = wrap(build(RECIPE), world, units=[nn.Embedding])
    seen: list[State] = []
    if world > 1:
        units = [state_of(module).unit for module in (model.embed, model.position)]
        for module in (model.embed, model.position):
            module.set_unshard_in_backward(False)
        model.set_reshard_after_forward(True)

        def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: seen.extend(unit.state for unit in units))

        model.embed.register_forward_hook(watch)
    for micro in range(3):
        step(model, rank, world, micro)
    assert seen == [State.SHARDED] * 2 * 3 * (world > 1)
    return grads_of(model)


def test_unshard_in_backward() -> None:
    check(gather_no_embedding)


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
    text = "copies differ in 'out.weight', shard 1: rank 3 unlike rank 1"
    assert run_ranks(4, tamper) == [text] * 4
