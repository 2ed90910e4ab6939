"""Starts the ranks of one `Job`, waits for their answers, and leaves no process behind.

Ranks live in sessions of their own, so Ctrl-C reaches only this program, which then ends them; should it be killed
outright, they see their stdin close and end by themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from _rank import Job, Record

# glibc gives freed memory back to the system by default, and every fresh page of the next buffer faults again. "kept"
# makes it neither return memory nor ask for a mapping of its own for a large buffer.
MALLOC = {
    "default": {},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 26)},
}
RANK_PROGRAM = Path(__file__).with_name("_rank.py")


def run_ranks(job: Job, malloc: str) -> dict[str, list[Record]]:
    """Run `job` in fresh processes; for each engine the records of rank 0, 1, ...

    Raises RuntimeError with the end of the log of the first rank that failed.
    """
    job_path = job.folder / "job.json"
    job_path.write_text(json.dumps(asdict(job), default=str))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    environment |= MALLOC[malloc]
    world = job.settings.world
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            with log_path(job, rank).open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", str(RANK_PROGRAM), str(job_path), str(rank)],
                        stdin=subprocess.PIPE,
                        stdout=sys.stderr if rank == 0 and job.mode == "time" else subprocess.DEVNULL,
                        stderr=log,
                        env=environment,
                        start_new_session=True,
                    )
                )
        wait(job, ranks)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
            if process.stdin:
                process.stdin.close()
    answers = [json.loads((job.folder / f"rank{rank}.json").read_text()) for rank in range(world)]
    return {name: [Record(**answer[name]) for answer in answers] for name in job.engines}


def log_path(job: Job, rank: int) -> Path:
    return job.folder / f"rank{rank}.log"


def wait(job: Job, ranks: list[subprocess.Popen[bytes]]) -> None:
    """Until all ranks are done; the first to fail ends the wait."""
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            break
        time.sleep(0.2)
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if failed:
        # Ranks that lost a peer fail too: the log that was finished first is the cause.
        rank = min(failed, key=lambda rank: log_path(job, rank).stat().st_mtime)
        tail = log_path(job, rank).read_text(errors="replace").strip()[-3000:]
        status = ranks[rank].returncode
        reason = tail or ("killed from outside; was there enough memory?" if status < 0 else "no message")
        raise RuntimeError(f"rank {rank} ended with status {status} in the {job.mode} run:\n{reason}")
