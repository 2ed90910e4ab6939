"""init_mesh and use_mesh on real ranks: groups, DTensors and checkpoints on a mesh that follows the hosts."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import RankError, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hsdp import mesh as mesh_module
from hsdp import topology
from hsdp.mesh import init_mesh, use_mesh
from hsdp.topology import discover

SORT_RANKS = "sort_ranks" in inspect.signature(dist.new_group).parameters
needs_sort_ranks = pytest.mark.skipif(not SORT_RANKS, reason="this torch can only make sorted groups")


def be_on_host(hosts: str, rank: int) -> None:
    os.environ[topology.HOST_VARIABLE] = hosts[rank]


def num_groups() -> int:
    """Groups this process is a member of. Private in torch, which offers no other list of them."""
    return len(dist.distributed_c10d._world.pg_map)


# ---- groups ----------------------------------------------------------------------------------------------------------


def make_mesh(rank: int, world: int, hosts: str, sizes: dict[str, Any]) -> dict[str, Any]:
    be_on_host(hosts, rank)
    before = num_groups()
    mesh = init_mesh(**sizes)
    groups = [mesh.get_group("replicate"), mesh.get_group("shard")]
    sums = []
    for group in groups:
        total = torch.tensor([10.0**rank])
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    use_mesh(mesh)
    return {
        "mesh": mesh.mesh.tolist(),
        "names": mesh.mesh_dim_names,
        "type": mesh.device_type,
        "coordinate": list(mesh.get_coordinate() or []),
        "group_ranks": [dist.get_rank(group) for group in groups],
        "members": [dist.get_process_group_ranks(group) for group in groups],
        "sums": sums,
        "timeouts_s": [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups],
        "num_new_groups": num_groups() - before,
    }


@pytest.mark.parametrize(
    ("hosts", "sizes", "rows"),
    [
        ("aaaa", {}, [[0, 1, 2, 3]]),
        ("aabb", {}, [[0, 1], [2, 3]]),
        ("abab", {}, [[0, 2], [1, 3]]),
        pytest.param("abba", {}, [[0, 3], [1, 2]], marks=needs_sort_ranks),
        ("aaaa", {"replicate": 4}, [[0], [1], [2], [3]]),
        ("abab", {"shard": 4, "timeout_s": 7}, [[0, 1, 2, 3]]),
        ("abab", {"dp_replicate": 2, "dp_shard": -1}, [[0, 2], [1, 3]]),
        ("a", {}, [[0]]),
        ("abb", {"replicate": "auto", "shard": 3}, [[0, 1, 2]]),
    ],
)
def test_init_mesh(hosts: str, sizes: dict[str, Any], rows: list[list[int]]) -> None:
    for rank, got in enumerate(run_ranks(len(hosts), make_mesh, hosts, sizes)):
        row, column = next((i, row.index(rank)) for i, row in enumerate(rows) if rank in row)
        members = [[other[column] for other in rows], rows[row]]
        assert got == {
            "mesh": rows,
            "names": ("replicate", "shard"),
            "type": "cpu",
            "coordinate": [row, column],
            "group_ranks": [row, column],
            "members": members,
            "sums": [sum(10**member for member in line) for line in members],
            "timeouts_s": [sizes.get("timeout_s", 60)] * 2,
            "num_new_groups": 2,
        }


def find_hosts(rank: int, world: int, hosts: str) -> Any:
    if hosts:
        be_on_host(hosts, rank)
    found = discover()
    return found.names, found.local_ranks, [found.ranks_of(host) for host in found.host_ids]


def test_discover() -> None:
    one_host = run_ranks(3, find_hosts, "")
    assert one_host == [one_host[0]] * 3
    assert one_host[0][1:] == ((0, 1, 2), [[0, 1, 2]])
    assert run_ranks(3, find_hosts, "bab") == [(("b", "a", "b"), (0, 1, 2), [[0, 2], [1]])] * 3


def find_hosts_over_mesh(rank: int, world: int) -> Any:
    be_on_host("abcd", rank)
    return discover(DeviceMesh("cpu", [[3, 1], [0, 2]])).names


def test_discover_over_a_mesh_goes_by_position() -> None:
    assert run_ranks(4, find_hosts_over_mesh) == [("d", "b", "a", "c")] * 4


def default_on_unequal_hosts(rank: int, world: int) -> list[list[int]]:
    be_on_host("aaaabb", rank)
    return init_mesh().mesh.tolist()


def test_unequal_hosts_are_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(6, default_on_unequal_hosts) == [[[0, 1], [2, 3], [4, 5]]] * 6
    said = [line for line in capfd.readouterr().out.splitlines() if "unequally" in line]
    text = "hosts have unequally many ranks (a: 4, b: 2): shard=2, their greatest common divisor, and replicate=3"
    assert said == [f"[rank 0] {text}"]


# ---- DTensor on the mesh ---------------------------------------------------------------------------------------------


def use_dtensors(rank: int, world: int, hosts: str) -> list[int]:
    be_on_host(hosts, rank)
    mesh = init_mesh(shard=2)
    groups_before = num_groups()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    full = torch.arange(15.0).view(5, 3)
    tensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
    rows = slice(0, 3) if coordinate[1] == 0 else slice(3, 5)
    assert torch.equal(tensor.to_local(), full[rows])
    assert torch.equal(tensor.full_tensor(), full)

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    assert (tuple(shape), tuple(offset)) == ((rows.stop - rows.start, 3), (rows.start, 0))

    whole = tensor.redistribute(placements=[Replicate(), Replicate()])
    assert torch.equal(whole.to_local(), full)
    both = tensor.redistribute(placements=[Shard(0), Shard(0)])
    assert torch.equal(both.full_tensor(), full)
    assert torch.equal((tensor * 2).sum().full_tensor(), full.sum() * 2)

    # From rank 0's values alone: they have to reach the right rows everywhere.
    scattered = distribute_tensor(full if rank == 0 else torch.zeros_like(full), mesh, [Replicate(), Shard(0)])
    assert torch.equal(scattered.to_local(), full[rows])

    shard_mesh, replicate_mesh = mesh["shard"], mesh["replicate"]
    assert shard_mesh.get_group() is mesh.get_group("shard")
    assert replicate_mesh.get_group() is mesh.get_group("replicate")
    assert shard_mesh.get_local_rank() == coordinate[1]
    on_row = distribute_tensor(full, shard_mesh, [Shard(0)])
    assert torch.equal(on_row.to_local(), full[rows])
    assert mesh["replicate", "shard"] == mesh

    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(tensor)
    model.bias = nn.Parameter(distribute_tensor(torch.arange(5.0), mesh, [Replicate(), Shard(0)]))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert set(state) == {"weight", "bias"}
    for name in state:
        assert torch.equal(state[name], {"weight": full, "bias": torch.arange(5.0)}[name])
    doubled = {name: value * 2 for name, value in state.items()}
    set_model_state_dict(model, doubled, options=StateDictOptions(full_state_dict=True))
    assert isinstance(model.weight, DTensor)
    assert torch.equal(model.weight.to_local(), full[rows] * 2)
    assert num_groups() == groups_before
    return [num_groups() - groups_before, *coordinate]


@pytest.mark.parametrize("hosts", ["aabb", "abab", pytest.param("abba", marks=needs_sort_ranks)])
def test_dtensors(hosts: str) -> None:
    got = run_ranks(4, use_dtensors, hosts)
    assert [result[0] for result in got] == [0] * 4


def full_values() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(21.0).view(7, 3), "bias": torch.arange(3.0) + 100}


def checkpoint(rank: int, world: int, hosts: str, sizes: dict[str, int], folder: str, save: bool) -> None:
    be_on_host(hosts, rank)
    mesh = init_mesh(**sizes)
    wanted = full_values()
    start = wanted if save else {name: torch.zeros_like(value) for name, value in wanted.items()}
    state = {name: distribute_tensor(value, mesh, [Replicate(), Shard(0)]) for name, value in start.items()}
    if save:
        dcp.save(state, checkpoint_id=folder)
        return
    dcp.load(state, checkpoint_id=folder)
    for name, value in wanted.items():
        assert torch.equal(state[name].full_tensor(), value), name


@needs_sort_ranks
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_move_between_numberings(tmp_path: Path) -> None:
    permuted, plain = str(tmp_path / "permuted"), str(tmp_path / "plain")
    run_ranks(4, checkpoint, "abba", {"shard": 2}, permuted, True)
    run_ranks(4, checkpoint, "aabb", {"shard": 2}, plain, True)
    for hosts, sizes, folder in [
        ("aabb", {"shard": 2}, permuted),
        ("abba", {"shard": 2}, plain),
        ("abba", {"shard": 4}, permuted),
        ("abab", {"shard": 2}, permuted),
        ("aaaa", {"shard": 1}, permuted),
        ("a", {"shard": 1}, permuted),
    ]:
        run_ranks(len(hosts), checkpoint, hosts, sizes, folder, False)


# ---- refusals --------------------------------------------------------------------------------------------------------


def call_init_mesh(rank: int, world: int, of_rank: list[dict[str, Any]]) -> None:
    be_on_host("aaab", rank)
    init_mesh(**of_rank[rank])


@pytest.mark.parametrize(
    ("of_rank", "text"),
    [
        ([{"replicate": 3, "shard": 4}] * 4, "replicate=3 x shard=4 needs 12 ranks, the world has 4; "),
        ([{"shard": 0}] * 4, "shard=0 is not a mesh size"),
        ([{"shard": "node"}] * 4, 'shard="node" needs equally many ranks on every host, found a: 3, b: 1'),
        ([{"replicate": 2, "dp_replicate": 4}] * 4, "replicate=2 and dp_replicate=4 are two spellings of one size"),
        ([{"device_type": "cuda:0"}] * 4, "device_type='cuda:0' has to be a type without an index"),
        ([{"device_type": "meta"}] * 4, "device_type='meta': the default process group has backends for "),
        ([{"timeout_s": -1}] * 4, "timeout_s=-1 has to be a number of seconds above 0"),
        ([{"timeout_s": float("nan")}] * 4, "timeout_s=nan has to be a number of seconds above 0"),
        (
            [{"shard": 2}] * 3 + [{"shard": 4}],
            "init_mesh was called with different arguments: shard: ranks 0-2: '2'; rank 3: '4'",
        ),
        (
            [{"shard": 2}] * 2 + [{"timeout_s": 5}] * 2,
            "init_mesh was called with different arguments: shard: ranks 0, 1: '2'; ranks 2, 3: 'None'",
        ),
        ([{}] * 3 + [{"timeout_s": "long"}], "rank 3: timeout_s='long' has to be a number of seconds above 0"),
    ],
)
def test_init_mesh_refuses(of_rank: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(4, call_init_mesh, of_rank, timeout_s=60)
    messages = set(error.value.errors.values())
    assert sorted(error.value.errors) == [0, 1, 2, 3]
    assert len(messages) == 1, messages
    name, message = messages.pop()
    assert name == "ValueError"
    assert message.startswith(text)


def check_foreign_mesh(rank: int, world: int, ranks: list[list[int]], names: tuple[str, str] | None) -> str | None:
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    try:
        assert use_mesh(mesh) is mesh
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("ranks", "names", "parts"),
    [
        ([[0, 1], [2, 3]], ("dp_replicate", "dp_shard"), None),
        ([[0, 2], [1, 3]], ("replicate", "shard"), None),
        ([[0, 1], [2, 3]], None, ["the mesh of shape (2, 2) has no axis names"]),
        ([[0, 1], [2, 3]], ("shard", "replicate"), ["the mesh has axes ('shard', 'replicate')"]),
        # torch's own groups on hosts "abba": rank 3 has coordinate 0 in its column and group rank 1.
        (
            [[0, 3], [1, 2]],
            ("replicate", "shard"),
            [
                "ranks 2, 3: along axis 'replicate' the mesh has ranks [3, 2], its process group [2, 3]",
                "hsdp.init_mesh",
            ],
        ),
    ],
)
def test_use_mesh(ranks: list[list[int]], names: tuple[str, str] | None, parts: list[str] | None) -> None:
    got = run_ranks(4, check_foreign_mesh, ranks, names)
    assert got == [got[0]] * 4
    if parts is None:
        assert got[0] is None
    else:
        assert got[0] is not None
        for part in parts:
            assert part in got[0]


def pretend_old_torch(rank: int, world: int) -> None:
    be_on_host("abba", rank)
    mesh_module._groups_keep_order = lambda: False
    init_mesh()


def test_groups_that_cannot_keep_the_order_are_refused() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(4, pretend_old_torch)
    assert [name for name, _ in error.value.errors.values()] == ["RuntimeError"] * 4
    assert "rows [[0, 3], [1, 2]] and so for a group in the order [3, 2]" in error.value.errors[0][1]


# ---- the default group -----------------------------------------------------------------------------------------------


def start_without_group(rank: int, world: int, launched: bool) -> list[str]:
    if not launched:
        del os.environ["WORLD_SIZE"]
    texts = []
    try:
        init_mesh()
    except RuntimeError as error:
        texts.append(str(error))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    texts.append(str(init_mesh().mesh.tolist()))
    return texts


def test_init_mesh_without_a_default_group() -> None:
    [(refusal, mesh)] = run_ranks(1, start_without_group, False, init_group=False)
    assert refusal.startswith("init_mesh needs the default process group of torch.distributed.init_process_group()")
    assert "torchrun --nproc-per-node" in refusal
    # The text's recipe for one process works.
    assert "init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)" in refusal
    assert mesh == "[[0]]"
    [(refusal, _)] = run_ranks(1, start_without_group, True, init_group=False)
    assert "a launcher started WORLD_SIZE=1 ranks: call that first" in refusal


def init_in_threads(rank: int, world: int) -> list[Any]:
    from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

    found = []

    @spawn_threads_and_init_comms(world_size=4)
    def in_thread(self: object) -> None:
        mesh = init_mesh(shard=2)
        full = torch.arange(15.0).view(5, 3)
        tensor = distribute_tensor(full, mesh, [Replicate(), Shard(0)])
        assert torch.equal(tensor.full_tensor(), full)
        found.append((dist.get_rank(), mesh.mesh.tolist(), list(mesh.get_coordinate() or [])))
        try:
            init_mesh(shard=dist.get_rank() + 1)
        except ValueError as error:
            found.append((dist.get_rank(), str(error)))

    in_thread(object())
    return sorted(found, key=lambda entry: (len(entry), entry))


def test_ranks_may_be_threads() -> None:
    pytest.importorskip("expecttest", reason="torch's threaded ranks need it")
    [found] = run_ranks(1, init_in_threads, init_group=False)
    text = "init_mesh was called with different arguments: shard: "
    text += "; ".join(f"rank {rank}: '{rank + 1}'" for rank in range(4))
    assert found[:4] == [(rank, text) for rank in range(4)]
    assert found[4:] == [(rank, [[0, 1], [2, 3]], [rank // 2, rank % 2]) for rank in range(4)]


def compare_with_torch(rank: int, world: int) -> bool:
    ours = init_mesh(shard=2)
    torchs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return ours == torchs


def test_on_one_host_the_mesh_equals_torchs() -> None:
    assert run_ranks(4, compare_with_torch) == [True] * 4
