"""The model and the engines that `engines.py` compares. Knows nothing about clocks, processes or tables.

An engine is a way to train one `Decoder` on `replicate x shard` ranks. Each starts from the same weights, has the
same units (the transformer blocks) and the same optimizer (foreach AdamW):

    name    what it is                                             a rank keeps      a step sends
    alone   the plain module, nobody sends anything: the floor     all               nothing
    ddp     torch DistributedDataParallel                          all               gradients
    fsdp1   torch FullyShardedDataParallel, HYBRID_SHARD           1 / shard         parameters and gradients
    fsdp2   torch fully_shard on a 2-D mesh                        1 / shard         parameters and gradients
    hsdp    this package                                           1 / shard         parameters and gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

DEVICE = torch.device("cpu")
VOCAB = 256  # bytes


@dataclass(frozen=True)
class Settings:
    """What every engine has in common; the same on all ranks."""

    replicate: int
    shard: int
    layers: int
    width: int
    seq: int  # tokens a sample
    batch: int  # samples a rank a microbatch
    accumulate: int  # microbatches a step
    reshard: bool  # release parameters between forward and backward (DDP and alone: no meaning)
    lr: float = 3e-4
    seed: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.shard


class Block(nn.Module):
    """Pre-norm transformer block: x[batch, seq, width] -> the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, width // heads]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Decoder-only language model: tokens[batch, seq + 1] -> mean cross-entropy of the next token."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.token, self.position = nn.Embedding(VOCAB, width), nn.Embedding(settings.seq, width)
        self.blocks = nn.ModuleList(Block(width, heads=max(1, width // 64)) for _ in range(settings.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


Defer = Callable[[], AbstractContextManager[object]]  # entered for all but the last microbatch of a step


@dataclass
class Engine:
    """A wrapped model with its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    defer: Defer

    def step(self, microbatches: Sequence[Tensor]) -> float:
        """One optimizer step; the mean loss of this rank's microbatches."""
        total = 0.0
        for index, tokens in enumerate(microbatches, start=1):
            with self.defer() if index < len(microbatches) else nullcontext():
                loss = self.model(tokens) / len(microbatches)
                loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # now: it is another engine's turn, and memory is for all of them
        return total


def wrap_alone(model: nn.Module, settings: Settings) -> tuple[nn.Module, Defer]:
    return model, nullcontext


def wrap_ddp(model: nn.Module, settings: Settings) -> tuple[nn.Module, Defer]:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, wrapped.no_sync


def wrap_fsdp1(model: nn.Module, settings: Settings) -> tuple[nn.Module, Defer]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mesh = init_device_mesh("cpu", (settings.replicate, settings.shard), mesh_dim_names=("replicate", "shard"))
    strategies = {True: ShardingStrategy.HYBRID_SHARD, False: ShardingStrategy._HYBRID_SHARD_ZERO2}
    wrapped = FullyShardedDataParallel(
        model,
        process_group=(mesh.get_group("shard"), mesh.get_group("replicate")),
        sharding_strategy=strategies[settings.reshard],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=DEVICE,
    )
    return wrapped, wrapped.no_sync


def wrap_fsdp2(model: nn.Module, settings: Settings) -> tuple[nn.Module, Defer]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh("cpu", (settings.replicate, settings.shard), mesh_dim_names=("replicate", "shard"))
    # None is torch's recommended default: every unit but the root is released after forward.
    reshard = None if settings.reshard else False
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)

    @contextmanager
    def defer() -> Iterator[None]:
        model.set_requires_all_reduce(False)
        model.set_is_last_backward(False)
        try:
            yield
        finally:
            model.set_requires_all_reduce(True)
            model.set_is_last_backward(True)

    return model, defer


def wrap_hsdp(model: nn.Module, settings: Settings) -> tuple[nn.Module, Defer]:
    import hsdp

    mesh = hsdp.init_mesh(replicate=settings.replicate, shard=settings.shard, device_type="cpu")
    reshard = None if settings.reshard else False
    wrapped = hsdp.hybrid_shard(model, mesh=mesh, units=Block, reshard_after_forward=reshard)
    return wrapped, lambda: hsdp.accumulate(wrapped)


WRAP = {"hsdp": wrap_hsdp, "fsdp2": wrap_fsdp2, "fsdp1": wrap_fsdp1, "ddp": wrap_ddp, "alone": wrap_alone}


def build(name: str, settings: Settings) -> Engine:
    """The engine `name` on fresh weights; every rank must call it, in the same order."""
    torch.manual_seed(settings.seed)
    model, defer = WRAP[name](Decoder(settings), settings)
    return Engine(model, torch.optim.AdamW(model.parameters(), lr=settings.lr, foreach=True), defer)


def make_batches(settings: Settings, num_steps: int = 4) -> list[list[Tensor]]:
    """This rank's random bytes, `[step][microbatch] -> tokens[batch, seq + 1]`.

    Few enough to be learnt by heart when repeated: the loss moves, so a wrong update shows in it.
    """
    generator = torch.Generator().manual_seed(settings.seed * 1000 + dist.get_rank())
    shape = (num_steps, settings.accumulate, settings.batch, settings.seq + 1)
    return [list(step) for step in torch.randint(VOCAB, shape, generator=generator)]
