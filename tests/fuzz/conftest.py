"""Ranks that stay up between the cases of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz_pool import Pool


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    pools = {world: Pool(world) for world in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()
