"""Reductions of one backward: which gradients still miss, what is on its way inside the row, what is done.

    gradient of a large parameter --send_direct--> in flight --drain--> arrived
    the last gradient of a unit   --send_rest----> packed small ones, flags, zeros for what got no gradient
    backward left a unit  --leave---> the same, where gradients miss; and from here on its reductions may be waited for
    every reduction of a unit arrived: `Gradients` hears of it and sends full buckets down the column

What is on its way is bounded: a rank that is ahead waits. It waits only for units that its backward has left. Ranks may
use different parameters of a unit, so before that another rank may wait for this one to send something else; all leave
units in one order, so among ranks that wait the one that has come least far waits for what every rank has sent.

Must not know when units are gathered or released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from hsdp.gradients import Gradients
from hsdp.pending import Pending, WaitError
from hsdp.segment import Segment
from hsdp.unit import Unit
from hsdp.waits import Waits


class InFlight(NamedTuple):
    """A reduction on its way."""

    unit: Unit
    pending: Pending
    num_bytes: int


@dataclass(eq=False)
class UnitReduction:
    """One unit in one backward."""

    unit: Unit
    missing: set[tuple[Segment, int]] = field(default_factory=set)  # gradients this backward still waits for
    in_flight: list[InFlight] = field(default_factory=list)  # before backward left the unit
    outstanding: int = 0  # reductions sent and not finished
    sent: bool = False  # whether every reduction of this backward is sent
    written: set[tuple[Segment, int]] = field(default_factory=set)  # direct slots reduced in this backward


class Reductions:
    """See the module's docstring."""

    def __init__(self, units: Sequence[Unit], waits: Waits) -> None:
        self._of_unit = {unit: UnitReduction(unit) for unit in units}
        self._waits = waits
        self._in_flight: deque[InFlight] = deque()  # of units that backward left
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

    def leave(self, unit: Unit) -> None:
        """Backward leaves `unit`, at the same place among units on every rank of a row."""
        state = self._of_unit[unit]
        if not state.sent:
            self.send_rest(unit)
        self._leave(state)
        self._wait_for_room(0)

    def _leave(self, state: UnitReduction) -> None:
        self._in_flight += state.in_flight
        state.in_flight = []

    def _launch(self, state: UnitReduction, segment: Segment, pending: Pending, num_bytes: int) -> None:
        state.outstanding += 1
        reduction = InFlight(state.unit, pending, num_bytes)
        if segment.row.size == 1:  # nothing to wait for
            self._finish(reduction)
            return
        state.in_flight.append(reduction)
        self._wait_for_room(sum(each.num_bytes for each in state.in_flight))

    def _wait_for_room(self, num_bytes: int) -> None:
        num_bytes += sum(each.num_bytes for each in self._in_flight)
        while self._in_flight and num_bytes > self._max_in_flight_bytes:
            num_bytes -= self._in_flight[0].num_bytes
            self._finish(self._in_flight.popleft())

    def _finish(self, reduction: InFlight) -> None:
        state = self._of_unit[reduction.unit]
        with self._waits.during("reduce", state.unit.name):
            reduction.pending.drain()
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
        for unit in reversed(self._of_unit):
            self._leave(self._of_unit[unit])
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def end(self) -> None:
        """The backward is over: nothing misses any more."""
        for state in self._of_unit.values():
            state.missing = set()

    def drop(self) -> None:
        """Wait for what is on its way, and forget it."""
        for state in self._of_unit.values():
            self._leave(state)
        while self._in_flight:
            with suppress(WaitError):
                self._in_flight.popleft().pending.drain()


def _first_tag(unit: Unit, segment: Segment) -> int:
    return sum(len(s.params) + 1 for s in unit.segments[: unit.segments.index(segment)])
