"""Gradients summed over microbatches: every way to defer communication gives the gradients of the plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    TOLERANCE,
    Recipe,
    Trained,
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
from torch.distributed.tensor import Partial, Replicate, Shard

import hsdp

FP64 = torch.float64
DEFERS = ["cross-reduce", "reduce"]


def micro_context(model: nn.Module, how: str) -> Callable[[bool], contextlib.AbstractContextManager[Any]]:
    """What surrounds a microbatch: `plain` reduces every time, `both` mixes the two ways to defer."""
    count = 0

    def context(last: bool) -> contextlib.AbstractContextManager[Any]:
        nonlocal count
        count += 1
        if last or how == "plain":
            return contextlib.nullcontext()
        if how == "both":
            return hsdp.accumulate(model, defer="reduce" if count % 3 == 1 else "cross-reduce")
        return hsdp.accumulate(model, defer=how)  # type: ignore[arg-type]

    return context


def train_accumulating(rank: int, world: int, mesh: tuple[int, int], recipe: Recipe, how: str) -> list[Trained]:
    results = []
    for reshard in (None, False):
        model = hsdp.hybrid_shard(build(recipe), mesh=mesh, reshard_after_forward=reshard, announce=False)
        context = micro_context(model, how)
        result = train(
            model,
            recipe,
            part=rank,
            parts=world,
            micro_context=context,
            clip=hsdp.clip_grad_norm_,
            set_to_none=not reshard,
        )
        hsdp.check_replicas(model)
        results.append(brief(result, rank))
    return results


@pytest.mark.parametrize("how", [*DEFERS, "both", "plain"])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 2), (2, 1)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_three_microbatches(mesh: tuple[int, int], how: str) -> None:
    models = [Recipe(dtype=FP64, steps=3, micro=3), Recipe("scalars", FP64, steps=3, micro=3)]
    for recipe in models if mesh == (2, 2) else models[1:]:
        for of_ranks in zip(*run_ranks(mesh[0] * mesh[1], train_accumulating, mesh, recipe, how), strict=True):
            assert_same_training(list(of_ranks), reference(recipe), TOLERANCE[FP64])


def test_ten_steps_in_fp32() -> None:
    recipe = Recipe(micro=3)
    for of_ranks in zip(*run_ranks(4, train_accumulating, (2, 2), recipe, "cross-reduce"), strict=True):
        assert_same_training(list(of_ranks), reference(recipe), TOLERANCE[torch.float32])


# ---- what stands in .grad in between ---------------------------------------------------------------------------------


def backward(model: nn.Module, recipe: Recipe, micro: int, rank: int, world: int) -> None:
    inputs, targets = batch(recipe, 0, micro, rank, world)
    loss_of(model(inputs), targets).backward()


def full_grads(model: nn.Module, factor: float = 1) -> dict[str, torch.Tensor]:
    return {name: full(param.grad) * factor for name, param in model.named_parameters() if param.grad is not None}


def grads_between(rank: int, world: int, recipe: Recipe, defer: Any) -> dict[str, Any]:
    model = build(recipe)
    if world == 1:
        backward(model, recipe, 0, rank, world)
        first = full_grads(model)
        backward(model, recipe, 1, rank, world)
        return {"first": first, "second": full_grads(model)}
    hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    with hsdp.accumulate(model, defer):
        backward(model, recipe, 0, rank, world)
    between = {param.grad.placements for param in model.parameters() if param.ndim}
    first = full_grads(model, 1 / world)  # Partial sums over ranks, not yet their mean
    backward(model, recipe, 1, rank, world)
    return {
        "between": between,
        "after": {param.grad.placements for param in model.parameters() if param.ndim},
        "first": first,
        "second": full_grads(model),
    }


@pytest.mark.parametrize("defer", DEFERS)
@pytest.mark.parametrize("model", ["transformer", "awkward", "scalars"])
def test_deferred_gradients_are_labelled_as_what_they_are(model: str, defer: str) -> None:
    recipe = Recipe(model, FP64)
    want = run_ranks(1, grads_between, recipe, defer, init_group=False)[0]
    for got in run_ranks(4, grads_between, recipe, defer):
        assert got["between"] == {(Partial(), Shard(0) if defer == "cross-reduce" else Partial())}
        assert got["after"] == {(Replicate(), Shard(0))}
        assert_close(got["first"], want["first"], TOLERANCE[FP64], "gradient")
        assert_close(got["second"], want["second"], TOLERANCE[FP64], "gradient")


def zero_between(rank: int, world: int, recipe: Recipe, defer: Any) -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for set_to_none in (True, False):
        model = build(recipe)
        if world > 1:
            hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
        accumulate = (lambda: hsdp.accumulate(model, defer)) if world > 1 else contextlib.nullcontext  # noqa: B023
        with accumulate():
            backward(model, recipe, 0, rank, world)
        model.zero_grad(set_to_none=set_to_none)
        with accumulate():
            backward(model, recipe, 1, rank, world)
        backward(model, recipe, 2, rank, world)
        results[f"set_to_none={set_to_none}"] = full_grads(model)
        # One parameter alone, and a deferral that nothing follows before the next one.
        with accumulate():
            backward(model, recipe, 3, rank, world)
            next(model.parameters()).grad = None
            backward(model, recipe, 4, rank, world)
        backward(model, recipe, 5, rank, world)
        results[f"one, set_to_none={set_to_none}"] = full_grads(model)
    return results


@pytest.mark.parametrize("defer", DEFERS)
def test_zero_grad_discards_what_was_deferred(defer: str) -> None:
    for recipe in (Recipe(dtype=FP64), Recipe("awkward", FP64)):
        want = run_ranks(1, zero_between, recipe, defer, init_group=False)[0]
        for got in run_ranks(4, zero_between, recipe, defer):
            for case, grads in want.items():
                assert_close(got[case], grads, 10 * TOLERANCE[FP64], f"{case}: gradient")


# ---- parameters that only some microbatches of some ranks use --------------------------------------------------------


class Picky(nn.Module):
    """Uses one of its linears for the whole forward."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(300, 300) for _ in range(4))
        self.tiny = nn.ParameterList(nn.Parameter(torch.full((1,), 0.5)) for _ in range(4))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.choices[choice](x) * self.tiny[choice]


