"""Are the copies equal? One hash a parameter and shard, compared down the columns."""

from __future__ import annotations

import ctypes
import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hsdp.control import exchange_over_mesh, format_ranks
from hsdp.module import schedules_of


def check_replicas(model: nn.Module) -> None:
    """Compare every parameter and buffer of a wrapped model between its copies, bit by bit.

    Every rank calls this. Costs one pass over the shards on the host.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs, its shard and the ranks.
        ValueError: nothing in `model` is wrapped.
    """
    mesh = schedules_of(model)[0].mesh
    local: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local[name] = _digest(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    by_rank = dict(zip(mesh.mesh.flatten().tolist(), exchange_over_mesh(local, mesh), strict=True))
    rows = mesh.mesh.tolist() if mesh.ndim == 2 else [mesh.mesh.tolist()]
    for shard in range(len(rows[0])):
        column = [row[shard] for row in rows]
        for name in local:
            values = {rank: by_rank[rank][name] for rank in column}
            different = [rank for rank in column if values[rank] != values[column[0]]]
            if different:
                raise RuntimeError(
                    f"copies differ in {name!r}, shard {shard}: {format_ranks(different)} unlike rank {column[0]}"
                )


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    num_bytes = data.numel() * data.element_size()
    # The memory itself: torch needs numpy for any other way to bytes, and the core needs torch only.
    memory = (ctypes.c_char * num_bytes).from_address(data.data_ptr()) if num_bytes else b""
    return hashlib.blake2b(memory, digest_size=16).hexdigest()
