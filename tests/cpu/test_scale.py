"""The scale of gradients: linear in microbatches, exactly 1/f of the sum, the same on every shape of mesh."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from cases import F64, check, data, grads_of, wrap
from harness import run_ranks
from models import full
from torch import nn

import hsdp
from hsdp.module import state_of

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]
REDUCES = [None, torch.float32, torch.bfloat16, torch.float16]


def sums(rank: int, world: int, mesh: tuple[int, int], reduce: Any) -> dict[str, float]:
    """A gradient of 2 on every rank and microbatch: small whole numbers, which every dtype holds exactly."""
    found = {}
    for factor, micro, defer in itertools.product([None, 1.0, 8.0], [1, 3], [None, "cross-reduce", "reduce"]):
        model: Any = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 3))
        hsdp.hybrid_shard(model, mesh=mesh, precision=hsdp.Precision(reduce=reduce), units="Linear", announce=False)
        if factor is not None:
            for module in (model, *model):
                module.set_gradient_divide_factor(factor)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(1 / 2)
        for number in range(micro):
            deferred = defer is not None and number < micro - 1
            with hsdp.accumulate(model, defer) if deferred else contextlib.nullcontext():
                model[1](torch.full((2, 300), 1.0)).sum().backward()
        grad = full(model[1].weight.grad)
        assert (grad == grad.flatten()[0]).all()
        assert model[0].weight.grad is None
        found[f"{factor} {micro} {defer}"] = grad.flatten()[0].item() / micro * (factor or world)
    return found


@pytest.mark.parametrize("reduce", REDUCES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_sums_divided_by_the_factor(mesh: tuple[int, int], reduce: Any) -> None:
    world = mesh[0] * mesh[1]
    for found in run_ranks(world, sums, mesh, reduce):
        assert len(found) == 18
        assert found == dict.fromkeys(found, 2.0 * world)


def many_microbatches(rank: int, world: int, reduce: Any, param: Any, defer: Any) -> tuple[float, float]:
    """64 microbatches whose gradients a sum in bf16 would lose; relative distances to fp64, of 64 and of one."""
    errors = []
    for count in (64, 1):
        torch.manual_seed(0)
        model: Any = nn.Linear(64, 64, bias=False)
        hsdp.hybrid_shard(model, mesh=(2, 2), precision=hsdp.Precision(param=param, reduce=reduce), announce=False)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(count, world, 1, 64, generator=generator).bfloat16().float()
        for number in range(count):
            with hsdp.accumulate(model, defer) if number < count - 1 else contextlib.nullcontext():
                model(inputs[number, rank]).sum().backward()
        want = inputs.double().sum((0, 1, 2)).expand(64, 64) / world
        errors.append(float(((full(model.weight.grad).double() - want).abs() / want).max()))
    return errors[0], errors[1]


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)], ids=["reduce", "both"])
def test_sixty_four_microbatches_in_bf16_are_as_exact_as_one(dtypes: tuple[Any, Any], defer: str) -> None:
    for many, one in run_ranks(4, many_microbatches, *dtypes, defer):
        if defer == "cross-reduce":  # the inputs are bf16 numbers, so each microbatch travels exactly
            assert many < 1e-6
        else:  # the sum of all is rounded once, on the wire
            assert many < (1e-6 if dtypes[1] is None and dtypes[0] is None else 2**-8)
        assert one < 1e-6


def count_messages(rank: int, world: int, micro: int) -> tuple[int, int]:
    """(reductions started inside the row for the one unit, elements sent down the column / those of the sums)."""
    model: Any = hsdp.hybrid_shard(nn.Linear(600, 600), mesh=(2, 2), announce=False)
    unit, schedule = state_of(model).unit, state_of(model).schedule
    reduced: list[int] = []
    crossed: list[int] = []
    reduce, all_reduce = unit.row.reduce, schedule.column.all_reduce

    def counted(jobs: Any, tag: int) -> Any:
        reduced.append(sum(job.full.numel() for job in jobs))
        return reduce(jobs, tag)

    def counted_column(bucket: torch.Tensor) -> Any:
        crossed.append(bucket.numel())
        return all_reduce(bucket)

    unit.row.reduce, schedule.column.all_reduce = counted, counted_column
    for number in range(micro):
        with hsdp.accumulate(model) if number < micro - 1 else contextlib.nullcontext():
            model(torch.ones(2, 600)).sum().backward()
    assert sum(crossed) == sum(segment.grads.numel for segment in unit.segments)
    return len(reduced), len(crossed)


@pytest.mark.parametrize("micro", [1, 4])
def test_microbatches_cost_one_cross_reduction(micro: int) -> None:
    """A reduction of the matrix and one of the packed bias a microbatch, and one message down the column in all."""
    assert run_ranks(4, count_messages, micro) == [(2 * micro, 1)] * 4


# ---- means over tokens -----------------------------------------------------------------------------------------------


def tokens_of(part: int, micro: int) -> int:
    return [5, 0, 13, 2][part] + 3 * micro


def token_mean(rank: int, world: int, micro: int) -> dict[str, torch.Tensor]:
    """Every rank and microbatch has another number of tokens, one of them none; the loss is their mean."""
    torch.manual_seed(0)
    model: Any = wrap(nn.Sequential(nn.Linear(6, 301), nn.Tanh(), nn.Linear(301, 1)).double(), world)
    parts = range(4) if world == 1 else [rank]
    total = sum(tokens_of(part, number) for part in range(4) for number in range(micro))
    loss = torch.zeros((), dtype=F64)
    for number in range(micro):
        for part in parts:
            x = data(0, 1, 6, seed=10 * part + number, rows=tokens_of(part, number))
            loss_sum = model(x).pow(2).sum()
            last = number == micro - 1 or world == 1
            with contextlib.nullcontext() if last else hsdp.accumulate(model):
                if world == 1:
                    each = loss_sum / total
                else:
                    mine = sum(tokens_of(part, number) for number in range(micro))
                    each = hsdp.token_mean(loss_sum, mine, model)
                each.backward()
            loss += each.detach() / world
    if world > 1:
        torch.distributed.all_reduce(loss)
    return grads_of(model) | {"loss": loss}


@pytest.mark.parametrize("micro", [1, 3])
def test_the_mean_over_all_tokens(micro: int) -> None:
    check(token_mean, micro)
