"""Hooks that users register on parameters: they see the final, reduced gradient, once a backward that reduces."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from cases import F64, RECIPE, check, step, wrap
from harness import run_ranks
from models import adamw, build, full
from torch.distributed.tensor import DTensor

import hsdp

NAMES = ("blocks.1.up.weight", "blocks.0.norm1.bias", "head.weight")


def record(model: Any, kind: str, seen: list[tuple[str, torch.Tensor]]) -> list[Any]:
    """Hooks of one kind on some parameters; returns their handles."""
    handles = []
    for name, param in model.named_parameters():
        if name in NAMES:
            if kind == "register_hook":
                handles.append(param.register_hook(lambda grad, name=name: seen.append((name, full(grad)))))
            else:
                hook = lambda param, name=name: seen.append((name, full(param.grad)))  # noqa: E731
                handles.append(param.register_post_accumulate_grad_hook(hook))
    return handles


def hooked(rank: int, world: int, kind: str, when: str) -> dict[str, torch.Tensor]:
    seen: list[tuple[str, torch.Tensor]] = []
    model: Any = build(RECIPE)
    if when == "before":
        handles = record(model, kind, seen)
    wrap(model, world)
    if when == "after":
        handles = record(model, kind, seen)
    values = {}
    for number in range(2):  # not cleared in between: the second kind sees the sum of both, the first kind only the new
        step(model, rank, world, number)
        assert sorted(name for name, _ in seen) == sorted(NAMES), "each hook once"
        values |= {f"{number} {name}": grad for name, grad in sorted(seen)}
        seen.clear()
    handles[0].remove()
    step(model, rank, world)
    assert len(seen) == len(NAMES) - 1
    return dict(sorted(values.items()))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_fire_once_with_the_reduced_gradient(kind: str, when: str) -> None:
    check(hooked, kind, when)


def change_gradient(rank: int, world: int) -> dict[str, torch.Tensor]:
    """A hook that returns another gradient replaces it."""
    model: Any = wrap(build(RECIPE), world)
    model.head.weight.register_hook(lambda grad: grad * 3)
    model.head.weight.register_hook(lambda grad: None)
    for number in range(2):
        step(model, rank, world, number)
    return {"grad": full(model.head.weight.grad)}


def test_a_hook_may_replace_the_gradient() -> None:
    check(change_gradient)


def wrong_gradient(rank: int, world: int) -> None:
    model: Any = wrap(build(RECIPE), world)
    handle = model.head.weight.register_hook(lambda grad: grad.full_tensor())
    with pytest.raises(ValueError, match=r"a hook on parameter 'head\.weight' returned Tensor: "):
        step(model, rank, world)
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    step(model, rank, world)
    assert isinstance(model.head.weight.grad, DTensor)


def test_a_hook_that_returns_something_else_is_refused() -> None:
    run_ranks(4, wrong_gradient)


def deferred(rank: int, world: int, defer: Any) -> None:
    model: Any = wrap(build(RECIPE), world)
    seen: list[tuple[str, torch.Tensor]] = []
    record(model, "register_post_accumulate_grad_hook", seen)
    for micro in range(3):
        with contextlib.nullcontext() if micro == 2 else hsdp.accumulate(model, defer):
            step(model, rank, world, micro)
        assert len(seen) == (len(NAMES) if micro == 2 else 0)


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
def test_microbatches_that_defer_call_no_hook(defer: str) -> None:
    run_ranks(4, deferred, defer)


def step_in_backward(rank: int, world: int) -> dict[str, torch.Tensor]:
    """One optimizer a parameter, stepped as soon as its gradient is there."""
    model: Any = wrap(build(RECIPE), world)
    optimizers = {param: adamw([param]) for param in model.parameters()}

    def update(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    for number in range(3):
        step(model, rank, world, number)
        assert all(param.grad is None for param in model.parameters())
    return {name: full(param) for name, param in model.named_parameters()}


def test_an_optimizer_in_the_hooks() -> None:
    check(step_in_backward)
    assert F64 is RECIPE.dtype
