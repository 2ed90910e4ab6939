"""The private corners of torch that the engine needs; each says why, and a test fails clearly when torch changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many owners the storage of `tensor` has.

    A gradient buffer may be written again only when nobody kept a gradient of the last step; nothing public tells.
    torch's CUDA graph trees ask the same.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward that is running. DDP and FSDP learn of the end in the same way."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def default_store() -> Any:
    """The store that the default process group was made with: what is left to talk through when a group is stuck."""
    return dist.distributed_c10d._get_default_store()


def is_backward_running() -> bool:
    """Whether this thread is inside a backward. torch's activation checkpointing asks the same."""
    return int(torch._C._current_graph_task_id()) != -1


def in_transform() -> bool:
    """Whether a transform of torch.func runs (jvp, grad, vmap): gradients of what it returns pass by our hooks."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def hooks_of(parameter: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """What users registered on a parameter: (`register_hook`, `register_post_accumulate_grad_hook`), in order.

    Autograd never accumulates into a sharded parameter, so the engine calls them; FSDP2 does it for the second kind.
    """
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return list(before.values()) if before else [], list(after.values()) if after else []


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give `target` the hooks of `source`: the same dicts, so that the handles users hold still remove them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(source, name):
            setattr(target, name, getattr(source, name))


def joint_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """One mesh of the axes of both, which are slices of one mesh. FSDP2 makes the meshes of its parameters with it."""
    return DeviceMesh._concatenate([first, second])


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where DTensor returns one whose collective still runs."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
