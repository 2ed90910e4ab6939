"""Optimizers over parameter objects that are not the model's any more: `step()` raises instead of training nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import RECIPE, check, params_of, step, wrap
from harness import run_ranks
from models import Recipe, adamw, batch, build
from torch import nn

import hsdp

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "AdamW-fused": lambda params: adamw(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=False),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


def made_before_wrapping(rank: int, world: int, how: str) -> list[str]:
    texts = []
    for make in OPTIMIZERS.values():
        if how == "meta":
            with torch.device("meta"):
                model: Any = nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 6))
        else:
            model = build(RECIPE)
        optimizer = make(model.parameters())
        if how == "fully_shard":
            for block in model.blocks:
                hsdp.fully_shard(block, mesh=hsdp.init_mesh(replicate=2, shard=2))
            hsdp.fully_shard(model, mesh=hsdp.init_mesh(replicate=2, shard=2))
        else:
            hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
        for number in range(2):
            optimizer.zero_grad()
            if how == "meta":
                model(torch.ones(2, 6)).sum().backward()
            else:
                step(model, rank, world, number)
            with pytest.raises(RuntimeError) as error:
                optimizer.step()
            texts.append(str(error.value))
        before = params_of(model)
        right = adamw(model.parameters())  # and one made now trains
        right.step()
        assert all(not torch.equal(value, before[name]) for name, value in params_of(model).items())
    return texts


@pytest.mark.parametrize("how", ["hybrid_shard", "fully_shard", "meta"])
def test_made_before_wrapping(how: str) -> None:
    for texts in run_ranks(4, made_before_wrapping, how):
        assert len(texts) == 2 * len(OPTIMIZERS)
        for text in texts:
            assert "as it was before it was sharded" in text
            assert "make the optimizer from model.parameters() after hybrid_shard or fully_shard" in text


def made_while_gathered(rank: int, world: int, how: str) -> list[str]:
    texts = []
    for make in OPTIMIZERS.values():
        model: Any = hsdp.hybrid_shard(build(RECIPE), mesh=(2, 2), announce=False)
        inputs, _ = batch(RECIPE, 0)
        if how == "unshard":
            for module in (model, *model.blocks):
                module.unshard()
        else:
            model.set_reshard_after_forward(False)
            model(inputs)
        assert any(type(param) is nn.Parameter for param in model.parameters())
        optimizer = make(model.parameters())
        for number in range(2):
            optimizer.zero_grad()
            step(model, rank, world, number)
            with pytest.raises(RuntimeError) as error:
                optimizer.step()
            texts.append(str(error.value))
    return texts


@pytest.mark.parametrize("how", ["unshard", "after forward"])
def test_made_while_gathered(how: str) -> None:
    for texts in run_ranks(4, made_while_gathered, how):
        assert len(texts) == 2 * len(OPTIMIZERS)
        for text in texts:
            assert "as it was while it was gathered" in text


def made_after_backward(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Full parameters stay in memory, and the model shows the sharded ones: an optimizer of these trains."""
    model: Any = wrap(build(RECIPE), world)
    if world > 1:
        model.set_reshard_after_backward(False)
    step(model, rank, world)
    optimizer = adamw(model.parameters())
    for micro in range(2):
        optimizer.step()
        optimizer.zero_grad()
        step(model, rank, world, micro)
    return params_of(model)


def test_made_after_a_backward_that_keeps_full_parameters() -> None:
    check(made_after_backward)


def identities(rank: int, world: int) -> None:
    """The sharded parameters are the same objects from wrapping on, whenever nothing is gathered."""
    model: Any = hsdp.hybrid_shard(build(Recipe()), mesh=(2, 2), reshard_after_forward=True, announce=False)
    optimizer = adamw(model.parameters())
    params = dict(model.named_parameters())

    def same() -> bool:
        now = dict(model.named_parameters())
        return list(now) == list(params) and all(now[name] is params[name] for name in params)

    for number in range(2):
        step(model, rank, world, number)
        assert same()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(Recipe(), 0)[0])
        assert same()
        model.unshard()
        assert not same()
        model.reshard()
        assert same()
    model.load_state_dict(model.state_dict())
    model.to("cpu")
    assert same()


def test_sharded_parameters_keep_their_identity() -> None:
    run_ranks(4, identities)


def keep_gathered(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The marks do no harm to one who trains as one should."""
    model: Any = wrap(build(RECIPE), world, reshard_after_forward=False)
    if world > 1:
        model.set_reshard_after_backward(False)
        model.unshard()
        model.reshard()
    optimizer = adamw(model.parameters())
    for number in range(3):
        step(model, rank, world, number)
        if number == 1:  # a second one through the same parameters, nothing cleared in between
            step(model, rank, world, number)
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        for module in (model, *model.blocks):
            module.reshard()
    return params_of(model)


def test_parameters_kept_gathered_train_as_ever() -> None:
    check(keep_gathered)
