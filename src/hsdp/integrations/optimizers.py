"""Optimizers that were made before their model was wrapped, as trainers make them, go on with what it has now.

Wrapping puts a sharded parameter in the place of every plain one, and an optimizer over the plain ones would train
nothing (pytorch#149205); hsdp makes it raise. A trainer that is given model and optimizer together can do better.

    with carry_over(model, [optimizer]):
        hsdp.hybrid_shard(model, ...)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


@contextmanager
def carry_over(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Context in which `model` is wrapped; afterwards the optimizers hold its parameters of the same names.

    The optimizers stay the objects they are, with their groups, hooks and learning rate schedules. State that has the
    shape of its parameter (Adagrad has some before the first step) is cut like it; it must be equal on all ranks.

    Raises:
        ValueError: an optimizer holds a parameter that `model` does not have: it belongs to another model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"group {index} of {type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(parameter.shape)} that {type(model).__name__} does not have; make the optimizer from "
                        "the parameters of the model that is set up with it"
                    )
    yield
    new = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [_carry(optimizer, old, new[names[id(old)]]) for old in group["params"]]


def _carry(optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if old in optimizer.state and old is not new:
        state = optimizer.state.pop(old)
        optimizer.state[new] = {key: _cut_like(value, old, new) for key, value in state.items()}
    return new


def _cut_like(value: object, old: torch.Tensor, new: torch.Tensor) -> object:
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or not isinstance(new, DTensor) or not old.ndim:
        return value
    # src_data_rank=None: every rank cuts its own part out of what it has, without communication.
    return distribute_tensor(value.to(new.device), new.device_mesh, new.placements, src_data_rank=None)
