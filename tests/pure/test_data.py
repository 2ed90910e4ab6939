"""data.py: which files, which bytes are held out, which window is which sample."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hsdp.data import (
    STDLIB_CAP_BYTES,
    bits,
    check_size,
    find_files,
    load_text,
    nats,
    sample_starts,
    spread_starts,
    unigram_entropy,
    windows,
)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def text_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_folder_gives_its_files_in_sorted_order_without_hidden_ones(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"", "a/z.txt": b"", "a/.git/x": b"", ".hidden": b"", "a/b/c.bin": b""})
    found = [path.relative_to(tmp_path).as_posix() for path in find_files([str(tmp_path)])]
    assert found == ["a/b/c.bin", "a/z.txt", "b.txt"]


def test_paths_keep_the_order_they_were_given_in(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": b"", "folder/c.txt": b"", "a.txt": b""})
    given = [str(tmp_path / name) for name in ("b.txt", "folder", "a.txt")]
    assert [path.name for path in find_files(given)] == ["b.txt", "c.txt", "a.txt"]


def test_the_standard_library_is_the_default() -> None:
    files = find_files([])
    assert files == sorted(files)
    assert {path.suffix for path in files} == {".py"}
    assert "argparse.py" in {path.name for path in files}
    assert not {"test", "tests", "site-packages"} & {part for path in files for part in path.parts}
    assert 10**6 < sum(path.stat().st_size for path in files) <= STDLIB_CAP_BYTES


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data path .*/nothing does not exist"):
        find_files([str(tmp_path / "nothing")])
    write(tmp_path, {".hidden": b"x"})
    with pytest.raises(ValueError, match=r"data folder .* has no files in it"):
        find_files([str(tmp_path)])


def test_too_few_bytes_are_refused_with_the_numbers(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"x" * 60, "b": b"x" * 5})
    files = find_files([str(tmp_path)])
    check_size(files, seq=31)  # 65 bytes, 2 windows of 32 need 64
    load_text(files, seq=31)
    for check in (check_size, load_text):
        with pytest.raises(ValueError, match="the data has 65 bytes, seq=32 needs at least 66"):
            check(files, seq=32)
    (tmp_path / "b").unlink()
    for check in (check_size, load_text):
        with pytest.raises(ValueError, match=r"data: No such file or directory: .*/b"):
            check(files, seq=1)


# ---- the two parts ---------------------------------------------------------------------------------------------------


def test_every_20th_file_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, {f"{index:02}": bytes([index, index]) for index in range(41)})
    text = load_text(find_files([str(tmp_path)]), seq=2)
    assert text.held_out.tolist() == [19, 19, 39, 39]
    assert text.train.tolist() == [index for index in range(41) if index not in (19, 39) for _ in range(2)]
    assert text.num_files == 41


@pytest.mark.parametrize(("total", "seq", "held_out"), [(400, 4, 20), (100, 9, 10), (100, 49, 50)])
def test_of_few_files_the_end_is_held_out(tmp_path: Path, total: int, seq: int, held_out: int) -> None:
    write(tmp_path, {"only": bytes(range(100)) * (total // 100)})
    text = load_text([tmp_path / "only"], seq)
    assert len(text.held_out) == held_out  # 1/20, but at least seq + 1
    assert text.train.tolist() + text.held_out.tolist() == list(range(100)) * (total // 100)


def test_checksum_tells_texts_apart(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"0" * 99 + b"1", "b": b"0" * 100})
    one, other = (load_text([tmp_path / name], seq=4) for name in "ab")
    assert one.checksum == load_text([tmp_path / "a"], seq=4).checksum
    assert one.checksum != other.checksum


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_targets_are_the_bytes_that_follow() -> None:
    inputs, targets = windows(text_of(*range(10)), [0, 6], seq=3)
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [7, 8, 9]]
    assert inputs.dtype == targets.dtype == torch.int64


def test_samples_depend_on_seed_and_step_alone() -> None:
    text = torch.zeros(1000, dtype=torch.uint8)
    starts = sample_starts(text, 8, seed=1, step=7, batch=16)
    assert starts == sample_starts(text, 8, seed=1, step=7, batch=16)
    assert starts[:4] == sample_starts(text, 8, seed=1, step=7, batch=4)
    assert starts != sample_starts(text, 8, seed=1, step=8, batch=16)
    assert starts != sample_starts(text, 8, seed=2, step=7, batch=16)
    # Pinned: a checkpoint of an earlier version goes on with the samples it would have had.
    assert starts[:4] == [576, 534, 310, 18]


def test_samples_reach_both_ends_and_no_further() -> None:
    text = torch.zeros(12, dtype=torch.uint8)
    starts = sample_starts(text, 8, seed=0, step=1, batch=200)
    assert set(starts) == {0, 1, 2, 3}  # a window of 8 + 1 bytes starts at 3 at the latest
    windows(text, starts, 8)


@pytest.mark.parametrize(
    ("length", "count", "starts"),
    [(100, 3, [0, 45, 90]), (30, 64, [0, 10, 20]), (10, 5, [0]), (19, 2, [0]), (21, 2, [0, 11])],
)
def test_spread_windows_do_not_overlap(length: int, count: int, starts: list[int]) -> None:
    assert spread_starts(torch.zeros(length, dtype=torch.uint8), seq=9, count=count) == starts


def test_unigram_entropy_of_known_texts() -> None:
    assert unigram_entropy(text_of(5, 5, 5)) == 0
    assert unigram_entropy(text_of(*range(256))) == pytest.approx(math.log(256))
    assert bits(unigram_entropy(text_of(*range(256)))) == pytest.approx(8)
    assert bits(unigram_entropy(text_of(1, 1, 2, 3))) == pytest.approx(1.5)
    assert nats(bits(0.3)) == pytest.approx(0.3)
