"""placement.py and the pure parts of topology.py and mesh.py: hosts -> rows, requests -> sizes, rows -> words."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from hsdp import mesh, placement, topology
from hsdp.placement import World, arrange, better_rows, borders, describe_rows, resolve_sizes


def world_of(hosts: str | list[str]) -> World:
    """One letter a rank, the letter is its host: "aabb"."""
    seen: Counter[str] = Counter()
    local_ranks = []
    for host in hosts:
        local_ranks.append(seen[host])
        seen[host] += 1
    return World(tuple(f"id-{host}" for host in hosts), tuple(local_ranks), tuple(hosts))


# ---- arrange ---------------------------------------------------------------------------------------------------------


def test_several_rows_in_one_host() -> None:
    rows = arrange("a" * 8 + "b" * 8, 4, 4)
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert next(zip(*rows, strict=True)) == (0, 4, 8, 12)


def test_round_robin_numbering_stays_inside_hosts() -> None:
    assert arrange("abab", 2, 2) == [[0, 2], [1, 3]]
    assert arrange("abababab", 4, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert arrange("abcdabcd", 4, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_rows_over_whole_hosts() -> None:
    assert arrange("aabbccdd", 2, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert arrange("abcdabcd", 2, 4) == [[0, 1, 4, 5], [2, 3, 6, 7]]  # round-robin: rows of a and b, of c and d


def test_arbitrary_numbering() -> None:
    assert arrange("abba", 2, 2) == [[0, 3], [1, 2]]
    assert arrange(["x", "y", "y", "x", "y", "x"], 2, 3) == [[0, 3, 5], [1, 2, 4]]


def test_unequal_hosts() -> None:
    assert arrange("aaaabb", 3, 2) == [[0, 1], [2, 3], [4, 5]]
    # 5 and 3 ranks: no mesh of rows of 4 avoids one border, rank order has no more than that.
    assert arrange("aaaaabbb", 2, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # 1, 4 and 3: rank order would have two borders, b fills a row of its own.
    assert arrange("abbbbccc", 2, 4) == [[0, 5, 6, 7], [1, 2, 3, 4]]
    # Remainders 1, 1, 2, 3, 3, 2 in rows of 4: every row closes with two hosts at most.
    hosts = "a" + "b" + "cc" + "ddd" + "eee" + "ff"
    rows = arrange(hosts, 3, 4)
    assert borders(hosts, rows) == 3
    assert rows == [[0, 4, 5, 6], [1, 7, 8, 9], [2, 3, 10, 11]]


def test_one_row_and_one_column() -> None:
    assert arrange("abab", 4, 1) == [[0], [1], [2], [3]]
    assert arrange("aabb", 1, 4) == [[0, 1, 2, 3]]
    assert arrange("a", 1, 1) == [[0]]


@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
def test_equal_runs_keep_rank_order(per_host: int, num_hosts: int) -> None:
    hosts = [f"h{rank // per_host}" for rank in range(per_host * num_hosts)]
    for shard in range(1, len(hosts) + 1):
        if len(hosts) % shard == 0:
            rows = arrange(hosts, len(hosts) // shard, shard)
            assert rows == [list(range(start, start + shard)) for start in range(0, len(hosts), shard)]


def check_rows(hosts: list[str], replicate: int, shard: int) -> None:
    rows = arrange(hosts, replicate, shard)
    assert [len(row) for row in rows] == [shard] * replicate
    assert sorted(rank for row in rows for rank in row) == list(range(len(hosts)))
    assert rows == sorted(sorted(row) for row in rows), "ranks ascend in a row, first ranks from row to row"
    counts = tuple(sorted(Counter(hosts).values()))
    assert borders(hosts, rows) == least_borders(counts, shard), (hosts, rows)


def test_better_rows() -> None:
    assert better_rows(dict(enumerate("abab")), [[0, 1], [2, 3]]) == [[0, 2], [1, 3]]
    assert better_rows(dict(enumerate("abab")), [[2, 0], [1, 3]]) is None  # as good, in another order
    assert better_rows(dict(enumerate("abab")), [[0, 1, 2, 3]]) is None  # crosses, and has to
    # The axes of a larger mesh: only these ranks, which are not all of the world.
    assert better_rows({4: "a", 7: "b", 6: "a", 9: "b"}, [[4, 7], [6, 9]]) == [[4, 6], [7, 9]]


@functools.cache
def least_borders(counts: tuple[int, ...], shard: int) -> int:
    """By trying everything: ranks left on each host -> fewest borders of any rows."""
    counts = tuple(sorted(count for count in counts if count))
    if not counts:
        return 0
    tried = []
    for taken in compositions(counts, shard):
        if taken[0]:  # some row has the first host's ranks; call it the next one
            left = tuple(sorted(count - some for count, some in zip(counts, taken, strict=True)))
            tried.append(sum(some > 0 for some in taken) - 1 + least_borders(left, shard))
    return min(tried)


def compositions(counts: tuple[int, ...], total: int) -> Iterator[tuple[int, ...]]:
    if not counts:
        if total == 0:
            yield ()
        return
    for some in range(min(counts[0], total) + 1):
        for rest in compositions(counts[1:], total - some):
            yield (some, *rest)


def test_least_borders_knows_simple_cases() -> None:
    assert least_borders((4, 4), 4) == 0
    assert least_borders((5, 3), 4) == 1
    assert least_borders((1, 1, 1, 1), 4) == 3
    assert least_borders((3, 3), 2) == 1


def host_strings(length: int) -> Iterator[list[str]]:
    """Every way to put `length` ranks on hosts, up to the hosts' names."""

    def extend(prefix: list[int], num_used: int) -> Iterator[list[int]]:
        if len(prefix) == length:
            yield prefix
            return
        for host in range(num_used + 1):
            yield from extend([*prefix, host], max(num_used, host + 1))

    return (["abcdefgh"[host] for host in hosts] for hosts in extend([], 0))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_fewest_borders_in_every_small_world(world: int) -> None:
    for hosts in host_strings(world):
        for shard in range(1, world + 1):
            if world % shard == 0:
                check_rows(hosts, world // shard, shard)


def test_fewest_borders_in_larger_random_worlds() -> None:
    generator = random.Random(0)
    for _ in range(300):
        replicate, shard, num_hosts = generator.randint(1, 5), generator.randint(2, 6), generator.randint(2, 6)
        hosts = [generator.choice("abcdef"[:num_hosts]) for _ in range(replicate * shard)]
        check_rows(hosts, replicate, shard)


def test_chains_are_searched_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2, 2, 2, 2, 3 and 3 ranks in rows of 7: 2 + 2 + 3 twice. Laying the largest that fits first starts with 3 + 3.
    hosts = "abcdefabcdefef"
    assert borders(hosts, arrange(hosts, 2, 7)) == 4
    monkeypatch.setattr(placement, "_EXACT_STATES", 0)
    assert borders(hosts, arrange(hosts, 2, 7)) == 5


def test_too_varied_to_search_is_still_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_EXACT_STATES", 0)
    generator = random.Random(0)
    for _ in range(100):
        replicate, shard = generator.randint(1, 6), generator.randint(2, 7)
        hosts = [generator.choice("abcdefgh") for _ in range(replicate * shard)]
        rows = arrange(hosts, replicate, shard)
        assert sorted(rank for row in rows for rank in row) == list(range(len(hosts)))
        assert borders(hosts, rows) < len(set(hosts))


def test_arrange_refuses_a_wrong_product() -> None:
    with pytest.raises(ValueError, match="needs 12 ranks, the world has 8") as error:
        arrange("aaaaabbb", 3, 4)
    assert "fit: 8 x 1, 4 x 2, 2 x 4, 1 x 8 (ranks by host: a: 5, b: 3)" in str(error.value)
    with pytest.raises(ValueError, match="sizes start at 1"):
        arrange("aaaa", -2, -2)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "replicate", "shard", "sizes"),
    [
        ("aaaabbbb", None, None, (2, 4)),  # the default: shard inside a host, replicate across
        ("abababab", None, None, (2, 4)),
        ("aaaa", None, None, (1, 4)),
        ("a", None, None, (1, 1)),
        ("aaaabb", None, None, (3, 2)),  # unequal: the greatest common divisor of 4 and 2
        ("aaaabbb", None, None, (7, 1)),
        ("aaaabbbb", None, "node", (2, 4)),
        ("aaaabbbb", 2, "node", (2, 4)),
        ("aaaabbbb", -1, "node", (2, 4)),
        ("aaaabbbb", 4, None, (4, 2)),
        ("aaaabbbb", None, 8, (1, 8)),
        ("aaaabbbb", None, 2, (4, 2)),
        ("aaaabbbb", -1, 2, (4, 2)),
        ("aaaabbbb", "auto", 2, (4, 2)),
        ("aaaabbbb", 8, -1, (8, 1)),
        ("aaaabbbb", 1, "auto", (1, 8)),
        ("aaaabbbb", "auto", None, (2, 4)),
        ("aaaabbbb", None, -1, (2, 4)),
        ("aaaabbbb", 2, 4, (2, 4)),
        ("aaaaabbb", 2, 4, (2, 4)),
    ],
)
def test_sizes(hosts: str, replicate: int | str | None, shard: int | str | None, sizes: tuple[int, int]) -> None:
    assert resolve_sizes(world_of(hosts), replicate, shard) == sizes