def choice_of(micro: int, rank: int, by_row: bool) -> int:
    """Choice 0 only on one rank (or row) in the first microbatch, 1 on another one in the second, else 2, never 3."""
    place, first, second = (rank // 2, 1, 0) if by_row else (rank, 1, 2)
    return {(0, first): 0, (1, second): 1}.get((micro, place), 2)


def use_in_turn(rank: int, world: int, defer: Any, by_row: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = Picky().double()
    data = torch.randn(3, 4, 5, 300, generator=torch.Generator().manual_seed(1), dtype=FP64)
    if world == 1:
        for micro in range(3):
            (sum(model(data[micro, r], choice_of(micro, r, by_row)).pow(2).mean() for r in range(4)) / 4).backward()
        return full_grads(model)
    # Ranks of a row gather a unit together, so only whole rows can differ in the units they run.
    hsdp.hybrid_shard(model, mesh=(2, 2), units="Linear" if by_row else "Picky", announce=False)
    for micro in range(3):
        with contextlib.nullcontext() if micro == 2 else hsdp.accumulate(model, defer):
            model(data[micro, rank], choice_of(micro, rank, by_row)).pow(2).mean().backward()
    return full_grads(model)


@pytest.mark.parametrize("defer", DEFERS)
@pytest.mark.parametrize("by_row", [True, False], ids=["rows-run-other-units", "ranks-use-other-parameters"])
def test_parameters_used_by_some_ranks_in_some_microbatches(by_row: bool, defer: str) -> None:
    want = run_ranks(1, use_in_turn, defer, by_row, init_group=False)[0]
    used = [f"choices.{i}.{kind}" for i in range(3) for kind in ("bias", "weight")] + [f"tiny.{i}" for i in range(3)]
    assert sorted(want) == used
    for got in run_ranks(4, use_in_turn, defer, by_row):
        assert_close(got, want, TOLERANCE[FP64], "gradient")


def discard_and_not_use(rank: int, world: int, defer: Any, set_to_none: bool) -> dict[str, torch.Tensor]:
    """Choice 0 is used in a microbatch that is then discarded, and in none after it."""
    torch.manual_seed(0)
    model: Any = Picky().double()
    if world > 1:
        hsdp.hybrid_shard(model, mesh=(2, 2), units="Picky", announce=False)
    data = torch.randn(4, 5, 300, generator=torch.Generator().manual_seed(1), dtype=FP64)
    for choice, last in ((0, False), (1, True)):
        with contextlib.nullcontext() if last or world == 1 else hsdp.accumulate(model, defer):
            model(data if world == 1 else data[rank], choice).pow(2).mean().backward()
        if not last:
            model.zero_grad(set_to_none=set_to_none)
    return full_grads(model)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("defer", DEFERS)
def test_a_discarded_gradient_that_nothing_follows(defer: str, set_to_none: bool) -> None:
    want = run_ranks(1, discard_and_not_use, defer, set_to_none, init_group=False)[0]
    assert ("choices.0.weight" in want) == (not set_to_none)
    for got in run_ranks(4, discard_and_not_use, defer, set_to_none):
        assert_close(got, want, TOLERANCE[FP64], "gradient")


# ---- the context itself ----------------------------------------------------------------------------------------------


def leave_by_exception(rank: int, world: int) -> dict[str, Any]:
    recipe = Recipe(dtype=FP64)
    model = hsdp.hybrid_shard(build(recipe), mesh=(1, 2), announce=False)
    try:
        with hsdp.accumulate(model):
            raise KeyError("a mistake of the user's")
    except KeyError:
        pass
    backward(model, recipe, 0, rank, world)
    after_exception = {param.grad.placements for param in model.parameters()}
    with hsdp.accumulate(model, "reduce"), hsdp.accumulate(model):
        backward(model, recipe, 0, rank, world)  # the inner context must not undo the outer one
    model.zero_grad()
    with hsdp.accumulate(model, "reduce"), hsdp.accumulate(model):
        backward(model, recipe, 0, rank, world)
    nested = {param.grad.placements for param in model.parameters()}
    errors = []
    for call in (
        lambda: hsdp.accumulate(model, "all").__enter__(),
        lambda: hsdp.accumulate(nn.Linear(2, 2)).__enter__(),
    ):  # type: ignore[arg-type]
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return {"after_exception": after_exception, "nested": nested, "errors": errors}


def test_the_context_cleans_up_and_refuses() -> None:
    for result in run_ranks(2, leave_by_exception):
        assert result["after_exception"] == {(Replicate(), Shard(0))}
        assert result["nested"] == {(Partial(), Partial())}
        assert "defer='all'" in result["errors"][0]
        assert "Linear holds no module wrapped" in result["errors"][1]


def freeze_between(rank: int, world: int) -> str:
    recipe = Recipe(dtype=FP64)
    model = hsdp.hybrid_shard(build(recipe), mesh=(1, 2), announce=False)
    with hsdp.accumulate(model):
        backward(model, recipe, 0, rank, world)
    model.get_parameter("blocks.1.up.weight").requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"requires_grad changed in unit 'blocks\.1'") as error:
        backward(model, recipe, 1, rank, world)
    return str(error.value)


def test_freezing_between_microbatches_is_refused() -> None:
    assert len(set(run_ranks(2, freeze_between))) == 1
