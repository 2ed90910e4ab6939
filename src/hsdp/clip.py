"""Clip gradients by their global norm: one number on every rank, whatever the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hsdp.dtensors import local_of
from hsdp.precision import sum_dtype


def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over the whole model is at most `max_norm`; return the norm before that.

    One pass over the local gradients and one scalar all-reduce inside the row: the rows hold equal gradients, so
    summing over all ranks would count everything `replicate` times. Gradients of plain parameters beside sharded ones
    count once too. Where nobody reduces them they may differ between ranks; then their mean over the ranks counts (of
    `|g|^p`; the largest for inf), so that every rank still scales by the same number.

    Returns:
        the global norm, a 0-dim plain tensor, the same on every rank.

    Raises:
        RuntimeError: on every rank, before any gradient is touched, when `error_if_nonfinite` and the norm is not
            finite.
        ValueError: a gradient is still a sum inside `hsdp.accumulate`.
    """
    params = _params(model_or_params)
    grads = [param.grad for param in params if param.grad is not None]
    if any(isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements) for grad in grads):
        raise ValueError(
            "a gradient is not reduced yet: it is the sum so far of microbatches inside hsdp.accumulate; "
            "clip after the backward of the last microbatch, outside of it"
        )
    norm = _global_norm(params, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}; they were not clipped")
    # torch's own clipping, on the local parts: each rank scales what it holds by the same number.
    clip_grads_with_norm_([_Holder(local_of(grad)) for grad in grads], max_norm, norm)  # type: ignore[misc]
    return norm


class _Holder:
    """What torch's clipping wants to see of a parameter."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad


def _params(model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(model_or_params, nn.Module):
        return list(model_or_params.parameters())
    return [model_or_params] if isinstance(model_or_params, torch.Tensor) else list(model_or_params)


def _global_norm(params: list[torch.Tensor], order: float) -> torch.Tensor:
    """Norm over everything; sharded gradients are completed over the axes they are sharded on, others count once."""
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[torch.Tensor]] = {}
    plain = [param for param in params if not isinstance(param, DTensor) and param.requires_grad]
    meshes = {param.device_mesh: None for param in params if isinstance(param, DTensor)}
    for grad in (param.grad for param in params if isinstance(param.grad, DTensor)):
        axes = tuple(axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate())
        groups.setdefault((grad.device_mesh, axes) if axes else None, []).append(local_of(grad))
    powers = []
    for key, group in groups.items():
        power = _local_power(group, order)
        powers.append(_over_axes(power, key[0], key[1], order) if key is not None else power)
    if plain:
        # Whether anything is plain is the same on every rank, unlike which of them got a gradient.
        power = _local_power([param.grad for param in plain if param.grad is not None], order, plain[0])
        for mesh in sorted(meshes, key=lambda mesh: mesh.size())[-1:]:
            power = _over_axes(power.to(mesh.device_type), mesh, range(mesh.ndim), order)
            power = power if order == inf else power / mesh.size()
        powers.append(power)
    if not powers:
        return torch.zeros(())
    stacked = torch.stack([power.to(powers[0].device) for power in powers])
    return stacked.max() if order == inf else stacked.sum() ** (1.0 / order)


def _local_power(grads: list[torch.Tensor], order: float, like: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of `|g|^order` over what this rank holds, the largest `|g|` for inf."""
    like = grads[0] if like is None else like
    # A rank may hold no rows of anything; its part of a sum or maximum of absolute values is zero.
    filled = [grad for grad in grads if grad.numel()]
    norm = get_total_norm(filled, order) if filled else torch.zeros((), device=like.device)
    norm = norm.to(sum_dtype(like.dtype))
    return norm if order == inf else norm**order


def _over_axes(power: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int], order: float) -> torch.Tensor:
    """The sum over the ranks of these axes, the largest for inf; the same on every one of them."""
    for axis in axes:
        group = mesh.get_group(axis)
        if order != inf:
            dist.all_reduce(power, group=group)
            continue
        # Not all_reduce(MAX): gloo compares with "<", which loses a nan or not depending on the rank that has it.
        each = [torch.empty_like(power) for _ in range(group.size())]
        dist.all_gather(each, power, group=group)
        power = torch.stack(each).max()
    return power
