"""Ranks that are threads of one process, over torch's in-process group: a backend that has only grouped collectives.

gloo goes through `DirectRow`; this is the way every other backend goes, `GroupedRow`: no messages between two ranks,
one order of calls, gradients reduced a unit at a time and padded where the last ranks have fewer rows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import TOLERANCE, Recipe, Trained, assert_close, assert_same_training, brief, build, full, reference, train
from torch import Tensor, nn

import hsdp
from hsdp.collectives import DirectRow, GroupedRow

FP64 = torch.float64
MESHES = [(1, 2), (2, 2), (2, 1), (1, 3)]
_building = threading.Lock()  # torch's random numbers are one stream for all threads


def run_threads(rank: int, world: int, threads: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(rank, threads, *args)` in threads of this process, each a rank of torch's "threaded" backend.

    It changes torch.distributed as a whole, so the process is one of the harness's, without a group of its own.
    """
    from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

    results: dict[int, Any] = {}

    def rank_main(_: Any) -> None:
        rank = dist.get_rank()
        results[rank] = fn(rank, threads, *args)

    spawn_threads_and_init_comms(rank_main, world_size=threads)(None)
    return [results[rank] for rank in range(threads)]


def in_threads(threads: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    return run_ranks(1, run_threads, threads, fn, *args, init_group=False)[0]


def build_sharded(recipe: Recipe, mesh: tuple[int, int], **options: Any) -> nn.Module:
    with _building:
        model = build(recipe)
    hsdp.hybrid_shard(model, mesh=mesh, announce=False, **options)
    rows = {type(segment.row) for unit in model._hsdp_state.schedule.units for segment in unit.segments}
    assert rows == {GroupedRow if mesh[1] > 1 else DirectRow}, "this is to test the way of other backends"
    return model


def ungroup() -> None:
    """Let the threaded group refuse several tensors at once, with the words of a backend that lacks the operation."""
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

    def single_only(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, outputs: list[Tensor], *args: Any) -> Any:
            if len(outputs) > 1:
                raise RuntimeError("No backend type associated with device type cpu")
            return method(self, outputs, *args)

        return call

    grouped = [
        name for name in vars(ProcessLocalGroup) if name.endswith("_coalesced") and name != "allreduce_coalesced"
    ]
    assert len(grouped) == 2, grouped
    for name in grouped:
        setattr(ProcessLocalGroup, name, single_only(getattr(ProcessLocalGroup, name)))


def train_all(rank: int, world: int, mesh: tuple[int, int], recipes: list[Recipe], accumulate: Any) -> list[Trained]:
    results = []
    for recipe in recipes:
        model = build_sharded(recipe, mesh, units="Linear" if recipe.model == "awkward" else None)

        def micro_context(last: bool, model: nn.Module = model) -> contextlib.AbstractContextManager[Any]:
            return hsdp.accumulate(model, accumulate) if accumulate and not last else contextlib.nullcontext()

        clip = hsdp.clip_grad_norm_
        result = train(model, recipe, part=rank, parts=world, clip=clip, micro_context=micro_context)
        hsdp.check_replicas(model)
        results.append(brief(result, rank))
    return results


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_training_equals_one_process(mesh: tuple[int, int]) -> None:
    recipes = [Recipe("awkward", FP64, steps=4), Recipe("tied", FP64, steps=4)]
    results = in_threads(mesh[0] * mesh[1], train_all, mesh, recipes, None)
    for recipe, of_ranks in zip(recipes, zip(*results, strict=True), strict=True):
        assert_same_training(list(of_ranks), reference(recipe), TOLERANCE[FP64])


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
def test_microbatches(defer: str) -> None:
    recipe = Recipe("awkward", FP64, steps=3, micro=3)
    results = in_threads(4, train_all, (2, 2), [recipe], defer)
    assert_same_training([result[0] for result in results], reference(recipe), TOLERANCE[FP64])


# ---- a backend that has not even those -------------------------------------------------------------------------------


def train_ungrouped(rank: int, world: int, recipe: Recipe) -> tuple[Trained, set[bool]]:
    model = build_sharded(recipe, (1, 3), units="Linear")
    result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_)
    return brief(result, rank), {
        segment.row._grouped for unit in model._hsdp_state.schedule.units for segment in unit.segments
    }


def run_ungrouped(rank: int, world: int, recipe: Recipe) -> list[Any]:
    ungroup()
    return run_threads(0, 1, 3, train_ungrouped, recipe)


