"""Cases: functions `(rank, world, ...) -> {name: tensor}` that run in one plain process on all the data and on the
ranks of a mesh on their parts of it. `check` compares what comes out; the rest is what cases are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import run_ranks
from models import TOLERANCE, Recipe, assert_close, batch, full, loss_of
from torch import nn
from torch.distributed.tensor import DTensor

import hsdp

F64 = torch.float64
ATOL = TOLERANCE[F64]
RECIPE = Recipe(dtype=F64, steps=3)
Case = Callable[..., dict[str, torch.Tensor]]


class Encoder(nn.Module):
    """Its entry points are not called forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 301)
        self.outer = nn.Linear(301, 6)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def check(case: Case, *args: Any, world: int = 4, atol: float = ATOL) -> None:
    """Every rank of `world` must return what the plain process returns."""
    want = run_ranks(1, case, *args, init_group=False)[0]
    assert want
    for got in run_ranks(world, case, *args):
        assert_close(got, want, atol, "value")


def wrap(model: nn.Module, world: int, mesh: tuple[int, int] = (2, 2), **options: Any) -> Any:
    """The model itself in the plain process."""
    return model if world == 1 else hsdp.hybrid_shard(model, mesh=mesh, announce=False, **options)


def data(rank: int, world: int, *shape: int, seed: int = 0, rows: int = 8) -> torch.Tensor:
    """This rank's part of `rows` random rows of `shape`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=generator, dtype=F64).chunk(world)[rank]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients; what has none is not in it."""
    return {f"grad {name}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(param) for name, param in model.named_parameters()}


def step(model: nn.Module, rank: int, world: int, micro: int = 0) -> None:
    """Forward and backward of a language model on one microbatch."""
    inputs, targets = batch(RECIPE, 0, micro, rank, world)
    loss_of(model(inputs), targets).backward()


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in model.parameters())


def gather(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """The tensors of all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(world)]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return parts
