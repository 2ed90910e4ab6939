"""Fine-tuning: adapters beside a frozen base, weights in integers and 8-bit floats, optimizers that look at sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from cases import check, data, grads_of, is_sharded, params_of, wrap
from models import full
from torch import nn
from torch.nn import functional as F

import hsdp

MESHES = [(2, 2), (4, 1), (1, 4)]


class Adapted(nn.Module):
    """A frozen linear layer in a storage dtype of its own, and a trained low-rank one beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(70, 70) / 8
        stored = (weight * 64 + 128).round().to(dtype) if dtype == torch.uint8 else weight.to(dtype)
        self.base = nn.Parameter(stored, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1 / 64 if dtype == torch.uint8 else 1.0), requires_grad=False)
        self.down, self.up = nn.Linear(70, 3, bias=False), nn.Linear(3, 70, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)
        self.shift = 128 if dtype == torch.uint8 else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.base.to(x.dtype) - self.shift) * self.scale
        return x + torch.tanh(F.linear(x, weight) + self.up(self.down(x)))


def adapted(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted(dtype) for _ in range(3)])


def adapt(rank: int, world: int, mesh: tuple[int, int], dtype: torch.dtype, defer: Any) -> dict[str, torch.Tensor]:
    model: Any = wrap(adapted(dtype), world, mesh)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(trained) == 6
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found = {}
    for number in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            x = data(rank, world, 70, seed=2 * number + micro).float()
            loss = model(x).pow(2).mean()
            if world > 1 and defer and micro == 0:
                with hsdp.accumulate(model, defer):
                    loss.backward()
            else:
                loss.backward()
        clip = hsdp.clip_grad_norm_ if world > 1 else nn.utils.clip_grad_norm_
        found[f"norm {number}"] = clip(model.parameters(), 0.5)
        optimizer.step()
        if number == 1:  # one adapter stops, another one starts again at the next step
            model[0].up.weight.requires_grad_(False)
            model[0].up.weight.grad = None
        if number == 2:
            model[0].up.weight.requires_grad_(True)
        assert all(param.grad is None for param in model.parameters() if not param.requires_grad)
        assert world == 1 or is_sharded(model)
    assert model[0].base.dtype == dtype
    return found | grads_of(model) | {f"trained {number}": full(param) for number, param in enumerate(trained)}


@pytest.mark.parametrize(
    ("dtype", "mesh", "defer"),
    [
        *((torch.float32, mesh, None) for mesh in MESHES),
        *((torch.uint8, mesh, "cross-reduce") for mesh in MESHES),
        (torch.bfloat16, (1, 4), "reduce"),
        (torch.float8_e4m3fn, (2, 2), None),
    ],
    ids=str,
)
def test_adapters_beside_a_frozen_base(dtype: torch.dtype, mesh: tuple[int, int], defer: Any) -> None:
    check(adapt, mesh, dtype, defer, atol=1e-6)


class Coarse(torch.optim.Optimizer):
    """Keeps momentum in bf16 for large parameters only, as 8-bit optimizers do (torchao#4912)."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            dtype = torch.bfloat16 if param.numel() >= 4096 else param.dtype
            state = self.state[param]
            if not state:
                state["momentum"] = torch.zeros_like(param, dtype=dtype)
            state["momentum"].mul_(0.5).add_(param.grad.to(dtype))
            param.add_(state["momentum"].to(param.dtype), alpha=-self.param_groups[0]["lr"])


def coarse(rank: int, world: int, mesh: tuple[int, int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 3)).double(), world, mesh)
    optimizer = Coarse(model.parameters())
    for number in range(3):
        optimizer.zero_grad()
        model(data(rank, world, 70, seed=number)).pow(2).mean().backward()
        optimizer.step()
    dtypes = [state["momentum"].dtype for state in optimizer.state.values()]
    assert dtypes == [torch.bfloat16, torch.float64, torch.float64, torch.float64]
    return params_of(model)


@pytest.mark.parametrize("mesh", MESHES)
def test_an_optimizer_sees_the_size_of_the_whole_parameter(mesh: tuple[int, int]) -> None:
    check(coarse, mesh, atol=1e-10)
