"""Who waits where: every rank tells the others of its progress, so that a wait that fails can say who is missing.

    the thread that trains   progress.come_to(...) at every unit: a few attributes are set, nothing else
    `Monitor`'s thread       once a second: tells the store of it; when a wait has failed, listens to the others, too
    `Watch`'s thread         on a device that works behind the host's back nothing waits on the host: it looks at events

The store is that of the default process group, through a connection of the thread's own: a store whose process is
stopped never answers, and then that thread waits and not the training. Every rank sends some 100 bytes a second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hsdp.diagnosis import Failure, Phase, Seen, explain

BEAT_S = 1.0
SILENT_S = 2.5  # so long without a beat, and a rank counts as silent
LISTEN_S = 3.0  # how long to listen after a failure: longer than SILENT_S, and over within 5 s of the limit
POLL_S = 0.3  # between two looks while listening
JOIN_S = 1.0
EXIT_STATUS = 70


@dataclass
class Progress:
    """Where this rank is; set by the training, read by the heartbeat."""

    step: int = 0
    phase: Phase = Phase.START
    unit: str = ""
    sequence: int = 0
    waits_for: str = ""
    failed: bool = False

    def come_to(self, phase: Phase, unit: str) -> None:
        """The training has come to `unit`."""
        self.phase, self.unit = phase, unit or "(root)"
        self.sequence += 1

    def finish_backward(self, synchronised: bool) -> None:
        self.step += synchronised
        self.phase = Phase.BETWEEN

    def recover(self) -> None:
        """The caller has dealt with a failure."""
        self.phase, self.waits_for, self.failed = Phase.BETWEEN, "", False

    def told(self) -> list[Any]:
        """As it travels."""
        return [self.step, self.phase.value, self.unit, self.sequence, self.waits_for, self.failed]


def _seen(told: Sequence[Any], silent_s: float) -> Seen:
    step, phase, unit, sequence, waits_for, failed = told
    gone = silent_s >= SILENT_S and not failed  # whoever has told of a failure may end
    return Seen(step, Phase(phase), unit, sequence, waits_for, failed, silent_s if gone else 0.0)


@dataclass
class _Heard:
    """The last beat of another rank, and when it was new, by this rank's clock."""

    beat: int
    told: list[Any]
    at: float


class Monitor:
    """The heartbeat of one rank.

    Args:
        key: names this model's records in the store; equal on all ranks, and no other model's.
        rank: this rank.
        rows: the ranks of the mesh, row by row.
        beat_s: seconds between two beats.
    """

    def __init__(self, key: str, rank: int, rows: Sequence[Sequence[int]], beat_s: float = BEAT_S) -> None:
        self.rank, self.rows, self.progress = rank, rows, Progress()
        self._others = [other for row in rows for other in row if other != rank]
        self._key, self._beat_s = key, beat_s
        self._num_beats = 0
        self._heard: dict[int, _Heard] = {}
        self._rounds = 0  # of listening that the store answered
        self._listened_at = 0.0
        self._store_lost = False  # whether it did not answer when it was needed
        self._thread: threading.Thread | None = None
        self._stopped, self._listening, self._wake = threading.Event(), threading.Event(), threading.Event()

    def start(self, store: Any) -> None:
        """Begin to beat, over a connection of its own to `store`."""
        if self._thread is None and self._others:
            name = f"hsdp-monitor-{self.rank}"
            self._thread = threading.Thread(target=self._run, args=(store,), name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Tell that this rank has ended, and end the thread; may be called again."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(0 if self._store_lost else JOIN_S)  # a store that does not answer holds it up

    def explain(self, waited_s: float, error: str, suspects: Sequence[int] = ()) -> str:
        """After a wait has failed: tell the others, listen to them for a while, and say what is known."""
        self.progress.failed = True
        self._store_lost = not self._listen()
        now = self._listened_at
        seen = {rank: _seen(heard.told, now - heard.at) for rank, heard in list(self._heard.items())}
        seen[self.rank] = _seen(self.progress.told(), 0.0)
        return explain(Failure(self.rank, self.rows, waited_s, error, suspects, self._store_lost), seen)

    def _listen(self) -> bool:
        """Let the thread listen until nothing more will be learnt, at most `LISTEN_S`; whether the store answered."""
        rounds, deadline = self._rounds, time.monotonic() + LISTEN_S
        self._listening.set()
        self._wake.set()
        while self._thread is not None and time.monotonic() < deadline:
            time.sleep(POLL_S / 3)
            if self._rounds > rounds and self._all_failed():
                # The store may live in this process: it must not go before the others have listened, too.
                time.sleep(2 * POLL_S)
                break
        return self._rounds > rounds or not self._others

    def _all_failed(self) -> bool:
        heard = list(self._heard.values())
        over = [each for each in heard if each.told[5] or each.told[1] == Phase.ENDED.value]
        return len(over) == len(self._others)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self, store: Any) -> None:
        # Whatever is wrong with the store, the training goes on; a failed wait then says that it did not answer.
        with suppress(RuntimeError, ValueError):
            store = store.clone() if hasattr(store, "clone") else store
            while not self._stopped.is_set():
                self._tell(store)
                if self._listening.is_set():
                    self._hear(store)
                self._wake.wait(POLL_S if self._listening.is_set() else self._beat_s)
                self._wake.clear()
            self.progress.phase, self.progress.waits_for = Phase.ENDED, ""
            self._tell(store)

    def _tell(self, store: Any) -> None:
        self._num_beats += 1
        store.set(f"{self._key}/{self.rank}", json.dumps([self._num_beats, self.progress.told()]))

    def _hear(self, store: Any) -> None:
        keys = {rank: f"{self._key}/{rank}" for rank in self._others}
        if not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        found = store.multi_get(list(keys.values())) if keys else []
        self._listened_at = time.monotonic()
        for rank, text in zip(keys, found, strict=True):
            beat, told = json.loads(text)
            heard = self._heard.get(rank)
            if heard is None or heard.beat != beat:
                self._heard[rank] = _Heard(beat, told, self._listened_at)
        self._rounds += 1


