"""Clip gradients by their global norm: one number on every rank, whatever the mesh."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hsdp.dtensors import local_of


def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over the whole model is at most `max_norm`; return the norm before that.

    One pass over the local gradients and one scalar all-reduce inside the row: the rows hold equal gradients, so
    summing over all ranks would count everything `replicate` times.

    Returns:
        the global norm, a 0-dim plain tensor, the same on every rank.

    Raises:
        RuntimeError: on every rank, before any gradient is touched, when `error_if_nonfinite` and the norm is not
            finite.
        ValueError: a gradient is still a sum inside `hsdp.accumulate`.
    """
    grads = [param.grad for param in _params(model_or_params) if param.grad is not None]
    if any(isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements) for grad in grads):
        raise ValueError(
            "a gradient is not reduced yet: it is the sum so far of microbatches inside hsdp.accumulate; "
            "clip after the backward of the last microbatch, outside of it"
        )
    norm = _global_norm(grads, float(norm_type))
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


def _global_norm(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Norm over everything; sharded gradients are completed over the axes they are sharded on, others count once."""
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[torch.Tensor]] = {}
    for grad in grads:
        axes = (
            tuple(i for i, p in enumerate(grad.placements) if isinstance(p, Shard)) if isinstance(grad, DTensor) else ()
        )
        key = (grad.device_mesh, axes) if isinstance(grad, DTensor) and axes else None
        groups.setdefault(key, []).append(local_of(grad))
    norms = [_group_norm(key, group, norm_type) for key, group in groups.items()]
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _group_norm(
    key: tuple[DeviceMesh, tuple[int, ...]] | None, grads: list[torch.Tensor], norm_type: float
) -> torch.Tensor:
    # A rank may hold no rows of anything; its part of a sum or maximum of absolute values is zero.
    filled = [grad for grad in grads if grad.numel()]
    norm = (
        get_total_norm(filled, norm_type) if filled else torch.zeros((), dtype=grads[0].dtype, device=grads[0].device)
    )
    if key is None:
        return norm
    mesh, axes = key
    largest = norm_type == float("inf")
    power = norm if largest else norm**norm_type
    for axis in axes:
        group = mesh.get_group(axis)
        if not largest:
            dist.all_reduce(power, group=group)
            continue
        # Not all_reduce(MAX): gloo compares with "<", which loses a nan or not depending on the rank that has it.
        norms = [torch.empty_like(power) for _ in range(group.size())]
        dist.all_gather(norms, power, group=group)
        power = torch.stack(norms).max()
    return power if largest else power ** (1.0 / norm_type)
