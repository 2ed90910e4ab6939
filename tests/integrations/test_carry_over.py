"""Optimizers made before wrapping go on with the sharded parameters, with their state and learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import RECIPE, check, params_of
from harness import run_ranks
from models import adamw, batch, build, loss_of

import hsdp
from hsdp.integrations.optimizers import carry_over

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-3),  # has state before its first step
    "two groups": lambda params: torch.optim.AdamW(split(list(params)), eps=1e-3),
}


def split(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[1::2], "lr": 1e-3}, {"params": params[::2], "lr": 2e-3, "weight_decay": 0.5}]


def goes_on(rank: int, world: int, name: str, steps_before: int) -> dict[str, torch.Tensor]:
    """Steps on the whole batch on every rank, then wrapped, then steps on the parts of it."""
    model: Any = build(RECIPE)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(steps_before + 2):
        if step == steps_before and world > 1:
            with carry_over(model, [optimizer]):
                hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
        part = (rank, world) if step >= steps_before else (0, 1)
        inputs, targets = batch(RECIPE, step, 0, *part)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return params_of(model)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on(name: str, steps_before: int) -> None:
    check(goes_on, name, steps_before)


def of_another_model(rank: int, world: int) -> str:
    model, other = build(RECIPE), torch.nn.Linear(5, 7)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="holds a parameter") as error, carry_over(model, [optimizer]):
        raise AssertionError("must not be reached")
    return str(error.value)


def test_an_optimizer_of_another_model_is_refused() -> None:
    (text,) = run_ranks(1, of_another_model)
    assert text.startswith("group 0 of SGD holds a parameter of shape (7, 5) that Transformer does not have")
