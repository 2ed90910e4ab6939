"""worker.py and launch.py without processes: whose place the environment gives, which rank failed first."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hsdp import launch, worker
from hsdp.launch import rank_environment, root_cause
from hsdp.model import ModelShape
from hsdp.options import TrainOptions
from hsdp.worker import Place, first_host, is_bad_input, place_from_environment

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "3"}


# ---- place -----------------------------------------------------------------------------------------------------------


def test_place_under_a_launcher() -> None:
    assert place_from_environment({"HOME": "/"}) is None
    place = place_from_environment(TORCHRUN)
    assert place == Place(5, 8, 1, "host", 29500)
    assert place.variables() == TORCHRUN


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_every_variable_is_needed(name: str) -> None:
    environment = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ValueError, match=f"but not {name}: a launcher sets all five"):
        place_from_environment(environment)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("RANK", "8", "RANK=8, outside of WORLD_SIZE=8"), ("WORLD_SIZE", "many", "WORLD_SIZE='many', which is not")],
)
def test_values_that_cannot_be_are_refused(name: str, value: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        place_from_environment({**TORCHRUN, name: value})


def test_place_in_a_slurm_job_step() -> None:
    place = place_from_environment(
        {**SLURM, "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_JOB_NODELIST": "gpu[001-004]"}
    )
    assert place == Place(5, 8, 1, "gpu003", 20703)
    given = {"MASTER_ADDR": "here", "MASTER_PORT": "1234"}
    assert place_from_environment({**SLURM, **given}) == Place(5, 8, 1, "here", 1234)
    assert place_from_environment({**SLURM, **TORCHRUN, "RANK": "2"}) == Place(2, 8, 1, "host", 29500)
    with pytest.raises(ValueError, match="but not MASTER_ADDR"):
        place_from_environment(SLURM)


def test_a_slurm_script_outside_of_a_step_launches_by_itself() -> None:
    script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    assert place_from_environment({**script, "SLURM_JOB_NODELIST": "a"}) is None
    assert place_from_environment({**SLURM, "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "a"}) is None


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("b2,b1", "b2"),
        ("gpu[007-012,20],login1", "gpu007"),
        ("gpu[9],a", "gpu9"),
        ("r2-[3,5]-n[10-11]", "r2-3-n10"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


# ---- launching -------------------------------------------------------------------------------------------------------


def test_environment_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_num_cores", lambda: 9)
    added = rank_environment({}, nproc=4, device_type="cpu")
    assert added["OMP_NUM_THREADS"] == "2"
    assert {name for name in added if name.startswith("MALLOC_")} == {
        "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_",
    }  # fmt: skip
    assert rank_environment({}, nproc=16, device_type="cpu")["OMP_NUM_THREADS"] == "1"
    assert not [name for name in rank_environment({}, 1, "accelerator") if name.startswith("MALLOC_")]
    assert rank_environment({**added, "OMP_NUM_THREADS": "7"}, nproc=4, device_type="cpu") == {}  # what is set stays


def failures(*exitcodes: tuple[int, int]) -> dict[int, ProcessFailure]:
    return {rank: ProcessFailure(rank, os.getpid(), exitcode, "/no/file") for rank, exitcode in exitcodes}


@pytest.mark.parametrize(
    ("seen", "rank"),
    [
        ([(0, 1), (2, -signal.SIGKILL), (1, -signal.SIGTERM)], 2),  # rank 0 lost rank 2
        ([(0, -signal.SIGTERM), (3, 1), (1, 1)], 3),
        ([(3, -signal.SIGTERM), (0, -signal.SIGTERM)], 3),  # somebody ended rank 3, the launcher then rank 0
        ([(1, 2)], 1),
    ],
)
def test_root_cause(seen: list[tuple[int, int]], rank: int) -> None:
    assert root_cause(failures(*seen)) == rank


def recorded(error: Exception, rank: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, list[float]]:
    """What a rank reports about `error` and how long it waits first; torch's error file is OUT/error.json."""
    waits: list[float] = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(out / "error.json"))
    monkeypatch.setattr(worker.time, "sleep", waits.append)
    try:
        raise error
    except Exception as caught:
        return *worker.report(caught, rank, str(out)), waits


def test_an_error_goes_from_the_rank_to_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line, waits = recorded(RuntimeError("two\nlines"), 3, tmp_path, monkeypatch)
    trace = tmp_path / "errors" / "rank-3.txt"
    assert (status, line, waits) == (1, f"RuntimeError: two lines [full traceback: {trace}]", [])
    assert trace.read_text().endswith("RuntimeError: two\nlines\n")

    (tmp_path / "checkpoint-70").mkdir()
    (tmp_path / "checkpoint-70" / "run.json").touch()
    failure = ProcessFailure(0, os.getpid(), status, str(tmp_path / "error.json"))
    assert launch._tell_failure({3: failure}, TrainOptions(out=str(tmp_path), nproc=4)) == 1
    assert capsys.readouterr().err == (
        f"error: rank 3 failed: RuntimeError: two lines; full traceback: {trace}. All 4 processes have ended. "
        f"To go on from step 70: hsdp train --resume {tmp_path}\n"
    )


def test_bad_input_of_a_rank_is_told_like_that_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="layers is 0") as caught:
        ModelShape(0, 8, 1)
    status, line, _ = recorded(caught.value, 0, tmp_path, monkeypatch)
    assert (status, line) == (2, "layers is 0; it must be 1 or more")
    assert not (tmp_path / "errors").exists()
    failure = ProcessFailure(0, os.getpid(), status, str(tmp_path / "error.json"))
    assert launch._tell_failure({0: failure}, TrainOptions(out=str(tmp_path), nproc=4)) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_rank_that_lost_another_lets_that_one_be_reported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("step failed")
    error.__cause__ = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    assert recorded(error, 0, tmp_path, monkeypatch)[2] == [worker._PEER_GRACE_S]


def test_bad_input_is_a_value_error_of_our_own() -> None:
    with pytest.raises(ValueError, match="layers is 0") as ours:
        ModelShape(0, 8, 1)
    with pytest.raises(ValueError, match="invalid literal") as foreign:
        int("x")
    with pytest.raises(OSError, match="No such file") as other:
        Path("/no/file").read_text()
    assert is_bad_input(ours.value)
    assert not is_bad_input(foreign.value)
    assert not is_bad_input(other.value)
