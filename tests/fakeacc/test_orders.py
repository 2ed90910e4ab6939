"""What the race checker and the backend must get right beyond the plain cases: futures, devices, lists, a missing wait.

A future orders what `wait()` orders and no later collective; a copy between devices lets both current streams wait; a
tensor grows in its own device's memory; and every report needs the wait that a test takes away.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Recipe, Transformer, batch, loss_of
from test_fakeacc import DEVICE, alone, join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.usefixtures("fakeacc_at_hand")


# ---- one process -----------------------------------------------------------------------------------------------------


def grow_elsewhere(rank: int, world: int) -> None:
    import fakeacc  # noqa: F401 - brings the device type

    for grow in (lambda tensor: tensor.resize_(100), lambda tensor: torch.add(torch.ones(100), 1, out=tensor)):
        before = [torch.accelerator.memory_allocated(device) for device in (0, 1)]
        with torch.device("fakeacc:1"):
            tensor = torch.empty(0)
            grow(tensor)
        assert tensor.untyped_storage().device == tensor.device == torch.device("fakeacc:1")
        assert torch.accelerator.memory_allocated(0) == before[0]
        assert torch.accelerator.memory_allocated(1) == before[1] + 400
        del tensor


def test_a_tensor_grows_on_its_own_device() -> None:
    alone(grow_elsewhere)


def cross(rank: int, world: int, how: str) -> list[str]:
    import fakeacc

    fakeacc.race_check(True)
    source = torch.zeros(4, device="fakeacc:0")
    if how == "to":
        source.to("fakeacc:1").add_(1)
    elif how == "back":
        target = torch.zeros(4, device="fakeacc:1")
        target.copy_(source, non_blocking=True)
        source.add_(1)
        target.add_(1)
    elif how == "from a side stream":
        with torch.Stream("fakeacc:0"):
            source.to("fakeacc:1")
    elif how == "to a side stream":
        copied = source.to("fakeacc:1")
        with torch.Stream("fakeacc:1"):
            copied.add_(1)
    return fakeacc.races()


@pytest.mark.parametrize(
    ("how", "report"),
    [
        ("to", None),
        ("back", None),
        ("from a side stream", "copy on 0/s1 reads what aten::zero_ wrote on 0/s0"),
        ("to a side stream", "aten::add on 1/s1 reads what copy wrote on 0/s0"),
    ],
)
def test_a_copy_between_devices_orders_their_current_streams(how: str, report: str | None) -> None:
    reports = alone(cross, how)
    assert reports == [] if report is None else any(report in each for each in reports), reports


def sync_by_result(rank: int, world: int) -> list[str]:
    import fakeacc

    fakeacc.race_check(True)
    tensor = torch.zeros(4, device=DEVICE)
    assert torch.equal(tensor, tensor)
    with torch.Stream(DEVICE):
        tensor.add_(1)
    return fakeacc.races()


def test_the_host_has_waited_for_a_result_it_knows() -> None:
    assert alone(sync_by_result) == []


def grow_on_a_side_stream(rank: int, world: int) -> list[str]:
    import fakeacc

    fakeacc.race_check(True)
    tensor = torch.zeros(4, device=DEVICE)
    with torch.Stream(DEVICE):
        tensor.resize_(8)
    return fakeacc.races()


def test_growing_reads_what_was_there() -> None:
    assert any("resize on 0/s1 reads what aten::zero_ wrote" in report for report in alone(grow_on_a_side_stream))


def module_names(rank: int, world: int) -> set[str]:
    import fakeacc  # noqa: F401 - brings the device type

    return {name for name in vars(torch.get_device_module(DEVICE)) if not name.startswith("_")}


def test_a_module_without_streams_has_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKEACC_NO_STREAMS", "1")
    devices = {"device_count", "is_available", "current_device", "set_device", "is_initialized", "device"}
    torchs = {"manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state", "get_amp_supported_dtype"}
    assert alone(module_names) == devices | torchs


# ---- collectives -----------------------------------------------------------------------------------------------------


def start(name: str) -> tuple[dist.Work, torch.Tensor]:
    """A collective under way, and what it writes."""
    group = dist.group.WORLD._get_backend(torch.device(DEVICE))
    output, wide = torch.zeros(2, device=DEVICE), torch.zeros(4, device=DEVICE)
    if name == "all_reduce":
        return group.allreduce([wide]), wide
    if name == "reduce_scatter":
        return group._reduce_scatter_base(output, wide), output
    return group._allgather_base(wide, output), wide


def use_futures(rank: int, world: int, name: str) -> tuple[list[str], list[str]]:
    fakeacc = join(rank, world)
    (first, written), (second, written_later) = start(name), start(name)
    first.get_future().wait()
    written.add_(1)
    early = fakeacc.races()
    written_later.add_(1)  # nobody waited for the second one
    late = fakeacc.races()
    second.wait()
    return early, late


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_future_orders_its_own_collective_and_no_later_one(name: str) -> None:
    for early, late in run_ranks(2, use_futures, name, init_group=False):
        assert early == []
        assert any("aten::add" in report and "what ccl:" in report for report in late)


def wait_twice(rank: int, world: int) -> list[float]:
    join(rank, world)
    work, output = start("reduce_scatter")
    work.wait()
    output.fill_(7.0)
    work.wait()
    return output.tolist()


def test_a_second_wait_writes_nothing() -> None:
    assert run_ranks(2, wait_twice, init_group=False) == [[7.0, 7.0]] * 2


def move_lists(rank: int, world: int) -> list[str]:
    fakeacc = join(rank, world)
    mine = torch.full((2,), rank + 1.0, device=DEVICE)
    parts = [torch.empty(2, device=DEVICE) for _ in range(world)]
    work = dist.gather(mine, parts if rank == 0 else None, dst=0, async_op=True)
    mine + 1  # both only read it
    work.wait()
    if rank == 0:
        assert [part[0].item() for part in parts] == [1.0, 2.0]
    received = torch.empty(2, device=DEVICE)
    dist.scatter(received, parts if rank == 0 else None, src=0)
    assert received.tolist() == mine.tolist()
    dist.all_to_all(parts, [torch.full((2,), 10.0 * rank + peer, device=DEVICE) for peer in range(world)])
    assert [part[0].item() for part in parts] == [rank, 10.0 + rank]
    dist.reduce(mine, dst=0)
    assert rank != 0 or mine.tolist() == [3.0, 3.0]
    group = dist.group.WORLD._get_backend(torch.device(DEVICE))
    for call in (lambda cpu: group.allgather([cpu], [mine]), lambda cpu: group.reduce_scatter([mine], [cpu])):
        with pytest.raises(RuntimeError, match="fakeccl: got a tensor on cpu"):
            call([torch.empty(2) for _ in range(world)])
    return fakeacc.races()


def test_lists_of_tensors() -> None:
    assert run_ranks(2, move_lists, init_group=False) == [[], []]


def be_late(rank: int, world: int) -> float:
    join(rank, world)
    dist.barrier()
    if rank == 1:
        time.sleep(3)
        return 0.0
    options = dist.AllreduceOptions()
    options.timeout = datetime.timedelta(seconds=1)
    begun = time.monotonic()
    group = dist.group.WORLD._get_backend(torch.device(DEVICE))
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
        group.allreduce([torch.ones(2, device=DEVICE)], options).wait()
    return time.monotonic() - begun


def test_a_call_has_its_own_timeout() -> None:
    assert run_ranks(2, be_late, init_group=False, timeout_s=30)[0] < 2.5


# ---- a wait that is missing ------------------------------------------------------------------------------------------


def train_with_a_wait_less(rank: int, world: int, missing: Callable[[int], list[int]]) -> list[tuple[int, int]]:
    """(the wait that orders nothing, number of reports) of each run; -1: none of them."""
    fakeacc = join(rank, world)
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []

    def run(number: int) -> int:
        fakeacc.race_check(True)
        torch.manual_seed(0)
        model = Transformer(1).to(DEVICE)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        fakeacc.skip_wait(number)
        inputs, targets = (each.to(DEVICE) for each in batch(Recipe(), 0, 0, rank, world))
        loss_of(model(inputs), targets).backward()
        count = fakeacc.num_waits()
        results.append((number, len(fakeacc.races())))
        return count

    for number in missing(run(-1)):
        run(number)
    return results


def all_of(num_waits: int) -> list[int]:
    return list(range(num_waits))


@pytest.mark.filterwarnings("ignore")
def test_fully_shard_with_a_wait_less_is_reported() -> None:
    for results in run_ranks(4, train_with_a_wait_less, all_of, init_group=False):
        print(results)  # pytest -s lists them
        (none, reports), *mutants = results
        assert (none, reports) == (-1, 0)
        assert len(mutants) >= 4
        assert any(found for _, found in mutants)
