"""The harness itself: values come back, every way to fail is told apart, nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import MAX_WORLD, RankError, run_ranks


def add_ranks(rank, world, start, *, scale=1.0):
    total = torch.full((3,), scale * (rank + start))
    dist.all_reduce(total)
    return total


def surroundings(rank, world):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HARNESS_PROBE")
    group = (dist.get_rank(), dist.get_world_size(), dist.get_backend())
    return [os.environ.get(name) for name in names], group, torch.get_num_threads(), os.getpid()


def random_numbers(rank, world):
    return torch.rand(2), random.random()


def leave_state(rank, world):
    torch.set_default_dtype(torch.float64)
    os.environ["HARNESS_LEAK"] = "1"
    dist.new_group([0])
    return None


def find_state(rank, world):
    return torch.get_default_dtype(), "HARNESS_LEAK" in os.environ


def fail_on(rank, world, failing):
    if rank in failing:
        raise ValueError(f"bad value on {rank}")
    return rank


def fail_while_others_wait(rank, world, failing):
    if rank == failing:
        raise ValueError("gave up")
    dist.barrier()


def die(rank, world, dying):
    print("before the end", flush=True)
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank, world, sleeping):
    if rank in sleeping:
        time.sleep(300)
    return rank


def leave_a_thread(rank, world):
    if rank == 1:
        threading.Thread(target=time.sleep, args=(300,)).start()
    return rank


def threads_of_the_template(rank, world):
    return os.listdir(f"/proc/{os.getppid()}/task")


def return_lambda(rank, world):
    return lambda: rank


def warn_and_print(rank, world):
    print("hello")
    warnings.warn("only a warning", UserWarning, stacklevel=1)
    return rank


def init_from_environment(rank, world):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return add_ranks(rank, world, 0)


def hold_the_gil(rank, world):
    ctypes.PyDLL(None).sleep(300)  # PyDLL keeps the GIL: no Python thread of this process runs meanwhile


def leave(rank, world):
    sys.exit("enough")


def torch_was_preloaded(rank, world):
    return "torch.distributed.checkpoint.state_dict" in sys.modules


@pytest.mark.parametrize("world", [1, 2, 3, MAX_WORLD])
def test_results_come_back_by_value_in_rank_order(world):
    results = run_ranks(world, add_ranks, 1, scale=2.0)
    expected = torch.full((3,), 2.0 * sum(range(1, world + 1)))
    assert len(results) == world
    for result in results:
        assert torch.equal(result, expected)
    assert not any(result.is_shared() for result in results)


def test_surroundings(monkeypatch):
    monkeypatch.setenv("HARNESS_PROBE", "seen")
    results = run_ranks(3, surroundings)
    for rank, (environment, group, num_threads, _) in enumerate(results):
        assert environment == [str(rank), str(rank), "3", "3", "seen"]
        assert group == (rank, 3, "gloo")
        assert num_threads == 1
    assert len({pid for *_, pid in results}) == 3


def test_ranks_start_from_the_same_seed():
    torch.manual_seed(0)
    expected = torch.rand(2)
    (first, first_random), (second, second_random) = run_ranks(2, random_numbers)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    assert first_random == second_random


def test_nothing_leaks_into_the_next_run():
    run_ranks(2, leave_state)
    assert run_ranks(2, find_state) == [(torch.float32, False)] * 2


def test_every_failed_rank_is_told():
    with pytest.raises(RankError) as caught:
        run_ranks(3, fail_on, (0, 2))
    assert caught.value.errors == {0: ("ValueError", "bad value on 0"), 2: ("ValueError", "bad value on 2")}
    text = str(caught.value)
    assert text.startswith("2 of 3 ranks failed, rank ")
    assert "rank 2: ValueError: bad value on 2" in text
    assert 'raise ValueError(f"bad value on {rank}")' in text  # the traceback of the rank


def test_ranks_waiting_for_a_failed_one_end_soon():
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, fail_while_others_wait, 1, grace_s=5)
    assert time.monotonic() - start < 15
    assert caught.value.errors[1] == ("ValueError", "gave up")
    assert set(caught.value.errors) == {0, 1, 2}
    for rank in (0, 2):  # their own error, not a kill
        assert caught.value.errors[rank][0] not in ("TimeoutError", "ProcessDied")
    assert ", rank 1 first" in str(caught.value)


def test_killed_rank_is_told():
    with pytest.raises(RankError) as caught:
        run_ranks(2, die, 1, grace_s=5)
    assert caught.value.errors[1] == ("ProcessDied", "the process ended without an answer: killed by SIGKILL")
    assert "before the end" in str(caught.value)
    assert run_ranks(2, fail_on, ()) == [0, 1]


def test_timeout_kills_the_ranks_that_hang():
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(3, sleep, (0, 2), timeout_s=3)
    assert time.monotonic() - start < 10
    assert caught.value.errors == dict.fromkeys((0, 2), ("TimeoutError", "no answer within timeout_s=3"))
    assert "in sleep\n" in str(caught.value)  # where it hangs
    assert run_ranks(2, fail_on, ()) == [0, 1]


def test_rank_that_does_not_end_is_told():
    with pytest.raises(RankError) as caught:
        run_ranks(2, leave_a_thread, grace_s=1)
    why = "gave its result but did not end within grace_s=1 (still running)"
    assert caught.value.errors == {1: ("UncleanEnd", why)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_template_is_safe_to_fork():
    (threads,) = run_ranks(1, threads_of_the_template)
    assert len(threads) == 1


def test_result_that_cannot_travel():
    with pytest.raises(RankError, match="return_lambda"):
        run_ranks(1, return_lambda)


def test_sys_exit_is_a_failure():
    with pytest.raises(RankError) as caught:
        run_ranks(1, leave)
    assert caught.value.errors == {0: ("SystemExit", "enough")}


def test_output_is_printed_with_its_rank(capsys):
    assert run_ranks(2, warn_and_print) == [0, 1]
    out = capsys.readouterr().out
    for rank in range(2):
        assert f"[rank {rank}] hello" in out
        assert f"[rank {rank}] " in out
    assert out.count("UserWarning: only a warning") == 2


def test_group_left_to_the_function():
    results = run_ranks(2, init_from_environment, init_group=False)
    assert torch.equal(results[0], torch.ones(3))


def test_fresh_interpreters():
    assert run_ranks(1, torch_was_preloaded) == [True]
    assert run_ranks(1, torch_was_preloaded, fresh=True) == [False]


def test_rank_that_holds_the_gil_is_killed():
    with pytest.raises(RankError) as caught:
        run_ranks(1, hold_the_gil, timeout_s=1)
    assert "in hold_the_gil\n" in str(caught.value)


@pytest.mark.parametrize("world", [0, MAX_WORLD + 1])
def test_world_out_of_range(world):
    with pytest.raises(ValueError, match=f"world={world}: run_ranks starts 1 to {MAX_WORLD} ranks"):
        run_ranks(world, fail_on, ())


def test_local_function_is_refused():
    with pytest.raises(ValueError, match="module-level function"):
        run_ranks(1, lambda rank, world: None)


def test_no_orphans_when_the_caller_is_killed(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent.parent)]!r}\n"
        "if __name__ == '__main__':\n"
        "    from harness import run_ranks\n"
        "    from test_harness import sleep\n"
        "    run_ranks(2, sleep, (0, 1))\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdin=subprocess.DEVNULL) as caller:
        watched = psutil.Process(caller.pid)
        deadline = time.monotonic() + 60
        descendants: list[psutil.Process] = []
        while len(descendants) < 4 and time.monotonic() < deadline:  # resource tracker, template, two ranks
            time.sleep(0.1)
            descendants = watched.children(recursive=True)
        caller.kill()
    assert len(descendants) == 4
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert alive == []
