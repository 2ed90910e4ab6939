"""Calls in backward: what is opened and closed, and when, is the same whatever gradients reach on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hsdp.calls import Call, Calls


@dataclass
class Node:
    """A call to come and the calls it makes; `same`: its output is that of the last of them."""

    children: list[Node] = field(default_factory=list)
    same: bool = False
    call: Call | None = None


trees = st.deferred(lambda: st.builds(Node, st.lists(trees, max_size=3), st.booleans()))
chains = st.lists(trees, max_size=4)


def make_unit(trainable: bool = True) -> Any:
    return SimpleNamespace(segments=[SimpleNamespace(grads=SimpleNamespace(offsets={0: 0} if trainable else {}))])


def forward(calls: Calls, node: Node) -> None:
    node.call = calls.begin([make_unit()])
    for child in node.children:
        forward(calls, child)
    assert calls.end(node.call, needs_gradient=True)


def backward(node: Node) -> list[Call]:
    """The calls of `node` in the order in which hooks tell of them. Where an output is a part's, that is first."""
    own = [node.call] if node.call is not None else []
    parts = [backward(child) for child in reversed(node.children)]
    if node.same and parts and parts[0]:
        first, *others = parts
        same = 1 + sum(1 for _ in _tails(node.children[-1]))
        return [*first[:same], *own, *first[same:], *(call for part in others for call in part)]
    return [*own, *(call for part in parts for call in part)]


def _tails(node: Node) -> Any:
    while node.same and node.children:
        node = node.children[-1]
        yield node


def run(tops: list[Node], is_reached: Any) -> list[tuple[str, Call]]:
    calls, events, ahead = Calls(), [], []
    calls.begin_forward()
    root = Node(tops)
    forward(calls, root)

    def open_all(due: Iterator[Call]) -> None:
        for call in due:
            events.extend(("close", over) for over in calls.open(call))
            events.append(("open", call))
            ahead.append([id(unit) for unit in calls.next_units(call)])

    reached = [call for call in backward(root) if call is root.call or is_reached()]
    for call in reached:
        open_all(calls.reach(call))
    open_all(calls.pass_by())
    events.extend(("close", over) for over in calls.leave_all())
    assert not calls.any_expected
    order = [[id(unit) for unit in call.units] for kind, call in events if kind == "open"]
    assert ahead == [*order[1:], []], "what is gathered ahead is not what comes next"
    return events


@settings(max_examples=50, deadline=None)
@given(tops=chains, data=st.data())
def test_every_rank_does_the_same_whatever_gradients_reach(tops: list[Node], data: st.DataObject) -> None:
    def names(events: list[tuple[str, Call]]) -> list[tuple[str, float]]:
        return [(kind, call.began) for kind, call in events]

    for node in _all(tops):
        node.same = False  # then no hook comes out of order
    want = run(tops, lambda: True)
    assert names(run(tops, lambda: data.draw(st.booleans()))) == names(want)


@settings(max_examples=50, deadline=None)
@given(tops=chains, data=st.data())
def test_a_call_is_open_while_its_parts_are_and_closed_before_earlier_ones_open(
    tops: list[Node], data: st.DataObject
) -> None:
    events = run(tops, lambda: data.draw(st.booleans()))
    when = {event: at for at, event in enumerate(events)}
    assert len(when) == len(events)
    calls = [call for kind, call in events if kind == "open"]
    assert len(calls) == 1 + sum(1 for _ in _all(tops))
    for one in calls:
        assert when["open", one] < when["close", one]
        for other in calls:
            if one is not other and one.encloses(other):
                assert when["close", other] < when["close", one]
                assert when["open", one] < when["close", other]
            if one.ended < other.began:
                assert when["close", other] < when["open", one]


def _all(nodes: list[Node]) -> Any:
    for node in nodes:
        yield node
        yield from _all(node.children)


def test_forwards_under_way_are_not_passed_by() -> None:
    calls, made = Calls(), []
    for _ in range(3):
        calls.begin_forward()
        for _ in range(2):
            call = calls.begin([make_unit()])
            calls.end(call, needs_gradient=True)
            made.append(call)
    for first in (0, 2, 4):
        one, two = made[first : first + 2]
        assert list(calls.reach(two)) == [two]
        assert calls.open(two) == []
        assert calls.next_units(two) == one.units
        assert list(calls.pass_by()) == [one]
        assert calls.open(one) == [two]
        assert calls.leave_all() == [one]
        assert calls.any_expected is (first < 4)
        calls.end_backward(forget=False)


def test_a_unit_is_idle_though_another_forward_expects_it() -> None:
    calls, unit, made = Calls(), make_unit(), []
    for _ in range(2):
        calls.begin_forward()
        for _ in range(2):
            call = calls.begin([unit])
            calls.end(call, needs_gradient=True)
            made.append(call)
    assert list(calls.reach(made[3])) == [made[3]]
    calls.open(made[3])
    assert calls.leave(made[3]) == [made[3]]
    assert not calls.is_idle(unit, made[3].number)
    assert list(calls.reach(made[2])) == [made[2]]
    calls.open(made[2])
    assert not calls.is_idle(unit, made[2].number)
    assert calls.leave(made[2]) == [made[2]]
    assert calls.is_idle(unit, made[2].number)
    assert not calls.is_over(unit)


def test_a_second_backward_may_reach_a_part_before_the_whole() -> None:
    calls = Calls()
    calls.begin_forward()
    before = calls.begin([make_unit()])
    calls.end(before, needs_gradient=True)
    outer = calls.begin([make_unit()])
    inner = calls.begin([make_unit()])
    for call in (inner, outer):
        calls.end(call, needs_gradient=True)
    assert list(calls.reach(inner)) == [outer, inner]
    for call in (outer, inner):
        calls.open(call)
    assert list(calls.pass_by()) == [before]
    calls.end_backward(forget=True)
    assert not calls.any_expected
    assert list(calls.reach(inner)) == [outer, inner]
    assert not calls.is_over(before.units[0])
    calls.end_backward(forget=True)
    calls.begin_forward()  # and now nothing is known of them
    for call in (inner, outer):
        assert list(calls.reach(call)) == [call]
        assert calls.open(call) == []
    assert list(calls.reach(before)) == [before]
    assert calls.open(before) == [inner, outer]


def test_a_recomputation_is_a_part_of_what_is_open() -> None:
    calls = Calls()
    calls.begin_forward()
    outer = calls.begin([make_unit()])
    calls.end(outer, needs_gradient=True)
    again = calls.recompute([make_unit()])
    assert list(calls.reach(outer)) == [outer]
    calls.open(outer)
    assert list(calls.reach(again)) == [again]
    assert calls.open(again) == []
    assert calls.leave(again) == [again]
    assert not calls.is_over(outer.units[0])
    assert calls.leave(outer) == [outer]
    assert calls.is_over(outer.units[0])


def test_a_frozen_call_is_expected_after_a_trainable_one_that_is_not_used() -> None:
    calls = Calls()
    calls.begin_forward()
    assert not calls.end(calls.begin([make_unit(trainable=False)]), needs_gradient=False)
    assert calls.end(calls.begin([make_unit()]), needs_gradient=False)
    assert calls.end(calls.begin([make_unit(trainable=False)]), needs_gradient=False)
    calls.begin_forward()
    assert not calls.end(calls.begin([make_unit(trainable=False)]), needs_gradient=False)
