"""No copies around collectives: what a training step writes, allocates and holds, seen by a dispatch mode.

A log of every operator that runs in one forward and backward (a later step, when buffers exist). Activations are far
smaller than any parameter here, so sizes tell what is what:

    a copy of a whole direct parameter or gradient   would show as one write of its size: there is none
    what is copied                                   own chunks (1/S) before a gather, and the packed small ones
    what is allocated                                autograd's own gradients, one a parameter, nothing else as large
    what is gathered at once                         2 units: the one that computes, the one that comes next

The same log of torch's fully_shard shows such copies: the log can see them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hsdp
from hsdp.layout import PACKED_CHUNK_BYTES
from hsdp.module import state_of

# A chunk of the largest parameter, and a unit's packed message, are smaller than the smallest whole direct parameter.
VOCABULARY, WIDTH, HIDDEN, BATCH, SEQ, LAYERS = 1024, 96, 768, 2, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """Every parameter is in a block, the embedding or the head: the root has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


COPIES = ("copy", "clone", "cat", "stack", "contiguous", "_to_copy", "split_with_sizes_copy", "repeat", "fill", "zero")


@dataclass
class Log:
    """Bytes of each tensor a copying operator wrote, of each new storage, and of the gathered units at any time."""

    copied: list[tuple[str, int]] = field(default_factory=list)
    allocated: list[tuple[str, int]] = field(default_factory=list)
    gathered: list[tuple[int, int]] = field(default_factory=list)  # (units, bytes), at every operator


class Watch(TorchDispatchMode):
    def __init__(self, gathered: Callable[[], tuple[int, int]]) -> None:
        super().__init__()
        self.log = Log()
        self._gathered = gathered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        outputs = tensors_in(result)
        if name.startswith("_foreach_copy"):
            outputs = tensors_in(args[0])
        if any(part in name for part in COPIES):
            # Views (expand and the like) are no writes; filling and copying into a buffer are.
            self.log.copied += [(name, tensor.numel() * tensor.element_size()) for tensor in outputs]
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in inputs:
                self.log.allocated.append((name, tensor.untyped_storage().nbytes()))
        self.log.gathered.append(self._gathered())
        return result


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [tensor for item in value.values() for tensor in tensors_in(item)] if isinstance(value, dict) else []


def build(engine: str, mesh: tuple[int, int], reshard: bool | None) -> Any:
    torch.manual_seed(0)
    model = Transformer()
    if engine == "hsdp":
        units = lambda module: isinstance(module, (Block, nn.Embedding)) or module is model.head  # noqa: E731
        return hsdp.hybrid_shard(model, mesh=mesh, units=units, reshard_after_forward=reshard, announce=False)
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for module in (model.embed, *model.blocks, model.head, model):
        fully_shard(module, mesh=device_mesh)
    return model


def watch_a_step(rank: int, world: int, engine: str, mesh: tuple[int, int], reshard: bool | None) -> Log:
    model = build(engine, mesh, reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(rank))
    units = [state_of(module).unit for module in model.modules() if isinstance(module, hsdp.HSDPModule)]

    def gathered() -> tuple[int, int]:
        # Not what a state machine says but what is there: the memory under the full parameters.
        sizes = [
            {p.gathered.untyped_storage()._cdata: p.gathered.untyped_storage().nbytes() for p in u.params}
            for u in units
        ]
        held = [sum(of_unit.values()) for of_unit in sizes]
        return sum(num_bytes > 0 for num_bytes in held), sum(held)

    for step in range(4):
        watch = Watch(gathered)
        with watch:
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if engine == "fsdp2" and step == 1:
            break
    return watch.log


def parameter_bytes(shard: int) -> tuple[list[int], list[int]]:
    """Bytes of every direct and of every packed parameter."""
    sizes = [4 * param.numel() for param in Transformer().parameters()]
    return [n for n in sizes if n / shard >= PACKED_CHUNK_BYTES], [n for n in sizes if n / shard < PACKED_CHUNK_BYTES]


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_one_step_copies_chunks_only(mesh: tuple[int, int], reshard: bool | None) -> None:
    shard = mesh[1]
    direct, packed = parameter_bytes(shard)
    assert len(direct) >= 2 * LAYERS + 2
    for log in run_ranks(4, watch_a_step, "hsdp", mesh, reshard):
        largest = max(num_bytes for _, num_bytes in log.copied)
        assert largest < min(direct), Counter(log.copied).most_common(5)
        assert largest >= max(direct) / shard, "the log missed the copy of the own chunk"
        # All writes: two gathers (own chunks, packed message, unpacked) and one packed reduction, 1/8 for activations.
        total = sum(num_bytes for _, num_bytes in log.copied)
        gather = (sum(direct) + sum(packed)) / shard + sum(packed)
        print(
            f"{mesh} {reshard}: copied {total:,} of {2 * gather + 2 * sum(packed):,.0f} bytes, "
            f"model {sum(direct + packed):,}"
        )
        assert total <= 1.125 * (2 * gather + 2 * sum(packed))


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_one_step_allocates_gradients_only(mesh: tuple[int, int]) -> None:
    """New storages as large as the smallest direct parameter: one for each gradient that autograd makes."""
    direct, _ = parameter_bytes(mesh[1])
    for log in run_ranks(4, watch_a_step, "hsdp", mesh, None):
        large = sorted(num_bytes for _, num_bytes in log.allocated if num_bytes >= min(direct))
        assert large == sorted(direct), Counter(log.allocated).most_common(8)


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_at_most_two_units_are_gathered(mesh: tuple[int, int], reshard: bool | None) -> None:
    _direct, packed = parameter_bytes(mesh[1])
    for log in run_ranks(4, watch_a_step, "hsdp", mesh, reshard):
        units = [units for units, _ in log.gathered]
        assert max(units) == 2
        # Two neighbours at once: prefetch works in both directions, and all is gone at the end.
        assert sum(number == 2 for number in units) > len(units) / 4
        block = sum(4 * param.numel() for param in Block().parameters())
        ends = 4 * VOCABULARY * (WIDTH + 1)
        # Message areas of packed parameters included.
        assert max(num_bytes for _, num_bytes in log.gathered) <= block + max(block, ends) + 2 * sum(packed)
        assert len(list(itertools.groupby(units))) > 2 * LAYERS


def test_the_log_sees_copies() -> None:
    """torch's fully_shard copies whole gradients into its reduce-scatter input."""
    direct, packed = parameter_bytes(2)
    for log in run_ranks(4, watch_a_step, "fsdp2", (2, 2), None):
        total = sum(num_bytes for _, num_bytes in log.copied)
        assert max(num_bytes for _, num_bytes in log.copied) > max(direct) / 2
        assert total > 1.5 * sum(direct + packed)
