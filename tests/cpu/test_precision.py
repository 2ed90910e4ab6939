"""Mixed precision against a plain process that computes each rank's part with the same casts, and the whole batch.

`emulate` cuts the batch as the ranks do, computes every part with a copy of the model in the computing dtype, casts the
gradients to the dtype of the wire, and sums them in fp32. What is left to differ is the engine: equal bits are expected
of parameters and gradients, except where sums are made in another order. Norms are sums and agree to their last bits.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import (
    BATCH,
    Recipe,
    Trained,
    adamw,
    assert_close,
    assert_same_training,
    batch,
    brief,
    build,
    full,
    largest_difference,
    loss_of,
    reference,
    snapshot,
    train,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import hsdp
from hsdp import Precision

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NO_CLIP = 1e9  # clipping then multiplies by exactly 1


def cast(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def emulate(rank: int, world: int, recipe: Recipe, precision: Precision, parts: int) -> Trained:
    """`parts` ranks in one plain process."""
    model = build(recipe)
    optimizer = adamw(model.parameters())
    wider = torch.promote_types(recipe.dtype, F32)
    norms, losses = [], []
    for step in range(recipe.steps):
        sums: dict[str, torch.Tensor] = {}
        losses.append(0.0)
        for micro in range(recipe.micro):
            grads = []
            for part in range(parts):
                worker = copy.deepcopy(model)
                for param in worker.parameters():
                    param.data = cast(param.data, precision.param)
                inputs, targets = batch(recipe, step, micro, part, parts)
                output = cast(worker(cast(inputs, precision.param)), precision.output)
                loss = loss_of(output, targets) / recipe.micro
                loss.backward()
                losses[-1] += float(loss.detach()) / parts
                wire = precision.reduce if precision.reduce in (F16, BF16) else None
                grads.append(
                    {n: cast(p.grad, wire).to(wider) for n, p in worker.named_parameters() if p.grad is not None}
                )
            while len(grads) > 1:  # in the order of a row and then a column, where fp32 sums depend on it
                grads = [
                    {n: one[n] + other[n] for n in one} for one, other in zip(grads[::2], grads[1::2], strict=True)
                ]
            for name, grad in grads[0].items():
                sums[name] = sums[name] + grad if name in sums else grad
        for name, param in model.named_parameters():
            param.grad = (sums[name] / parts).to(param.dtype)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)))
        optimizer.step()
    return replace(snapshot(model), norms=norms, losses=losses)


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    precision: Precision
    mesh: tuple[int, int] = (2, 2)
    defer: str = "cross-reduce"
    atol: float = 0.0
    rtol: float = 1e-6  # of norms and losses


def train_mixed(rank: int, world: int, case: Case) -> Trained:
    model = build(case.recipe)
    hsdp.hybrid_shard(model, mesh=case.mesh, precision=case.precision, announce=False)

    def context(last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else hsdp.accumulate(model, case.defer)  # type: ignore[arg-type]

    result = train(model, case.recipe, part=rank, parts=world, micro_context=context, clip=hsdp.clip_grad_norm_)
    assert {param.dtype for param in model.parameters()} == {case.recipe.dtype}
    assert {param.grad.dtype for param in model.parameters()} == {case.recipe.dtype}
    hsdp.check_replicas(model)
    return brief(result, rank)


SHORT = Recipe(steps=4, max_norm=NO_CLIP)
AWKWARD = replace(SHORT, model="awkward")
CASES = {
    "bf16, fp32 reduce": Case(SHORT, Precision(param=BF16, reduce=F32)),
    "bf16, awkward": Case(AWKWARD, Precision(param=BF16, reduce=F32)),
    "bf16, 1x2": Case(SHORT, Precision(param=BF16, reduce=F32), (1, 2)),
    "bf16, 2x1": Case(AWKWARD, Precision(param=BF16, reduce=F32), (2, 1)),
    "bf16 alone": Case(SHORT, Precision(param=BF16)),
    "fp16": Case(SHORT, Precision(param=F16, reduce=F32)),
    "fp16, awkward": Case(AWKWARD, Precision(param=F16, reduce=F16)),
    "reduce in bf16": Case(SHORT, Precision(reduce=BF16)),
    "reduce in bf16, awkward": Case(AWKWARD, Precision(reduce=BF16)),
    "bf16, reduce in fp16": Case(SHORT, Precision(param=BF16, reduce=F16)),
    "output": Case(SHORT, Precision(param=BF16, output=F32)),
    "microbatches": Case(replace(SHORT, micro=3), Precision(param=BF16, reduce=F32), atol=1e-5),
    "microbatches, deferred": Case(replace(AWKWARD, micro=3), Precision(param=BF16, reduce=F32), defer="reduce"),
    "bf16 parameters": Case(replace(SHORT, dtype=BF16), Precision(), rtol=1e-2),
    "bf16 parameters, microbatches": Case(replace(AWKWARD, dtype=BF16, micro=3), Precision(), atol=1e-2, rtol=1e-2),
    "fp64 computing in fp32": Case(replace(SHORT, dtype=F64), Precision(param=F32)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_emulation(name: str) -> None:
    case = CASES[name]
    world = case.mesh[0] * case.mesh[1]
    want = run_ranks(1, emulate, case.recipe, case.precision, world, init_group=False)[0]
    assert_same_training(run_ranks(world, train_mixed, case), want, case.atol, case.rtol)


def test_ten_steps_of_bf16_against_the_whole_batch() -> None:
    """Here the parts of the batch are rounded by themselves: bf16 keeps 8 bits, gradients differ by about 1 %.

    Ten steps move a weight by some 1e-2; a tenth of that is the tolerance. The distance to fp32 training must be within
    it as well, and not zero: something was computed in bf16.
    """
    recipe = Recipe()
    precision = Precision(param=BF16, reduce=F32)
    whole = run_ranks(1, emulate, recipe, precision, 1, init_group=False)[0]
    results = run_ranks(4, train_mixed, Case(recipe, precision))
    assert {result.digest for result in results} == {results[0].digest}
    got = results[0]
    for want in (whole, reference(recipe)):
        difference, name = largest_difference(got.params, want.params)
        print(f"largest difference {difference:.1e} in {name}")
        assert 1e-6 < difference < 5e-3, name
        for norm, expected in zip(got.norms, want.norms, strict=True):
            assert abs(norm / expected - 1) < 0.05


# ---- sums are kept in fp32 -------------------------------------------------------------------------------------------


def sum_small_and_large(rank: int, world: int, defer: Any) -> list[float]:
    """Gradients 256, 1 and 1, that bf16 would sum to 256."""
    model = nn.Linear(64, 64, bias=False)
    hsdp.hybrid_shard(model, mesh=(1, 2), precision=Precision(param=BF16, reduce=F32), announce=False)
    for value, last in ((256.0, False), (1.0, False), (1.0, True)):
        with contextlib.nullcontext() if last else hsdp.accumulate(model, defer):
            model(torch.full((1, 64), value)).sum().backward()
    return [float(value) for value in full(model.weight.grad).unique()]


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
def test_microbatches_are_summed_in_fp32(defer: str) -> None:
    assert run_ranks(2, sum_small_and_large, defer) == [[258.0]] * 2


def sum_over_ranks(rank: int, world: int, mesh: tuple[int, int]) -> list[float]:
    """Gradients of 256 on rank 0 and 1 elsewhere: bf16 sums to 256, the mean of 259 is 64.75."""
    model = nn.Linear(64, 64, bias=False)
    hsdp.hybrid_shard(model, mesh=mesh, precision=Precision(param=BF16), announce=False)
    model(torch.full((1, 64), 256.0 if rank == 0 else 1.0)).sum().backward()
    return [float(value) for value in full(model.weight.grad).unique()]


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)])
def test_ranks_are_summed_in_fp32(mesh: tuple[int, int]) -> None:
    assert run_ranks(4, sum_over_ranks, mesh) == [[64.75]] * 4


# ---- dtypes a module sees --------------------------------------------------------------------------------------------


class Probe(nn.Module):
    """Notes the dtypes of what its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("running", torch.full((4,), 1 / 3))
        self.register_buffer("count", torch.tensor(7))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, extra: dict[str, torch.Tensor], *, y: torch.Tensor) -> dict[str, Any]:
        tensors = {"x": x, "extra": extra["deep"], "tokens": extra["tokens"], "y": y, "weight": self.linear.weight}
        self.seen = {
            name: tensor.dtype for name, tensor in {**tensors, "running": self.running, "count": self.count}.items()
        }
        out = self.linear(x.to(self.linear.weight.dtype))
        return {"out": out, "list": [out.sum(), extra["tokens"]]}


