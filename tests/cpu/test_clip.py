"""Clipping: the norm and the clipped gradients are those of one plain process, whatever the mesh and the order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import check
from harness import run_ranks
from models import TOLERANCE, Recipe, assert_close, batch, build, full, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import hsdp

FP64 = torch.float64
MESHES = [(2, 2), (1, 4), (4, 1)]
ORDERS = [1.0, 2.0, 3.0, math.inf]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def backward(model: nn.Module, recipe: Recipe, rank: int, world: int) -> None:
    inputs, targets = batch(recipe, 0, 0, rank, world)
    loss_of(model(inputs), targets).backward()


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def full_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(grad) for name, grad in grads_of(model).items()}


# ---- values ----------------------------------------------------------------------------------------------------------


def clip_every_way(
    rank: int, world: int, mesh: tuple[int, int], recipe: Recipe, orders: list[float]
) -> dict[tuple[str, float], Any]:
    """{(function, order): (norm, gradients after it)}; every clipping starts from the same gradients."""
    model = build(recipe)
    if world > 1:
        hsdp.hybrid_shard(model, mesh=mesh, announce=False)
    backward(model, recipe, rank, world)
    start = {name: local(grad).clone() for name, grad in grads_of(model).items()}
    results: dict[tuple[str, float], Any] = {}
    for function, order in [(function, order) for function in ("hsdp", "torch") for order in orders]:
        if recipe.model == "awkward" and world > 1 and mesh[1] > 1 and function == "torch" and order == math.inf:
            continue  # torch raises where a rank holds no rows, "infinity norm on an empty tensor", and hangs elsewhere
        clip = hsdp.clip_grad_norm_ if world > 1 and function == "hsdp" else torch.nn.utils.clip_grad_norm_
        for name, grad in grads_of(model).items():
            local(grad).copy_(start[name])
        norm = clip(model.parameters(), 1e9, norm_type=order)
        assert all(torch.equal(local(grad), start[name]) for name, grad in grads_of(model).items()), "1e9 is enough"
        clip(model.parameters(), 0.01, norm_type=order)
        if function == "hsdp":
            assert type(norm) is Tensor
            assert norm.shape == ()
            assert not norm.requires_grad
        results[function, order] = (full(norm).item(), full_grads(model))
    return results


@pytest.mark.parametrize(
    ("mesh", "model", "orders"),
    [((2, 2), "transformer", [2.0]), *((mesh, "awkward", ORDERS) for mesh in MESHES)],
    ids=["2x2-transformer", "2x2-awkward", "1x4-awkward", "4x1-awkward"],
)
def test_equals_torch_on_one_process_and_on_dtensors(mesh: tuple[int, int], model: str, orders: list[float]) -> None:
    recipe = Recipe(model, FP64)
    want = run_ranks(1, clip_every_way, mesh, recipe, orders, init_group=False)[0]
    results = run_ranks(4, clip_every_way, mesh, recipe, orders)
    assert len(results[0]) == 2 * len(orders) - (model == "awkward" and mesh != (4, 1))
    for (function, order), (norm, grads) in results[0].items():
        what = f"{function}, order {order}"
        expected, expected_grads = want[function, order]
        assert norm == pytest.approx(expected, rel=1e-13), what
        assert all(result[function, order][0] == norm for result in results), f"{what}: ranks disagree"
        assert_close(grads, expected_grads, TOLERANCE[FP64], f"{what}: gradient")
        clipped_norm = torch.stack([grad.norm(order) for grad in grads.values()]).norm(order).item()
        assert clipped_norm == pytest.approx(0.01, rel=1e-3), what


def norm_in_low_precision(rank: int, world: int, dtype: torch.dtype) -> tuple[float, float]:
    recipe = Recipe("awkward", dtype)
    model = hsdp.hybrid_shard(build(recipe), mesh=(2, 2), announce=False)
    backward(model, recipe, rank, world)
    exact = torch.stack([grad.double().norm() for grad in full_grads(model).values()]).norm()
    return hsdp.clip_grad_norm_(model, 1.0).item(), exact.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_of_lower_precision(dtype: torch.dtype) -> None:
    results = run_ranks(4, norm_in_low_precision, dtype)
    norm, exact = results[0]
    assert norm == pytest.approx(exact, rel=2 * torch.finfo(dtype).eps)
    assert all(result[0] == norm for result in results)


# ---- what is given, and what comes back ------------------------------------------------------------------------------


class Beside(nn.Module):
    """Two sharded parameters and one that stays plain; `unused` gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Linear(6, 5)
        self.plain = nn.Parameter(torch.linspace(1, 2, 6))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.sharded(x * self.plain)


