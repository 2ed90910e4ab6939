"""What a failed wait is explained with, from what is known of the ranks."""

from __future__ import annotations

import pytest

from hsdp.diagnosis import Failure, Phase, Seen, explain, reasons

BACK, FORE, BETWEEN, AFTER = Phase.BACKWARD, Phase.FORWARD, Phase.BETWEEN, Phase.AFTER_FORWARD
ME = Seen(6, FORE, "blocks.2", 40, "gather")
LOST = Failure(0, [[0, 1], [2, 3]], 60.0, "timed out", (3,))


def seen_of(third: Seen | None, me: Seen = ME, others: Seen = ME) -> dict[int, Seen]:
    """Ranks 0 to 2 wait for the same thing; rank 3 is the one that differs."""
    seen = {0: me, 1: others, 2: others}
    return seen if third is None else {**seen, 3: third}


@pytest.mark.parametrize(
    ("third", "line", "reason"),
    [
        (
            Seen(6, BETWEEN, "head", 39),
            "  rank 3: after step 6",
            "rank 3 did step 6 and did not begin step 7: fewer batches than the others, or busy with something else",
        ),
        (
            Seen(6, Phase.ENDED, "head", 39),
            "  rank 3: its process has ended, after step 6",
            "rank 3 did step 6 and did not begin step 7: fewer batches",
        ),
        (
            Seen(6, FORE, "blocks.1", 39, silent_s=3.4),
            "  rank 3: no sign of life for 3 s; last heard of: step 7, forward, came to unit 'blocks.1' last",
            "rank 3: dead, stopped, or cut off from the store",
        ),
        (
            Seen(6, FORE, "head", 39, "reduce", silent_s=9.0),
            "  rank 3: no sign of life for 9 s; last heard of: step 7, forward, waits for the reduce of unit 'head'",
            "rank 3: dead, stopped, or cut off from the store",
        ),
        (
            Seen(6, FORE, "blocks.1", 39),
            "  rank 3: step 7, forward, came to unit 'blocks.1' last",
            "rank 3: slower than the others by more than the limit, or stuck in its own code",
        ),
        (
            Seen(6, BACK, "head", 41, "reduce", True),
            "  rank 3: step 7, backward, waits for the reduce of unit 'head'",
            "rank 2 waits for the gather of unit 'blocks.2', rank 3 waits for the reduce of unit 'head': all ranks ",
        ),
        (
            Seen(0, Phase.START, "", 0),
            "  rank 3: before its first step",
            "rank 3 did not begin the first step",
        ),
        (None, "  rank 3: before its first step", "rank 3 did not begin the first step: dead, stopped, or busy"),
    ],
)
def test_the_culprit(third: Seen | None, line: str, reason: str) -> None:
    text = explain(LOST, seen_of(third))
    assert text.splitlines() == [
        "the gather of unit 'blocks.2' did not complete on rank 0: waited 60.0 s, without what has to come from rank 3 "
        "[timed out]",
        "  ranks 0-2: step 7, forward, waits for the gather of unit 'blocks.2'",
        line,
        text.splitlines()[-1],
    ]
    assert text.splitlines()[-1].startswith(f"likely: {reason}")
    assert len(reasons(LOST, seen_of(third))) == 1


def test_where_the_store_does_not_answer() -> None:
    failure = Failure(2, [[0, 1, 2, 3]], 60.0, "timed out", (0, 1), store_lost=True)
    text = explain(failure, {2: ME})
    assert "without what has to come from one of ranks 0, 1" in text
    assert "  ranks 0, 1, 3: unknown: the store does not answer" in text
    assert "likely: the process that holds the store is dead, stopped or cut off from here (rank 0, unless" in text


def test_one_that_is_a_step_ahead_is_not_behind() -> None:
    """Rows need not be in step: a row that nobody of this one waits for may be further."""
    assert reasons(LOST, seen_of(Seen(7, BETWEEN, "head", 80))) == []


def test_whoever_is_gone_explains_those_who_wait_elsewhere() -> None:
    seen = {0: ME, 1: Seen(6, BACK, "head", 41, "reduce"), 2: ME, 3: Seen(6, BACK, "head", 41, silent_s=4)}
    assert reasons(LOST, seen) == ["rank 3: dead, stopped, or cut off from the store"]


def test_rows_may_be_at_different_units() -> None:
    other = Seen(6, BACK, "head", 41, "cross-reduce")
    assert reasons(LOST, {0: ME, 1: ME, 2: other, 3: other}) == []


def test_nothing_is_made_up() -> None:
    """All wait for one thing, and no message was lost that anybody knows of."""
    failure = Failure(0, [[0, 1, 2]], 60.0, "timed out")
    text = explain(failure, {0: ME, 1: ME, 2: ME})
    assert text.splitlines()[1:] == ["  ranks 0-2: step 7, forward, waits for the gather of unit 'blocks.2'"]
