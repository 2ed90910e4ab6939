"""Rank processes that stay up between cases: a case goes to them through a store, what came out comes back likewise.

    with Pool(4) as pool:
        pool.run(case)      # what each rank found, or an error of all ranks as text

One pool a world size. A case that fails ends its ranks, since their groups may be stuck; the next case gets new ones.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import Any

import torch.distributed as dist
from fuzz_cases import Case, train
from harness import RankError, run_ranks
from harness_rank import dump, load
from models import digest

CASE_TIMEOUT_S = 60
LIFETIME_S = 3600
PART_BYTES = 4 * 2**20
RENEW_AFTER = 200  # cases: caches of torch keep some groups alive
GROUP_TIMEOUT_S = 15


def serve(rank: int, world: int, port: int) -> None:
    """In a rank: cases until told to end."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=LIFETIME_S))
    number = 0
    while (case := load(store.get(f"case {number}"))) is not None:
        renew_groups(dist.PrefixStore(f"groups of case {number}", store))
        found = train(case, rank)
        answer = {"digest": digest(found), "found": found if rank == 0 else None}
        put(store, f"answer {number} {rank}", dump(answer))
        number += 1


def put(store: dist.Store, key: str, value: bytes) -> None:
    """In parts: torch's store closes a connection over which 8 MiB come at once."""
    parts = [value[start : start + PART_BYTES] for start in range(0, len(value), PART_BYTES)]
    for i, part in enumerate(parts):
        store.set(f"{key} part {i}", part)
    store.set(key, str(len(parts)))


def get(store: dist.Store, key: str) -> bytes:
    parts = [f"{key} part {i}" for i in range(int(store.get(key)))]
    value = b"".join(store.get(part) for part in parts)
    for part in parts:
        store.delete_key(part)
    return value


def renew_groups(store: dist.Store) -> None:
    """End the groups of the last case, which all ranks are done with: their threads wake up all the time."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


class Pool:
    """See the module's docstring."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._thread: threading.Thread | None = None
        self._error: RankError | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, case: Case) -> list[dict[str, Any]]:
        """The answers of all ranks.

        Raises:
            RankError: a rank failed.
        TimeoutError: they did not answer.
        """
        assert case.world == self.world
        if self._thread is None or self._number >= RENEW_AFTER:
            self.close()
            self._start()
        self._store.set(f"case {self._number}", dump(case))
        keys = [f"answer {self._number} {rank}" for rank in range(self.world)]
        deadline = time.monotonic() + CASE_TIMEOUT_S
        assert self._thread is not None
        while not self._store.check(keys):
            if not self._thread.is_alive():
                self._thread = None
                assert self._error is not None, "the ranks ended without an answer"
                raise self._error
            if time.monotonic() > deadline:
                self._thread = None  # its ranks end with this process at the latest
                raise TimeoutError(f"no answer within {CASE_TIMEOUT_S} s to {case}")
            time.sleep(0.002)
        answers = [load(get(self._store, key)) for key in keys]
        self._number += 1
        return answers

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._number, self._error = 0, None
        self._thread = threading.Thread(target=self._keep_up, name=f"fuzz ranks, {self.world}", daemon=True)
        self._thread.start()

    def _keep_up(self) -> None:
        try:
            run_ranks(
                self.world, serve, self._store.port, timeout_s=LIFETIME_S, group_timeout_s=GROUP_TIMEOUT_S, grace_s=2
            )
        except RankError as error:
            self._error = error

    def close(self) -> None:
        """End the ranks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"case {self._number}", dump(None))
            thread.join()