def clip_beside(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Beside().double()
    if world > 1:
        hsdp.hybrid_shard(model, mesh=(2, 2), ignored_params=[model.plain, model.unused], announce=False)
    assert isinstance(model.sharded.weight, DTensor) == (world > 1)
    assert not isinstance(model.plain, DTensor)
    # The same inputs everywhere, so that the gradient of the plain parameter, which nobody reduces, is the same too.
    model(torch.arange(12.0, dtype=FP64).view(2, 6)).pow(2).mean().backward()
    start = {name: local(grad).clone() for name, grad in grads_of(model).items()}
    results: dict[str, Any] = {}
    for order in ORDERS:
        for name, grad in grads_of(model).items():
            local(grad).copy_(start[name])
        clip = hsdp.clip_grad_norm_ if world > 1 else torch.nn.utils.clip_grad_norm_
        norm = clip(model.parameters(), 1.0, norm_type=order)
        assert type(norm) is Tensor
        results[str(order)] = (norm.item(), full_grads(model))
    return results


def test_plain_parameters_beside_sharded_ones_count_once() -> None:
    want = run_ranks(1, clip_beside, init_group=False)[0]
    assert set(want["2.0"][1]) == {"plain", "sharded.weight", "sharded.bias"}
    for result in run_ranks(4, clip_beside):
        for order, (norm, grads) in want.items():
            assert result[order][0] == pytest.approx(norm, rel=1e-13), order
            assert_close(result[order][1], grads, TOLERANCE[FP64], f"order {order}: gradient")


class Spread(nn.Module):
    """Parameters of every kind: sharded over one mesh and over another one, a DTensor that is replicated, plain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)
        self.replicated = nn.Parameter(torch.linspace(1, 2, 5))
        self.plain = nn.Parameter(torch.linspace(2, 3, 5))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * local(self.replicated) * self.plain * self.frozen


def spread(world: int) -> Spread:
    torch.manual_seed(0)
    model = Spread().double()
    if world > 1:
        mesh = hsdp.init_mesh(replicate=2, shard=2)
        line = init_device_mesh("cpu", (world,))
        hsdp.fully_shard(model.first, mesh=mesh)
        hsdp.fully_shard(model.second, mesh=line)
        model.replicated = nn.Parameter(DTensor.from_local(model.replicated.data, line, [Replicate()]))
    return model


def clip_spread(rank: int, world: int, order: float) -> dict[str, Tensor]:
    model = spread(world)
    x = torch.arange(12.0, dtype=FP64).view(2, 6)
    model(x).pow(2).mean().backward()
    if world > 1:  # what a user does who keeps it replicated
        model.replicated.grad = DTensor.from_local(
            local(model.replicated.grad), model.second.weight.device_mesh, [Replicate()]
        )
    clip = hsdp.clip_grad_norm_ if world > 1 else torch.nn.utils.clip_grad_norm_
    return {"norm": clip(model.parameters(), 0.1, norm_type=order)} | full_grads(model)


@pytest.mark.parametrize("order", ORDERS)
def test_every_kind_of_parameter_counts_once(order: float) -> None:
    check(clip_spread, order, atol=1e-12)


def clip_unequal(rank: int, world: int, order: float) -> dict[str, Any]:
    """A plain parameter that nobody reduces, with another gradient on every rank, on one rank none."""
    model = spread(world)
    model(torch.arange(12.0, dtype=FP64).view(2, 6)).pow(2).mean().backward()
    model.plain.grad = None if rank == 2 else torch.full((5,), 10.0 * (rank + 1), dtype=FP64)
    norm = hsdp.clip_grad_norm_([*model.first.parameters(), model.plain], 0.1, norm_type=order)
    sharded = hsdp.clip_grad_norm_(model.first, 1e9, norm_type=order)
    model.plain.grad = torch.full((5,), math.nan if rank == 1 else 1.0, dtype=FP64)
    with pytest.raises(RuntimeError, match="they were not clipped"):
        hsdp.clip_grad_norm_([*model.first.parameters(), model.plain], 0.1, norm_type=order, error_if_nonfinite=True)
    return {"norm": norm.item(), "sharded": sharded.item()}


@pytest.mark.parametrize("order", ORDERS)
def test_one_number_also_where_plain_gradients_differ(order: float) -> None:
    results = run_ranks(4, clip_unequal, order)
    assert all(result == results[0] for result in results)
    found, left = results[0]["norm"], results[0]["sharded"] * results[0]["norm"] / 0.1  # before it was scaled
    if order == math.inf:
        assert found == pytest.approx(max(left, 40.0), rel=1e-5)
    else:
        plain = sum(5 * (10.0 * (rank + 1)) ** order for rank in (0, 1, 3)) / 4
        assert found == pytest.approx((left**order + plain) ** (1 / order), rel=1e-5)


def clip_what_is_given(rank: int, world: int) -> dict[str, Any]:
    recipe = Recipe("awkward", FP64)
    model = hsdp.hybrid_shard(build(recipe), mesh=(1, 4), announce=False)
    empty = [hsdp.clip_grad_norm_(given, 1.0) for given in (model, model.parameters(), [], nn.Identity())]
    backward(model, recipe, rank, world)
    before = full_grads(model)
    one = model.get_parameter("scale")  # one row: three ranks hold nothing of it
    norms = {
        "module": hsdp.clip_grad_norm_(model, 1e9),
        "generator": hsdp.clip_grad_norm_((param for param in model.parameters()), 1e9),
        "list": hsdp.clip_grad_norm_(list(model.parameters()), 1e9),
        "tensor": hsdp.clip_grad_norm_(one, 1e9),
        "tensor, inf": hsdp.clip_grad_norm_(one, 1e9, norm_type=math.inf),
    }
    return {
        "empty": [(type(norm) is Tensor, norm.shape == (), norm.item()) for norm in empty],
        "norms": {name: norm.item() for name, norm in norms.items()},
        "all": torch.stack([grad.norm() for grad in before.values()]).norm().item(),
        "one": before["scale"].abs().item(),
    }


def test_modules_lists_generators_tensors_and_nothing() -> None:
    for result in run_ranks(4, clip_what_is_given):
        assert result["empty"] == [(True, True, 0.0)] * 4
        for given in ("module", "generator", "list"):
            assert result["norms"][given] == pytest.approx(result["all"], rel=1e-13), given
        for given in ("tensor", "tensor, inf"):
            assert result["norms"][given] == pytest.approx(result["one"], rel=1e-13), given


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def clip_not_finite(rank: int, world: int, mesh: tuple[int, int], value: float, order: float) -> dict[str, Any]:
    recipe = Recipe("awkward", FP64)
    model = hsdp.hybrid_shard(build(recipe), mesh=mesh, announce=False)
    backward(model, recipe, rank, world)
    if rank % mesh[1] == 1:  # one element on one rank of every row: the rows hold equal gradients
        local(model.get_parameter("big.weight").grad).view(-1)[7] = value
    before = {name: local(grad).clone() for name, grad in grads_of(model).items()}
    try:
        hsdp.clip_grad_norm_(model, 0.01, norm_type=order, error_if_nonfinite=True)
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    touched = [
        name
        for name, grad in grads_of(model).items()
        if not torch.allclose(local(grad), before[name], rtol=0, atol=0, equal_nan=True)
    ]
    norm = hsdp.clip_grad_norm_(model, 0.01, norm_type=order)  # as torch: no error, and the norm says it
    return {"error": error, "touched": touched, "norm": norm.item()}


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_error_if_nonfinite_on_every_rank_before_anything_is_touched(
    mesh: tuple[int, int], value: float, order: float
) -> None:
    for result in run_ranks(4, clip_not_finite, mesh, value, order):
        assert f"the norm of order {order} of the gradients is {value}" in result["error"]
        assert result["touched"] == []
        assert str(result["norm"]) == str(value)


def diverge(rank: int, world: int) -> list[str]:
    """A loss that is not finite on one rank of four; then finite gradients again, which are clipped as ever."""
    recipe = Recipe("awkward", FP64)
    model = hsdp.hybrid_shard(build(recipe), mesh=(2, 2), announce=False)
    inputs, targets = batch(recipe, 0, 0, rank, world)
    (loss_of(model(inputs), targets) * (math.nan if rank == 3 else 1.0)).backward()
    with pytest.raises(RuntimeError, match=r"order 2\.0 of the gradients is nan") as error:
        hsdp.clip_grad_norm_(model, 0.01, error_if_nonfinite=True)
    model.zero_grad()
    backward(model, recipe, rank, world)
    norm = hsdp.clip_grad_norm_(model, 0.01, error_if_nonfinite=True)
    again = hsdp.clip_grad_norm_(model, 0.01, error_if_nonfinite=True)
    return [str(error.value), f"{norm.item() > 0.02} {again.item():.4f}"]


def test_a_loss_that_diverges_on_one_rank() -> None:
    results = run_ranks(4, diverge)
    assert all(result == results[0] for result in results)
    assert results[0][1] == "True 0.0100"


# ---- gradients that are no gradients yet -----------------------------------------------------------------------------


def clip_too_early(rank: int, world: int, defer: Any) -> str:
    recipe = Recipe("awkward", FP64)
    model = hsdp.hybrid_shard(build(recipe), mesh=(2, 2), announce=False)
    with hsdp.accumulate(model, defer):
        backward(model, recipe, rank, world)
    before = {name: local(grad).clone() for name, grad in grads_of(model).items()}
    with pytest.raises(ValueError, match="a gradient is not reduced yet") as error:
        hsdp.clip_grad_norm_(model, 0.01)
    assert all(torch.equal(local(grad), before[name]) for name, grad in grads_of(model).items())
    return str(error.value)


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
def test_gradients_not_yet_reduced_are_refused(defer: str) -> None:
    assert len(set(run_ranks(4, clip_too_early, defer))) == 1
