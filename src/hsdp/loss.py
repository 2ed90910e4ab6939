"""Losses that are means over tokens, where ranks hold unequal numbers of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hsdp.module import schedules_of


def token_mean(loss_sum: torch.Tensor, num_tokens: torch.Tensor | int, model: nn.Module) -> torch.Tensor:
    """The loss to call `backward()` on, so that gradients are those of the mean over all tokens of all ranks.

    Gradients are averaged over ranks; a mean of each rank's own mean weighs the tokens of a rank with few of them more
    (huggingface/transformers#34242). Every rank calls this: it costs an all-reduce of one number.

    Args:
        loss_sum: this rank's loss, summed over its tokens, 0-dim.
        num_tokens: this rank's tokens that count; of the whole step, where it is one of several microbatches.
        model: the wrapped model.

    Returns:
        `loss_sum x ranks / tokens of all ranks`, 0-dim. Its mean over ranks is the global mean loss; with microbatches
        that of their sum. Where no rank has any tokens it is `loss_sum x ranks`, which is 0 then.

    Raises:
        ValueError: nothing in `model` is wrapped.
    """
    mesh = schedules_of(model)[0].mesh
    total = torch.as_tensor(num_tokens).detach().reshape(()).to(loss_sum.device, torch.int64, copy=True)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(total, group=mesh.get_group(axis))
    return loss_sum * mesh.size() / total.clamp(min=1)  # no .item(): that would wait for the device
