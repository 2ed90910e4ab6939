"""DTensors made the cheap way equal those made the public way; fails when torch changes DTensor's constructor."""

from __future__ import annotations

import torch
from harness import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hsdp.dtensors import final_placements, like, local_of, make_dtensor


def compare(rank: int, world: int) -> list[object]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = torch.arange(15.0).view(5, 3)
    public = distribute_tensor(whole, mesh, (Replicate(), Shard(0)))
    rows = public.to_local().clone()
    made = make_dtensor(rows, mesh, (5, 3), final_placements(mesh, (5, 3)))
    cheap = like(torch.nn.Parameter(made), rows)
    assert isinstance(cheap, DTensor)
    return [
        made.placements == public.placements == cheap.placements,
        made.shape == cheap.shape == whole.shape,
        made.stride() == cheap.stride() == whole.stride(),
        torch.equal(made.full_tensor(), whole),
        torch.equal(cheap.full_tensor(), whole),
        local_of(cheap).data_ptr() == rows.data_ptr(),
        final_placements(mesh, ()) == (Replicate(), Replicate()),
        cheap.requires_grad,
    ]


def test_like_and_make_equal_distribute_tensor() -> None:
    for result in run_ranks(4, compare):
        assert result == [True] * 7 + [False]
