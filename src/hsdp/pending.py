"""Pending: communication under way, whoever started it, and what a wait for it may raise."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

_SOON = timedelta(milliseconds=1)  # to wait for what ought to be there; gloo takes 0 for no limit
_SOURCE = re.compile(r"\[\S*\.(?:cc|cpp|h|hpp):\d+\] ")  # where in gloo's own sources an error came up


class WaitError(RuntimeError):
    """A collective did not complete in time, or a rank that takes part in it is gone.

    `suspects`: the ranks whose part did not come; several where it cannot be told which.
    """

    def __init__(self, text: str, suspects: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.suspects = tuple(suspects)


class PairingError(WaitError):
    """Ranks of one row sent different messages in one collective; `tags[r]` is that of shard rank `r`."""

    def __init__(self, tags: Sequence[int]) -> None:
        super().__init__("ranks sent different messages in one collective")
        self.tags = list(tags)


class Transfer(NamedTuple):
    """One message or collective, and the ranks whose part may be what is waited for."""

    work: dist.Work | None
    suspects: tuple[int, ...]


class Pending:
    """Communication under way.

    `wait()`: the results are there, and further work on the current stream is ordered behind them.
    `drain()`: moreover nothing reads or writes the buffers any more, so that they may be freed or overwritten.
    Both may be called again.
    """

    def __init__(
        self,
        receives: Sequence[Transfer] = (),
        sends: Sequence[Transfer] = (),
        timeout: timedelta | None = None,
        then: Callable[[], None] | None = None,
        keep: Sequence[torch.Tensor] = (),
    ) -> None:
        self._receives = [transfer for transfer in receives if transfer.work is not None]
        self._sends = [transfer for transfer in sends if transfer.work is not None]
        self._timeout = timeout
        self._then = then
        self._keep = tuple(keep)  # buffers that must outlive the transfers

    def wait(self) -> None:
        receives, self._receives = self._receives, []
        self._wait(receives)
        then, self._then = self._then, None
        if then is not None:
            then()

    def drain(self) -> None:
        self.wait()
        sends, self._sends = self._sends, []
        self._wait(sends)
        self._keep = ()

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        """Wait for all; `timeout` is for the whole of it."""
        begun = time.monotonic()
        for work, suspects in transfers:
            assert work is not None
            try:
                if self._timeout is None:
                    work.wait()
                else:
                    left = self._timeout - timedelta(seconds=time.monotonic() - begun)
                    work.wait(max(left, _SOON))
            except RuntimeError as error:
                raise WaitError(_SOURCE.sub("", " ".join(str(error).split())), suspects) from error
