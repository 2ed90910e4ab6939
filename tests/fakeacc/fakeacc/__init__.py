"""The device type "fakeacc" and the process-group backend "fakeccl": an accelerator that is host memory.

`import fakeacc` before a device is touched; then `init_process_group("cpu:gloo,fakeacc:fakeccl")`. README.md in the
folder above says what it can do and what the environment variables are.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "fakeccl"
NAME = "fakeacc"


def _load() -> Any:
    """The compiled half, from where it was built."""
    folder = os.environ.get("FAKEACC_BUILD")
    if folder is None:
        from fakeacc_build import build

        folder = str(build())
    spec = importlib.util.spec_from_file_location(f"{__name__}._C", Path(folder, "_C.so"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_C = _load()
race_check, races = _C.race_check, _C.races
start_trace, stop_trace = _C.start_trace, _C.stop_trace
skip_wait, num_waits = _C.skip_wait, _C.num_waits


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _C.current_device() if index is None else index


class _Device:
    """Context in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index, self._before = _index(device), -1

    def __enter__(self) -> None:
        self._before = _C.current_device()
        _C.set_device(self._index)

    def __exit__(self, *_: Any) -> None:
        _C.set_device(self._before)


def _needed() -> dict[str, Any]:
    """What an accelerator cannot do without: four functions for users, the rest for torch itself."""
    return {
        "device_count": _C.device_count,
        "is_available": lambda: _C.device_count() > 0,
        "current_device": _C.current_device,
        "set_device": lambda device: _C.set_device(_index(device)),
        "is_initialized": _C.is_initialized,
        "device": _Device,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=NAME: torch.get_rng_state(),
        "set_rng_state": lambda state, device=NAME: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }


def _optional() -> dict[str, Any]:
    """Streams, events and statistics, which a device module need not have."""

    def stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device(NAME, _index(device)), priority=priority)

    def event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event(NAME, enable_timing=enable_timing)

    statistics = ("memory_allocated", "max_memory_allocated", "memory_reserved", "memory_stats")
    return {
        "Stream": stream,
        "Event": event,
        "stream": lambda stream: stream,  # a torch.Stream is a context
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        **{name: getattr(torch.accelerator, name) for name in (*statistics, "reset_peak_memory_stats", "empty_cache")},
    }


def _register() -> None:
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(_needed())
    if os.environ.get("FAKEACC_NO_STREAMS", "0") == "0":
        module.__dict__.update(_optional())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return _C.make_group(dist.ProcessGroupGloo(store, rank, size, timeout), timeout)

    # A list: torch would take the letters of a text for device types.
    dist.Backend.register_backend(BACKEND, make_group, devices=[NAME])


_register()
