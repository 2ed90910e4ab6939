"""The announcement: every number in it against arithmetic, and who prints it."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import hsdp
from hsdp import topology


class Block(nn.Linear):
    """A unit of 512 x 512 + 512 parameters."""

    def __init__(self) -> None:
        super().__init__(512, 512)


def announce(rank: int, world: int) -> tuple[str, str, hsdp.Description]:
    model = nn.Sequential(Block(), Block(), nn.Linear(512, 2, bias=False))
    model[2].weight.requires_grad_(False)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        hsdp.hybrid_shard(model, mesh=(2, 2), units=Block, precision=hsdp.Precision(param=torch.bfloat16))
    description = hsdp.describe(model)
    return printed.getvalue(), str(description), description


def test_the_numbers_and_the_text() -> None:
    results = run_ranks(4, announce)
    block, head = 512 * 512 + 512, 2 * 512
    for rank, (printed, text, seen) in enumerate(results):
        assert printed == (text + "\n" if rank == 0 else "")
        assert (seen.world, seen.replicate, seen.shard, seen.rank) == (4, 2, 2, rank)
        assert seen.sharing == ((0, 1) if rank < 2 else (2, 3))
        assert seen.twins == (rank % 2, rank % 2 + 2)
        assert seen.rows == ((0, 1), (2, 3))
        assert list(seen.hosts) == [0, 1, 2, 3]
        assert (seen.num_hosts, seen.spanning_rows, seen.num_units) == (1, 0, 3)
        assert (seen.num_parameters, seen.num_trainable) == (2 * block + head, 2 * block)
        assert seen.parameter_bytes == (2 * block + head) // 2 * 4
        assert seen.optimizer_bytes == 2 * block // 2 * 4 * 2
        assert 0 <= seen.gradient_bytes - 2 * block // 2 * 4 <= 2 * 16  # and the flags
        assert block * 2 <= seen.largest_gather_bytes <= (block + 512) * 2  # bf16, biases packed once more
        assert seen.largest_gather_unit == "0"
    assert results[0][1].splitlines() == [
        "HSDP over 4 ranks = replicate 2 x shard 2, on 1 host",
        "  rank 0 shares one copy of the model with ranks 0, 1, and its part has twins on ranks 0, 2",
        "  shard groups stay inside a host: yes",
        f"  {2 * block + head:,} parameters (1,024 of them frozen) in 3 units; precision: param bfloat16",
        "  bytes a rank: parameters 1.0 MiB, gradients 1.0 MiB, AdamW 2.0 MiB, largest gather 0.5 MiB (0)",
    ]


def draw(rank: int, world: int, path: str) -> tuple[str, hsdp.Description]:
    os.environ[topology.HOST_VARIABLE] = "abba"[rank]
    model = nn.Sequential(nn.Linear(4, 4))
    hsdp.hybrid_shard(model, mesh=(2, 2), announce=False)
    description = hsdp.describe(model)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        description.draw()
    description.draw(f"{path}{rank}.svg")
    return printed.getvalue(), description


def test_the_picture_of_a_live_mesh(tmp_path: Path) -> None:
    results = run_ranks(4, draw, f"{tmp_path}/")
    assert {(text, seen.rows, tuple(seen.hosts.items())) for text, seen in results} == {
        (results[0][0], ((0, 3), (1, 2)), ((0, "a"), (3, "a"), (1, "b"), (2, "b")))
    }
    lines = [line.strip(" │\n") for line in results[0][0].splitlines()]
    assert lines[0] == "replicate 2 x shard 2: 2 copies of the model, each spread over 2 ranks"
    assert lines.index("replicate 0   0 ━━ 3") < lines.index("replicate 1   1 ━━ 2")
    assert len({path.read_bytes() for path in tmp_path.glob("*.svg")}) == 1


def announce_on_hosts(rank: int, world: int, hosts: str, ranks: list[list[int]]) -> str:
    os.environ[topology.HOST_VARIABLE] = hosts[rank]
    model = nn.Sequential(nn.Linear(4, 4))
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        hsdp.hybrid_shard(model, mesh=DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")))
    return printed.getvalue()


@pytest.mark.parametrize(
    ("hosts", "ranks", "said"),
    [
        ("abab", [[0, 1], [2, 3]], [
            "  shard groups stay inside a host: no, 2 of 2 span hosts",
            "  better: rows [0, 2], [1, 3], as hsdp.init_mesh(replicate=2, shard=2) makes them",
        ]),
        ("abab", [[0, 2], [1, 3]], ["  shard groups stay inside a host: yes"]),
        ("abab", [[0, 1, 2, 3]], ["  shard groups stay inside a host: no, 1 of 1 span hosts"]),  # there is none better
    ],
)  # fmt: skip
def test_a_mesh_that_crosses_hosts_needlessly_is_told(hosts: str, ranks: list[list[int]], said: list[str]) -> None:
    first, *others = run_ranks(4, announce_on_hosts, hosts, ranks)
    assert [line for line in first.splitlines() if "host:" in line or "better" in line] == said
    assert others == [""] * 3
