"""Training on the fake accelerator equals one plain process on the CPU, with no race, whatever the device lacks."""

from __future__ import annotations

import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks
from models import (
    TOLERANCE,
    Awkward,
    Recipe,
    Trained,
    adamw,
    assert_close,
    assert_same_training,
    batch,
    brief,
    build,
    full,
    loss_of,
    reference,
    train,
)
from torch import nn

import hsdp
from hsdp.collectives import GroupedRow

pytestmark = pytest.mark.usefixtures("on_fakeacc")

MESHES = [(2, 2), (4, 1), (1, 4)]
DEVICE = "fakeacc"


def train_there(rank: int, world: int, recipe: Recipe, where: str, options: dict[str, Any]) -> Trained:
    """`where`: what the model is on before it is wrapped."""
    with torch.device(where):
        model = build(recipe)
    hsdp.hybrid_shard(model, device=DEVICE, announce=False, **options)
    for name, param in model.named_parameters():
        assert param.device == torch.device(DEVICE, torch.get_device_module(DEVICE).current_device()), name
    rows = {type(segment.row) for unit in model._hsdp_state.schedule.units for segment in unit.segments}
    assert rows == {GroupedRow} or hsdp.describe(model).shard == 1
    result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_)
    hsdp.check_replicas(model)
    return brief(result, rank)


# ---- what a device may lack ------------------------------------------------------------------------------------------

LACKS: dict[str, dict[str, str]] = {
    "nothing": {},
    "streams": {"FAKEACC_NO_STREAMS": "1"},
    "set_data": {"FAKEACC_NO_SET_DATA": "1"},
    "pinned memory": {"FAKEACC_NO_PINNED": "1"},
    "all of it": {"FAKEACC_NO_STREAMS": "1", "FAKEACC_NO_SET_DATA": "1", "FAKEACC_NO_PINNED": "1"},
}


