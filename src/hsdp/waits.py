"""When a collective does not complete: who waits for what, told by every rank that failed, in one message.

Messages carry the unit they belong to, so two units are never mixed up; a unit that some ranks of a row skip leaves the
others waiting. A rank whose wait fails writes where it was to the store that the default group was made with, waits a
moment for the others to do the same, and raises with all of it.

    rank 0   skips unit "expert", goes on          waits for reduce of "head"     --- writes, reads, raises
    rank 1   waits for gather of "expert"          ... timeout_s ...              --- writes, reads, raises
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from hsdp.collectives import PairingError, WaitError
from hsdp.control import format_ranks
from hsdp.internals import default_store

GRACE_S = 5.0  # ranks that wait for each other time out within moments, so the last one is heard in this time

SAME_UNITS = "All ranks of a row must run the same units, equally often and in one order"


class Waits:
    """Where this rank waits, for one schedule.

    Args:
        rank: this rank.
        ranks: all ranks of the mesh.
        key: tells this schedule's notes from those of another; equal on all ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int], key: int) -> None:
        self._rank, self._ranks, self._key = rank, list(ranks), key
        self._failures = 0
        self.messages: dict[int, tuple[str, str]] = {}  # by tag: what a message is for, and its unit

    @contextmanager
    def during(self, action: str, unit: str) -> Iterator[None]:
        """Around a wait. `action`: what is waited for, such as "gather".

        Raises:
            RuntimeError: the wait failed; the text names the unit and what every rank that failed was waiting for.
        """
        try:
            yield
        except PairingError as error:
            sent = [self.messages.get(tag, ("message", str(tag))) for tag in error.tags]
            raise RuntimeError(
                "ranks of a row called different things at the same time: "
                + ", ".join(
                    f"shard rank {i}: {what} of unit {name or '(root)'!r}" for i, (what, name) in enumerate(sent)
                )
                + f". {SAME_UNITS}"
            ) from error
        except WaitError as error:
            here = {"action": action, "unit": unit or "(root)"}
            raise RuntimeError(self._explain(here, error)) from error

    def _explain(self, here: dict[str, Any], error: WaitError) -> str:
        notes = {self._rank: here, **self._exchange(here)}
        same = sorted(rank for rank, note in notes.items() if note == here)
        other = [
            f"rank {rank} waits for the {note['action']} of unit {note['unit']!r}"
            for rank, note in sorted(notes.items())
            if note != here
        ]
        silent = sorted(set(self._ranks) - set(notes))
        parts = [
            f"the {here['action']} of unit {here['unit']!r} did not complete: {error}",
            f"waiting for it: {format_ranks(same)}",
            *other,
            *([f"{format_ranks(silent)} did not fail: dead, stopped, or never came this far"] if silent else []),
        ]
        return "; ".join(parts) + f". {SAME_UNITS}; ranks that wait for something else skipped it"

    def _exchange(self, here: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Notes of the other ranks that fail within the grace; none where there is no store any more."""
        self._failures += 1
        prefix = f"hsdp/waits/{self._key}/{self._failures}"
        found: dict[int, dict[str, Any]] = {}
        try:
            store = default_store()
            store.set(f"{prefix}/{self._rank}", json.dumps(here))
            deadline = time.monotonic() + GRACE_S
            waiting = [rank for rank in self._ranks if rank != self._rank]
            while waiting and time.monotonic() < deadline:
                for rank in [rank for rank in waiting if store.check([f"{prefix}/{rank}"])]:
                    found[rank] = json.loads(store.get(f"{prefix}/{rank}"))
                    waiting.remove(rank)
                time.sleep(0.05)
            # The store lives in one of the ranks: it must not go before the others have read.
            store.wait([f"{prefix}/{self._rank}"], timedelta(seconds=1))
            if found:
                time.sleep(0.2)
        except RuntimeError:  # the store's rank is gone
            pass
        return found
