"""Mistakes: a ValueError with the same text on every rank, at once. Models that differ in values only: made equal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import RankError, run_ranks
from models import Awkward, Block, Recipe, Transformer, build, digest, full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hsdp
from hsdp import Precision
from hsdp.monitor import LISTEN_S

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (1, 3), (3, 1)]

# ---- values that differ between ranks become rank 0's ----------------------------------------------------------------


class Buffered(Awkward):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(7, 3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.register_buffer("count", torch.randint(1000, (1,)))
        self.register_buffer("zero_dim", torch.randn(()))
        self.register_buffer("strided", torch.randn(3, 5).t())


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def seed_by_rank(rank: int, world: int, mesh: tuple[int, int], units: Any) -> tuple[str, str]:
    torch.manual_seed(100 + rank)
    model = Buffered()
    before = digest(values_of(model))
    hsdp.hybrid_shard(model, mesh=mesh, units=units, announce=False)
    hsdp.check_replicas(model)
    return before, digest(values_of(model))


@pytest.mark.parametrize("units", [None, nn.Linear], ids=["one-unit", "units"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_models_seeded_by_rank_become_rank_0s(mesh: tuple[int, int], units: Any) -> None:
    results = run_ranks(mesh[0] * mesh[1], seed_by_rank, mesh, units)
    assert len({before for before, _ in results}) == len(results)
    assert {after for _, after in results} == {results[0][0]}


def seed_by_rank_unsynced(rank: int, world: int) -> Any:
    torch.manual_seed(100 + rank)
    model = Buffered()
    mine = {name: tensor.clone() for name, tensor in values_of(model).items()}
    hsdp.hybrid_shard(model, mesh=(2, 2), sync_replicas=False, announce=False)
    rows = [model.big.weight.to_local(), mine["big.weight"].chunk(2)[rank % 2]]
    with pytest.raises(RuntimeError, match="copies differ in 'few', shard 0: rank 2 unlike rank 0"):
        hsdp.check_replicas(model)
    return torch.equal(*rows), torch.equal(model.table, mine["table"])


def test_without_sync_replicas_every_rank_keeps_its_rows() -> None:
    assert run_ranks(4, seed_by_rank_unsynced) == [(True, True)] * 4


# ---- models and options that differ between ranks --------------------------------------------------------------------


def renamed() -> nn.Module:
    model = Transformer()
    model.rest = model.norm
    del model.norm
    return model


def reshaped() -> nn.Module:
    model = Transformer()
    model.blocks[1].up = nn.Linear(64, 1000)
    return model


def another_dtype() -> nn.Module:
    model = Transformer()
    model.blocks[2].norm2.double()
    return model


def frozen() -> nn.Module:
    model = Transformer()
    model.head.weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = Transformer()
    model.head.weight = model.embed.weight
    return model


def as_is() -> nn.Module:
    return Transformer()


# How rank 1 differs, and what the text must name.
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "names": (renamed, {}, ".weight'"),
    "shapes": (reshaped, {}, "blocks.1.up.weight"),
    "dtypes": (another_dtype, {}, "blocks.2.norm2.weight"),
    "requires_grad": (frozen, {}, "head.weight"),
    "ties": (tied, {}, "head.weight"),
    "layers": (lambda: Transformer(layers=2), {}, "blocks.2"),
    "units": (as_is, {"units": [Block, "Linear"]}, "units"),
    "precision": (as_is, {"precision": Precision(param=torch.bfloat16)}, "precision"),
    "cast_inputs": (as_is, {"precision": Precision(cast_inputs=False)}, "cast_inputs=False"),
    "reshard_after_forward": (as_is, {"reshard_after_forward": False}, "reshard_after_forward"),
    "sync_replicas": (as_is, {"sync_replicas": False}, "sync_replicas"),
}


def differ(rank: int, world: int, odd: int) -> dict[str, tuple[str, float]]:
    """{case: (text, seconds)}; all cases in one run: after an error the ranks must still be together."""
    mesh = hsdp.init_mesh(replicate=2, shard=2)
    results = {}
    for name, (make, options, _) in DIFFERENT.items():
        model, start = (make() if rank == odd else as_is()), time.monotonic()
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the texts are compared in the parent
            hsdp.hybrid_shard(model, mesh=mesh, announce=False, **(options if rank == odd else {}))
        results[name] = (str(error.value), time.monotonic() - start)
        assert not any(isinstance(param, DTensor) for param in model.parameters()), f"{name}: half wrapped"
    hsdp.hybrid_shard(as_is(), mesh=mesh, announce=False)
    return results


@pytest.mark.parametrize("odd", [1, 2, 0], ids=["other-column", "other-row", "first"])
def test_a_difference_is_named_on_every_rank(odd: int) -> None:
    results = run_ranks(4, differ, odd)
    for name, (_, _, wanted) in DIFFERENT.items():
        texts = {result[name][0] for result in results}
        assert len(texts) == 1, f"{name}: ranks disagree: {texts}"
        (text,) = texts
        assert text.startswith("the model or its options differ between ranks: "), text
        assert wanted in text, f"{name}: {text}"
        assert f"rank {odd}" in text or (odd == 0 and "rank" in text), f"{name}: {text}"
        assert max(result[name][1] for result in results) < 10


# ---- a mistake on one rank only --------------------------------------------------------------------------------------


def one_is_wrong(rank: int, world: int) -> list[str]:
    mesh = hsdp.init_mesh(replicate=1, shard=2)
    texts = []
    mistakes: list[Callable[[], Any]] = [
        lambda: hsdp.hybrid_shard(nn.ReLU(), mesh=mesh, announce=False),
        lambda: hsdp.hybrid_shard(nn.Linear(2, 2), mesh=mesh, units="Block", announce=False),
        lambda: hsdp.hybrid_shard(wrapped, mesh=mesh, announce=False),
    ]
    wrapped = hsdp.hybrid_shard(nn.Linear(2, 2), mesh=mesh, announce=False)
    for wrong in mistakes:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the texts are compared in the parent
            wrong() if rank == 1 else hsdp.hybrid_shard(nn.Linear(2, 2), mesh=mesh, announce=False)
        texts.append(str(error.value))
    return texts


def test_a_mistake_on_one_rank_is_an_error_on_all() -> None:
    results = run_ranks(2, one_is_wrong)
    assert results[0] == results[1]
    for text, wanted in zip(
        results[0], ["no parameters to shard", "matches no module", "sharded already"], strict=True
    ):
        assert wanted in text
        assert "rank 1" in text


# ---- bad input -------------------------------------------------------------------------------------------------------


def two_d(names: tuple[str, ...] | None, shape: tuple[int, ...] = (2, 2)) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap(**options: Any) -> Any:
    return hsdp.hybrid_shard(Transformer(1), announce=False, **options)


def shard_one(module: Any = None, **options: Any) -> Any:
    return hsdp.fully_shard(Transformer(1) if module is None else module, **options)


def with_a_dtensor() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), two_d(("a", "b")), [Shard(0), Shard(0)]))
    return model


def twice() -> None:
    hsdp.hybrid_shard(wrap(replicate=2, shard=2), replicate=2, shard=2, announce=False)


def outer() -> None:
    hsdp.hybrid_shard(nn.Sequential(wrap(replicate=2, shard=2)), replicate=2, shard=2, announce=False)


def bottom_up_twice() -> None:
    shard_one(shard_one(mesh=hsdp.init_mesh()), mesh=hsdp.init_mesh())


MISTAKES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "product": (lambda: wrap(replicate=3, shard=2), ["replicate=3", "shard=2", "6 ranks", "4", "shard=2"]),
    "product, tuple": (lambda: wrap(mesh=(2, 4)), ["replicate=2", "shard=4", "8 ranks", "4"]),
    "does not divide": (lambda: wrap(shard=3), ["shard=3", "4"]),
    "larger than the world": (lambda: wrap(shard=8), ["shard=8", "4"]),
    "zero": (lambda: wrap(replicate=0, shard=4), ["replicate=0"]),
    "negative": (lambda: wrap(replicate=-2), ["replicate=-2"]),
    "both -1": (lambda: wrap(replicate=-1, shard=-1), ["replicate", "shard", "-1"]),
    "not a number": (lambda: wrap(shard="all"), ["shard='all'"]),
    "a fraction": (lambda: wrap(shard=2.5), ["shard=2.5"]),
    "a truth value": (lambda: wrap(shard=True), ["shard=True"]),
    "mesh and numbers": (
        lambda: hsdp.hybrid_shard(Transformer(1), mesh=(2, 2), shard=2),
        ["give either mesh or the two numbers"],
    ),
    "mesh of three": (lambda: wrap(mesh=(1, 2, 2)), ["mesh=(1, 2, 2)", "a DeviceMesh, the tuple (replicate, shard)"]),
    "mesh of one": (lambda: wrap(mesh=4), ["mesh=4"]),
    "unknown names": (lambda: wrap(mesh=two_d(("rows", "columns"))), ["('rows', 'columns')", "('replicate', 'shard')"]),
    "swapped names": (lambda: wrap(mesh=two_d(("shard", "replicate"))), ["('shard', 'replicate')", "in that order"]),
    "no names": (lambda: wrap(mesh=two_d(None)), ["no axis names", "mesh_dim_names"]),
    "timeout": (lambda: wrap(mesh=two_d(("replicate", "shard")), timeout_s=0), ["timeout_s=0 has to be a number"]),
    "two spellings": (lambda: wrap(mesh=two_d(("shard", "dp_shard"))), ["['shard', 'dp_shard'] are two spellings"]),
    "no parameters": (
        lambda: hsdp.hybrid_shard(nn.Sequential(nn.ReLU()), shard=4),
        ["Sequential has no parameters to shard"],
    ),
    "wrapped twice": (twice, ["Transformer cannot be wrapped: it is sharded already"]),
    "a wrapped child": (outer, ["Sequential cannot be wrapped: its module '0' is sharded already"]),
    "a DTensor": (lambda: hsdp.hybrid_shard(with_a_dtensor(), shard=4), ["'weight' is a DTensor already"]),
    "units of nothing": (lambda: wrap(shard=4, units="Decoder"), ["units='Decoder' matches no module of Transformer"]),
    "units of a wrong kind": (lambda: wrap(shard=4, units=7), ["units=7: expected module classes"]),
    "fully_shard, 3-D": (
        lambda: shard_one(mesh=two_d(("a", "b", "c"), (1, 2, 2))),
        ["mesh has 3 axes ('a', 'b', 'c')"],
    ),
    "fully_shard, list": (lambda: shard_one(nn.ModuleList([nn.Linear(2, 2)])), ["ModuleList has no forward"]),
    "fully_shard, twice": (bottom_up_twice, ["Transformer is sharded already"]),
    "fully_shard, placement": (
        lambda: shard_one(shard_placement_fn=lambda p: Shard(1)),
        ["shard_placement_fn", "Shard(dim=1) for parameter 'blocks.0.norm1.weight' of shape (64,)"],
    ),
}


def make_mistakes(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    results = {}
    for name, (mistake, _) in MISTAKES.items():
        start = time.monotonic()
        kind, text = "", "it was not refused"
        try:
            mistake()
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        results[name] = (kind, text, time.monotonic() - start)
    return results


@pytest.fixture(scope="module")
def mistakes() -> list[dict[str, tuple[str, str, float]]]:
    """All mistakes in one run: after each the ranks must still be together."""
    return run_ranks(4, make_mistakes)


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_input_is_refused_on_every_rank(name: str, mistakes: list[dict[str, tuple[str, str, float]]]) -> None:
    kind, text, _ = mistakes[0][name]
    assert {result[name][:2] for result in mistakes} == {(kind, text)}
    assert kind == "ValueError", text
    for wanted in MISTAKES[name][1]:
        assert wanted in text
    assert max(result[name][2] for result in mistakes) < 10


def defaults(rank: int, world: int) -> None:
    shard_one(offload_policy=OffloadPolicy())
    shard_one()
    hsdp.hybrid_shard(build(Recipe()), mesh=two_d(("dp_replicate", "dp_shard")))


def test_defaults_are_not_refused() -> None:
    run_ranks(2, defaults_two)
    run_ranks(4, defaults)


def defaults_two(rank: int, world: int) -> None:
    for options in ({}, {"replicate": "auto"}, {"shard": "node"}, {"replicate": -1, "shard": 1}, {"mesh": (-1, 2)}):
        wrap(**options)  # type: ignore[arg-type]


def before_the_group(rank: int, world: int) -> None:
    hsdp.hybrid_shard(nn.Linear(2, 2))


def test_without_a_process_group() -> None:
    with pytest.raises(RankError, match=r"needs the default process group of torch.distributed.init_process_group\(\)"):
        run_ranks(2, before_the_group, init_group=False)


# ---- broken runs -----------------------------------------------------------------------------------------------------


def lose_a_rank(rank: int, world: int) -> str:
    """One rank stops taking part: the others get an error after `timeout_s` and do not hang."""
    model = hsdp.hybrid_shard(build(Recipe()), mesh=(1, 2), timeout_s=2.0, announce=False)
    if rank == 1:
        time.sleep(10)
        return ""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert time.monotonic() - start < 2 + LISTEN_S + 2
    return str(error.value)


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    first, *seen, likely = run_ranks(2, lose_a_rank, grace_s=20)[0].splitlines()
    assert first.startswith("the gather of unit '(root)' did not complete on rank 0: waited 2.0 s, without what has ")
    assert "come from rank 1" in first
    waits = "  rank 0: step 1, forward, waits for the gather of unit '(root)'"
    assert seen == [waits, "  rank 1: before its first step"]
    assert likely.startswith("likely: rank 1 did not begin the first step")
