"""Double backward: gradient penalties through a sharded model are those of the plain one; what cannot be is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from cases import F64, check, data, gather, grads_of, is_sharded, params_of, wrap
from harness import run_ranks
from torch import nn

import hsdp


def critic() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(30, 301), nn.Tanh(), nn.Linear(301, 30), nn.Softplus()) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 30), nn.Sequential(*blocks), nn.Linear(30, 1)).double()


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """How far the norm of the gradient of the output is from 1, for every row (arXiv:1704.00028)."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).pow(2).mean()


def train(rank: int, world: int, order: str, mesh: tuple[int, int], reshard: bool | None) -> dict[str, torch.Tensor]:
    model: Any = wrap(critic(), world, mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        real, fake = data(rank, world, 6, seed=seed), data(rank, world, 6, seed=100 + seed)
        if order == "alone":
            penalty(model, real).backward()
        elif order == "in the middle":
            loss = model(real).mean()
            loss = loss + 10 * penalty(model, (real + fake) / 2)
            (loss - model(fake).mean()).backward()
        elif order == "apart":  # another backward between the two of the penalty
            gp = penalty(model, real)
            model(fake).mean().backward()
            gp.backward()
        elif order == "evaluated between":
            gp = penalty(model, real)
            with torch.no_grad():
                model(fake)
            gp.backward()
        optimizer.step()
        if seed < 2:
            optimizer.zero_grad()
    with torch.no_grad():
        model(data(0, 1, 6))
    assert world == 1 or is_sharded(model), "gathered for a graph that is of no use any more"
    return params_of(model) | grads_of(model)


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("order", ["alone", "in the middle", "apart", "evaluated between"])
def test_gradient_penalty(order: str, reshard: bool | None) -> None:
    check(train, order, (2, 2), reshard)


@pytest.mark.parametrize("mesh", [(1, 4), (4, 1)], ids=["1x4", "4x1"])
def test_gradient_penalty_on_other_meshes(mesh: tuple[int, int]) -> None:
    check(train, "in the middle", mesh, None)


def hessian_vector(rank: int, world: int) -> dict[str, torch.Tensor]:
    """A second derivative with respect to the inputs, which no parameter takes part in as a leaf."""
    model: Any = wrap(critic(), world)
    x = data(rank, world, 6).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.pow(2).sum(), x)
    assert all(param.grad is None for param in model.parameters())
    return {"second": second if world == 1 else torch.cat(gather(second, world))}


def test_second_derivatives_of_inputs() -> None:
    check(hessian_vector)


def refused(rank: int, world: int) -> None:
    model: Any = hsdp.hybrid_shard(critic(), mesh=(2, 2), announce=False)
    x = data(rank, world, 6)
    assert x.dtype is F64
    with pytest.raises(RuntimeError, match=r"backward\(create_graph=True\), which sharding would cut from its graph"):
        model(x).mean().backward(create_graph=True)
    model.reset_iter_state()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(x).mean(), list(model.parameters()), create_graph=True)
    model.reset_iter_state()
    model(x).mean().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_gradients_of_parameters_with_a_graph_are_refused_at_once() -> None:
    run_ranks(4, refused)


def cleared_by_the_model(rank: int, world: int, made: str) -> dict[str, torch.Tensor]:
    """What the model calls its parameters is what the optimizer has, also while the graph of a graph is alive."""
    model: Any = wrap(critic(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = [id(param) for param in model.parameters()]
    found = {}
    for seed in range(3):
        gp = penalty(model, data(rank, world, 6, seed=seed))
        if made == "before backward":
            assert [id(param) for param in model.parameters()] == ids
            model.zero_grad()
        gp.backward()
        assert [id(param) for param in model.parameters()] == ids
        with torch.no_grad():
            model(data(rank, world, 6))
        assert [id(param) for param in model.parameters()] == ids
        with hsdp.gathered(model) if world > 1 else contextlib.nullcontext():
            assert world == 1 or not is_sharded(model)
        assert [id(param) for param in model.parameters()] == ids
        found.update({f"{seed} {name}": grad for name, grad in grads_of(model).items()})
        optimizer.step()
        if made == "after":
            model.zero_grad()
    return found | params_of(model)


@pytest.mark.parametrize("made", ["before backward", "after"])
def test_parameters_are_the_sharded_ones_between_steps(made: str) -> None:
    check(cleared_by_the_model, made)


class Energy(nn.Module):
    """Takes a gradient with respect to its input in the middle of its forward, as models of forces do."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.create_graph = create_graph
        self.up, self.down, self.out = nn.Linear(6, 301), nn.Linear(301, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        energy = self.down(torch.tanh(self.up(x * self.scale))).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.create_graph)
        return self.out((force + self.down(self.up(x))) * self.scale)


def train_energy(rank: int, world: int, create_graph: bool, units: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = wrap(Energy(create_graph).double(), world, units=units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        model.zero_grad()
        model(data(rank, world, 6, seed=seed)).pow(2).mean().backward()
        optimizer.step()
    return params_of(model) | grads_of(model)


@pytest.mark.parametrize("units", [nn.Linear, Energy], ids=["units", "root only"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_inside_a_forward(create_graph: bool, units: Any) -> None:
    check(train_energy, create_graph, units)
