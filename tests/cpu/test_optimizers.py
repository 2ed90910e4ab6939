"""torch's optimizers update sharded parameters as they update plain ones; what torch refuses on DTensors is refused."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import TOLERANCE, assert_close, digest, full, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hsdp

FP64 = torch.float64
STEPS, BATCH = 3, 12
MESHES = [(2, 2), (1, 3)]


class Net(nn.Module):
    """Rows that divide by neither 2 nor 3, one of them alone, and one matrix large enough to be gathered in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 131)
        self.big = nn.Linear(131, 1031)
        self.last = nn.Linear(1031, 4, bias=False)
        self.cube = nn.Parameter(torch.randn(5, 3, 2) / 4)
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.big(torch.tanh(self.first(x))))
        return self.last(x) * self.scale + torch.tanh(self.cube).sum((0, 2)).sum()


@dataclass(frozen=True, eq=False)
class Case:
    """One optimizer and its options. `matrices`: it takes 2-D parameters only, AdamW takes the others."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    matrices: bool = False

    def __str__(self) -> str:
        chosen = [f"{key}={value}" for key, value in self.options.items() if key in ("foreach", "fused", "amsgrad")]
        return "-".join([self.name, *chosen])

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        params = list(model.parameters())
        make = getattr(torch.optim, self.name)
        if not self.matrices:
            return [make(params, **self.options)]
        others = [param for param in params if param.ndim != 2]
        return [
            make([param for param in params if param.ndim == 2], **self.options),
            torch.optim.AdamW(others, eps=1e-3),
        ]


# A large eps, see [Note: Adam and rounding] in models.py.
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
SGD = {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
ADAGRAD = {"lr": 1e-2, "eps": 1e-3}
FOREACH = [{"foreach": False}, {"foreach": True}]
FUSED = {"fused": True}

ALLOWED = [
    *(Case("AdamW", {**ADAMW, **how}) for how in ({}, *FOREACH, FUSED)),
    Case("AdamW", {**ADAMW, "amsgrad": True}),
    *(Case("SGD", {**SGD, **how}) for how in ({}, *FOREACH)),
    *(Case("Adagrad", {**ADAGRAD, **how}) for how in ({}, *FOREACH)),
]
MUON = Case("Muon", {"lr": 1e-2}, matrices=True)
REFUSED = {
    Case("SGD", {**SGD, **FUSED}): "_fused_sgd_.default does not have a sharding strategy",
    Case("Adagrad", {**ADAGRAD, **FUSED}): "_fused_adagrad_.default does not have a sharding strategy",
    **{Case("Adafactor", {"lr": 1e-2, **how}): "in-place operations that require placement changes" for how in FOREACH},
}
CASES = [*ALLOWED, MUON, *REFUSED]


def shard(model: nn.Module, mesh: tuple[int, int] | None, engine: str) -> None:
    if engine == "hsdp":
        hsdp.hybrid_shard(model, mesh=mesh, units="Linear", announce=False)
    elif engine == "torch":
        assert mesh is not None
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
        for module in (*(child for child in model.children() if isinstance(child, nn.Linear)), model):
            fully_shard(module, mesh=device_mesh)


def train(rank: int, world: int, mesh: tuple[int, int] | None, engine: str, case: Case) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net().to(FP64)
    shard(model, mesh, engine)
    optimizers = case.build(model)
    data = torch.randn(STEPS, BATCH, 6, generator=torch.Generator().manual_seed(1), dtype=FP64)
    for step in range(STEPS):
        part = data[step, rank * BATCH // world : (rank + 1) * BATCH // world]
        loss_of(model(part), part[:, :4] * part[:, 1:5]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if engine == "hsdp":
        hsdp.check_replicas(model)
        for param, state in (item for optimizer in optimizers for item in optimizer.state.items()):
            assert state
            for name, value in state.items():
                if name != "step":
                    assert isinstance(value, DTensor), name
                    assert value.placements == param.placements, name
    return {name: full(param) for name, param in model.named_parameters()}


def train_all(rank: int, world: int, mesh: tuple[int, int] | None, engine: str, cases: list[int]) -> list[Any]:
    """For every case a digest of the trained parameters and, on rank 0, them; or the error as (type name, message)."""
    results: list[Any] = []
    for number in cases:
        try:
            params = train(rank, world, mesh, engine, CASES[number])
            results.append((digest(params), params if rank == 0 else None))
        except (RuntimeError, NotImplementedError) as error:
            results.append((type(error).__name__, str(error)))
    return results


@functools.cache
def trained(mesh: tuple[int, int] | None, engine: str) -> list[list[Any]]:
    """Results of every rank for every case; torch's engine runs only what is compared with it."""
    cases = [i for i, case in enumerate(CASES) if engine != "torch" or case not in ALLOWED]
    world = 1 if mesh is None else mesh[0] * mesh[1]
    results = run_ranks(world, train_all, mesh, engine, cases, init_group=mesh is not None)
    return [[dict(zip(cases, result, strict=True)).get(i) for i in range(len(CASES))] for result in results]


def result_of(case: Case, mesh: tuple[int, int] | None, engine: str) -> Any:
    """The trained parameters of `case`, or the error as (type name, message); the same on every rank."""
    results = [result[CASES.index(case)] for result in trained(mesh, engine)]
    assert {result[0] for result in results} == {results[0][0]}, "ranks differ"
    params_or_message = results[0][1]
    return params_or_message if isinstance(params_or_message, dict) else results[0]


on_meshes = pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")


@on_meshes
@pytest.mark.parametrize("case", ALLOWED, ids=str)
def test_equals_one_process(case: Case, mesh: tuple[int, int]) -> None:
    want = result_of(case, None, "plain")
    assert_close(result_of(case, mesh, "hsdp"), want, TOLERANCE[FP64])
    start = dict(Net().named_parameters())
    assert all((tensor - start[name]).abs().max() > 1e-4 for name, tensor in want.items()), "it trains nothing"


@on_meshes
def test_muon(mesh: tuple[int, int]) -> None:
    """Near to one process, nearer to torch's own sharding.

    Muon orthogonalises in bf16, where a sum in another order is another rounding, and amplifies that in the directions
    that have hardly any gradient.
    """
    torch.manual_seed(0)
    start = dict(Net().to(FP64).named_parameters())
    want, got, torchs = result_of(MUON, None, "plain"), result_of(MUON, mesh, "hsdp"), result_of(MUON, mesh, "torch")
    for name, before in start.items():
        moved = (want[name] - before).norm()
        assert moved > 1e-3, name
        assert (got[name] - want[name]).norm() <= (0.2 if before.ndim == 2 else 2e-3) * moved, name
        assert (got[name] - torchs[name]).norm() <= (0.02 if before.ndim == 2 else 2e-4) * moved, name


@on_meshes
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_torch_refuses_on_dtensors(case: Case, mesh: tuple[int, int]) -> None:
    """These run in one process; with sharded parameters torch raises, with its own `fully_shard` as with ours."""
    assert isinstance(result_of(case, None, "plain"), dict)
    kind, message = result_of(case, mesh, "hsdp")
    assert REFUSED[case] in message
    assert result_of(case, mesh, "torch") == (kind, message)
