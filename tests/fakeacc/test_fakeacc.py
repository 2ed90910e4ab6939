"""The fake accelerator itself: memory, streams, collectives, and a race checker that sees what it is for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Recipe, Transformer, adamw, assert_close, batch, full, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("fakeacc_at_hand")

DEVICE = "fakeacc"


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """`function` in a process of its own, without a process group."""
    return run_ranks(1, function, *args, init_group=False)[0]


# ---- memory ----------------------------------------------------------------------------------------------------------


def use_memory(rank: int, world: int) -> None:
    import fakeacc

    fresh = torch.empty(5, device=DEVICE)
    assert fresh.isnan().all(), "memory that nobody wrote"
    old = torch.ones(5, device=DEVICE)
    storage, view = old.untyped_storage(), old.view(5)
    storage.resize_(0)
    assert storage.size() == 0
    storage.resize_(20)
    assert view.isnan().all(), "memory that was given back"
    assert fakeacc._C.device_count() == 4
    before = torch.accelerator.memory_allocated()
    kept = torch.empty(2**20, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == 2**20
    elsewhere = torch.empty(7, device="fakeacc:3")
    assert torch.accelerator.memory_allocated(3) == 28
    assert torch.accelerator.memory_allocated() - before == 2**20
    with pytest.raises(torch.OutOfMemoryError, match="fakeacc out of memory: device 0 holds"):
        torch.empty(4 * 2**20, dtype=torch.uint8, device=DEVICE)
    torch.accelerator.reset_peak_memory_stats()
    del kept, elsewhere
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 2**20


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKEACC_MIB", "4")
    alone(use_memory)


def use_what_is_optional(rank: int, world: int, name: str) -> Any:
    import fakeacc  # noqa: F401 - brings the device type

    if name == "streams":
        module = torch.get_device_module(DEVICE)
        names = ["Stream", "Event", "stream", "current_stream", "set_stream", "synchronize", "memory_allocated"]
        return [hasattr(module, each) for each in names]
    if name == "pinned memory":
        return torch.empty(3, pin_memory=True).is_pinned()
    tensor = torch.zeros(3)
    tensor.data = torch.ones(3, device=DEVICE)
    return str(tensor.device)


@pytest.mark.parametrize(
    ("name", "variable", "with_it"),
    [
        ("streams", "FAKEACC_NO_STREAMS", [True] * 7),
        ("pinned memory", "FAKEACC_NO_PINNED", True),
        ("set_data", "FAKEACC_NO_SET_DATA", "fakeacc:0"),
    ],
)
def test_what_may_be_missing(name: str, variable: str, with_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone(use_what_is_optional, name) == with_it
    monkeypatch.setenv(variable, "1")
    if name == "streams":
        assert alone(use_what_is_optional, name) == [False] * 7
    else:
        with pytest.raises(Exception, match=r"no pinned memory|incompatible tensor type"):
            alone(use_what_is_optional, name)


def use_devices(rank: int, world: int) -> None:
    import fakeacc

    module = torch.get_device_module(DEVICE)
    assert (module.device_count(), module.is_available(), module.is_initialized()) == (2, True, False)
    module.set_device("fakeacc:1")
    assert (module.current_device(), module.is_initialized()) == (1, True)
    assert torch.empty(1, device=DEVICE).device.index == 1
    with module.device(0):
        assert torch.empty(1, device=DEVICE).device.index == 0
    assert module.current_device() == 1
    with pytest.raises(RuntimeError, match="no device 2, there are 2"):
        module.set_device(2)
    fakeacc.start_trace()
    event = module.Event()
    event.record()
    other = module.Stream()
    other.wait_event(event)
    (torch.zeros(2, device=DEVICE) + 1).tolist()
    traced = fakeacc.stop_trace()
    assert [what.partition(":")[0] for what, _, _ in traced[:2]] == ["record_event", "wait_event"]
    assert traced[1][1:] == (1, other.stream_id)
    assert [entry[1:] for entry in traced if entry[0].startswith("aten::add")] == [(1, 0)]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKEACC_DEVICES", "2")
    alone(use_devices)


# ---- races -----------------------------------------------------------------------------------------------------------


def races_of(rank: int, world: int, name: str, ordered: bool) -> list[str]:
    import fakeacc

    fakeacc.race_check(True)
    main, side = torch.accelerator.current_stream(), torch.Stream(DEVICE)
    tensor = torch.zeros(4, device=DEVICE)
    if name in ("read", "overwrite", "event"):
        if ordered and name == "event":
            event = torch.Event(DEVICE)
            event.record(main)
            side.wait_event(event)
        elif ordered:
            side.wait_stream(main)
        with side:
            tensor.add_(1) if name == "overwrite" else tensor + 1
    elif name == "overwrite what is read":
        side.wait_stream(main)
        with side:
            tensor + 1
        if ordered:
            main.wait_stream(side)
        tensor.zero_()
    elif name == "synchronize":
        if ordered:
            torch.accelerator.synchronize()
        with side:
            tensor + 1
    elif name == "free":
        side.wait_stream(main)
        with side:
            tensor + 1
        if ordered:
            tensor.record_stream(side)
        del tensor
        torch.zeros(4, device=DEVICE)
    elif name == "resize":
        side.wait_stream(main)
        with side:
            tensor + 1
        if ordered:
            main.wait_stream(side)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(16)
        tensor.zero_()
    elif name == "read on the host":
        with side:
            if ordered:
                side.wait_stream(main)
            tensor.tolist()
    return fakeacc.races()


RACES = {
    "read": "aten::add on 0/s1 reads what aten::zero_ wrote on 0/s0 without waiting",
    "overwrite": "aten::add on 0/s1 overwrites what aten::zero_ wrote on 0/s0 without waiting",
    "event": "aten::add on 0/s1 reads what",
    "overwrite what is read": "aten::zero_ on 0/s0 overwrites what aten::add still reads on 0/s1",
    "synchronize": "aten::add on 0/s1 reads what",
    "free": "uses bytes freed while aten::add may still run on 0/s1",
    "resize": "uses bytes freed while aten::add may still run on 0/s1",
    "read on the host": "on 0/s1 reads what aten::zero_ wrote on 0/s0",
}


@pytest.mark.parametrize("name", RACES)
def test_a_missing_order_is_reported(name: str) -> None:
    assert alone(races_of, name, True) == []
    reports = alone(races_of, name, False)
    assert any(RACES[name] in report for report in reports), reports


# ---- collectives -----------------------------------------------------------------------------------------------------


def join(rank: int, world: int) -> Any:
    import fakeacc

    torch.get_device_module(DEVICE).set_device(rank)
    dist.init_process_group("cpu:gloo,fakeacc:fakeccl")
    fakeacc.race_check(True)
    return fakeacc


def call_everything(rank: int, world: int) -> list[str]:
    fakeacc = join(rank, world)
    mine = torch.full((4,), rank + 1.0, device=DEVICE)
    total = world * (world + 1) / 2
    everyone = [float(each + 1) for each in range(world) for _ in range(4)]

    summed = mine.clone()
    dist.all_reduce(summed)
    assert summed.tolist() == [total] * 4
    mean = mine.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [total / world] * 4
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    assert sent.tolist() == [2.0] * 4
    parts = [torch.empty(4, device=DEVICE) for _ in range(world)]
    dist.all_gather(parts, mine)
    assert torch.cat(parts).tolist() == everyone
    whole = torch.empty(4 * world, device=DEVICE)
    whole[4 * rank : 4 * rank + 4] = mine
    dist.all_gather_into_tensor(whole, whole[4 * rank : 4 * rank + 4])  # in place
    assert whole.tolist() == everyone
    part = torch.empty(4, device=DEVICE)
    dist.reduce_scatter_tensor(part, torch.ones(4 * world, device=DEVICE) * (rank + 1))
    assert part.tolist() == [total] * 4
    dist.reduce_scatter_tensor(part, torch.ones(4 * world, device=DEVICE) * (rank + 1), op=dist.ReduceOp.AVG)
    assert part.tolist() == [total / world] * 4
    dist.reduce_scatter(part, [mine.clone() for _ in range(world)])
    assert part.tolist() == [total] * 4
    swapped = torch.empty(world, device=DEVICE)
    dist.all_to_all_single(swapped, torch.full((world,), float(rank), device=DEVICE))
    assert swapped.tolist() == [float(each) for each in range(world)]
    peer = rank ^ 1
    works = [dist.isend(mine, peer), dist.irecv(part, peer)]
    for work in works:
        work.wait()
    assert part.tolist() == [peer + 1.0] * 4
    group = dist.group.WORLD
    outputs = [torch.empty(4 * world, device=DEVICE), torch.empty(2 * world, device=DEVICE)]
    group.allgather_into_tensor_coalesced(outputs, [mine, mine[:2].clone()]).wait()
    assert outputs[0].tolist() == everyone
    group.reduce_scatter_tensor_coalesced([part], [torch.ones(4 * world, device=DEVICE)]).wait()
    assert part.tolist() == [float(world)] * 4
    with pytest.raises(RuntimeError, match="fakeccl: got a tensor on cpu"):
        group._get_backend(torch.device(DEVICE)).allreduce([torch.ones(1)])
    dist.barrier()
    return fakeacc.races()


def test_every_collective() -> None:
    assert run_ranks(4, call_everything, init_group=False) == [[]] * 4


def call_coalesced(rank: int, world: int) -> str:
    join(rank, world)
    with pytest.raises(RuntimeError) as error:
        dist.group.WORLD.allgather_into_tensor_coalesced(
            [torch.empty(2, device=DEVICE)], [torch.ones(1, device=DEVICE)]
        )
    return str(error.value)


def test_a_backend_without_grouped_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECCL_NO_COALESCED", "1")
    for text in run_ranks(2, call_coalesced, init_group=False):
        assert "does not support allgather_into_tensor_coalesced" in text


def misuse(rank: int, world: int, how: str) -> list[str]:
    fakeacc = join(rank, world)
    tensor = torch.ones(4, device=DEVICE)
    work = dist.all_reduce(tensor, async_op=True)
    if how == "read before wait":
        tensor + 1
    elif how == "write before wait":
        tensor.zero_()
    elif how == "free before wait":
        del tensor
    work.wait()
    if how == "free before wait":
        del work
        torch.zeros(4, device=DEVICE)
    return fakeacc.races()


@pytest.mark.parametrize(
    ("how", "report"),
    [
        ("read before wait", "aten::add on 0/s0 reads what ccl:allreduce wrote on 0/s1"),
        ("write before wait", "aten::zero_ on 0/s0 overwrites what ccl:allreduce wrote on 0/s1"),
        ("free before wait", None),  # the work keeps it
    ],
)
def test_a_collective_that_is_not_waited_for(how: str, report: str | None) -> None:
    first = run_ranks(2, misuse, how, init_group=False)[0]
    assert first == [] if report is None else any(report in each for each in first), first


# ---- what torch itself trains on it ----------------------------------------------------------------------------------


def train_with_torch(rank: int, world: int, engine: str) -> Any:
    fakeacc = join(rank, world) if world > 1 else None
    device = DEVICE if world > 1 else "cpu"
    torch.set_default_device(device)
    torch.manual_seed(0)
    model: Any = Transformer(1)
    if engine == "DDP" and world > 1:
        model = DistributedDataParallel(model)
    elif world > 1:
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())
    for step in range(2):
        inputs, targets = (each.to(device) for each in batch(RECIPE, step, 0, rank, world))
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    named = model.named_parameters()
    params = {name.removeprefix("module."): full(param).cpu() for name, param in named}
    return params, fakeacc.races() if fakeacc is not None else []


RECIPE = Recipe()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["DDP", "fully_shard"])
def test_torchs_own_engines_train_without_a_race(engine: str) -> None:
    want, _ = alone(train_with_torch, engine)
    for params, races in run_ranks(4, train_with_torch, engine, init_group=False):
        assert races == []
        assert_close(params, want, 1e-6)


def race_in_the_function(rank: int, world: int) -> None:
    tensor = torch.zeros(4)
    with torch.Stream(DEVICE):
        tensor + 1


@pytest.mark.usefixtures("on_fakeacc")
def test_a_race_fails_the_test_that_has_it() -> None:
    with pytest.raises(Exception, match=r"races on fakeacc:\s+aten::add on"):
        run_ranks(2, race_in_the_function)


def default_device(rank: int, world: int) -> Any:
    return torch.zeros(2).device.type, nn.Linear(2, 2).weight.device.index, os.environ["LOCAL_RANK"]


@pytest.mark.usefixtures("on_fakeacc")
def test_ranks_make_their_tensors_there() -> None:
    assert run_ranks(2, default_device) == [(DEVICE, 0, "0"), (DEVICE, 1, "1")]
