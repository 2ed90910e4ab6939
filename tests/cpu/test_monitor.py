"""A rank that is missing: every other rank ends within the limit plus 5 s, with a text that names the one that is."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks
from torch import nn

import hsdp
from hsdp.diagnosis import Phase
from hsdp.module import schedules_of
from hsdp.monitor import EXIT_STATUS, Monitor, Watch

LIMIT_S = 3.0
PROMISED_S = LIMIT_S + 5.0
MESHES = [(2, 2), (1, 4), (4, 1)]


def build(limit_s: float = LIMIT_S, mesh: tuple[int, int] = (2, 2)) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    return hsdp.hybrid_shard(layers, mesh=mesh, units="Linear", timeout_s=limit_s, announce=False)


def steps(model: Any, number: int) -> None:
    for _ in range(number):
        model(torch.ones(2, 300)).sum().backward()


def lose(rank: int, world: int, mesh: tuple[int, int], lost: int, how: str, own_store: bool = False) -> Any:
    """Two steps together, then rank `lost` is lost; what the others say of it, and how long that took."""
    if own_store:  # as without a launcher: the store lives in rank 0
        store = dist.TCPStore("127.0.0.1", int(os.environ["OWN_PORT"]), 4, rank == 0, timedelta(seconds=20))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = build(mesh=mesh)
    steps(model, 2)
    time.sleep(1.5)  # a beat, to be heard of
    dist.barrier()
    if rank == lost:
        if how == "one batch less":
            return None
        os.kill(os.getpid(), getattr(signal, how))
    since = time.monotonic()
    try:
        steps(model, 1)
    except RuntimeError as error:
        raise RuntimeError(f"{time.monotonic() - since:.3f} {error}") from None


def told(lost: int, **options: Any) -> dict[int, str]:
    """What the other ranks raised; each has to be in time."""
    with pytest.raises(RankError) as error:
        run_ranks(4, lose, lost=lost, grace_s=PROMISED_S + 2, **options)
    texts = {}
    for rank, (kind, text) in error.value.errors.items():
        if rank != lost:
            seconds, _, texts[rank] = text.partition(" ")
            assert kind == "RuntimeError"
            assert float(seconds) < PROMISED_S, text
    assert sorted([*texts, lost]) == [0, 1, 2, 3]
    return texts


@pytest.mark.parametrize("mesh", MESHES, ids=["2x2", "1x4", "4x1"])
def test_one_batch_less(mesh: tuple[int, int]) -> None:
    for text in told(3, mesh=mesh, how="one batch less").values():
        assert "rank 3: after step 2" in text
        assert "likely: rank 3 did step 2 and did not begin step 3: fewer batches than the others" in text


@pytest.mark.parametrize("mesh", MESHES, ids=["2x2", "1x4", "4x1"])
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_process_that_is_stopped_or_killed(how: str, mesh: tuple[int, int]) -> None:
    for text in told(1, mesh=mesh, how=how).values():
        assert re.search(r"\n  rank 1: no sign of life for \d+ s; last heard of: after step 2\n", text), text
        assert "likely: rank 1: dead, stopped, or cut off from the store" in text


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_the_process_that_holds_the_store(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OWN_PORT", str(free.getsockname()[1]))
    texts = told(0, mesh=(2, 2), how=how, own_store=True, init_group=False)
    for text in texts.values():
        assert "the process that holds the store is dead, stopped or cut off from here (rank 0, unless" in text


# ---- the monitor itself ----------------------------------------------------------------------------------------------


def count_beats(rank: int, world: int) -> Any:
    model = build(limit_s=60.0, mesh=(1, 2))
    assert not any(thread.name.startswith("hsdp") for thread in threading.enumerate()), "runs before it is needed"
    steps(model, 3)
    monitor = schedules_of(model)[0].waits.monitor
    before = monitor._num_beats
    began, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - began < 3:
        steps(model, 1)
    beats, seconds = monitor._num_beats - before, time.process_time() - cpu
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("hsdp")]
    progress = monitor.progress
    record = (progress.phase, progress.waits_for, progress.failed)
    thread_s = thread_cpu_s(monitor)
    del model, monitor, progress
    gc.collect()  # a model is in cycles with its hooks
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("hsdp")]
    return beats, threads, record, left, thread_s / seconds


def thread_cpu_s(monitor: Monitor) -> float:
    """CPU seconds of the monitor's thread so far; user and system time as Linux counts them."""
    assert monitor._thread is not None
    with open(f"/proc/self/task/{monitor._thread.native_id}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no CPU times of threads here")
