"""`hsdp train`: what a run leaves behind, going on from a checkpoint, bad input, and how every process ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from harness import RankError, run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hsdp import cli, commands, launch, progress
from hsdp.commands import resolve, run_train
from hsdp.train import train

TINY = {"layers": 2, "width": 16, "heads": 2, "seq": 16, "device": "cpu"}
TIMES = ("ms", "tokens_per_s", "peak_memory_bytes")  # of a step, which differ from run to run
END_S = 30  # in which everything must have ended; seconds when the machine is idle


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """6000 bytes that are easy to learn; the last 300 are held out: 17 windows of 16 + 1, an odd number."""
    path = tmp_path_factory.mktemp("data") / "text.py"
    path.write_text("".join(f"def f{number % 10}(x):\n    return x + {number % 7}\n\n" for number in range(207))[:6000])
    return str(path)


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def untimed(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in entries]


def contents(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by the way to it."""
    dcp_to_torch_save(checkpoint, scratch)
    found: dict[str, torch.Tensor] = {}

    def walk(value: Any, way: str) -> None:
        if isinstance(value, torch.Tensor):
            found[way] = value
        elif isinstance(value, dict):
            for name, item in value.items():
                walk(item, f"{way}/{name}")

    walk(torch.load(scratch, weights_only=False), "")
    return found


# ---- in ranks of the harness -----------------------------------------------------------------------------------------


def train_in_rank(rank: int, world: int, given: dict[str, Any]) -> tuple[float, float, float]:
    result = train(resolve(given, world, "cpu"))
    return result.train_loss, result.held_out_loss, result.unigram


@pytest.fixture(scope="module")
def run_2x2(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """8 steps on 2 x 2, of 2 microbatches of 2 sequences a rank; a checkpoint and a held-out loss every 4 steps."""
    out = tmp_path_factory.mktemp("run_2x2")
    sizes = {"replicate": 2, "shard": 2, "batch": 2, "accumulate": 2, "steps": 8, "save_every": 4, "eval_every": 4}
    results = run_ranks(4, train_in_rank, {**TINY, **sizes, "data": (data,), "out": str(out)})
    assert len(set(results)) == 1  # every rank tells the same
    return out


def test_a_resumed_run_is_the_uninterrupted_one(run_2x2: Path, tmp_path: Path) -> None:
    given = {"replicate": 2, "shard": 2, "resume": str(run_2x2 / "checkpoint-4"), "out": str(tmp_path / "out")}
    run_ranks(4, train_in_rank, given)
    assert untimed(metrics_of(tmp_path / "out")) == untimed(metrics_of(run_2x2))[4:]
    expected = contents(run_2x2 / "checkpoint-8", tmp_path / "a.pt")
    found = contents(tmp_path / "out" / "checkpoint-8", tmp_path / "b.pt")
    assert found.keys() == expected.keys()
    assert len([name for name in found if name.startswith("/optimizer")]) >= 2 * len(
        [name for name in found if name.startswith("/model")]
    )
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 2), (2, 1)])
def test_another_mesh_goes_on_with_the_same_training(run_2x2: Path, tmp_path: Path, replicate: int, shard: int) -> None:
    resume = str(run_2x2 / "checkpoint-4")
    given = {"replicate": replicate, "shard": shard, "resume": resume, "out": str(tmp_path)}
    run_ranks(replicate * shard, train_in_rank, given)
    assert json.loads((tmp_path / "checkpoint-8" / "run.json").read_text())["global_batch"] == 16
    for found, expected in zip(metrics_of(tmp_path), metrics_of(run_2x2)[4:], strict=True):
        for name in ("step", "loss", "lr", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), (found["step"], name)


def test_weights_data_and_held_out_loss_do_not_depend_on_the_mesh(run_2x2: Path, tmp_path: Path, data: str) -> None:
    """One rank that reads a step's 16 sequences at once, against 2 x 2 that read 2 at a time; 17 windows held out."""
    given = {**TINY, "data": (data,), "out": str(tmp_path), "steps": 8, "eval_every": 4}
    run_ranks(1, train_in_rank, {**given, "batch": 16})
    expected = metrics_of(run_2x2)
    for found, other in zip(metrics_of(tmp_path), expected, strict=True):
        assert found.keys() == other.keys()
        for name in set(found) - set(TIMES):
            assert found[name] == pytest.approx(other[name], rel=1e-4), (found["step"], name)
    assert [entry["step"] for entry in expected if "held_out_loss" in entry] == [4, 8]


