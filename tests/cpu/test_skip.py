"""Units that some ranks of a row skip: an error on every rank, in time, that says who waits for what; no mix-up."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from cases import F64, check, data, grads_of, wrap
from harness import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import hsdp
from hsdp.monitor import LISTEN_S

TIMEOUT_S = 2.0


class Experts(nn.Module):
    """Units of equal sizes; each call says which of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(300, 300)
        self.experts = nn.ModuleList(nn.Linear(300, 300) for _ in range(3))
        self.head = nn.Linear(300, 1)

    def forward(self, x: torch.Tensor, chosen: list[int], encode: bool = True) -> torch.Tensor:
        x = self.encoder(x) if encode else x
        for number in chosen:
            x = x + torch.tanh(self.experts[number](x))
        return self.head(x)


def build() -> Any:
    torch.manual_seed(0)
    return Experts().double()


def skip(rank: int, world: int, mesh: tuple[int, int], how: str, first_step: bool) -> tuple[str, float]:
    model = wrap(build(), world, mesh, units="Linear", timeout_s=TIMEOUT_S)
    x = data(rank, world, 300)
    if not first_step:
        model(x, [0, 1, 2]).mean().backward()
    start = time.monotonic()
    odd = rank == world - 1
    chosen = {"another expert": [0, 1] if odd else [0, 2], "no expert": [] if odd else [1], "encoder": [0],
              "another order": [0, 1, 2] if odd else [2, 1, 0]}[how]  # fmt: skip
    with pytest.raises(RuntimeError) as error:
        model(x, chosen, encode=how != "encoder" or not odd).mean().backward()
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("mesh", "how", "first_step"),
    [
        ((2, 2), "another expert", True),
        ((1, 2), "another expert", False),
        ((2, 2), "no expert", False),
        ((1, 2), "encoder", True),
        ((1, 2), "another order", False),
    ],
)
def test_a_skipped_unit_is_an_error_on_every_rank(mesh: tuple[int, int], how: str, first_step: bool) -> None:
    world = mesh[0] * mesh[1]
    results = run_ranks(world, skip, mesh, how, first_step, grace_s=30)
    unit = {"another order": "experts.2", "another expert": "experts.2", "no expert": "experts.1"}.get(how, how)
    for rank, (text, seconds) in enumerate(results):
        assert seconds < 2 * TIMEOUT_S + LISTEN_S + 3
        assert "did not complete" in text, text
        assert "ranks that wait for something else skipped it" in text, text
        if rank == world - 2:  # the row of the one that skips
            assert text.startswith(f"the gather of unit '{unit}' did not complete"), text
            assert f"rank {world - 1} waits for the" in text, text
        if rank == world - 1:
            assert f"rank {world - 2} waits for the gather of unit '{unit}'" in text, text


def rows_differ(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Rows gather by themselves, so whole rows may run other units; None where nobody did."""
    model = wrap(build(), world, units="Linear")
    for seed in range(2):
        for part in range(4) if world == 1 else [rank]:
            chosen = [0] if part < 2 else [1, 0]
            loss = model(data(part, 4, 300, seed=seed), chosen, encode=part >= 2).pow(2).mean()
            (loss / 4 if world == 1 else loss).backward()
    names = {name for name, param in model.named_parameters() if param.grad is None}
    assert names == {"experts.2.weight", "experts.2.bias"}
    return grads_of(model)


def test_rows_that_run_other_units() -> None:
    check(rows_differ)


# ---- units that all ranks run and only some use ----------------------------------------------------------------------


class Tasks(nn.Module):
    """Every head runs; the output is that of one."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.trunk = nn.Linear(6, 300)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1)) for _ in range(3))

    def run_heads(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return [head(x) for head in self.heads][task]

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return checkpoint(self.run_heads, x, task, use_reentrant=False) if self.recompute else self.run_heads(x, task)


def train_tasks(rank: int, world: int, mesh: tuple[int, int]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(Tasks(recompute=False).double(), world, mesh, units="Linear", timeout_s=TIMEOUT_S)
    for seed in range(2):
        for part in range(4) if world == 1 else [rank]:
            loss = model(data(part, 4, 6, seed=seed), part % 2).pow(2).mean()
            (loss / 4 if world == 1 else loss).backward()
    assert {name for name, param in model.named_parameters() if param.grad is None} == {
        f"heads.2.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")
    }
    return grads_of(model)


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)], ids=["2x2", "1x4", "4x1"])
def test_every_rank_uses_its_own_head(mesh: tuple[int, int]) -> None:
    check(train_tasks, mesh)


def recompute_tasks(rank: int, world: int) -> str:
    model: Any = wrap(Tasks(recompute=True).double(), world, (1, 2), units="Linear", timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError) as error:
        model(data(rank, world, 6), rank).mean().backward()
    return str(error.value)


def test_ranks_that_recompute_at_different_times_are_an_error() -> None:
    for text in run_ranks(2, recompute_tasks, grace_s=30):
        assert "did not complete" in text, text
        assert "waits for the gather of unit 'heads.0.0'" in text or "the gather of unit 'heads.0.0' did" in text, text


# ---- generation ------------------------------------------------------------------------------------------------------


def generate(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Each rank calls the model as often as it likes, with its own choice of units, between two training steps."""
    model = wrap(build(), world, units="Linear", timeout_s=TIMEOUT_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = {}
    for seed in range(2):
        for part in range(4) if world == 1 else [rank]:
            loss = model(data(part, 4, 300, seed=seed), [0, 1]).pow(2).mean()
            (loss / 4 if world == 1 else loss).backward()
        if world == 1:
            with torch.no_grad():
                outputs[f"{seed}"] = torch.stack([call(model, part) for part in range(4)])
        else:
            with hsdp.gathered(model), torch.no_grad():
                assert not any(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
                mine = call(model, rank)
            assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
            parts = [torch.empty_like(mine) for _ in range(4)]
            torch.distributed.all_gather(parts, mine)
            outputs[f"{seed}"] = torch.stack(parts)
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def call(model: Any, part: int) -> torch.Tensor:
    x = torch.full((1, 300), 0.1, dtype=F64)
    for number in range(part):
        x = x + model(x, [number % 3])
    return x.mean()


def test_generation_of_different_lengths() -> None:
    check(generate)
