"""Where ranks sit and what mesh follows from it: plain ints and strings, pure, the same answer on every rank.

Holds: the world as ranks on hosts, `plan_world` (one that does not run yet), `arrange` (hosts -> rows of ranks),
`resolve_sizes` (what was asked -> two numbers) and `describe_rows` (what the rows mean for a rank).
Must not know: torch, process groups, environment variables.

    ranks on hosts     arrange(hosts, replicate=2, shard=2)
    a: 0, 2            row 0: [0, 2]   all on a      a row shares one copy of the model
    b: 1, 3            row 1: [1, 3]   all on b      columns [0, 1] and [2, 3] hold the same shard

The aim is the fewest *borders* inside rows: hosts in the row - 1, summed over the rows.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_EXACT_STATES = 200_000  # `_chain_hosts` searches exactly up to so many states


@dataclass(frozen=True)
class World:
    """Every rank's place.

    Attributes:
        hosts: by rank, the identity of its host (not for people).
        local_ranks: by rank, its number on its host as the launcher gave it, else its position among the host's ranks.
        names: by rank, its host's name for people; different hosts have different names.
        local_world_sizes: by rank, how many ranks its launcher says to have started on its host; None: it says nothing.
        devices: by rank, the type of its device and how many of them it sees.
    """

    hosts: tuple[str, ...]
    local_ranks: tuple[int, ...]
    names: tuple[str, ...]
    local_world_sizes: tuple[int | None, ...] = ()
    devices: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def host_ids(self) -> tuple[str, ...]:
        """Every host once, in the order of its first rank."""
        return tuple(dict.fromkeys(self.hosts))

    def ranks_of(self, host: str) -> list[int]:
        return [rank for rank, its_host in enumerate(self.hosts) if its_host == host]

    def ranks_per_host(self) -> dict[str, int]:
        """Number of ranks by host name, in the order of `host_ids`."""
        return dict(Counter(self.names))

    def with_ranks_per_host(self, number: int) -> World:
        """The world as if every `number` ranks in the order of their numbers were one host.

        Raises:
            ValueError: the number of ranks is no multiple.
        """
        if _as_int(number) is None or number < 1 or self.size % number:
            raise ValueError(
                f"ranks_per_host={number!r} does not divide the world of {self.size} ranks; "
                f"numbers that fit: {_join(_divisors(self.size))}"
            )
        names = tuple(f"host {rank // number}" for rank in range(self.size))
        return replace(self, hosts=names, names=names, local_ranks=tuple(rank % number for rank in range(self.size)))

    def spans(self, rows: Iterable[Sequence[int]]) -> int:
        """How many of `rows` have ranks on more than one host."""
        return num_spanning(self.hosts, rows)


ORDERS = ("block", "round-robin")


def plan_world(counts: Sequence[int], order: str = "block") -> World:
    """A world that does not run yet, to look at its mesh.

    Args:
        counts: ranks of every host.
        order: how a launcher numbers the ranks: "block" host after host, "round-robin" one a host in turn.

    Raises:
        ValueError: no host, a host without ranks, or another order.
    """
    if not counts or min(counts) < 1:
        raise ValueError(f"ranks by host: {list(counts)}; there is at least one host, and every host has 1 or more")
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: one of {', '.join(ORDERS)}")
    places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    if order == "round-robin":
        places.sort(key=lambda place: (place[1], place[0]))
    names = tuple(f"host {host}" for host, _local in places)
    return World(names, tuple(local for _host, local in places), names)


# ---- hosts -> rows ---------------------------------------------------------------------------------------------------


def arrange(hosts: Sequence[str], replicate: int, shard: int) -> list[list[int]]:
    """Rows of ranks (shard groups) with the fewest host borders inside rows. Pure; the same on every rank.

    A row over h hosts has h - 1 borders. A legal mesh exists for every set of hosts, equal or not, in any numbering.
    Rank order is kept, row after row, wherever nothing has fewer borders: hosts that own equal runs of ranks give
    `arange(world).view(replicate, shard)`. Otherwise each host first fills as many rows of its own as it can, and the
    remainders are chained so that rows end where hosts end as often as possible. The chain is exact for all but worlds
    with very many different remainders; there it may not be the best.

    Args:
        hosts: by rank, which host it is on.

    Returns:
        `replicate` rows of `shard` ranks, ascending inside a row and by first rank from row to row. (So row groups are
        in the order torch prefers; columns still need not ascend: hosts "abba" give [0, 3] and [1, 2].)

    Raises:
        ValueError: replicate x shard is not the number of ranks.

    >>> arrange(["a", "b", "a", "b"], replicate=2, shard=2)
    [[0, 2], [1, 3]]
    """
    world = len(hosts)
    if replicate < 1 or shard < 1 or replicate * shard != world:
        counts = ", ".join(f"{host}: {count}" for host, count in Counter(hosts).items())
        raise ValueError(f"{_product_error(world, replicate, shard)} (ranks by host: {counts})")
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)

    rows: list[list[int]] = []
    rest_of: dict[str, list[int]] = {}
    for host, ranks in ranks_of.items():
        num_whole = len(ranks) // shard * shard
        rows += [ranks[start : start + shard] for start in range(0, num_whole, shard)]
        if num_whole < len(ranks):
            rest_of[host] = ranks[num_whole:]
    chain = _chain_hosts({host: len(ranks) for host, ranks in rest_of.items()}, shard)
    rest = [rank for host in chain for rank in rest_of[host]]
    rows += [sorted(rest[start : start + shard]) for start in range(0, len(rest), shard)]
    rows.sort()

    in_rank_order = [list(range(start, start + shard)) for start in range(0, world, shard)]
    if borders(hosts, in_rank_order) <= borders(hosts, rows):
        return in_rank_order
    return rows


def borders(host_of: Sequence[str] | Mapping[int, str], rows: Iterable[Sequence[int]]) -> int:
    """Host borders inside rows: the sum over rows of (hosts in the row - 1)."""
    return sum(len({host_of[rank] for rank in row}) - 1 for row in rows)


def num_spanning(host_of: Sequence[str] | Mapping[int, str], rows: Iterable[Sequence[int]]) -> int:
    """How many of `rows` have ranks on more than one host."""
    return sum(len({host_of[rank] for rank in row}) > 1 for row in rows)


def better_rows(host_of: Mapping[int, str], rows: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """Rows of the same sizes over the same ranks with fewer host borders inside them; None where there are none.

    Args:
        host_of: which host a rank is on.
    """
    ranks = sorted(host_of)
    arranged = arrange([host_of[rank] for rank in ranks], len(rows), len(rows[0]))
    best = [[ranks[index] for index in row] for row in arranged]
    return best if borders(host_of, best) < borders(host_of, rows) else None


def _chain_hosts(remainders: dict[str, int], shard: int) -> list[str]:
    """Hosts with leftover ranks, in an order in which rows cut from the chain end at the end of a host most often.

    Laid end to end and cut every `shard` ranks, H hosts have H - K borders inside rows, where K is how often a running
    total is a multiple of `shard`. Two hosts that fill a row between them are always best together. (Were they in
    different closed groups A and B, {both} and the others of A and B are two closed groups as well.) The rest is
    searched over how many hosts of each remainder have been laid.
    """
    waiting: dict[int, list[str]] = {}
    for host, remainder in remainders.items():
        waiting.setdefault(remainder, []).append(host)
    chain: list[str] = []
    for remainder in sorted(waiting):
        partner = shard - remainder
        while partner in waiting and len(waiting[remainder]) > (partner == remainder) and waiting[partner]:
            chain += [waiting[remainder].pop(0), waiting[partner].pop(0)]
    left = {remainder: names for remainder, names in waiting.items() if names}
    num_states = math.prod(len(names) + 1 for names in left.values())
    counts = {remainder: len(names) for remainder, names in left.items()}
    order = _exact_order(counts, shard) if num_states <= _EXACT_STATES else _greedy_order(counts, shard)
    return chain + [left[remainder].pop(0) for remainder in order]


def _exact_order(counts: dict[int, int], shard: int) -> list[int]:
    """The remainders in an order whose running total is a multiple of `shard` most often."""
    sizes = sorted(counts)
    strides = [math.prod(counts[size] + 1 for size in sizes[index + 1 :]) for index in range(len(sizes))]
    num_states = math.prod(counts[size] + 1 for size in sizes)
    best = [0] * num_states  # state: how many hosts of each size are laid, as one mixed-radix number
    last = [0] * num_states  # index of the size laid last on the best way there
    for state in range(1, num_states):
        laid = [state // stride % (counts[size] + 1) for size, stride in zip(sizes, strides, strict=True)]
        options = [index for index, count in enumerate(laid) if count]
        last[state] = max(options, key=lambda index: best[state - strides[index]])
        total = sum(count * size for count, size in zip(laid, sizes, strict=True))
        best[state] = best[state - strides[last[state]]] + (total % shard == 0)
    order: list[int] = []
    state = num_states - 1
    while state:
        order.append(sizes[last[state]])
        state -= strides[last[state]]
    return order[::-1]


def _greedy_order(counts: dict[int, int], shard: int) -> list[int]:
    """A good order for worlds too varied to search: close the row if one host can, else lay the largest that fits."""
    left = dict(counts)
    order: list[int] = []
    gap = shard
    while left:
        fitting = [size for size in left if size <= gap]
        size = max(fitting) if fitting else min(left)
        order.append(size)
        gap = (gap - size) % shard or shard
        left[size] -= 1
        if not left[size]:
            del left[size]
    return order


# ---- what was asked -> two numbers -----------------------------------------------------------------------------------


def resolve_sizes(world: World, replicate: int | str | None, shard: int | str | None) -> tuple[int, int]:
    """The two sizes of the mesh. Pure.

    Args:
        replicate: number of copies; -1 or "auto" is the rest; None is the default.
        shard: ranks that share a copy; -1 or "auto" is the rest; "node" is the ranks of one host; None is the default.
            With no number given, shard is the ranks of a host (their greatest common divisor where hosts are unequal)
            and replicate what remains. With one given, the other follows.

    Returns:
        (replicate, shard), their product the number of ranks.

    Raises:
        ValueError: not a size, no mesh of that size, or "node" where hosts are unequal; with the sizes that would fit.
    """
    copies = _size("replicate", replicate)
    sharing = _size("shard", shard)
    if _is_auto(replicate) and _is_auto(shard):
        raise ValueError(
            f"replicate={replicate!r} and shard={shard!r}: only one of them can be the rest; give the other"
        )
    per_host = world.ranks_per_host()
    if shard == "node":
        if len(set(per_host.values())) > 1:
            raise ValueError(
                f'shard="node" needs equally many ranks on every host, found {_counts_text(per_host)}; '
                f"shard sizes that fit {_inside_hosts(world)}"
            )
        sharing = next(iter(per_host.values()))
    if copies is None and sharing is None:
        sharing = math.gcd(*per_host.values())
    if copies is None:
        assert sharing is not None
        _check_divides(world.size, "shard", sharing)
        return world.size // sharing, sharing
    if sharing is None:
        _check_divides(world.size, "replicate", copies)
        return copies, world.size // copies
    if copies * sharing != world.size:
        raise ValueError(_product_error(world.size, copies, sharing))
    return copies, sharing


def _is_auto(value: object) -> bool:
    return (isinstance(value, str) and value == "auto") or _as_int(value) == -1


def _as_int(value: object) -> int | None:
    """`value` where it is a whole number of some kind (numpy's as well), else None. A bool is no number here."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _size(name: str, value: object) -> int | None:
    """A number the user fixed, or None where it has to be derived."""
    if value is None or _is_auto(value) or (name == "shard" and isinstance(value, str) and value == "node"):
        return None
    number = _as_int(value)
    if number is None or number < 1:
        node = '"node" for the ranks of a host, ' if name == "shard" else ""
        raise ValueError(
            f"{name}={value!r} is not a mesh size: give a whole number of at least 1, {node}"
            'or -1 or "auto" for the rest'
        )
    return number


def _check_divides(world: int, name: str, size: int) -> None:
    if world % size:
        how = "is larger than" if size > world else "does not divide"
        raise ValueError(f"{name}={size} {how} the world of {world} ranks; sizes that fit: {_join(_divisors(world))}")


def _product_error(world: int, replicate: int, shard: int) -> str:
    if replicate < 1 or shard < 1:
        return f"replicate={replicate} x shard={shard}: sizes start at 1"
    fits_replicate = world // replicate if world % replicate == 0 else "none"
    pairs = ", ".join(f"{world // size} x {size}" for size in _divisors(world))
    return (
        f"replicate={replicate} x shard={shard} needs {replicate * shard} ranks, the world has {world}; "
        f"shard sizes that fit replicate={replicate}: {fits_replicate}; replicate x shard that fit: {pairs}"
    )


def _divisors(number: int) -> list[int]:
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return low + [number // size for size in reversed(low) if size * size != number]


def _inside_hosts(world: World) -> str:
    sizes = _divisors(math.gcd(*world.ranks_per_host().values()))
    return f"inside every host: {_join(sizes)}"


def _counts_text(per_host: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in per_host.items())


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


# ---- what the mesh means for a rank ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """Where one rank stands in the mesh.

    Attributes:
        copy_ranks: the ranks that share a copy of the model with it (its row), in row order, itself included.
        twin_ranks: the ranks that hold the same shard of all copies (its column), in column order, itself included.
        num_hosts: hosts in the world.
        ranks_per_host: number of ranks by host name.
        num_spanning_rows: shard groups that lie on more than one host; 0: every one stays inside a host.
    """

    copy_ranks: tuple[int, ...]
    twin_ranks: tuple[int, ...]
    num_hosts: int
    ranks_per_host: dict[str, int]
    num_spanning_rows: int

    @property
    def stays_inside_hosts(self) -> bool:
        return self.num_spanning_rows == 0


def describe_rows(world: World, rows: Sequence[Sequence[int]], rank: int) -> Placement:
    """What `rows` (see `arrange`) mean for `rank`. Pure."""
    mine = next((row for row in rows if rank in row), None)
    assert mine is not None, f"rank {rank} is in none of the rows"
    column = list(mine).index(rank)
    return Placement(
        copy_ranks=tuple(mine),
        twin_ranks=tuple(row[column] for row in rows),
        num_hosts=len(world.host_ids),
        ranks_per_host=world.ranks_per_host(),
        num_spanning_rows=world.spans(rows),
    )
