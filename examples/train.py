"""Train a small model on every rank that a launcher started: each host holds one copy, spread over its ranks.

    torchrun --nproc-per-node 4 examples/train.py     # one machine; docs/launch.md has several
    torchrun --nproc-per-node 4 examples/train.py 20  # 20 steps

It needs RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and does not ask which launcher set them.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn

import hsdp


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layers = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


def make_batch(seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """64 random numbers, and the same ones sorted. Put your own data here: each rank reads another part of it."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    return x, x.sort(dim=1).values


def train(device: torch.device, steps: int) -> None:
    """Train; every rank calls it, in a process group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(Block(64) for _ in range(4))).to(device)
    hsdp.hybrid_shard(model)  # in place; default sizes: shard = the ranks of a host, replicate = the hosts
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        x, y = make_batch(step * world + rank, device)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        hsdp.clip_grad_norm_(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        x, y = make_batch(0, device)  # one that no rank has trained on
        loss = nn.functional.mse_loss(model(x), y)
    print(f"rank {rank} on {socket.gethostname()}: held-out loss {loss.item():.6f}", flush=True)  # equal everywhere


def main() -> None:
    device, backend = torch.device("cpu"), "gloo"
    if (found := torch.accelerator.current_accelerator(check_available=True)) is not None:
        index = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()  # 0 where a rank sees only its own
        torch.accelerator.set_device_index(index)
        device = torch.device(found.type, index)
        backend = f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found.type)}"
    dist.init_process_group(backend)
    train(device, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 50)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