def test_a_heart_beats_once_a_second_and_costs_nothing() -> None:
    for rank, (beats, threads, record, left, share) in enumerate(run_ranks(2, count_beats)):
        assert 2 <= beats <= 5
        assert threads == [f"hsdp-monitor-{rank}"]
        assert record == (Phase.BETWEEN, "", False)
        assert left == [], "the thread outlives its model"
        assert share < 0.01


class Stuck:
    """An event that the device does not come to, or only when told."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


def watched(limit_s: float) -> tuple[Watch, Monitor, list[int]]:
    store, exits = dist.HashStore(), list[int]()
    for rank in (1, 2):
        other = Monitor("key", rank, [[0, 1, 2]])
        other.progress.step = 4
        other.progress.come_to(Phase.BETWEEN if rank == 1 else Phase.FORWARD, "head")
        other._tell(store)
    monitor = Monitor("key", 0, [[0, 1, 2]], beat_s=0.1)
    monitor.progress.step = 4
    monitor.progress.come_to(Phase.FORWARD, "head")
    monitor.start(store)
    return Watch(monitor, limit_s, exits.append), monitor, exits


def test_a_stuck_device_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    watch, monitor, exits = watched(limit_s=2.0)
    for event in (Stuck(done=True), Stuck(), Stuck()):
        watch.add(event, "gather", "blocks.1" if event.done else "head")
    began = time.monotonic()
    while not exits and time.monotonic() - began < 20:
        time.sleep(0.05)
    assert exits == [EXIT_STATUS]
    assert time.monotonic() - began < 2.0 + 5.0
    text = capfd.readouterr().err
    assert text.startswith("the gather of unit 'head' did not complete on rank 0: waited ")
    assert "[the device has not completed it]" in text
    assert "rank 1: no sign of life for " in text
    assert "test_a_stuck_device_ends_the_process" in text, "no Python stack"
    watch.stop()
    monitor.stop()


def come_to_waits(watch: Watch) -> None:
    for _ in range(1000):
        watch.check()
        time.sleep(0.02)


def test_a_stuck_device_is_raised_at_the_next_wait() -> None:
    watch, monitor, exits = watched(limit_s=2.0)
    watch.add(Stuck(), "reduce", "head")
    with pytest.raises(RuntimeError, match="the reduce of unit 'head' did not complete on rank 0"):
        come_to_waits(watch)
    time.sleep(1.5)
    assert exits == []
    watch.stop()
    monitor.stop()


def test_a_device_that_comes_along_is_left_alone() -> None:
    watch, monitor, exits = watched(limit_s=0.6)
    late = Stuck()
    watch.add(late, "gather", "head")
    watch.add(None, "gather", "head")  # a device without events
    time.sleep(0.2)
    late.done = True
    time.sleep(1.0)
    watch.check()
    assert not monitor.progress.failed
    assert exits == []
    watch.stop()
    monitor.stop()


def unshard_alone(rank: int, world: int) -> str | None:
    model = build(mesh=(1, 2))
    if rank == 1:
        return None
    with pytest.raises(RuntimeError) as error:
        model[1].unshard()
    return str(error.value)


def test_unshard_before_the_first_step() -> None:
    text = run_ranks(2, unshard_alone, grace_s=PROMISED_S)[0]
    assert text.startswith("the gather of unit '1' did not complete on rank 0: waited ")
    assert "likely: rank 1 did not begin the first step" in text
