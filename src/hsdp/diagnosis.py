"""What a failed wait means: from what is known of every rank to one text that names the culprit. Pure.

    rank 0  step 7, forward, waits for the gather of 'blocks.2'  --+
    rank 1  step 7, forward, waits for the gather of 'blocks.2'  --+--> "... likely: rank 2 did step 6 and did not begin
    rank 2  after step 6, waits for nothing                      --+     step 7: it has fewer batches ..."
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hsdp.control import format_ranks


class Phase(str, Enum):
    """What a rank is doing. A text, to travel as JSON."""

    START = "before its first step"
    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN = "between"  # a backward that synchronised is over, and no forward has begun
    AFTER_FORWARD = "after forward"
    ENDED = "ended"


@dataclass(frozen=True)
class Seen:
    """What one rank last told of itself.

    Attributes:
        step: synchronising backwards it has finished.
        unit: the unit it last came to.
        sequence: how many units it has come to in all.
        waits_for: "gather", "reduce" or "cross-reduce" of `unit`; "" where it waits for nothing.
        failed: whether that wait has failed.
        silent_s: seconds since its last sign of life; 0 where it is well, or has failed and so may have ended.
    """

    step: int
    phase: Phase
    unit: str
    sequence: int
    waits_for: str = ""
    failed: bool = False
    silent_s: float = 0.0

    @property
    def in_step(self) -> bool:
        return self.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.AFTER_FORWARD)

    @property
    def where(self) -> str:
        """For people."""
        if self.phase is Phase.START:
            return self.phase.value
        if self.phase is Phase.ENDED:
            return f"its process has ended, after step {self.step}"
        if self.phase is Phase.BETWEEN:
            return f"after step {self.step}"
        return f"step {self.step + 1}, {self.phase.value}"

    @property
    def text(self) -> str:
        text = self.where
        if self.waits_for:
            text += f", waits for the {self.waits_for} of unit {self.unit!r}"
        elif self.in_step:
            text += f", came to unit {self.unit!r} last"
        return f"no sign of life for {self.silent_s:.0f} s; last heard of: {text}" if self.silent_s else text


@dataclass(frozen=True)
class Failure:
    """One wait that failed, as the rank that waited knows it.

    Attributes:
        rank: this rank.
        rows: the ranks of the mesh, row by row.
        waited_s: how long, in seconds.
        error: what torch said.
        suspects: ranks whose part did not come, one of them where it cannot be told; empty where nothing is known.
        store_lost: whether nothing can be learnt of other ranks, for the store does not answer.
    """

    rank: int
    rows: Sequence[Sequence[int]]
    waited_s: float
    error: str
    suspects: Sequence[int] = ()
    store_lost: bool = False

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for row in self.rows for rank in row)


def explain(failure: Failure, seen: Mapping[int, Seen]) -> str:
    """The text for people; `seen` has this rank and all ranks that could be heard of."""
    me = seen[failure.rank]
    came = ""
    if failure.suspects:
        which = format_ranks(sorted(failure.suspects))
        came = f", without what has to come from {which if len(failure.suspects) == 1 else 'one of ' + which}"
    lines = [
        f"the {me.waits_for} of unit {me.unit!r} did not complete on rank {failure.rank}: "
        f"waited {failure.waited_s:.1f} s{came} [{failure.error}]"
    ]
    lines += [f"  {format_ranks(ranks)}: {text}" for text, ranks in _by_text(failure, seen).items()]
    return "\n".join([*lines, *(f"likely: {reason}" for reason in reasons(failure, seen))])


def _by_text(failure: Failure, seen: Mapping[int, Seen]) -> dict[str, list[int]]:
    """Ranks by what is to be said of them, in the order of the first one."""
    found: dict[str, list[int]] = {}
    for rank in failure.ranks:
        if rank in seen:
            text = seen[rank].text
        else:
            text = "unknown: the store does not answer" if failure.store_lost else "before its first step"
        found.setdefault(text, []).append(rank)
    return found


def reasons(failure: Failure, seen: Mapping[int, Seen]) -> list[str]:
    """Why the wait failed, as far as the evidence goes; who is gone explains who waits, so it hides the rest."""
    me = seen[failure.rank]
    others = {rank: seen[rank] for rank in failure.ranks if rank in seen and rank != failure.rank}
    silent = [rank for rank, each in others.items() if each.silent_s and each.phase is not Phase.ENDED]
    well = {rank: each for rank, each in others.items() if rank not in silent}
    found = []
    if failure.store_lost:
        found.append(
            "the process that holds the store is dead, stopped or cut off from here (rank 0, unless a launcher such as "
            "torchrun holds it)" + (f", or {format_ranks(sorted(failure.suspects))} is" if failure.suspects else "")
        )
    if silent:
        found.append(f"{format_ranks(silent)}: dead, stopped, or cut off from the store")
    if behind := [rank for rank, each in well.items() if not (each.waits_for or each.in_step) and each.step <= me.step]:
        last = max(seen[rank].step for rank in behind)
        found.append(
            f"{format_ranks(behind)} did step {last} and did not begin step {me.step + 1}: fewer batches than the "
            "others, or busy with something else"
            if last
            else f"{format_ranks(behind)} did not begin the first step"
        )
    absent = [rank for rank in failure.ranks if rank not in seen]
    if absent and not failure.store_lost:
        found.append(f"{format_ranks(absent)} did not begin the first step: dead, stopped, or busy with something else")
    if found:
        return found
    found = [text for row in failure.rows if (text := _split(row, seen))]
    busy = [rank for rank, each in well.items() if not each.waits_for and each.in_step]
    if busy and not found:
        found.append(f"{format_ranks(busy)}: slower than the others by more than the limit, or stuck in its own code")
    return found


def _split(row: Sequence[int], seen: Mapping[int, Seen]) -> str | None:
    """What to say where ranks of one row wait for different things: some went another way through the model."""
    waits: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(row):
        if seen[rank].waits_for:
            waits.setdefault((seen[rank].waits_for, seen[rank].unit), []).append(rank)
    if len(waits) < 2:
        return None
    told = ", ".join(
        f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for the {action} of unit {unit!r}"
        for (action, unit), ranks in waits.items()
    )
    return (
        f"{told}: all ranks of a row must run the same units, equally often and in one order; ranks that wait for "
        "something else skipped it"
    )