def test_a_backend_without_grouped_collectives() -> None:
    recipe = Recipe("awkward", FP64, steps=3)
    results = run_ranks(1, run_ungrouped, recipe, init_group=False)[0]
    assert all(grouped == {False} for _, grouped in results)
    assert_same_training([result for result, _ in results], reference(recipe), TOLERANCE[FP64])


# ---- parameters that some ranks use ----------------------------------------------------------------------------------


class Picky(nn.Module):
    """Uses one of its linears; the matrices travel alone, the biases packed."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(nn.Linear(301, 301) for _ in range(4))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.choices[choice](x)


def use_some(rank: int, world: int) -> dict[str, Tensor]:
    """Ranks 0 and 1 use choice 0, rank 2 choice 1, rank 3 choice 2; nobody uses choice 3."""
    with _building:
        torch.manual_seed(0)
        model = Picky().double()
    data = torch.randn(4, 5, 301, generator=torch.Generator().manual_seed(1), dtype=FP64)
    losses = [lambda r=r: model(data[r], max(r - 1, 0)).pow(2).mean() for r in range(4)]
    if world == 1:
        (sum(loss() for loss in losses) / 4).backward()  # type: ignore[no-untyped-call]
    else:
        hsdp.hybrid_shard(model, mesh=(2, 2), units=Picky, announce=False)
        losses[rank]().backward()  # type: ignore[no-untyped-call]
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def test_parameters_that_some_ranks_use() -> None:
    want = use_some(0, 1)
    assert sorted(want) == [f"choices.{i}.{kind}" for i in range(3) for kind in ("bias", "weight")]
    for got in in_threads(4, use_some):
        assert_close(got, want, TOLERANCE[FP64], "gradient")


class Stage(nn.Module):
    """A unit with a weight that every rank uses and one of the same size that some do."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(301, 301), nn.Linear(301, 301)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = x + self.always(x).tanh() / 4
        return x + self.sometimes(x).tanh() / 4 if use else x


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(4))

    def forward(self, x: Tensor, part: int, parts: int, number: int) -> Tensor:
        for place, stage in enumerate(self.stages):
            x = stage(x, use=(place + part + number) % parts == 0)
        return x


def train_stages(rank: int, world: int, mesh: tuple[int, int] | None, parts: int, steps: int = 3) -> list[Any]:
    """Gradients of every step; one plain process goes through all `parts` of the batch."""
    with _building:
        torch.manual_seed(0)
        model = Stages().double()
    if mesh is not None:
        hsdp.hybrid_shard(model, mesh=mesh, units=Stage, announce=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(steps, parts, 3, 301, generator=torch.Generator().manual_seed(1), dtype=FP64)
    grads = []
    for number in range(steps):
        mine = range(parts) if mesh is None else [rank]
        loss = sum(model(data[number, part], part, parts, number).pow(2).mean() for part in mine)
        (loss / len(mine)).backward()  # type: ignore[union-attr, operator]
        grads.append({name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return grads


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (1, 4)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_units_with_parameters_that_some_ranks_use(mesh: tuple[int, int]) -> None:
    """Their last gradients appear in another order on every rank; calls must not."""
    parts = mesh[0] * mesh[1]
    want = train_stages(0, 1, None, parts)
    for got in in_threads(parts, train_stages, mesh, parts):
        for step, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_close(one, other, TOLERANCE[FP64], f"gradient of step {step}")


# ---- ranks that call different things --------------------------------------------------------------------------------


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(301, 301) for _ in range(2))

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.ways[way](x)


def take_different_ways(rank: int, world: int, where: str) -> str:
    """Rank 1 enters another unit of equal size than rank 0; nothing but their names tells them apart."""
    with _building:
        model = Either()
    hsdp.hybrid_shard(model, mesh=(1, 2), units="Linear", announce=False)
    x = torch.randn(3, 301, requires_grad=True)
    with hsdp.gathered(model) if where == "reduce" else contextlib.nullcontext():
        try:
            model(x, rank).sum().backward()
        except RuntimeError as error:
            return str(error)
    return "none"


@pytest.mark.parametrize("where", ["gather", "reduce"])
def test_units_of_equal_size_are_never_mixed_up(where: str) -> None:
    for text in in_threads(2, take_different_ways, where):
        assert f"shard rank 0: {where} of unit 'ways.0'" in text, text
        assert f"shard rank 1: {where} of unit 'ways.1'" in text, text