def probe(rank: int, world: int, precision: Precision) -> dict[str, Any]:
    model: Any = hsdp.hybrid_shard(Probe(), mesh=(1, 2), precision=precision, announce=False)
    x = torch.ones(2, 4, requires_grad=True)
    extra = {"deep": torch.ones(1), "tokens": torch.ones(1, dtype=torch.int64)}
    out = model(x, extra, y=torch.ones(2, dtype=F64))
    out["list"][0].backward()
    assert x.grad is not None
    return {
        **model.seen,
        "out": out["out"].dtype,
        "total": out["list"][0].dtype,
        "out_tokens": out["list"][1].dtype,
        "x.grad": x.grad.dtype,
        "weight.grad": model.linear.weight.grad.dtype,
        "state": {name: tensor.dtype for name, tensor in model.state_dict().items()},
        "buffer": float(model.running[0]),
    }


@pytest.mark.parametrize(
    ("precision", "want"),
    [
        (Precision(), {}),
        (Precision(param=BF16), {"x": BF16, "extra": BF16, "y": BF16, "weight": BF16, "out": BF16, "total": BF16}),
        (Precision(param=F16, output=F32), {"x": F16, "extra": F16, "y": F16, "weight": F16}),
        (Precision(param=BF16, cast_inputs=False), {"weight": BF16, "out": BF16, "total": BF16}),
        (Precision(buffer=BF16), {"running": BF16}),
        (Precision(output=F64), {"out": F64, "total": F64}),
        (Precision(reduce=BF16), {}),
    ],
    ids=repr,
)
def test_dtypes(precision: Precision, want: dict[str, torch.dtype]) -> None:
    plain = {
        "x": F32,
        "extra": F32,
        "tokens": torch.int64,
        "y": F64,
        "weight": F32,
        "running": F32,
        "count": torch.int64,
    }
    plain |= {"out": F32, "total": F32, "out_tokens": torch.int64, "x.grad": F32, "weight.grad": F32}
    for got in run_ranks(2, probe, precision):
        state, buffer = got.pop("state"), got.pop("buffer")
        assert got == plain | want
        running = want.get("running", F32)
        assert state == {"linear.weight": F32, "linear.bias": F32, "running": running, "count": torch.int64}
        assert buffer == float(torch.tensor(1 / 3).to(running))


