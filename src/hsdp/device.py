"""What the engine asks of a device, and nothing else: any torch device type fits.

Only four functions are required of `torch.<type>`: `device_count`, `current_device`, `set_device`, `is_available`.
Memory statistics are optional. A collective of torch.distributed already orders itself behind the work queued on the
caller's current stream and `wait()` orders the current stream behind it, so the engine needs no streams of its own.
"""

from __future__ import annotations

import resource
from typing import Any

import torch


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

    def peak_memory_bytes(self) -> int:
        """Most memory used so far: of the device where it keeps statistics, else of the process."""
        read = getattr(self._module, "max_memory_allocated", None)
        if self.type != "cpu" and read is not None:
            return int(read())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
