"""The text that `hsdp train` learns from: files -> bytes -> windows, the same on every rank.

Holds: which files, the held-out part, and which window is which sample. Must not know: meshes, ranks, models. A sample
is a pure function of (seed, step, its number in the global batch), so neither the mesh nor the number of ranks changes
what a step learns from, and a run that was interrupted goes on with the samples it would have had. Every rank
holds the whole text in memory.

    files, sorted --every 20th--> held-out text       windows at even distances
                  --the others--> training text       a window = seq bytes and the byte after each of them
"""

from __future__ import annotations

import math
import os
import random
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HELD_OUT_EVERY = 20  # one file in 20, or 1/20 of the bytes where there are fewer files than that
STDLIB_CAP_BYTES = 16 * 2**20
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Text:
    """A text in two parts.

    Attributes:
        train: (bytes,) uint8, what is learned from.
        held_out: (bytes,) uint8, what is only measured on.
        num_files: files that were read.
        checksum: CRC-32 of both parts, equal on two ranks only if they have the same text.
    """

    train: Tensor
    held_out: Tensor
    num_files: int
    checksum: int


# ---- files -----------------------------------------------------------------------------------------------------------


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files to read, in an order that is the same everywhere.

    Args:
        paths: files, and folders of which every file counts but hidden ones; none: the running Python's standard
            library, its .py files without tests, up to 16 MiB.

    Raises:
        ValueError: a path that does not exist, or a folder without a file in it.
    """
    if not paths:
        return _stdlib_files()
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(_walk(path, skipped=set()))
            if not found:
                raise ValueError(f"data folder {path} has no files in it (hidden ones do not count)")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"data path {path} does not exist")
    return files


def _walk(folder: Path, skipped: set[str]) -> Iterable[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        yield from (Path(where, name) for name in names if not name.startswith(".") and Path(where, name).is_file())


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    total_bytes = 0
    for path in sorted(_walk(root, _STDLIB_SKIPPED)):
        if path.suffix == ".py" and total_bytes + path.stat().st_size <= STDLIB_CAP_BYTES:
            files.append(path)
            total_bytes += path.stat().st_size
    if not files:
        raise ValueError(f"this Python's standard library has no source files in {root}; name a text with --data")
    return files


def check_size(files: Sequence[Path], seq: int) -> None:
    """Refuse a text too small for one training and one held-out window; looks at file sizes only.

    Raises:
        ValueError: with the numbers, or with the file that cannot be looked at.
    """
    try:
        total_bytes = sum(path.stat().st_size for path in files)
    except OSError as error:
        raise ValueError(f"data: {error.strerror}: {error.filename}") from error
    _require(total_bytes, seq)


def _require(total_bytes: int, seq: int) -> None:
    needed = 2 * (seq + 1)
    if total_bytes < needed:
        raise ValueError(
            f"the data has {total_bytes} bytes, seq={seq} needs at least {needed}: a training and a held-out window "
            "of seq + 1 each; give more data or a smaller --seq"
        )


def load_text(files: Sequence[Path], seq: int) -> Text:
    """Read `files` and split them: every 20th file is held out, or the end of the text where files are few.

    Args:
        seq: bytes in a window; each part gets at least one window of `seq + 1`.

    Raises:
        ValueError: a file that cannot be read, or too few bytes.
    """
    contents: list[bytes] = []
    try:
        for path in files:
            contents.append(path.read_bytes())
    except OSError as error:
        raise ValueError(f"data: {error.strerror}: {error.filename}") from error
    _require(sum(map(len, contents)), seq)
    train = b"".join(text for index, text in enumerate(contents) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1)
    held_out = b"".join(contents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    if min(len(train), len(held_out)) <= seq:
        whole = b"".join(contents)
        cut = len(whole) - max(len(whole) // HELD_OUT_EVERY, seq + 1)
        train, held_out = whole[:cut], whole[cut:]
    return Text(_tensor(train), _tensor(held_out), len(files), zlib.crc32(held_out, zlib.crc32(train)))


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---- windows ---------------------------------------------------------------------------------------------------------


def sample_starts(text: Tensor, seq: int, *, seed: int, step: int, batch: int) -> list[int]:
    """Where the windows of one step's global batch start: `batch` positions in `text`, by number in the batch."""
    # Seeded by a string: Python hashes it with SHA-512, the same on every machine and in every version.
    draw = random.Random(f"{seed}/{step}")
    return [draw.randrange(len(text) - seq) for _ in range(batch)]


def spread_starts(text: Tensor, seq: int, count: int) -> list[int]:
    """Where up to `count` windows start that do not overlap and are spread evenly over `text`."""
    last = len(text) - seq - 1
    count = max(1, min(count, len(text) // (seq + 1)))
    return [last * index // max(1, count - 1) for index in range(count)]


def windows(text: Tensor, starts: Sequence[int], seq: int) -> tuple[Tensor, Tensor]:
    """The windows at `starts` as (inputs, targets), each (len(starts), seq) int64; a target is the byte after it."""
    rows = torch.stack([text[start : start + seq + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def unigram_entropy(text: Tensor) -> float:
    """Entropy of the bytes of `text` in nats a byte: no model that knows only how often each byte occurs does better.

    >>> unigram_entropy(torch.tensor([7, 9, 7, 9], dtype=torch.uint8)) == math.log(2)
    True
    """
    counts = torch.bincount(text.int(), minlength=256).double()
    shares = counts[counts > 0] / len(text)
    return float(-(shares * shares.log()).sum())


def bits(value: Any) -> Any:
    """Nats as bits: a number, or an array of them."""
    return value / math.log(2)


def nats(value: Any) -> Any:
    """Bits as nats: a number, or an array of them."""
    return value * math.log(2)