# ---- one unit, several dtypes ----------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of three dtypes in one unit, each several chunks and packed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 301, dtype=F64)
        self.middle = nn.Linear(301, 401)
        self.narrow = nn.Linear(401, 3, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.middle(torch.tanh(self.wide(x)).float())).bfloat16())


def train_dtypes(rank: int, world: int) -> Trained:
    torch.manual_seed(0)
    model = Mixed()
    if world > 1:
        hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    data = torch.randn(4, BATCH, 5, generator=torch.Generator().manual_seed(0), dtype=F64)
    for parts in data:
        if world > 1:
            model(parts.chunk(world)[rank]).float().pow(2).mean().backward()
            continue
        before = [param.grad for param in model.parameters()]
        grads: list[list[torch.Tensor]] = []
        for part in parts.chunk(4):
            model.zero_grad()
            model(part).float().pow(2).mean().backward()
            grads.append([param.grad for param in model.parameters()])
        for i, param in enumerate(model.parameters()):
            one, two, three, four = (grad[i].to(torch.promote_types(param.dtype, F32)) for grad in grads)
            mean = (((one + two) + (three + four)) / 4).to(param.dtype)
            param.grad = mean if before[i] is None else before[i] + mean
    return snapshot(model)


def test_one_unit_of_several_dtypes() -> None:
    want = run_ranks(1, train_dtypes, init_group=False)[0]
    assert len({grad.dtype for grad in want.grads.values()}) == 3
    for got in run_ranks(4, train_dtypes):
        assert_close(got.grads, want.grads, 0.0, "gradient")


# ---- torch's own policy ----------------------------------------------------------------------------------------------


def policy(rank: int, world: int) -> Any:
    policy = MixedPrecisionPolicy(BF16, F32, F64, cast_forward_inputs=False)
    model = hsdp.fully_shard(Probe(), mesh=hsdp.init_mesh(shard=2), mp_policy=policy)
    extra = {"deep": torch.ones(1), "tokens": torch.ones(1, dtype=torch.int64)}
    out = model(torch.ones(2, 4), extra, y=torch.ones(2))["out"]
    return model.seen["weight"], model.seen["x"], out.dtype, hsdp.describe(model).precision


def test_the_policy_of_fully_shard() -> None:
    want = (BF16, F32, F64, Precision(BF16, F32, F64, cast_inputs=False))
    assert run_ranks(2, policy) == [want] * 2
