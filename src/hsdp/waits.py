"""Around every wait: what is waited for, and what is raised when it does not come.

Messages carry the unit they belong to, so two units are never mixed up; a unit that some ranks of a row skip leaves the
others waiting. A rank whose wait fails asks the monitor who is where, and raises with all of it.

    rank 0   skips unit "expert", goes on          waits for reduce of "head"     --- tells, listens, raises
    rank 1   waits for gather of "expert"          ... timeout_s ...              --- tells, listens, raises
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hsdp.internals import default_store
from hsdp.monitor import BEAT_S, Event, Monitor, Watch
from hsdp.pending import PairingError, WaitError

SAME_UNITS = "All ranks of a row must run the same units, equally often and in one order"


class Waits:
    """The waits of one schedule.

    Args:
        rank: this rank.
        rows: the ranks of the mesh, row by row.
        key: tells this schedule's records from those of another; equal on all ranks.
        limit_s: how long a wait may last.
        record_event: gives an event behind what is queued on the device, where the host does not wait for it.
    """

    def __init__(
        self,
        rank: int,
        rows: Sequence[Sequence[int]],
        key: str,
        limit_s: float,
        record_event: Callable[[], Event | None] | None = None,
    ) -> None:
        self._made_of = (rank, rows, key, limit_s, record_event)
        self.messages: dict[int, tuple[str, str]] = {}  # by tag: what a message is for, and its unit
        self.monitor = Monitor(f"hsdp/monitor/{key}", rank, rows, min(BEAT_S, limit_s / 4))
        self.progress = self.monitor.progress
        self._watch = Watch(self.monitor, limit_s)
        self._record_event = record_event
        self._started = False

    def for_copy(self, number: int) -> Waits:
        """Those of copy `number` of the model."""
        rank, rows, key, limit_s, record_event = self._made_of
        return Waits(rank, rows, f"{key}/{number}", limit_s, record_event)

    def start(self, owner: object) -> None:
        """Begin to tell the other ranks of this one's progress, as long as `owner` lives."""
        if not self._started:
            self._started = True
            self.monitor.start(default_store())
            weakref.finalize(owner, self.stop)  # also when the process ends

    def stop(self) -> None:
        """Nothing of it runs any more."""
        self._watch.stop()
        self.monitor.stop()

    @contextmanager
    def during(self, action: str, unit: str) -> Iterator[None]:
        """Around a wait. `action`: what is waited for, such as "gather".

        Raises:
            RuntimeError: the wait failed; the text names the unit, where every rank is, and who is missing.
        """
        self._watch.check()
        progress = self.progress
        came_to, progress.unit, progress.waits_for = progress.unit, unit or "(root)", action
        since = time.monotonic()
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
            raise RuntimeError(self.monitor.explain(time.monotonic() - since, str(error), error.suspects)) from error
        progress.unit, progress.waits_for = came_to, ""
        if self._record_event is not None:
            self._watch.add(self._record_event(), action, unit or "(root)")
