"""Reductions of one backward: which gradients still miss, what is on its way inside the row, what is done.

    gradient of a large parameter --send_direct--> in flight --drain--> arrived
    the last gradient of a unit   --send_rest----> packed small ones, flags, zeros for what got no gradient
    every reduction of a unit arrived: `Gradients` hears of it and sends full buckets down the column

Must not know when units are gathered or released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hsdp.collectives import Pending, WaitError
from hsdp.gradients import Gradients
from hsdp.segment import Segment
from hsdp.unit import Unit
from hsdp.waits import Waits


@dataclass(eq=False)
class UnitReduction:
    """One unit in one backward."""

    unit: Unit
    missing: set[tuple[Segment, int]] = field(default_factory=set)  # gradients this backward still waits for
    outstanding: int = 0  # reductions sent and not finished
    sent: bool = False  # whether every reduction of this backward is sent
    written: set[tuple[Segment, int]] = field(default_factory=set)  # direct slots reduced in this backward


class Reductions:
    """See the module's docstring."""

    def __init__(self, units: Sequence[Unit], waits: Waits) -> None:
        self._of_unit = {unit: UnitReduction(unit) for unit in units}
        self._unit_of = {segment: unit for unit in units for segment in unit.segments}
        self._waits = waits
        self._in_flight: deque[tuple[Pending, Segment, int]] = deque()
        self._in_flight_bytes = 0
        largest = max((unit.gathered_bytes for unit in units), default=0)
        self._max_in_flight_bytes = max(largest // 2, 1)
        self._gradients: Gradients | None = None

    def __getitem__(self, unit: Unit) -> UnitReduction:
        return self._of_unit[unit]

    @property
    def gradients(self) -> Gradients:
        assert self._gradients is not None, "a gradient was reduced before a backward began"
        return self._gradients

    def begin(self, gradients: Gradients) -> None:
        """A backward begins, whose sums go to `gradients`."""
        self._gradients = gradients
        for state in self._of_unit.values():
            state.missing = {(s, i) for s in state.unit.segments for i in s.grads.offsets}
            state.outstanding, state.sent, state.written = 0, False, set()

    def send_direct(self, unit: Unit, segment: Segment, slots: Sequence[int]) -> None:
        """Start reducing parameters that travel in messages of their own."""
        state = self._of_unit[unit]
        region, holds_sums = self.gradients.region(segment), self.gradients.holds_sums(segment)
        jobs, numel = [], 0
        for i in slots:
            job, used = segment.direct_job(i, region, holds_sums or (segment, i) in state.written)
            self.gradients.used(segment)[i] |= used
            state.written.add((segment, i))
            jobs.append(job)
            numel += job.full.numel()
        tag = unit.tag + unit.num_tags + _first_tag(unit, segment) + 1 + slots[0]
        self._launch(state, segment, segment.row.reduce(jobs, tag), numel * segment.gathered_dtype.itemsize)

    def send_rest(self, unit: Unit) -> None:
        """Send what was not sent as it appeared: packed slots, flags, and zeros for what got no gradient."""
        state = self._of_unit[unit]
        for segment in unit.segments:
            if not segment.grads.offsets:
                continue
            direct = [i for i in segment.grads.offsets if not segment.layout.slots[i].packed]
            if segment.row.any_order:
                for i in direct:
                    if (segment, i) in state.missing:
                        self.send_direct(unit, segment, [i])
            elif direct:
                self.send_direct(unit, segment, direct)
            region, add = self.gradients.region(segment), self.gradients.holds_sums(segment)
            used = self.gradients.used(segment)
            for i in segment.grads.offsets:
                used[i] |= segment.has_grad(i)
            job = segment.packed_job(used, region, add)
            pending = segment.row.reduce([job], unit.tag + unit.num_tags + _first_tag(unit, segment))
            self._launch(state, segment, pending, job.full.numel() * job.full.element_size())
        state.sent = True
        self._check_arrived(state)

    def _launch(self, state: UnitReduction, segment: Segment, pending: Pending, num_bytes: int) -> None:
        state.outstanding += 1
        self._in_flight.append((pending, segment, num_bytes))
        self._in_flight_bytes += num_bytes
        limit = self._max_in_flight_bytes if segment.row.size > 1 else 0
        while self._in_flight and self._in_flight_bytes > limit:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending, segment, num_bytes = self._in_flight.popleft()
        state = self._of_unit[self._unit_of[segment]]
        with self._waits.during("reduce", state.unit.name):
            pending.drain()
        self._in_flight_bytes -= num_bytes
        state.outstanding -= 1
        self._check_arrived(state)

    def _check_arrived(self, state: UnitReduction) -> None:
        """Tell the gradients once every reduction of a unit has arrived."""
        if state.sent and state.outstanding == 0:
            for segment in state.unit.segments:
                if segment.grads.offsets:
                    self.gradients.segment_reduced(segment)

    def finish(self) -> None:
        """Send what no unit has sent, and wait for everything."""
        for unit in reversed(self._of_unit):
            if unit.reduces and not self._of_unit[unit].sent:
                self.send_rest(unit)
        while self._in_flight:
            self._finish_oldest()

    def end(self) -> None:
        """The backward is over: nothing misses any more."""
        for state in self._of_unit.values():
            state.missing = set()

    def drop(self) -> None:
        """Wait for what is on its way, and forget it."""
        while self._in_flight:
            with suppress(WaitError):
                self._in_flight.popleft()[0].drain()
        self._in_flight_bytes = 0


def _first_tag(unit: Unit, segment: Segment) -> int:
    return sum(len(s.params) + 1 for s in unit.segments[: unit.segments.index(segment)])
