"""Buffers: placed on the device when a model is wrapped, made equal then, or before every training forward as well.

A buffer is on every rank, whole. Running statistics of BatchNorm see only their own rank's part of the batch, so they
drift apart; what is then saved or evaluated depends on the rank. `sync_buffers="forward"` gives all ranks those of the
first one before each training forward, which is what DDP does.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hsdp.collectives import broadcast_first
from hsdp.device import move
from hsdp.precision import Precision

POLICIES = ("wrap", "forward")


def place_buffers(model: nn.Module, device: torch.device, precision: Precision) -> None:
    """Move all buffers to the device and cast them; a buffer that several modules share stays one."""
    placed: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or isinstance(buffer, DTensor) or buffer.is_meta:
                continue
            if buffer not in placed:
                floats = buffer.is_floating_point() and precision.buffer is not None
                placed[buffer] = move(buffer, device, precision.buffer if floats else None)
            module._buffers[name] = placed[buffer]


def broadcast_buffers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the buffers of the mesh's first rank: one message a dtype and axis."""
    buffers: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in dict.fromkeys(model.buffers()):
        if not isinstance(buffer, DTensor) and buffer.numel() and not buffer.is_meta:
            buffers.setdefault(buffer.dtype, []).append(buffer)
    for same in buffers.values():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in same])
        for axis in reversed(range(mesh.ndim)):
            broadcast_first(flat, mesh.get_group(axis), flat.device)
        with torch.no_grad():
            for buffer, part in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
                buffer.copy_(part.view(buffer.shape))
