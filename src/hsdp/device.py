"""What the engine asks of a device, and nothing else: any torch device type fits. And which device a model belongs on.

Only four functions are required of `torch.<type>`: `device_count`, `current_device`, `set_device`, `is_available`.
Events and memory statistics are optional. A collective of torch.distributed already orders itself behind the work
queued on the caller's current stream and `wait()` orders the current stream behind it, so the engine needs no streams
of its own. `torch.accelerator` is not used for work: it names one accelerator of the process, not the model's.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Any

import torch

_SHOWN_NAMES = 3  # parameters named for one device in an error


class DeviceHandle:
    """The module `torch.<type>` behind one device, with a fallback for what it lacks."""

    def __init__(self, device_type: str) -> None:
        self.type = device_type
        self._module: Any = torch.get_device_module(device_type)

    @property
    def device(self) -> torch.device:
        """The current device; an index only where the type has several devices."""
        if self.type == "cpu":
            return torch.device("cpu")
        return torch.device(self.type, self._module.current_device())

    def device_count(self) -> int:
        return int(self._module.device_count()) if self._module.is_available() else 0

    def bind(self, index: int | None = None) -> None:
        """Make a device this process's current one: `index`, or the launcher's choice unless one is in use already.

        Groups and streams are made for the current device, so this comes before them.
        """
        if self.type == "cpu":
            return
        if index is not None:
            if index != self._module.current_device():
                self._module.set_device(index)
            return
        unused = hasattr(self._module, "is_initialized") and not self._module.is_initialized()
        local_rank = os.environ.get("LOCAL_RANK", "")
        if unused and local_rank.isdecimal():
            self._module.set_device(int(local_rank) % self._module.device_count())  # one visible a process: always 0

    @property
    def has_events(self) -> bool:
        """Whether it works behind the host's back and can say how far it has come."""
        return self.type != "cpu" and hasattr(self._module, "Event")

    def record_event(self) -> Any | None:
        """An event behind what is queued on the current stream, with `query()`; None where the device has none."""
        if not self.has_events:
            return None
        event = self._module.Event()
        event.record()
        return event

    def peak_memory_bytes(self) -> int:
        """Most memory used so far: of the device where it keeps statistics, else of the process."""
        read = getattr(self._module, "max_memory_allocated", None)
        if self.type != "cpu" and read is not None:
            return int(read())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def choose_device(
    asked: torch.device | str | int | None,
    places: Mapping[str, torch.device],
    mesh_type: str | None,
    default_type: str,
) -> tuple[str, int | None]:
    """Which device a model is to be sharded on: (type, index), the index None where the current one is meant.

    What was asked for comes first, then where tensors are, then the mesh's type, then `default_type`. Tensors on the
    CPU or on the meta device decide nothing, and move.

    Args:
        asked: the user's `device`; a number is an index of the accelerator that the rest names.
        places: where the tensors are that will be sharded, by name.
        mesh_type: of the user's mesh, if there is one.
        default_type: where nothing else says anything.

    Raises:
        ValueError: tensors on two accelerators, or on another than was asked for; or some on the CPU beside others on
            an accelerator, where neither a device nor a mesh says that they are to move.
    """
    names_on: dict[torch.device, list[str]] = {}
    for name, place in places.items():
        if place.type != "meta":
            names_on.setdefault(place, []).append(name)
    on_cpu = names_on.pop(torch.device("cpu"), [])
    if len(names_on) > 1:
        raise ValueError(
            "parameters are on several devices: "
            + "; ".join(f"{device}: {_some(names)}" for device, names in names_on.items())
            + "; move the model to one of them, or leave some out with ignored_params"
        )
    found = next(iter(names_on), None)
    wanted = _wanted(asked, found.type if found else mesh_type or default_type)
    if wanted is not None and mesh_type is not None and wanted[0] != mesh_type:
        raise ValueError(f"device={asked!r} is no device of the mesh, which is for {mesh_type!r}; give one of the two")
    if found is None:
        return wanted or (mesh_type or default_type, None)
    target = wanted or (mesh_type or found.type, found.index if mesh_type in (None, found.type) else None)
    if target[0] != found.type or target[1] not in (None, found.index):
        source = f"device={asked!r}" if asked is not None else f"the mesh, which is for {mesh_type!r},"
        raise ValueError(
            f"{source} does not fit parameters on {found}: {_some(names_on[found])}; only parameters on the CPU or on "
            "the meta device are moved"
        )
    if on_cpu and asked is None and mesh_type is None:
        raise ValueError(
            f"some parameters are on {found}: {_some(names_on[found])}, others on the CPU: {_some(on_cpu)}; pass "
            f"device={str(found)!r} to move these as well, or leave them out with ignored_params"
        )
    return found.type, found.index


def _wanted(asked: torch.device | str | int | None, likely_type: str) -> tuple[str, int | None] | None:
    if asked is None:
        return None
    if isinstance(asked, int) and not isinstance(asked, bool):
        # Never torch.device(int), which means the process's current accelerator, whatever the model is on.
        if likely_type == "cpu":
            raise ValueError(
                f"device={asked} is an index, and nothing names an accelerator; pass device='<type>:{asked}'"
            )
        return likely_type, asked
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={asked!r} is no device: {error}") from error
    if device.type == "meta":
        raise ValueError("device='meta' holds no values; give the device to train on")
    return device.type, None if device.type == "cpu" else device.index


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def move(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Move and cast a tensor that nothing differentiates; whoever holds it sees it on the new device.

    Returns:
        the tensor itself; another one only where torch can neither give it new data nor swap it.
    """
    dtype = dtype or tensor.dtype
    if tensor.device == device and tensor.dtype == dtype:
        return tensor
    with torch.no_grad():
        moved = tensor.detach().to(device, dtype)
    try:
        tensor.data = moved
        return tensor
    except RuntimeError:  # backends without _has_compatible_shallow_copy_type refuse (pytorch#196975)
        pass
    try:
        torch.utils.swap_tensors(tensor, moved)
    except RuntimeError:  # it has weak references
        return moved
    return tensor
