"""Calls: forwards of wrapped modules, and which of them a backward has reached, passed by or left.

    forward   begin --end--> expected, if gradients may reach an output
    backward  expected --reach, pass_by--> due --open--> open --open of one outside it, leave, leave_all--> over

Autograd runs last made first. So when a gradient reaches a call, all later calls are over, and one that no gradient has
reached by then gets none on this rank. It may on another, where ranks use different parameters, and all must do the
same: a call that is passed by has its turn like one that is reached.

Must not know what is done with the units of a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hsdp.unit import Unit


@dataclass(eq=False)
class Call:
    """One forward of a wrapped module.

    Args:
        units: what it needs: the module's own, then those that own parameters tied to its own.
        number: of the root's forward that it is a part of.
        began: when, by a clock that counts begins and ends. A recomputation has no time of its own: it may be a part
            of every call that is open, and no other is a part of it.
    """

    units: list[Unit]
    number: int
    began: float = math.inf
    ended: float = -math.inf

    @property
    def is_trainable(self) -> bool:
        return any(segment.grads.offsets for unit in self.units for segment in unit.segments)

    @property
    def is_recomputation(self) -> bool:
        return self.began == math.inf

    def encloses(self, other: Call) -> bool:
        """Whether `other` is a part of it, or itself."""
        return self.began <= other.began and other.ended <= self.ended


class Calls:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._num_forwards = 0  # of the root
        self._clock = itertools.count()
        self._differs = False  # whether gradients of this forward may pass other calls on other ranks
        self._expected: list[Call] = []  # as they ended
        self._taken: list[Call] = []  # what was due in this backward
        self._passed: list[Call] = []  # in earlier ones of this forward; another one through its graph may come
        self._open: list[Call] = []  # outer ones first
        self._numbers: set[int] = set()  # of the forwards that this backward goes through

    def begin_forward(self) -> None:
        """The root's forward begins."""
        self._num_forwards += 1
        self._differs, self._passed = False, []

    def begin(self, units: list[Unit]) -> Call:
        return Call(units, self._num_forwards, next(self._clock))

    def recompute(self, units: list[Unit]) -> Call:
        return Call(units, self._num_forwards)

    def end(self, call: Call, needs_gradient: bool) -> bool:
        """`call` ended, and on this rank an output needs a gradient, or none does. Returns whether one is expected.

        The answer is the same on ranks that use different parameters. Only a frozen call that depends on no trainable
        one, after a trainable one whose outputs need no gradient, is expected without reason.
        """
        call.ended = next(self._clock)
        self._differs |= call.is_trainable and not needs_gradient
        if needs_gradient or self._differs:
            self._expected.append(call)
        return needs_gradient or self._differs

    @property
    def any_expected(self) -> bool:
        return bool(self._expected)

    def reach(self, call: Call) -> Iterator[Call]:
        """A gradient has reached `call`: the calls that are due, in order. Those before the last were passed by."""
        if call in self._passed:
            self._expect_again(call.number)
        # Not expected in a recomputation, and where an output is that of a part of the module, which came first.
        if call not in self._expected:
            if call not in self._open:
                yield call
            return
        self._numbers.add(call.number)
        for each in self._ended_after(call.ended):
            if each.began > call.ended or each.encloses(call):
                yield self._take(each)

    def pass_by(self, call: Call | None = None) -> Iterator[Call]:
        """The calls inside of `call` that no gradient has reached, in order; all of this backward's if it is `None`."""
        for each in self._ended_after(-math.inf if call is None else call.began):
            if call is None or call.encloses(each):
                yield self._take(each)

    def _ended_after(self, time: float) -> Iterator[Call]:
        """Last first. Other forwards that are under way have a backward of their own."""
        later = itertools.takewhile(lambda each: each.ended >= time, reversed(self._expected))
        yield from [each for each in later if each.number in self._numbers]

    def _take(self, call: Call) -> Call:
        self._expected.remove(call)
        self._taken.append(call)
        return call

    def _expect_again(self, number: int) -> None:
        again = [each for each in self._passed if each.number == number]
        self._expected = sorted(self._expected + again, key=lambda each: each.ended)
        self._passed = [each for each in self._passed if each.number != number]

    def open(self, call: Call) -> list[Call]:
        """The backward of `call` begins. Returns the calls that are over by that, inner ones first."""
        over = [each for each in reversed(self._open) if not (each.encloses(call) or call.encloses(each))]
        inside = [each for each in self._open if call.encloses(each)]
        outside = [each for each in self._open if each.encloses(call)]
        self._open = [*outside, call, *inside]
        return over

    def leave(self, call: Call) -> list[Call]:
        """The gradients of all inputs of `call` are complete. Returns the calls that are over by that."""
        if call not in self._open:
            return []
        at = self._open.index(call)
        over = self._open[at:]
        del self._open[at:]
        return over[::-1]

    def leave_all(self) -> list[Call]:
        """The backward ends. Returns the calls that are over by that."""
        over, self._open = self._open[::-1], []
        return over

    def next_units(self, call: Call) -> list[Unit]:
        """The units of the call whose turn comes after `call`, in the order of backward."""
        for each in reversed(self._expected):
            if each.number == call.number and not call.is_recomputation:
                return each.units[::-1]
        return []

    def is_over(self, unit: Unit) -> bool:
        """Whether no call that needs `unit` is open or expected."""
        return not any(unit in call.units for call in (*self._open, *self._expected))

    def is_idle(self, unit: Unit, number: int) -> bool:
        """Whether none is open, nor expected of the forward of this number."""
        expected = (call for call in self._expected if call.number == number)
        return not any(unit in call.units for call in (*self._open, *expected))

    def end_backward(self, forget: bool) -> None:
        """No backward runs any more. `forget`: what is still expected is so no more, unless a gradient reaches it."""
        self._passed += self._taken
        if forget:
            self._passed += self._expected
            self._expected = []
        self._open, self._taken, self._numbers = [], [], set()