@pytest.mark.parametrize("lacks", LACKS)
@pytest.mark.parametrize("mesh", MESHES, ids=["2x2", "4x1", "1x4"])
def test_a_device_that_lacks(lacks: str, mesh: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LACKS[lacks].items():
        monkeypatch.setenv(name, value)
    for recipe, where in ((Recipe(steps=3), "cpu"), (Recipe("awkward", torch.float64, steps=3), DEVICE)):
        results = run_ranks(4, train_there, recipe, where, {"mesh": mesh})
        assert_same_training(results, reference(recipe), TOLERANCE[recipe.dtype])


def train_ungrouped(rank: int, world: int, recipe: Recipe, mesh: tuple[int, int]) -> dict[str, torch.Tensor]:
    """DTensor's own `full_tensor` needs the grouped all-gather; ours does not."""
    model = hsdp.hybrid_shard(build(recipe), mesh=mesh, announce=False)
    optimizer = adamw(model.parameters())
    for step in range(recipe.steps):
        inputs, targets = batch(recipe, step, 0, rank, world)
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        hsdp.clip_grad_norm_(model, recipe.max_norm)
        optimizer.step()
    with hsdp.gathered(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("streams", [True, False], ids=["streams", "no-streams"])
@pytest.mark.parametrize("mesh", MESHES, ids=["2x2", "4x1", "1x4"])
def test_a_backend_without_grouped_collectives(
    streams: bool, mesh: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECCL_NO_COALESCED", "1")
    if not streams:
        monkeypatch.setenv("FAKEACC_NO_STREAMS", "1")
    recipe = Recipe(steps=3)
    for params in run_ranks(4, train_ungrouped, recipe, mesh):
        assert_close(params, reference(recipe).params, TOLERANCE[recipe.dtype])


# ---- how many devices a process sees, and nodes ----------------------------------------------------------------------


def train_on_nodes(rank: int, world: int, recipe: Recipe, per_node: int, options: dict[str, Any]) -> Any:
    os.environ.update(HSDP_HOST=f"node{rank // per_node}", LOCAL_RANK=str(rank % per_node))
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    module: Any = torch.get_device_module(DEVICE)
    module.set_device(rank % per_node % module.device_count())
    with torch.device("cpu"):
        model = build(recipe)
    hsdp.hybrid_shard(model, announce=False, **options)
    result = train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_)
    devices = {str(param.device) for param in model.parameters()}
    return brief(result, rank), hsdp.describe(model).rows, devices


@pytest.mark.parametrize("visible", [1, 2, 4, 8])
@pytest.mark.parametrize("per_node", [2, 4], ids=["two-nodes", "one-node"])
def test_devices_a_node(visible: int, per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups follow from the ranks on a node, not from the devices it has: FSDP1 makes the wrong ones here."""
    monkeypatch.setenv("FAKEACC_DEVICES", str(visible))
    recipe = Recipe(steps=2)
    results = run_ranks(4, train_on_nodes, recipe, per_node, {})
    rows = ((0, 1), (2, 3)) if per_node == 2 else ((0, 1, 2, 3),)
    for rank, (_, found, devices) in enumerate(results):
        assert found == rows
        assert devices == {f"{DEVICE}:{rank % per_node % visible}"}
    assert_same_training([result for result, _, _ in results], reference(recipe), TOLERANCE[recipe.dtype])


# ---- where the model is ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parts on several devices, and a buffer that two modules share."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 300, device=first)
        self.second = nn.Linear(300, 6, device=second)
        table, watched = torch.arange(6.0, device="cpu"), torch.zeros(1, device="cpu")
        for part in (self.first, self.second):
            part.register_buffer("table", table)
            part.register_buffer("watched", watched)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.second.table


def refuse(rank: int, world: int, first: str, second: str, options: dict[str, Any]) -> None:
    hsdp.hybrid_shard(Mixed(first, second), mesh=(1, 2), announce=False, **options)


@pytest.mark.parametrize(
    ("first", "second", "options", "parts"),
    [
        ("fakeacc:0", "fakeacc:1", {}, ["several devices", "fakeacc:0: first.weight, first.bias", "fakeacc:1: "]),
        ("fakeacc:0", "cpu", {}, ["others on the CPU: second.weight, second.bias", "device='fakeacc:0'"]),
        ("fakeacc:0", "fakeacc:0", {"device": "fakeacc:1"}, ["'fakeacc:1' does not fit parameters on fakeacc:0"]),
        ("cpu", "cpu", {"device": "fakeacc:9"}, ["device='fakeacc:9': this process sees 4 of 'fakeacc'"]),
        ("fakeacc:0", "cpu", {"device": "cpu"}, ["device='cpu' does not fit parameters on fakeacc:0"]),
    ],
)
def test_devices_refused(first: str, second: str, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, refuse, first, second, options)
    for rank in (0, 1):
        kind, text = error.value.errors[rank]
        assert kind == "ValueError"
        for part in parts:
            assert part in text


def move_mixed(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    with torch.device("cpu"):
        torch.manual_seed(0)
        ignored = nn.Parameter(torch.randn(3))
    model = Mixed("fakeacc:2", "cpu")
    model.register_parameter("ignored", ignored)
    table, held = model.first.table, [model.first.table]
    weak = weakref.ref(model.first.watched)  # what has a weak reference cannot be swapped
    early = adamw(model.parameters())
    hsdp.hybrid_shard(
        model, mesh=(1, 2), device="fakeacc:2", ignored_params={ignored}, reduce_ignored=False, announce=False
    )
    module: Any = torch.get_device_module(DEVICE)
    assert module.current_device() == 2
    assert {str(param.device) for name, param in model.named_parameters() if name != "ignored"} == {"fakeacc:2"}
    assert model.ignored is ignored
    assert ignored.device.type == "cpu"
    assert model.first.table is table
    assert model.second.table is table
    assert held[0].device == torch.device("fakeacc:2")
    assert model.first.watched is model.second.watched
    assert model.first.watched.device == torch.device("fakeacc:2")
    assert (weak() is model.first.watched) == (os.environ.get("FAKEACC_NO_SET_DATA") is None)
    model(torch.ones(2, 6, device="fakeacc:2")).sum().backward()
    assert all(param.grad is not None for name, param in model.named_parameters() if name != "ignored")
    with pytest.raises(RuntimeError, match="as it was before it was sharded"):
        early.step()
    return None


@pytest.mark.parametrize("set_data", [True, False], ids=["set_data", "no-set_data"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_on_the_cpu_moves_when_told_so(set_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not set_data:
        monkeypatch.setenv("FAKEACC_NO_SET_DATA", "1")
    run_ranks(2, move_mixed)


def train_meta(rank: int, world: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Awkward()
    torch.manual_seed(3)
    hsdp.hybrid_shard(model, mesh=(2, 2), init=initialise, announce=False)
    assert {param.device.type for param in model.parameters()} == {DEVICE}
    assert not any(full(param).isnan().any() for param in model.parameters()), "memory nobody wrote"
    model(torch.ones(2, 6)).sum().backward()
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def initialise(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.01)


def test_a_meta_model_is_made_on_the_accelerator() -> None:
    first, *others = run_ranks(4, train_meta)
    for other in others:
        assert_close(other, first, 0.0)


def index_and_default(rank: int, world: int) -> list[str]:
    found = []
    for device in (3, "fakeacc:3", "fakeacc", None):
        with torch.device("cpu"):
            model = nn.Linear(2, 2)
        hsdp.hybrid_shard(model, mesh=(1, 1), device=device, announce=False)
        found.append(str(model.weight.device))
    return found


def test_a_device_as_a_number_a_name_or_nothing() -> None:
    assert run_ranks(1, index_and_default) == [["fakeacc:3"] * 4]


def train_on_the_cpu(rank: int, world: int) -> Any:
    with torch.device("cpu"):
        model = build(Recipe(steps=2))
        hsdp.hybrid_shard(model, mesh=(1, 2), device="cpu", announce=False)
        return brief(train(model, Recipe(steps=2), part=rank, parts=world, clip=hsdp.clip_grad_norm_), rank)


def test_the_cpu_on_a_machine_with_an_accelerator() -> None:
    assert_same_training(run_ranks(2, train_on_the_cpu), reference(Recipe(steps=2)), 1e-6)


def without_a_backend(rank: int, world: int) -> str:
    import fakeacc  # noqa: F401 - the device exists, no process group serves it

    dist.init_process_group("gloo")
    texts = []
    for wrap in (
        lambda: hsdp.hybrid_shard(nn.Linear(2, 2, device=DEVICE), announce=False),
        lambda: hsdp.init_mesh(device_type=DEVICE),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the texts are compared
            wrap()
        texts.append(str(error.value))
    assert "register_backend" in texts[0]
    assert "init_process_group('cpu:gloo,fakeacc:<its backend>')" in texts[0]
    assert hsdp.init_mesh().device_type == "cpu"
    return texts[1]


def test_a_missing_backend_is_an_error_at_once() -> None:
    for text in run_ranks(2, without_a_backend, init_group=False):
        assert "device_type='fakeacc': the default process group has backends for" in text


def mixed_precision(rank: int, world: int, recipe: Recipe) -> Any:
    model = build(recipe)
    precision = hsdp.Precision(param=torch.bfloat16, reduce=torch.float32)
    hsdp.hybrid_shard(model, mesh=(2, 2), precision=precision, announce=False)
    return brief(train(model, recipe, part=rank, parts=world, clip=hsdp.clip_grad_norm_), rank)


def test_mixed_precision() -> None:
    recipe = Recipe(steps=3)
    want = run_ranks(4, mixed_precision, recipe)[0]
    assert want.losses[-1] < want.losses[0]
    assert_close(want.params, reference(recipe).params, 2e-2)
