"""One parameter in several places, one module in several units, children that are called by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import check, data, grads_of, is_sharded, params_of, wrap
from torch import nn

import hsdp

MESHES = [(2, 2), (4, 1), (1, 4)]


class Part(nn.Module):
    """A linear layer and one that others may have as well."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(6, 6), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared(torch.tanh(self.own(x)))


class Words(nn.Module):
    """Seven words, so that every mesh cuts the tied weight unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 301)
        self.body = nn.Linear(301, 301)
        self.head = nn.Linear(301, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


WRAPPINGS = {"root": Words, "both": [nn.Embedding, nn.Linear], "the first": nn.Embedding, "the second": nn.Linear}


def words(world: int, mesh: tuple[int, int], how: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = Words().double()
    if how != "bottom-up":
        return wrap(model, world, mesh, units=WRAPPINGS[how])
    if world > 1:
        device_mesh = hsdp.init_mesh(replicate=mesh[0], shard=mesh[1])
        for module in (model.head, model.embed, model):
            hsdp.fully_shard(module, mesh=device_mesh)
    return model


def train_words(model: Any, optimizer: torch.optim.Optimizer, rank: int, world: int, steps: range) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(7, (8, 5), generator=generator).chunk(world)[rank]
    for _ in steps:
        optimizer.zero_grad()
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()


def save_ties_and_load(rank: int, world: int, mesh: tuple[int, int], how: str, folder: str) -> dict[str, torch.Tensor]:
    """Train two steps, save, load into another model, train on with that one."""
    model = words(world, mesh, how, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_words(model, optimizer, rank, world, range(2))
    other = model
    if world > 1:
        other = words(world, mesh, how, seed=1)
        assert sorted(model.state_dict()) == ["body.bias", "body.weight", "embed.weight", "head.weight"]
        if folder:
            dcp.save(model.state_dict(), checkpoint_id=folder)
            state = other.state_dict()
            dcp.load(state, checkpoint_id=folder)
            other.load_state_dict(state)
        else:
            other.load_state_dict(model.state_dict(), assign=True)
        assert other.embed.weight is other.head.weight
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    train_words(other, optimizer, rank, world, range(2))
    assert other.embed.weight is other.head.weight
    assert world == 1 or is_sharded(other)
    return params_of(other) | grads_of(other)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", [*WRAPPINGS, "bottom-up"])
def test_ties_survive_save_and_load(mesh: tuple[int, int], how: str, tmp_path: Path) -> None:
    check(save_ties_and_load, mesh, how, "" if how in ("both", "root") else str(tmp_path))


class Towers(nn.Module):
    """Units that share a module, which is a unit itself or not."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.parts = nn.ModuleList([Part(shared), Part(nn.Linear(6, 6)), Part(shared)])
        self.named = nn.ModuleDict({"left": nn.Linear(6, 6), "right": nn.Linear(6, 6)})

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        left = self.named["left"](x)
        return left if skip else left * self.parts[0](self.named["right"](x))


def share(rank: int, world: int, mesh: tuple[int, int], units: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = wrap(Towers().double(), world, mesh, units=units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        optimizer.zero_grad()
        model(data(rank, world, 6, seed=number), skip=number == 1).pow(2).mean().backward()
        optimizer.step()
        assert world == 1 or is_sharded(model)
    return params_of(model) | grads_of(model)


@pytest.mark.parametrize(
    ("mesh", "units"),
    [
        *(((2, 2), units) for units in (None, Part, [Part, nn.Linear], Towers)),
        *((mesh, [Part, nn.Linear]) for mesh in MESHES[1:]),
    ],
    ids=["auto", "parts", "all", "root", "all, 4x1", "all, 1x4"],
)
def test_a_module_in_two_units(mesh: tuple[int, int], units: Any) -> None:
    check(share, mesh, units)


def call_by_hand(rank: int, world: int, mesh: tuple[int, int], units: Any) -> dict[str, torch.Tensor]:
    """The children of a wrapped model, without its forward; between two forwards of the whole."""
    torch.manual_seed(0)
    model: Any = wrap(Towers().double(), world, mesh, units=units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        x = data(rank, world, 6, seed=number)
        if number == 1:
            model(x).pow(2).mean().backward()
        else:
            for part in reversed(model.parts):
                x = part(x)
            for name in ("right", "left"):
                x = model.named[name](x)
            x.pow(2).mean().backward()
        optimizer.step()
    return params_of(model) | grads_of(model)


@pytest.mark.parametrize("mesh", MESHES)
def test_children_called_by_hand(mesh: tuple[int, int]) -> None:
    check(call_by_hand, mesh, [Part, nn.Linear])


class Inner(nn.Module):
    """A unit whose parameter belongs to the module around it as well."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table, self.own = table, nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x @ self.table))


class Outer(nn.Module):
    """Uses a tied parameter before and after the unit that has it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 5))
        self.inner = Inner(self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.table.sum(1)) @ self.table.tanh()


def use_around_the_unit(rank: int, world: int, mesh: tuple[int, int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = wrap(Outer().double(), world, mesh, units=Inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for number in range(3):
        x = data(rank, world, 7, seed=number).requires_grad_(number == 2)
        with torch.no_grad():
            found[f"output {number}"] = model(data(0, 1, 7, seed=number))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        assert world == 1 or is_sharded(model)
    return found | params_of(model) | grads_of(model)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_tied_parameter_used_around_its_unit(mesh: tuple[int, int]) -> None:
    check(use_around_the_unit, mesh)
