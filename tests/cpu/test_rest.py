"""What is not sharded: buffers and their policy, ignored parameters, and dtypes chosen for single parameters."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from cases import F64, RECIPE, check, data, grads_of, step, wrap
from harness import run_ranks
from models import build, full
from torch import nn
from torch.distributed.tensor import DTensor

import hsdp

# ---- buffers ---------------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 301), nn.BatchNorm1d(301), nn.Linear(301, 3)
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def statistics(rank: int, world: int, policy: Any) -> Any:
    """(buffers before the last training forward's update is seen, whether the copies are equal after a sync)."""
    torch.manual_seed(0)
    model: Any = hsdp.hybrid_shard(Statistics().double(), mesh=(2, 2), sync_buffers=policy, announce=False)
    seen: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, args: seen.append(module.running_mean.clone()))
    for seed in range(3):
        model(data(rank, world, 6, seed=seed)).pow(2).mean().backward()
    model.eval()
    with torch.no_grad():
        model(data(rank, world, 6))
    return seen, model.norm.running_mean.clone()


def test_the_policy_of_buffers() -> None:
    for policy in ("wrap", "forward"):
        results = run_ranks(4, statistics, policy)
        for number in range(3):
            means = [seen[number] for seen, _ in results]
            equal = all(torch.equal(mean, means[0]) for mean in means)
            assert equal == (policy == "forward" or number == 0), f"{policy}, forward {number}"
        # An evaluation changes nothing: every rank uses what its last training forward left.
        for seen, last in results:
            assert torch.equal(seen[3], last)
        assert not torch.equal(results[0][1], results[1][1])
    first = next(seen for seen, _ in results)
    alone = run_ranks(1, first_rank_alone, init_group=False)[0]
    for number in range(3):
        assert torch.allclose(first[number], alone[number], atol=1e-12)


def first_rank_alone(rank: int, world: int) -> list[torch.Tensor]:
    """The running means that one process has before each forward, given the first rank's part of the data."""
    torch.manual_seed(0)
    model: Any = Statistics().double()
    seen = []
    for seed in range(3):
        seen.append(model.norm.running_mean.clone())
        model(data(0, 4, 6, seed=seed)).pow(2).mean().backward()
    return seen


def small_buffers(rank: int, world: int) -> None:
    model = nn.Linear(6, 6)
    model.register_buffer("scale", torch.full((3,), float(rank)).to(torch.float8_e4m3fn))
    model.register_buffer("seen", torch.tensor(rank > 0))
    hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    assert model.scale.float().tolist() == [0.0] * 3
    assert not model.seen


def test_buffers_of_any_dtype_are_made_equal() -> None:
    run_ranks(4, small_buffers)


def refuse_policy(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="sync_buffers='always': expected one of 'wrap', 'forward'"):
        hsdp.hybrid_shard(Statistics(), shard=2, sync_buffers="always")  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused() -> None:
    run_ranks(2, refuse_policy)


# ---- ignored parameters ----------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """`sometimes` is used by ranks 1 and 2 only, `never` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 301)
        self.scale = nn.Parameter(torch.rand(301))
        self.sometimes = nn.Parameter(torch.rand(301))
        self.never = nn.Parameter(torch.rand(3))
        self.table = nn.Embedding(11, 301, sparse=True)

    def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
        x = self.inner(x) * self.scale + self.table((x.abs() * 10).long().sum(-1) % 11)
        return torch.tanh(x * self.sometimes if part in (1, 2) else x)


def reduce_ignored(rank: int, world: int, defer: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank if world > 1 else 0)  # made equal at wrap
    model: Any = Partly().double()
    ignored = [model.scale, model.sometimes, model.never, model.table.weight]
    if world > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrap(model, world, ignored_params=ignored, reduce_ignored=True)
        assert {name for name, p in model.named_parameters() if isinstance(p, DTensor)} == {
            "inner.weight",
            "inner.bias",
        }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        for micro in range(3):
            deferred = world > 1 and micro < 2
            with hsdp.accumulate(model, defer) if deferred else contextlib.nullcontext():
                for part in range(4) if world == 1 else [rank]:
                    x = data(part, 4, 6, seed=10 * number + micro)
                    (model(x, part).pow(2).mean() / (4 if world == 1 else 1)).backward()
        assert model.never.grad is None
        if number < 2:
            for param in model.parameters():
                if param.grad is not None and param.grad.layout != torch.strided:
                    param.grad = param.grad.to_dense()
            optimizer.step()
            optimizer.zero_grad()
    if world > 1:
        hsdp.check_replicas(model)
    dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads_of(model).items()}
    return {name: full(param) for name, param in model.named_parameters()} | dense


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
def test_reduce_ignored(defer: str) -> None:
    check(reduce_ignored, defer)


def warn_of_ignored(rank: int, world: int) -> list[str]:
    texts = []
    for frozen in (False, True):
        model: Any = build(RECIPE)
        model.head.weight.requires_grad_(not frozen)
        before = model.head.weight.data_ptr()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap(model, world, ignored_params={model.head.weight})
        texts += [str(each.message) for each in caught if "ignored_params" in str(each.message)]
        assert model.head.weight.data_ptr() == before
    return texts


def test_trained_ignored_parameters_are_warned_of_once() -> None:
    first, *others = run_ranks(4, warn_of_ignored)
    assert others == [[]] * 3
    (text,) = first
    assert text.startswith("ignored_params: head.weight require gradients, which nobody reduces")


# ---- dtypes of single parameters -------------------------------------------------------------------------------------


def keep_norms(name: str, param: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if "norm" in name else None


def override(rank: int, world: int) -> dict[str, str]:
    model: Any = build(RECIPE).float()
    precision = hsdp.Precision(param=torch.bfloat16, param_override=keep_norms)
    hsdp.hybrid_shard(model, mesh=(2, 2), precision=precision, announce=False)
    seen = {}

    def note(module: Any, args: Any) -> None:
        seen.update({f"{module.tag}.{name}": str(p.dtype) for name, p in module.named_parameters(recurse=False)})

    for name, module in model.named_modules():
        module.tag = name
        module.register_forward_pre_hook(note)
    step(model, rank, world)
    assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
    return seen


def test_a_dtype_for_single_parameters() -> None:
    for seen in run_ranks(4, override):
        assert len(seen) == 3 * 11 + 5
        for name, dtype in seen.items():
            assert dtype == ("torch.float32" if "norm" in name else "torch.bfloat16"), name


def wrong_override(rank: int, world: int) -> None:
    for wrong, match in (
        (lambda name, param: torch.int8, r"param_override for 'weight'=torch.int8"),
        (lambda name, param: torch.bfloat16 if rank else None, "gathered dtype"),
    ):
        precision = hsdp.Precision(param_override=wrong)
        with pytest.raises(ValueError, match=match):
            hsdp.hybrid_shard(nn.Linear(2, 2), shard=2, precision=precision)
    assert F64.is_floating_point


def test_a_wrong_override_is_refused_on_every_rank() -> None:
    run_ranks(2, wrong_override)