class Event(Protocol):
    """What is queued on a device up to some place."""

    def query(self) -> bool:
        """Whether the device has come there."""


class _Watched(NamedTuple):
    event: Event
    action: str
    unit: str
    since: float


class Watch:
    """Finds that a device is stuck in a collective, which no wait on the host tells.

    Args:
        limit_s: how long the device may take. The watch is a beat ahead of it: the backend's own watchdog has the same
            limit and ends the process with less to say.
        exit_process: ends a process whose training is stuck where it cannot raise.
    """

    def __init__(self, monitor: Monitor, limit_s: float, exit_process: Callable[[int], Any] = os._exit) -> None:
        self._monitor, self._limit_s, self._exit_process = monitor, max(limit_s - BEAT_S, limit_s / 2), exit_process
        self._watched: deque[_Watched] = deque()
        self._error: str | None = None
        self._raised = threading.Event()
        self._stopped = threading.Event()
        self._trains = threading.get_ident()
        self._thread: threading.Thread | None = None

    def add(self, event: Event | None, action: str, unit: str) -> None:
        """Watch a wait that was queued on the device; a device without events is not watched."""
        if event is None:
            return
        self._watched.append(_Watched(event, action, unit, time.monotonic()))
        if self._thread is None:
            self._trains = threading.get_ident()
            self._thread = threading.Thread(target=self._run, name="hsdp-watch", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """
        Raises:
            RuntimeError: the device is stuck.
        """
        if self._error is not None:
            self._raised.set()
            raise RuntimeError(self._error)

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stopped.wait(min(BEAT_S, self._limit_s / 4)):
            while self._watched and self._watched[0].event.query():
                self._watched.popleft()
            waited_s = time.monotonic() - self._watched[0].since if self._watched else 0.0
            if waited_s >= self._limit_s:
                self._give_up(self._watched[0], waited_s)
                return

    def _give_up(self, oldest: _Watched, waited_s: float) -> None:
        """Print what is known, and see that the training ends: raising if it comes to a wait, else with its process."""
        progress = self._monitor.progress
        progress.waits_for, progress.unit = oldest.action, oldest.unit
        self._error = self._monitor.explain(waited_s, "the device has not completed it")
        print(f"{self._error}\nrank {self._monitor.rank} is in:\n{stack_of(self._trains)}", file=sys.stderr, flush=True)
        if not self._raised.wait(BEAT_S):
            self._exit_process(EXIT_STATUS)


def stack_of(thread: int) -> str:
    """The Python stack of a thread, as in a traceback."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "  (the thread has ended)\n"
