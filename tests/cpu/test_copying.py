"""Deep copies of wrapped models: independent, trainable, averages of weights on the shards; pickling is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cases import F64, RECIPE, Encoder, check, data, grads_of, is_sharded, params_of, step, wrap
from harness import run_ranks
from models import Recipe, TiedTransformer, adamw, build
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hsdp


def train_both(rank: int, world: int, model_name: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train, copy, train the two with different data, in turn."""
    first: Any = wrap(build(Recipe(model_name, F64)), world, **options)
    step(first, rank, world) if model_name != "scalars" else first(data(rank, world, 6)).pow(2).mean().backward()
    adamw(first.parameters()).step()
    first.zero_grad()
    second = copy.deepcopy(first)
    assert type(second).__name__ == type(first).__name__
    if world > 1:
        assert isinstance(second, FSDPModule)
        assert is_sharded(second) or model_name == "scalars"
        assert {id(p) for p in first.parameters()}.isdisjoint(id(p) for p in second.parameters())
        assert [p.placements for p in first.parameters()] == [p.placements for p in second.parameters()]
    if isinstance(first, TiedTransformer):
        assert second.head.weight is second.embed.weight
    third = copy.deepcopy(second)  # a copy of a copy, which nobody trains
    optimizers = [adamw(first.parameters()), adamw(second.parameters())]
    for number in range(4):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            if model_name == "scalars":
                model(data(rank, world, 6, seed=number + (model is second))).pow(2).mean().backward()
            else:
                step(model, rank, world, number + 10 * (model is second))
            optimizer.step()
            if number < 3:
                optimizer.zero_grad()
    values = {"first": first, "second": second, "third": third}
    params = {f"{which} {name}": value for which, model in values.items() for name, value in params_of(model).items()}
    return params | {f"{which} {name}": g for which, model in values.items() for name, g in grads_of(model).items()}


def last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(param.ndim - 1) if param.ndim else None


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("transformer", {}),
        ("tied", {"units": ["Block", "Embedding", "Linear"]}),
        ("scalars", {"shard_placement_fn": last_dim}),
        ("transformer", {"reshard_after_forward": False}),
    ],
    ids=["units", "tied", "scalars-last-dim", "kept"],
)
def test_a_copy_trains_by_itself(model: str, options: dict[str, Any]) -> None:
    check(train_both, model, options)


def settings(rank: int, world: int) -> None:
    model: Any = wrap(Encoder().double(), world, units=nn.Linear, reshard_after_forward=False)
    hsdp.register_forward_method(model, "encode")
    model.set_gradient_divide_factor(8.0)
    model.inner.set_all_reduce_hook(lambda sums: sums.mul_(3))
    model.register_forward_hook(lambda module, args, out: out * 2)
    calls: list[int] = []
    model.inner.weight.register_hook(lambda grad: calls.append(1))
    twin = copy.deepcopy(model)
    x = data(rank, world, 6)
    assert torch.equal(twin(x), model(x))
    assert torch.equal(twin.encode(x), model.encode(x))
    model.reset_iter_state()
    twin.reset_iter_state()
    for each in (model, twin):
        each(x).sum().backward()
    assert torch.equal(twin.inner.weight.grad.to_local(), model.inner.weight.grad.to_local())
    assert calls == [1]  # as in plain torch, a copy has no hooks on parameters
    assert list(twin.state_dict()) == list(model.state_dict())
    twin.load_state_dict(model.state_dict())
    assert str(hsdp.describe(twin)) == str(hsdp.describe(model))
    hsdp.check_replicas(twin)
    part = copy.deepcopy(model.outer)  # a unit by itself
    assert torch.equal(part(model.encode(x)) * 2, model(x))
    shallow = copy.copy(model)
    assert shallow.inner is model.inner


def test_a_copy_has_the_settings_of_the_model() -> None:
    run_ranks(4, settings)


def copy_early(rank: int, world: int) -> None:
    """Rows that were initialized differently are made equal at the first gather, in a copy as well."""
    with torch.device("meta"):
        model = Encoder()
    mesh = hsdp.init_mesh(replicate=2, shard=2)
    for part in (model.inner, model.outer, model):
        hsdp.fully_shard(part, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    twin: Any = copy.deepcopy(model)
    twin(data(rank, world, 6).float())
    hsdp.check_replicas(twin)


def test_a_copy_made_before_the_first_gather() -> None:
    run_ranks(4, copy_early)


def average(rank: int, world: int) -> dict[str, torch.Tensor]:
    """An exponential average of weights; the averaged model evaluates, and equals that of plain training."""
    model: Any = wrap(build(RECIPE), world)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = adamw(model.parameters())
    outputs = {}
    for number in range(4):
        step(model, rank, world, number)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        with torch.no_grad():
            outputs[f"{number}"] = averaged(torch.ones(2, 4, dtype=torch.int64)).clone()
    assert world == 1 or is_sharded(averaged)
    return outputs | params_of(averaged.module)


def test_an_average_of_weights() -> None:
    check(average)


def refuse(rank: int, world: int) -> None:
    model = wrap(build(RECIPE), world)
    for call in (lambda: pickle.dumps(model), lambda: torch.save(model, "nowhere.pt")):
        with pytest.raises(ValueError, match=r"HSDPTransformer cannot be pickled: .* save model.state_dict\(\)"):
            call()


def test_pickling_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_ranks(4, refuse)
