"""Named cases: corners that broken engines were seen to get wrong, in their smallest form, and what fuzzing finds."""

from __future__ import annotations

import pytest
from fuzz_cases import Case, Layer
from fuzz_pool import Pool
from test_fuzz import check_case

CASES = {
    "more than a store takes at once": Case((Layer("linear", 300), Layer("linear", 300), Layer("branch"))),
    "one rank alone": Case(mesh=(1, 1)),
    "no rows on some ranks, cut along the last dim": Case((Layer("linear", 2),), (1, 4), last_dim=True, adam=True),
    "used by some ranks only, deferred": Case((Layer("branch", use="some"),), (2, 2), micro=("reduce", "plain")),
    "a frozen weight is still needed when the last gradient is there": Case(
        (Layer("linear", 64), Layer("residual", 300, frozen="first")), (2, 2), wrap="every layer", reshard=True
    ),
    "weights change after a lone forward": Case((Layer("linear", 300),), (1, 2), reshard=False, lone=True),
    "tied across units": Case((Layer("bare", 6), Layer("tied"), Layer("tied")), (2, 2), wrap="every layer", clip=True),
    "never cleared, deferred in turn": Case(
        (Layer("twice", 131), Layer("scalar")), (4, 1), micro=("cross-reduce", "plain", "reduce", "plain"), zero="never"
    ),
    "recomputed, in two dtypes": Case((Layer("narrow", 64), Layer("norm")), (1, 3), wrap="bottom-up", recompute=True),
    "some ranks wait for what others send later": Case(
        (Layer("linear", 1),) * 3 + (Layer("branch", 1, use="some"), Layer("linear", 3, use="never")),
        (1, 4),
        wrap="auto",
        last_dim=True,
        micro=("plain", "plain"),
        clip=True,
        seed=1,
    ),
    "no gradient reaches a unit on some ranks": Case(
        (Layer("branch", 1, frozen="first", use="some"), Layer("linear", 1)), (2, 2), micro=("plain", "plain")
    ),
    "every rank has its own head": Case(
        (Layer("linear", 64), Layer("heads", 131, use="some")), (2, 2), wrap="nested", micro=("reduce", "plain")
    ),
    "one order of calls, every rank has its own head": Case(
        (Layer("linear", 64), Layer("heads", 131, use="some"), Layer("again")), (1, 2), wrap="nested", grouped=True
    ),
    "one order of calls, no gradient reaches a unit on some ranks": Case(
        (Layer("branch", 1, frozen="first", use="some"), Layer("linear", 1)), (1, 2), grouped=True
    ),
    "one order of calls, tied across units": Case(
        (Layer("bare", 6), Layer("tied"), Layer("tied")), (1, 2), wrap="every layer", grouped=True
    ),
    "one order of calls, used by some ranks only": Case(
        (Layer("branch", 300, use="some"), Layer("branch", 300, use="some")), (2, 2), wrap="every layer", grouped=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_found(pools: dict[int, Pool], name: str) -> None:
    check_case(CASES[name], pools)
