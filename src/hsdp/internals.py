"""The private corners of torch that the engine needs; each says why, and a test fails clearly when torch changes."""

from __future__ import annotations

from collections.abc import Callable

import torch


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many owners the storage of `tensor` has.

    A gradient buffer may be written again only when nobody kept a gradient of the last step; nothing public tells.
    torch's CUDA graph trees ask the same.
    """
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the backward that is running. DDP and FSDP learn of the end in the same way."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_backward_running() -> bool:
    """Whether this thread is inside a backward. torch's activation checkpointing asks the same."""
    return int(torch._C._current_graph_task_id()) != -1
