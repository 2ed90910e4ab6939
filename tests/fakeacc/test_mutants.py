"""Take away one wait at a time: the race checker has to see it, though every number stays right.

A training step of a small transformer waits some twenty times for a collective. In a mutant one of those waits orders
another stream than the current one; the host waits as ever. Only where another wait does the same, for a collective
that was started later over the same group and so ends later, a mutant is no mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from models import Recipe, Transformer, batch, loss_of

import hsdp
from hsdp.pending import Pending, Transfer

pytestmark = pytest.mark.usefixtures("on_fakeacc")


class Mutant:
    """Stands in for `Pending`'s wait, and leaves the current stream unordered behind the `missing`-th work."""

    def __init__(self, missing: int | None) -> None:
        self.missing = missing
        self.num_waits = 0
        self.covered = False  # whether a later collective of the same group had been waited for by then
        self._started: dict[int, int] = {}  # by id of a work: how many were started before it
        self._waited: dict[tuple[int, ...], int] = {}  # by group: the latest start among the works waited for

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._started[id(transfer.work)] = len(self._started)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        for work, group in transfers:
            assert work is not None
            started = self._started[id(work)]
            if self.num_waits == self.missing:
                self.covered = self._waited.get(group, -1) > started
                wait_elsewhere(work)
            else:
                self._waited[group] = max(started, self._waited.get(group, -1))
                work.wait()
            self.num_waits += 1


def wait_elsewhere(work: Any) -> None:
    here = torch.accelerator.current_stream()
    torch.accelerator.set_stream(torch.Stream(here.device))
    try:
        work.wait()
    finally:
        torch.accelerator.set_stream(here)


def train(rank: int, world: int, mesh: tuple[int, int], mutant: Mutant) -> list[str]:
    """Two steps of a new model; returns the reports of races."""
    import fakeacc

    works: list[Any] = []  # kept, for `id` to tell them apart
    make = Pending.__init__

    def init(pending: Pending, receives: Sequence[Transfer] = (), *args: Any, **kwargs: Any) -> None:
        works.extend(receives)
        mutant.start(receives)
        make(pending, receives, *args, **kwargs)

    with (
        mock.patch.object(Pending, "__init__", init),
        mock.patch.object(Pending, "_wait", lambda _, transfers: mutant.wait(transfers)),
    ):
        torch.manual_seed(0)
        model = hsdp.hybrid_shard(Transformer(2), mesh=mesh, announce=False)
        for step in range(2):
            inputs, targets = batch(Recipe(), step, 0, rank, world)
            loss_of(model(inputs), targets).backward()
    return fakeacc.races()


def take_waits_away(rank: int, world: int, mesh: tuple[int, int]) -> list[tuple[bool, list[str]]]:
    """(whether another wait covers it, reports) of every mutant."""
    whole = Mutant(None)
    assert train(rank, world, mesh, whole) == []
    results = []
    for missing in range(whole.num_waits):
        mutant = Mutant(missing)
        reports = train(rank, world, mesh, mutant)
        results.append((mutant.covered, reports))
    return results


@pytest.mark.parametrize(("mesh", "num_waits"), [((2, 2), 21), ((1, 4), 19), ((4, 1), 2)], ids=["2x2", "1x4", "4x1"])
def test_every_missing_wait_is_reported(mesh: tuple[int, int], num_waits: int) -> None:
    for mutants in run_ranks(4, take_waits_away, mesh, timeout_s=300):
        assert len(mutants) == num_waits
        for number, (covered, reports) in enumerate(mutants):
            print(number, "covered by another wait" if covered else reports[:1])  # pytest -s lists them
            assert bool(reports) != covered, number
        assert sum(covered for covered, _ in mutants) <= 2
