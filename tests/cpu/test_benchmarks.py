"""`benchmarks/engines.py` in its tiny size: that it runs, what it calls equal, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--size", "tiny", "--rounds", "2", "--steps", "1", "--warmup-rounds", "1"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts' own modules, importable as they are for each other."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if name in ("_engines", "_launch", "_rank", "_report", "engines"):
            del sys.modules[name]


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(BENCHMARKS / "engines.py"), *TINY, *arguments]


def environment(folder: Path, fake_hsdp: str | None = None) -> dict[str, str]:
    """Temporary files in `folder`; `fake_hsdp` is the text of a package to find in place of the real one."""
    variables = {**os.environ, "TMPDIR": str(folder)}
    if fake_hsdp is not None:
        package = folder / "fake" / "hsdp"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(fake_hsdp)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    return variables


def run(folder: Path, *arguments: str, fake_hsdp: str | None = None) -> subprocess.CompletedProcess[str]:
    variables = environment(folder, fake_hsdp)
    return subprocess.run(command(*arguments), env=variables, capture_output=True, text=True, timeout=180, check=False)


def test_all_engines_agree(tmp_path: Path) -> None:
    arguments = ["--no-memory", "--accumulate", "2", "--rounds", "8", "--json", str(tmp_path / "result.json")]
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    (only,) = result["runs"]
    assert [engine["name"] for engine in only["engines"]] == ["hsdp", "fsdp2", "fsdp1", "ddp", "alone"]
    assert only["loss_difference"] < 1e-5
    for engine in only["engines"]:
        assert len(engine["step_s"]) == len(engine["step_cpu_s"]) == 8
        assert len(engine["losses"]) == 9
        assert min(engine["step_s"] + engine["step_cpu_s"]) > 0
        assert f"\n{engine['name']} " in done.stdout
    assert result["settings"]["accumulate"] == 2
    assert result["machine"]["torch"]


def test_memory_and_profile(tmp_path: Path) -> None:
    arguments = ["--engines", "hsdp", "ddp", "--replicate", "1", "--width", "256", "--reshard", "no"]
    done = run(tmp_path, *arguments, "--profile", str(tmp_path / "traces"), "--json", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stderr
    (only,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    # 1.7 M parameters: DDP keeps at least parameter, gradient and two AdamW states of 4 bytes each.
    parameters_bytes = 4 * 1.7e6
    for engine, least in zip(only["engines"], (2, 4), strict=True):
        assert least * parameters_bytes < engine["peak_bytes"] < 20 * parameters_bytes
        trace = json.loads((tmp_path / "traces" / f"{engine['name']}.json").read_text())
        assert any("Optimizer.step" in str(event.get("name")) for event in trace["traceEvents"])


def test_unequal_losses_are_an_error(tmp_path: Path) -> None:
    silent = "def init_mesh(**options): pass\ndef hybrid_shard(model, **options): return model\n"
    arguments = ["--engines", "hsdp", "ddp", "--shard", "1", "--no-memory", "--rounds", "8"]
    done = run(tmp_path, *arguments, fake_hsdp=silent)
    assert done.returncode == 1
    assert "losses are NOT EQUAL" in done.stdout


def test_failing_rank_ends_the_run(tmp_path: Path) -> None:
    failing = """
import os, pathlib, time, torch.distributed as dist
def init_mesh(**options):
    pathlib.Path(__file__).with_name(f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    dist.barrier()
def hybrid_shard(model, **options):
    if dist.get_rank() == 1:
        raise ValueError("rank one does not want to")
    time.sleep(1000)
"""
    done = run(tmp_path, "--engines", "hsdp", "--shard", "1", fake_hsdp=failing)
    assert done.returncode == 1
    assert "rank 1 ended with status 1 in the time run" in done.stderr
    assert "ValueError: rank one does not want to" in done.stderr
    pids = [int(path.read_text()) for path in (tmp_path / "fake" / "hsdp").glob("pid*")]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not list(tmp_path.glob("hsdp-benchmark-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_program(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["--engines", "alone", "--replicate", "1", "--rounds", "100000"]
    with subprocess.Popen(command(*arguments), env=environment(tmp_path), stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        next(line for line in program.stderr if "warm-up" in line)  # ranks are at work
        ranks = psutil.Process(program.pid).children()
        program.send_signal(number)
        gone, alive = psutil.wait_procs(ranks, timeout=20)
        for process in alive:
            process.kill()
        rest = program.stderr.read()
    assert (len(gone), len(alive)) == (2, 0)
    if number == signal.SIGINT:
        assert program.returncode == 1
        assert rest.endswith("stopped\n")
        assert not list(tmp_path.glob("hsdp-benchmark-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "0"], "'0' is not a whole number above 0"),
        (["--width", "100"], "100 is not a multiple of 64"),
        (["--engines", "fsdp1", "--shard", "1"], "no engine left to run"),
        (["--layers", "9", "--width", "65536"], "GiB are available; choose fewer --engines"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    started_s = time.monotonic()
    done = run(tmp_path, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started_s < 60


@pytest.mark.usefixtures("scripts")
def test_every_engine_has_every_place() -> None:
    from _rank import order

    rounds = [order(["a", "b", "c"], index) for index in range(6)]
    assert rounds[:4] == [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"], ["a", "c", "b"]]
    for place in zip(*rounds, strict=True):
        assert sorted(place) == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.usefixtures("scripts")
def test_table_of_known_numbers() -> None:
    from _report import Row, loss_difference, paired_ratio, text_table

    rows = [
        Row("hsdp", [0.8, 1.0, 3.0], [2.0, 2.0, 2.0], [5.0, 4.0002], 3 << 20),
        Row("fsdp2", [1.0, 2.0, 4.0], [4.0, 4.0, 4.0], [5.0, 4.0], None),
        Row("alone", [0.5, 0.5, 0.5], [1.0, 1.0, 1.0], [5.0, 1.0], None),
    ]
    assert paired_ratio(rows[0].step_s, rows[1].step_s) == "0.75 (0.62-0.78)"  # of 0.8, 0.5, 0.75
    cells = [cell.strip() for cell in text_table(rows, markdown=True).splitlines()[2].split("|")]
    assert cells == ["", "hsdp", "1000.0", "0.75 (0.62-0.78)", "-", "2.000", "0.50 (0.50-0.50)", "3", "4.00020", ""]
    assert loss_difference(rows) == pytest.approx(5e-5)  # the last loss of `alone` is its own
    rows[2].losses[0] = 5.5
    assert loss_difference(rows) == pytest.approx(0.1)  # its first is not
