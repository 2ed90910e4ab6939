"""Parameters that the user keeps out of sharding: whole and plain on every rank. Reduced on request, as DDP does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp.precision import sum_dtype


class IgnoredGradients:
    """The gradients of ignored parameters, averaged over the mesh at the end of a backward that synchronises.

    `.grad` of such a parameter is this rank's own sum until then. What it already held from an earlier reduction is
    the same on every rank, so that averaging the whole leaves it as it was.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh) -> None:
        self._params, self._mesh = [param for _, param in named], mesh

    def reduce(self) -> None:
        """Average over all ranks; a parameter that no rank used keeps no gradient."""
        groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in self._params:
            if param.requires_grad:
                groups.setdefault(sum_dtype(param.dtype), []).append(param)
        for dtype, params in groups.items():
            self._reduce(params, dtype)

    @torch.no_grad()
    def _reduce(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        device = params[0].device
        used = torch.tensor([float(param.grad is not None) for param in params], dtype=dtype, device=device)
        parts = [param.new_zeros(param.shape) if param.grad is None else param.grad for param in params]
        parts = [part.to_dense() if part.layout != torch.strided else part for part in parts]
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts] + [used])
        for axis in range(self._mesh.ndim):
            if self._mesh.size(axis) > 1:
                dist.all_reduce(flat, group=self._mesh.get_group(axis))
        *means, flags = flat.split([part.numel() for part in parts] + [len(params)])
        for param, mean, flag in zip(params, means, flags.tolist(), strict=True):
            if flag:
                param.grad = (mean / self._mesh.size()).to(param.dtype).view(param.shape)
