"""Models, meshes, wrappings and microbatch patterns that nobody thought of, against one plain process.

    HSDP_FUZZ_CASES=5000 HSDP_FUZZ_SEED=7 pytest tests/fuzz/test_fuzz.py      # other cases, and more of them

Without the variables the cases are the same in every run. A failure prints the smallest case that fails; it becomes a
named one in test_found.py.
"""

from __future__ import annotations

import os

from fuzz_cases import Case, cases, train
from fuzz_pool import Pool
from hypothesis import HealthCheck, Phase, given, seed, settings
from models import assert_close

NUM_CASES = int(os.environ.get("HSDP_FUZZ_CASES", "250"))
SEED = os.environ.get("HSDP_FUZZ_SEED")


def check_case(case: Case, pools: dict[int, Pool]) -> None:
    answers = pools[case.world].run(case)
    assert {answer["digest"] for answer in answers} == {answers[0]["digest"]}, "ranks differ"
    want, got = train(case, None), answers[0]["found"]
    assert sorted(got) == sorted(want)
    assert_close({name: got[name] for name in want}, want, case.atol, "value")


@settings(
    max_examples=NUM_CASES,
    derandomize=SEED is None,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@seed(int(SEED or 0))
@given(case=cases)
def test_any_training_equals_one_process(pools: dict[int, Pool], case: Case) -> None:
    check_case(case, pools)
