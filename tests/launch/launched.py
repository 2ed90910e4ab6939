"""What the tests of launchers share: the environment of a rank, waiting for what was started, reading what it printed.

examples/train.py prints, beside the announcement of the mesh, one line a rank at its end:

    rank 2 on host1: held-out loss 0.027402
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAUNCH = EXAMPLES / "launch"
TRAIN = (str(EXAMPLES / "train.py"), "12")  # 12 steps
TIMEOUT_S = 120.0

# No end of line: torchrun's Python is unbuffered, so the end is a write of its own and another rank may come between.
_LAST_LINE = re.compile(r"rank (\d+) on (\S+): held-out loss (\d+\.\d{6})")


def environment(**more: str) -> dict[str, str]:
    """Variables for a launcher and its ranks: this Python and this source tree first, one thread, no chatter.

    HSDP_HOST of the surrounding environment would hide which host is which.
    """
    python = str(Path(sys.executable).parent)
    return {
        "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "HSDP_HOST": "",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **more,
    }


def finish(processes: Iterable[subprocess.Popen[str]], timeout_s: float = TIMEOUT_S) -> str:
    """Wait until all have ended well, and return what they printed, process after process."""
    processes = list(processes)
    deadline = time.monotonic() + timeout_s
    texts: list[str] = []
    late = False
    for process in processes:
        try:
            text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            late = True
            process.kill()
            text = (error.output or b"").decode(errors="replace")  # what it started may hold the pipe open
            process.stdout.close()
            process.wait()
        texts.append(f"{text}[exit status {process.returncode}]\n")
    output = "".join(texts)
    assert not late, f"not done within {timeout_s:g} s:\n{output}"
    assert not any(process.returncode for process in processes), output
    return output


@dataclass(frozen=True)
class Trained:
    """What a run of examples/train.py ended with: every rank's host and loss, and the announcement."""

    hosts: Mapping[int, str]
    losses: Mapping[int, float]
    text: str

    @classmethod
    def of(cls, text: str) -> Trained:
        lines = {(int(rank), host, float(loss)) for rank, host, loss in _LAST_LINE.findall(text)}
        # One that is there twice is what Ray prints. Two different ones of a rank are two runs.
        assert len({rank for rank, _, _ in lines}) == len(lines), f"a rank is there twice:\n{text}"
        return cls({rank: host for rank, host, _ in lines}, {rank: loss for rank, _, loss in lines}, text)

    def ranks_by_host(self) -> dict[str, list[int]]:
        return {host: [rank for rank in sorted(self.hosts) if self.hosts[rank] == host] for host in self.hosts.values()}

    def check(self, ranks_by_host: Mapping[str, list[int]], *, sizes: str, sharing: str, twins: str) -> None:
        """Every rank ran where it should have, on the announced mesh, whose rows are inside hosts, and all agree.

        Args:
            sizes, sharing, twins: as announced: "2 x shard 2, on 2 hosts", and of rank 0 "ranks 0, 1", "ranks 0, 2".
        """
        assert self.ranks_by_host() == ranks_by_host, self.text
        assert f"HSDP over {len(self.hosts)} ranks = replicate {sizes}\n" in self.text, self.text
        mine = f"rank 0 shares one copy of the model with {sharing}, and its part has twins on {twins}\n"
        assert mine in self.text, self.text
        assert "shard groups stay inside a host: yes\n" in self.text, self.text
        assert len(set(self.losses.values())) == 1, self.text
        assert next(iter(self.losses.values())) < 1, self.text  # 2.2 before the first step