def test_a_second_run_keeps_the_first_and_resuming_in_place_what_came_before(tmp_path: Path, data: str) -> None:
    given = {**TINY, "data": (data,), "out": str(tmp_path), "steps": 4, "save_every": 2, "batch": 2}
    run_ranks(1, train_in_rank, given)
    first = (tmp_path / "metrics.jsonl").read_text()
    run_ranks(1, train_in_rank, {**given, "seed": 1})
    assert (tmp_path / "previous-1" / "metrics.jsonl").read_text() == first
    assert {path.name for path in (tmp_path / "previous-1").iterdir()} == {
        "metrics.jsonl", "loss.png", "checkpoint-2", "checkpoint-4",
    }  # fmt: skip
    second = untimed(metrics_of(tmp_path))
    assert [entry["step"] for entry in second] == [1, 2, 3, 4]

    run_ranks(1, train_in_rank, {"resume": str(tmp_path / "checkpoint-2"), "steps": 3})
    assert untimed(metrics_of(tmp_path))[:2] == second[:2]
    assert [entry["step"] for entry in metrics_of(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "previous-2" / "checkpoint-4").is_dir()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    run_ranks(1, train_in_rank, {"resume": str(tmp_path), "steps": 4})  # the newest one, which is 3
    assert [entry["step"] for entry in metrics_of(tmp_path)] == [1, 2, 3, 4]


def train_on_own_file(rank: int, world: int, folder: str) -> None:
    path = Path(folder, f"{rank}")
    path.write_bytes(b"same " * 99 if rank != 1 else b"other" * 99)
    train(resolve({**TINY, "data": (str(path),), "out": folder}, world, "cpu"))


def test_ranks_with_different_data_all_refuse(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, train_on_own_file, str(tmp_path))
    assert set(caught.value.errors) == {0, 1}
    for kind, text in caught.value.errors.values():
        assert kind == "ValueError"
        assert "the ranks read different data (checksum: rank 0: " in text


def train_with_data_of_one_rank(rank: int, world: int, data: str, folder: str) -> None:
    options = resolve({**TINY, "data": (data,), "out": folder}, world, "cpu")
    train(options if rank == 0 else replace(options, data=(folder + "/gone",)))


def test_data_that_one_rank_lacks_ends_all(tmp_path: Path, data: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, train_with_data_of_one_rank, data, str(tmp_path))
    assert {kind for kind, _ in caught.value.errors.values()} == {"ValueError"}
    assert {text for _, text in caught.value.errors.values()} == {f"rank 1: data path {tmp_path}/gone does not exist"}


# ---- as a command ----------------------------------------------------------------------------------------------------


def arguments(**given: Any) -> list[str]:
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a launcher may have put there."""
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted and not name.startswith("SLURM")}
    return {**kept, **more}


@contextlib.contextmanager
def started(*command: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `command` after `python`, with everything it starts; killed at the end whatever happens."""
    process = subprocess.Popen(
        [sys.executable, *command], env=environment(**more), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.communicate()


def output_of(*command: str, **more: str) -> tuple[int, str, str]:
    with started(*command, **more) as process:
        stdout, stderr = process.communicate(timeout=150)
        return process.returncode, stdout, stderr


HSDP_TRAIN = ("-m", "hsdp.cli", "train")


def test_the_command_leaves_what_it_says(tmp_path: Path, data: str) -> None:
    sizes = {**TINY, "width": 32, "batch": 2, "steps": 60, "eval_every": 20, "lr": 0.01}
    status, stdout, stderr = output_of(*HSDP_TRAIN, *arguments(**sizes, data=data, out=tmp_path))
    assert (status, stderr) == (0, "")
    assert "HSDP over 4 ranks = replicate 2 x shard 2, on 1 host\n" in stdout
    assert "2 sequences x 2 replicate x 2 shard x 1 accumulate = 8 sequences of 16 bytes = 128 bytes a step" in stdout

    entries = metrics_of(tmp_path)
    assert [entry["step"] for entry in entries] == list(range(1, 61))
    assert all(entry["ms"] > 0 and entry["tokens_per_s"] > 0 and entry["grad_norm"] > 0 for entry in entries)
    assert all(entry["peak_memory_bytes"] > 2**20 for entry in entries)
    assert max(entry["lr"] for entry in entries) == 0.01
    assert [entry["step"] for entry in entries if "held_out_loss" in entry] == [20, 40, 60]

    summary = dict(line.rsplit("  ", 1) for line in stdout.splitlines()[-6:])
    numbers = [float(summary[name.ljust(17)].split()[0]) for name in ("training loss", "held-out loss")]
    unigram = float(stdout.split("unigram entropy    ")[1].split()[0])
    assert numbers[0] == pytest.approx(entries[-1]["loss"], abs=1e-3)
    assert numbers[1] == pytest.approx(entries[-1]["held_out_loss"], abs=1e-3)
    assert numbers[1] < unigram - 0.5
    assert entries[0]["loss"] > unigram
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoint-60" / ".metadata").is_file()
    for name in ("loss.png", "metrics.jsonl", "checkpoint-60"):
        assert str(tmp_path / name) in stdout


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_it_takes_its_place_under_torchrun(tmp_path: Path, data: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *HSDP_TRAIN)
    status, stdout, stderr = output_of(*torchrun, *arguments(**TINY, data=data, out=tmp_path, steps=1))
    assert status == 0, stderr
    assert stdout.count("HSDP over 2 ranks = replicate 1 x shard 2, on 1 host") == 1
    assert (tmp_path / "checkpoint-1").is_dir()


def test_it_takes_its_place_in_a_slurm_step_and_all_ranks_refuse_bad_input(tmp_path: Path, data: str) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    job["MASTER_PORT"] = free_port()
    command = (*HSDP_TRAIN, *arguments(**TINY, data=data, out=tmp_path, steps=1, shard=3))
    with (
        started(*command, **job, SLURM_PROCID="0", SLURM_LOCALID="0") as zero,
        started(*command, **job, SLURM_PROCID="1", SLURM_LOCALID="1") as one,
    ):
        for rank, process in enumerate((zero, one)):
            _, stderr = process.communicate(timeout=150)
            assert process.returncode == 2
            assert stderr.startswith(f"error (rank {rank}): shard=3 is larger than the world of 2 ranks")
            assert len(stderr.splitlines()) == 1


# ---- bad input -------------------------------------------------------------------------------------------------------


BAD_INPUT = [
    ({"data": ("{tmp}/nothing",)}, "data path {tmp}/nothing does not exist"),
    ({"data": ("{tmp}/empty",)}, "data folder {tmp}/empty has no files in it"),
    ({"seq": 5000}, "the data has 6000 bytes, seq=5000 needs at least 10002"),
    ({"batch": 0}, "batch is 0; it must be 1 or more"),
    ({"steps": 0}, "steps is 0; it must be 1 or more"),
    ({"nproc": 0}, "nproc is 0; it must be 1 or more"),
    ({"nproc": -2}, "nproc is -2; it must be 1 or more"),
    ({"width": 15}, "width 15 does not divide into 2 heads"),
    ({"shard": 5}, "shard=5 is larger than the world of 4 ranks; sizes that fit: 1, 2, 4"),
    ({"shard": 3, "replicate": 2}, "replicate=2 x shard=3 needs 6 ranks, the world has 4"),
    ({"shard": 0}, "shard=0 is not a mesh size"),
    ({"replicate": -1, "shard": -1}, "replicate=-1 and shard=-1: only one of them can be the rest"),
    ({"precision": "fp8"}, "precision is 'fp8'; it must be one of fp32, bf16"),
    ({"device": "abacus"}, "device is 'abacus'; this machine has cpu"),
    ({"out": "{tmp}/file/out"}, "--out {tmp}/file/out: Not a directory"),
    ({"resume": "{tmp}/nothing"}, "--resume {tmp}/nothing: does not exist"),
    ({"resume": "{tmp}/empty"}, "--resume {tmp}/empty: neither a checkpoint of hsdp train nor a run's folder"),
    ({"resume": "{tmp}/file"}, "--resume {tmp}/file: neither a checkpoint of hsdp train nor a run's folder"),
    ({"resume": "{tmp}/torn"}, "--resume {tmp}/torn: its run.json cannot be read"),
    ({"resume": "{run}", "layers": 3}, "--layers 3 does not go with the checkpoint, whose model has layers 2"),
    ({"resume": "{run}"}, "--resume {run}: that checkpoint is at step 8 of 8 already"),
    ({"resume": "{run}", "nproc": 3}, "the checkpoint's global batch of 16 sequences does not divide over 3 ranks"),
]


def filled_in(value: Any, places: dict[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(filled_in(item, places) for item in value)
    return value.format(**places) if isinstance(value, str) else value


@pytest.mark.parametrize(("given", "line"), BAD_INPUT)
def test_bad_input_is_one_line_and_launches_nothing(
    given: dict[str, Any], line: str, run_2x2: Path, data: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "torn").mkdir()
    for name in ("run.json", ".metadata"):
        (tmp_path / "torn" / name).write_text("{")
    monkeypatch.setattr(launch, "launch", lambda options: pytest.fail(f"launched {options}"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    places = {"tmp": str(tmp_path), "run": str(run_2x2)}
    base = {"device": "cpu"} if "resume" in given else {**TINY, "data": (data,), "out": str(tmp_path / "out")}
    given = {name: filled_in(value, places) for name, value in given.items()}
    assert run_train({**base, **given}) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {filled_in(line, places)}")
    assert len(shown.err.splitlines()) == 1


def test_bad_input_gives_exit_status_2(tmp_path: Path) -> None:
    status, stdout, stderr = output_of(*HSDP_TRAIN, *arguments(device="cpu", shard=8, out=tmp_path))
    assert (status, stdout) == (2, "")
    assert stderr == "error: shard=8 is larger than the world of 4 ranks; sizes that fit: 1, 2, 4\n"


def test_nproc_is_not_for_a_launched_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert run_train({"nproc": 2, "device": "cpu"}) == 2
    expected = "error (rank 1): --nproc 2 is for a plain start; here a launcher has started 2 ranks\n"
    assert capsys.readouterr().err == expected
    monkeypatch.delenv("MASTER_PORT")
    assert run_train({"device": "cpu"}) == 2
    assert "but not MASTER_PORT: a launcher sets all five" in capsys.readouterr().err


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(progress, "find_spec", lambda name: None if name == "rich" else object())
        assert run_train({"device": "cpu"}) == 2
        line = "error: hsdp train needs rich, which is not installed: pip install 'hsdp[train]'\n"
        assert capsys.readouterr().err == line
    monkeypatch.delitem(sys.modules, commands.__name__)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"the hsdp command needs typer, .* pip install 'hsdp\[train\]'"):
        cli.main()


# ---- how it ends -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def endless_run(out: Path, data: str, nproc: int) -> Iterator[tuple[subprocess.Popen[str], dict[int, psutil.Process]]]:
    """A run in the middle of training and its ranks' processes; at the end all of them must be gone."""
    options = arguments(**TINY, data=data, out=out, steps=10**6, nproc=nproc)
    with started(*HSDP_TRAIN, *options) as process:
        deadline = time.monotonic() + 120
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no step was made"
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = {int(child.environ()["RANK"]): child for child in family if "RANK" in child.environ()}
        try:
            assert sorted(ranks) == list(range(nproc))
            yield process, ranks
            _, alive = psutil.wait_procs(family, timeout=END_S)
            assert alive == []
        finally:
            for child in family:  # each is in a session of its own, and nobody's child once the launcher has ended
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()


def test_a_killed_rank_ends_the_run_with_one_line(tmp_path: Path, data: str) -> None:
    with endless_run(tmp_path, data, nproc=3) as (process, ranks):
        ranks[1].kill()
        _, stderr = process.communicate(timeout=END_S)
        assert process.returncode == 1
        assert stderr == (
            f"error: rank 1 (process {ranks[1].pid}) was killed by SIGKILL (out of memory?). "
            "All 3 processes have ended.\n"
        )


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGINT, 130, "interrupted: all 2 processes have ended.\n"),
        (signal.SIGTERM, 143, "stopped by SIGTERM: all 2 processes have ended.\n"),
    ],
)
def test_a_signal_ends_every_process(tmp_path: Path, data: str, number: signal.Signals, status: int, line: str) -> None:
    with endless_run(tmp_path, data, nproc=2) as (process, _):
        process.send_signal(number)
        _, stderr = process.communicate(timeout=END_S)
        assert (process.returncode, stderr) == (status, line)


def test_ranks_end_with_a_launcher_that_was_killed(tmp_path: Path, data: str) -> None:
    with endless_run(tmp_path, data, nproc=2) as (process, _):
        process.kill()
        process.wait(END_S)


def test_a_rank_that_fails_is_named_with_its_traceback(tmp_path: Path, data: str) -> None:
    options = arguments(**TINY, data=data, out=tmp_path, steps=50, nproc=2, lr=1e30)
    status, _, stderr = output_of(*HSDP_TRAIN, *options)
    assert status == 1
    (line,) = stderr.splitlines()
    rank = line.removeprefix("error: rank ")[0]
    path = tmp_path / "errors" / f"rank-{rank}.txt"
    assert line.startswith(f"error: rank {rank} failed: RuntimeError: the loss is nan")
    assert line.endswith(f"; full traceback: {path}. All 2 processes have ended.")
    trace = path.read_text()
    assert "in train_step" in trace
    assert trace.endswith("RuntimeError: the loss is nan, so training has diverged; a smaller --lr may help\n")