def test_sizes_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    sizes = resolve_sizes(world_of("aaaa"), numpy.int64(2), numpy.int32(2))
    assert sizes == (2, 2)
    assert [type(size) for size in sizes] == [int, int]


PAIRS = "replicate x shard that fit: 8 x 1, 4 x 2, 2 x 4, 1 x 8"


@pytest.mark.parametrize(
    ("replicate", "shard", "text"),
    [
        (
            3,
            4,
            f"replicate=3 x shard=4 needs 12 ranks, the world has 8; shard sizes that fit replicate=3: none; {PAIRS}",
        ),
        (4, 4, f"replicate=4 x shard=4 needs 16 ranks, the world has 8; shard sizes that fit replicate=4: 2; {PAIRS}"),
        (
            2,
            "node",
            f"replicate=2 x shard=8 needs 16 ranks, the world has 8; shard sizes that fit replicate=2: 4; {PAIRS}",
        ),
        (None, 3, "shard=3 does not divide the world of 8 ranks; sizes that fit: 1, 2, 4, 8"),
        (None, 16, "shard=16 is larger than the world of 8 ranks; sizes that fit: 1, 2, 4, 8"),
        (5, -1, "replicate=5 does not divide the world of 8 ranks; sizes that fit: 1, 2, 4, 8"),
        (-1, "auto", "replicate=-1 and shard='auto': only one of them can be the rest; give the other"),
        (0, 8, 'replicate=0 is not a mesh size: give a whole number of at least 1, or -1 or "auto" for the rest'),
        (
            1,
            -2,
            "shard=-2 is not a mesh size: give a whole number of at least 1, "
            '"node" for the ranks of a host, or -1 or "auto" for the rest',
        ),
    ],
)
def test_sizes_refused(replicate: int | str | None, shard: int | str | None, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        resolve_sizes(world_of("aaaaaaaa"), replicate, shard)


@pytest.mark.parametrize("wrong", [True, False, 2.0, "4", "nodes", [2], (2, 2), 0])
@pytest.mark.parametrize("name", ["replicate", "shard"])
def test_no_size_at_all(name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* is not a mesh size"):
        resolve_sizes(world_of("aaaa"), **{"replicate": None, "shard": None, name: wrong})  # type: ignore[arg-type]


def test_only_shard_knows_nodes() -> None:
    with pytest.raises(ValueError, match="replicate='node' is not a mesh size"):
        resolve_sizes(world_of("aaaa"), "node", None)


def test_node_needs_equal_hosts() -> None:
    with pytest.raises(ValueError, match=r"found a: 4, b: 2; .* every host: 1, 2$"):
        resolve_sizes(world_of("aaaabb"), None, "node")


# ---- world and rows --------------------------------------------------------------------------------------------------


def test_world() -> None:
    world = world_of("baab")
    assert world.size == 4
    assert world.host_ids == ("id-b", "id-a")
    assert world.ranks_of("id-a") == [1, 2]
    assert world.ranks_per_host() == {"b": 2, "a": 2}
    assert world.spans([[0, 3], [1, 2]]) == 0
    assert world.spans([[0, 1], [2, 3]]) == 2


def test_describe_rows() -> None:
    world = world_of("abab")
    inside = describe_rows(world, arrange(world.hosts, 2, 2), rank=3)
    assert inside.copy_ranks == (1, 3)
    assert inside.twin_ranks == (2, 3)
    assert inside.num_hosts == 2
    assert inside.ranks_per_host == {"a": 2, "b": 2}
    assert inside.stays_inside_hosts
    across = describe_rows(world, [[0, 1], [2, 3]], rank=0)
    assert across.copy_ranks == (0, 1)
    assert across.twin_ranks == (0, 2)
    assert across.num_spanning_rows == 2
    assert not across.stays_inside_hosts


def facts(name: str, boot_id: str, local_rank: int | None) -> dict[str, object]:
    host = {"host": [name, boot_id], "local_rank": local_rank}
    return {**host, "local_world_size": None, "devices": 1, "device_type": "cpu"}


def test_hosts_of_one_name_are_told_apart() -> None:
    world = topology._world(
        [facts("node", "1", 0), facts("node", "2", 0), facts("node", "1", 1), facts("x", "3", None)]
    )
    assert world.names == ("node", "node (2)", "node", "x")
    assert world.local_ranks == (0, 0, 1, 0)
    assert world.ranks_of(world.hosts[0]) == [0, 2]
    assert world.ranks_per_host() == {"node": 2, "node (2)": 1, "x": 1}


def test_local_ranks_without_a_launcher() -> None:
    world = topology._world([facts("b", "", None), facts("a", "", None), facts("b", "", None)])
    assert world.local_ranks == (0, 0, 1)


def test_host_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(topology.HOST_VARIABLE, raising=False)
    monkeypatch.setattr(topology.socket, "gethostname", lambda: "machine")
    name, boot_id = topology._host_identity()
    assert name == "machine"
    assert len(boot_id) in (0, 36)  # not every system has one
    monkeypatch.setattr(topology, "_BOOT_ID_PATH", "/does/not/exist")
    assert topology._host_identity() == ["machine", ""]
    monkeypatch.setenv(topology.HOST_VARIABLE, "rack7")
    assert topology._host_identity() == ["rack7", ""]


# ---- a user's mesh ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("replicate", "shard"),
        ("dp_replicate", "dp_shard"),
        ("replicate", "dp_shard"),
        ("shard",),
        ("replicate",),
        ("pp", "replicate", "shard", "tp"),
        ("dp_replicate", "cp", "shard"),
        ("dp_shard", "tp"),
    ],
)
def test_good_meshes(names: tuple[str, ...]) -> None:
    assert mesh.mesh_problem([2] * len(names), names) is None


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (None, ["shape (2, 2) has no axis names", "mesh_dim_names=('replicate', 'shard')"]),
        (("dp", "tp"), ["axes ('dp', 'tp')", "('replicate', 'shard') or ('dp_replicate', 'dp_shard')"]),
        (("shard", "replicate"), ["axes ('shard', 'replicate')", "in that order"]),
        (("shard", "tp", "dp_replicate"), ["axes ('shard', 'tp', 'dp_replicate')", "in that order"]),
        (("shard", "dp_shard"), ["['shard', 'dp_shard'] are two spellings of one axis"]),
        (("dp_replicate", "replicate", "shard"), ["['dp_replicate', 'replicate'] are two spellings of one axis"]),
    ],
)
def test_meshes_refused(names: tuple[str, ...] | None, parts: list[str]) -> None:
    problem = mesh.mesh_problem([2] * len(names or (2, 2)), names)
    assert problem is not None
    for part in parts:
        assert part in problem


def test_ranks_per_host() -> None:
    world = world_of("abcd").with_ranks_per_host(2)
    assert world.names == ("host 0", "host 0", "host 1", "host 1")
    assert world.local_ranks == (0, 1, 0, 1)
    assert resolve_sizes(world, None, None) == (2, 2)
    for number in (0, 3, -1, True, "2"):
        with pytest.raises(ValueError, match="numbers that fit: 1, 2, 4"):
            world.with_ranks_per_host(number)  # type: ignore[arg-type]
