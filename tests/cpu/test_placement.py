"""A mesh that the user brings: larger ones, some of the ranks, process groups; and what hosts are when told."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist
from harness import RankError, run_ranks
from models import TOLERANCE, Recipe, Trained, assert_same_training, brief, build, reference, train
from test_mesh import be_on_host
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hsdp
from hsdp.topology import discover

RECIPE = Recipe(steps=2)


def train_over(model: nn.Module, part: int, parts: int) -> Trained:
    result = train(model, RECIPE, part=part, parts=parts, clip=hsdp.clip_grad_norm_)
    hsdp.check_replicas(model)
    return brief(result, part)


def data_part(model: nn.Module, rank: int) -> tuple[int, int]:
    """(this rank's part of the batch, parts): ranks of other axes than ours see the same data."""
    rows = hsdp.describe(model).rows
    ranks = [each for row in rows for each in row]
    return ranks.index(rank), len(ranks)


# ---- a larger mesh ---------------------------------------------------------------------------------------------------


def train_in_a_larger_mesh(rank: int, world: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = hsdp.hybrid_shard(build(RECIPE), mesh=mesh, announce=False)
    result = train_over(model, *data_part(model, rank))
    description = hsdp.describe(model)
    return result, description.rows, (description.replicate, description.shard)


@pytest.mark.parametrize(
    ("shape", "names", "sizes", "rows_of"),
    [
        ((2, 2), ("replicate", "tp"), (2, 1), {0: ((0,), (2,)), 3: ((1,), (3,))}),
        ((2, 2), ("tp", "replicate"), (2, 1), {1: ((0,), (1,)), 2: ((2,), (3,))}),
        ((2, 2), ("dp_shard", "tp"), (1, 2), {0: ((0, 2),), 3: ((1, 3),)}),
        ((4,), ("shard",), (1, 4), {0: ((0, 1, 2, 3),)}),
        ((4,), ("dp_replicate",), (4, 1), {2: ((0,), (1,), (2,), (3,))}),
        ((2, 1, 2), ("dp_replicate", "cp", "dp_shard"), (2, 2), {0: ((0, 1), (2, 3))}),
        ((2, 2, 2), ("replicate", "shard", "tp"), (2, 2), {0: ((0, 2), (4, 6)), 7: ((1, 3), (5, 7))}),
        ((2, 2, 2), ("pp", "replicate", "shard"), (2, 2), {0: ((0, 1), (2, 3)), 5: ((4, 5), (6, 7))}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_our_axes_of_a_larger_mesh(
    shape: tuple[int, ...], names: tuple[str, ...], sizes: tuple[int, int], rows_of: dict[int, Any]
) -> None:
    world = 8 if len(shape) == 3 and 1 not in shape else 4
    results = run_ranks(world, train_in_a_larger_mesh, shape, names)
    for rank, rows in rows_of.items():
        assert results[rank][1:] == (rows, sizes)
        members = [each for row in rows for each in row]
        assert_same_training([results[member][0] for member in members], reference(RECIPE), TOLERANCE[RECIPE.dtype])


def train_on_some(rank: int, world: int) -> Any:
    mesh = DeviceMesh("cpu", [[0, 2]], mesh_dim_names=("replicate", "shard"))
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the mesh of axes replicate, shard") as error:
            hsdp.hybrid_shard(build(RECIPE), mesh=mesh)
        return str(error.value)
    model = hsdp.hybrid_shard(build(RECIPE), mesh=mesh, announce=False)
    return train_over(model, rank // 2, 2)


def test_some_of_the_ranks() -> None:
    first, refused, second = run_ranks(3, train_on_some)
    assert "only its own ranks" in refused
    assert_same_training([first, second], reference(RECIPE), TOLERANCE[RECIPE.dtype])


# ---- process groups --------------------------------------------------------------------------------------------------


def group_of(rank: int, lines: list[list[int]]) -> Any:
    """The group of `lines` that this rank is in; every rank makes all of them."""
    keep_order = {} if all(line == sorted(line) for line in lines) else {"sort_ranks": False}
    groups = [dist.new_group(line, **keep_order) for line in lines]
    return next((group for line, group in zip(lines, groups, strict=True) if rank in line), None)


def train_with_groups(rank: int, world: int, columns: list[list[int]] | None, rows: list[list[int]] | None) -> Any:
    pair = tuple(None if lines is None else group_of(rank, lines) for lines in (columns, rows))
    model = hsdp.hybrid_shard(build(RECIPE), mesh=pair, announce=False)  # type: ignore[arg-type]
    return train_over(model, *data_part(model, rank)), hsdp.describe(model).rows


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ([[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ([[3, 1], [0, 2]], [[3, 0], [1, 2]]),
        ([[0, 1, 2, 3]], None),
        (None, [[0, 1, 2, 3]]),
    ],
)
def test_process_groups(columns: list[list[int]] | None, rows: list[list[int]] | None) -> None:
    results = run_ranks(4, train_with_groups, columns, rows)
    wanted = [[each] for each in columns[0]] if rows is None and columns else rows
    assert [list(map(list, found)) for _, found in results] == [wanted] * 4
    in_order = [results[each][0] for row in wanted or [] for each in row]
    assert_same_training(in_order, reference(RECIPE), TOLERANCE[RECIPE.dtype])


@pytest.mark.parametrize(
    ("columns", "rows", "part"),
    [
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]], "share more than rank"),
        ([[0, 2], [1, 3]], [[0, 1, 2, 3]], "share more than rank"),
        ([[0, 1, 2], [3]], [[0, 3], [1], [2]], "down this column are"),
        ([[0, 3], [2, 1]], [[0, 1], [2, 3]], "of one row see the rows"),
        ([[0, 3], [1, 2]], [[0, 1], [2, 3]], "the replicate groups along this row are"),
    ],
)
def test_groups_that_form_no_mesh(columns: list[list[int]], rows: list[list[int]], part: str) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(4, train_with_groups, columns, rows, timeout_s=60)
    assert sorted(error.value.errors) == [0, 1, 2, 3]
    for name, text in error.value.errors.values():
        assert name == "ValueError"
        assert part in text


# ---- who shares a host -----------------------------------------------------------------------------------------------


def rows_of(rank: int, world: int, hosts: str, local_sizes: list[int], options: dict[str, Any]) -> list[list[int]]:
    be_on_host(hosts, rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(local_sizes[rank])
    return hsdp.init_mesh(**options).mesh.tolist()


def test_ranks_per_host_is_stronger_than_what_hosts_say(capfd: pytest.CaptureFixture[str]) -> None:
    explicit = run_ranks(4, rows_of, "abcd", [4] * 4, {"ranks_per_host": 2})
    assert explicit == [[[0, 1], [2, 3]]] * 4
    assert run_ranks(4, rows_of, "abab", [2] * 4, {"shard": "node"}) == [[[0, 2], [1, 3]]] * 4
    assert "LOCAL_WORLD_SIZE" not in capfd.readouterr().out


def test_a_launcher_that_says_otherwise_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(4, rows_of, "aaaa", [2] * 4, {}) == [[[0, 1, 2, 3]]] * 4
    said = [line for line in capfd.readouterr().out.splitlines() if "LOCAL_WORLD_SIZE" in line]
    assert len(said) == 1
    assert said[0].startswith("[rank 0] host a has 4 ranks, and LOCAL_WORLD_SIZE=2 there: ")


def ranks_per_host_differs(rank: int, world: int) -> None:
    hsdp.init_mesh(ranks_per_host=1 + rank)


def test_ranks_per_host_is_the_same_on_every_rank() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, ranks_per_host_differs)
    assert all("ranks_per_host: rank 0: '1'; rank 1: '2'" in text for _, text in error.value.errors.values())


def world_facts(rank: int, world: int) -> Any:
    found = discover()
    return found.devices, found.local_world_sizes


def test_the_world_knows_devices() -> None:
    assert run_ranks(2, world_facts) == [((("cpu", 1), ("cpu", 1)), (2, 2))] * 2
