"""Which device a model is sharded on, whatever says so; and what the handle needs of a device module."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from hsdp.device import DeviceHandle, choose_device, move


def on(**places: str) -> Any:
    """Where parameters are, by name."""
    return {name: torch.device(device) for name, device in places.items()}


XPU = on(a="xpu:1", b="xpu:1", c="meta")
CPU = on(a="cpu", b="meta")
MIXED = on(a="cpu", b="xpu:1", c="cpu")


@pytest.mark.parametrize(
    ("asked", "tensors", "mesh_type", "default", "chosen"),
    [
        # nothing is said: where the parameters are, else the mesh, else the default
        (None, XPU, None, "cpu", ("xpu", 1)),
        (None, XPU, "xpu", "cpu", ("xpu", 1)),
        (None, CPU, None, "cpu", ("cpu", None)),
        (None, CPU, None, "mps", ("mps", None)),
        (None, CPU, "xpu", "mps", ("xpu", None)),
        (None, CPU, "cpu", "mps", ("cpu", None)),
        (None, {}, None, "cpu", ("cpu", None)),
        (None, {}, "xpu", "cpu", ("xpu", None)),
        (None, on(a="meta"), None, "mps", ("mps", None)),
        # a device is asked for
        ("xpu:1", XPU, None, "cpu", ("xpu", 1)),
        ("xpu", XPU, None, "cpu", ("xpu", 1)),
        (1, XPU, None, "cpu", ("xpu", 1)),
        (torch.device("xpu", 1), MIXED, None, "cpu", ("xpu", 1)),
        ("xpu:0", CPU, None, "cpu", ("xpu", 0)),
        ("cpu", CPU, None, "xpu", ("cpu", None)),
        ("cpu:0", CPU, None, "xpu", ("cpu", None)),
        (3, CPU, None, "xpu", ("xpu", 3)),
        (3, CPU, "mps", "xpu", ("mps", 3)),
        (0, {}, "xpu", "cpu", ("xpu", 0)),
        # a mesh tells that CPU parameters move
        (None, MIXED, "xpu", "cpu", ("xpu", 1)),
    ],
)
def test_the_device(asked: Any, tensors: Any, mesh_type: Any, default: str, chosen: tuple[str, int | None]) -> None:
    assert choose_device(asked, tensors, mesh_type, default) == chosen


@pytest.mark.parametrize(
    ("asked", "tensors", "mesh_type", "parts"),
    [
        (None, on(a="xpu:0", b="xpu:1", c="xpu:1"), None, ["several devices", "xpu:0: a", "xpu:1: b, c"]),
        (None, on(a="xpu:0", b="mps:0"), None, ["xpu:0: a", "mps:0: b", "ignored_params"]),
        ("xpu:0", on(a="xpu:0", b="mps:0"), None, ["several devices"]),
        (None, MIXED, None, ["on xpu:1: b", "on the CPU: a, c", "device='xpu:1'", "ignored_params"]),
        ("xpu:0", XPU, None, ["device='xpu:0' does not fit parameters on xpu:1: a, b"]),
        ("cpu", XPU, None, ["device='cpu' does not fit parameters on xpu:1"]),
        (0, XPU, None, ["device=0 does not fit parameters on xpu:1"]),
        (None, XPU, "cpu", ["the mesh, which is for 'cpu', does not fit parameters on xpu:1"]),
        ("xpu", CPU, "cpu", ["device='xpu' is no device of the mesh, which is for 'cpu'"]),
        (1, CPU, None, ["device=1 is an index, and nothing names an accelerator", "'<type>:1'"]),
        ("warp:1", CPU, None, ["device='warp:1' is no device"]),
        (1.5, CPU, None, ["device=1.5 is no device"]),
        (True, XPU, None, ["device=True is no device"]),
        ("meta", CPU, None, ["device='meta' holds no values"]),
        (None, on(**{f"layer{i}": f"xpu:{i % 2}" for i in range(10)}), None, ["layer0, layer2, layer4 and 2 more"]),
    ],
)
def test_devices_refused(asked: Any, tensors: Any, mesh_type: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the parts are compared
        choose_device(asked, tensors, mesh_type, "cpu")
    for part in parts:
        assert part in str(error.value)


def test_the_handle_of_the_cpu() -> None:
    handle = DeviceHandle("cpu")
    assert (handle.device, handle.device_count()) == (torch.device("cpu"), 1)
    handle.bind()
    handle.bind(7)  # nothing to bind
    assert handle.peak_memory_bytes() > 2**20


class BareModule:
    """All that the engine may ask of a device module."""

    def __init__(self, count: int) -> None:
        self.count, self.current, self.calls = count, 0, 0

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    def set_device(self, index: int) -> None:
        self.current, self.calls = index, self.calls + 1


def test_a_handle_of_four_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = BareModule(4)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setenv("LOCAL_RANK", "3")
    handle = DeviceHandle("xpu")
    assert handle.device_count() == 4
    handle.bind()  # whether it is in use cannot be asked, so it is left as it is
    assert module.calls == 0
    handle.bind(2)
    handle.bind(2)
    assert (handle.device, module.calls) == (torch.device("xpu", 2), 1)
    assert handle.record_event() is None
    assert handle.peak_memory_bytes() > 2**20
    module.count = 0
    assert handle.device_count() == 0


@pytest.mark.parametrize(("visible", "bound"), [(8, 3), (4, 3), (2, 1), (1, 0)])
def test_an_unused_device_is_the_launchers(visible: int, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = BareModule(visible)
    module.is_initialized = lambda: module.calls > 0
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setenv("LOCAL_RANK", "3")
    DeviceHandle("xpu").bind()
    assert module.current == bound
    monkeypatch.setenv("LOCAL_RANK", "2")
    DeviceHandle("xpu").bind()  # it is in use now
    assert module.current == bound


def test_move_in_place() -> None:
    tensor = torch.arange(3.0)
    held = tensor
    assert move(tensor, torch.device("cpu")) is tensor
    assert move(tensor, torch.device("cpu"), torch.float64) is tensor
    assert held.dtype == torch.float64
    assert held.tolist() == [0, 1, 2]


class NoSetData(torch.Tensor):
    """A backend that refuses `tensor.data = tensor_of_another_device`; the swap then works, or not."""

    @property
    def data(self) -> Any:
        return self

    @data.setter
    def data(self, value: Any) -> None:
        raise RuntimeError("incompatible tensor type")


def test_move_where_new_data_is_refused() -> None:
    tensor = torch.arange(3.0).as_subclass(NoSetData)
    held = tensor
    moved = move(tensor, torch.device("cpu"), torch.float64)
    assert moved is held
    assert held.dtype == torch.float64
    watched = torch.arange(3.0).as_subclass(NoSetData)
    reference = weakref.ref(watched)  # a tensor with weak references cannot be swapped
    moved = move(watched, torch.device("cpu"), torch.float64)
    assert (moved.dtype, watched.dtype) == (torch.float64, torch.float32)
    assert reference() is watched
