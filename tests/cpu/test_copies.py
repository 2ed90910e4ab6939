"""What one training step copies, allocates and keeps gathered, counted by a log of every operation on every rank.

The collectives themselves are not tensor operations; what surrounds them is, and should be next to nothing: each rank
copies its own chunks into the gathered buffers, and packs what is too small for a message of its own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hsdp

BF16 = torch.bfloat16
WIDTH, HIDDEN, HEADS, VOCABULARY, SEQ, BATCH, LAYERS = 264, 1320, 4, 501, 8, 2, 3
MESH = (2, 2)
S = MESH[1]
SCALARS = 1024  # bytes allowed for flags and the like
COPIES = {
    *("copy_", "_foreach_copy_", "copy", "clone", "_foreach_clone", "_to_copy", "cat", "stack", "constant_pad_nd"),
    *("slice_scatter", "select_scatter", "index_copy_", "index_copy", "split_with_sizes_copy", "_chunk_cat", "repeat"),
    *("as_strided_copy", "view_copy", "slice_copy", "expand_copy", "scatter_", "index_put_", "masked_scatter_", "put_"),
}
FACTORIES = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros"),
    *("ones", "ones_like", "new_ones", "full", "full_like", "new_full"),
}


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(SEQ, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class Model(nn.Module):
    """Every parameter is in one of the units [embed, block, block, block, head]; the root has none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = Head()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- the log ---------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """What one log saw. `copied`, `allocated`: bytes; `full`: (phase, operation) that wrote something as large as a
    parameter that is gathered in place; `added`: bytes added into `watched` memory; `alive`: most bytes gathered at
    once, by phase."""

    copied: int = 0
    allocated: int = 0
    added: int = 0
    alive: Counter[str] = field(default_factory=Counter)
    full: set[tuple[str, str]] = field(default_factory=set)
    ops: Counter[tuple[str, str]] = field(default_factory=Counter)


class Log(TorchDispatchMode):
    """Counts; holds no tensor, since a gradient that someone else holds is copied rather than taken by autograd."""

    def __init__(self, full_numels: Iterable[int], alive: Callable[[], int], watched: Iterable[int] = ()) -> None:
        super().__init__()
        self.phase = ""
        self.summary = Summary()
        self._full_numels, self._alive, self._watched = set(full_numels), alive, set(watched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        summary, name = self.summary, func._schema.name.split("::")[1]
        summary.alive[self.phase] = max(summary.alive[self.phase], self._alive())
        given = {storage_of(value) for value in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        summary.ops[self.phase, name] += 1
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value)
        ]
        fresh = [tensor for tensor in tensors_in(result) if storage_of(tensor) not in given]
        num_bytes = sum(t.numel() * t.element_size() for t in (written or fresh) if on_cpu(t))
        if name in COPIES:
            summary.copied += num_bytes
        if name in FACTORIES:
            summary.allocated += num_bytes
        if name == "add_":
            summary.added += sum(t.numel() * t.element_size() for t in written if storage_of(t) in self._watched)
        if any(t.numel() in self._full_numels for t in written + fresh if on_cpu(t)):
            summary.full.add((self.phase, name))
        return result


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def on_cpu(tensor: Tensor) -> bool:
    """Whether it has memory: the engine asks the meta device for the strides of a shape."""
    return tensor.device.type == "cpu"


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ---- one step --------------------------------------------------------------------------------------------------------


@dataclass
class Bounds:
    """Arithmetic over the layouts, in bytes. `pair`: the largest two neighbouring units, gathered."""

    own_chunks: int = 0  # direct slots, gathered dtype: what a rank puts into the gathered buffers itself
    packed_gather: int = 0  # a rank's part of the packed messages, and all of them unpacked
    own_rows: int = 0  # of gradients, dtype of the sums, packed ones and flags included
    wire_rows: int = 0  # the same in the dtype in which they travel
    packed_part: int = 0  # a rank's part of the packed messages of gradients, flags included
    pair: int = 0
    largest: int = 0
    total: int = 0


def units_of(model: Any) -> list[Any]:
    return list(model._hsdp_state.schedule.units)


def bounds_of(model: nn.Module) -> Bounds:
    bounds = Bounds()
    sizes = [unit.gathered_bytes for unit in units_of(model) if unit.gathered_bytes]
    assert len(sizes) == LAYERS + 2, "embed, blocks and head, and nothing in the root"
    bounds.pair = max(left + right for left, right in itertools.pairwise(sizes))
    bounds.largest, bounds.total = max(sizes), sum(sizes)
    for segment in (segment for unit in units_of(model) for segment in unit.segments):
        layout, grads, gathered = segment.layout, segment.grads, segment.gathered_dtype.itemsize
        bounds.own_chunks += gathered * sum(layout.slots[i].chunk for i in layout.direct)
        unpacked = sum(S * layout.slots[i].chunk for i in layout.packed)
        bounds.packed_gather += gathered * (layout.packed_numel + unpacked)
        rows = sum(layout.slots[i].counts(S)[segment.row.rank] for i in layout.direct) + grads.packed_numel
        bounds.own_rows += rows * segment.sum_dtype.itemsize
        bounds.wire_rows += rows * gathered
        bounds.packed_part += grads.packed_numel * gathered
    return bounds


def direct_numels(model: nn.Module) -> set[int]:
    """Sizes of the parameters that are gathered in place; no chunk is as large as one of them."""
    slots = [slot for unit in units_of(model) for segment in unit.segments for slot in segment.layout.slots]
    full = {slot.numel for slot in slots if not slot.packed}
    matrices = {WIDTH * WIDTH, 3 * WIDTH * WIDTH, WIDTH * HIDDEN, WIDTH * VOCABULARY}
    assert full == matrices, f"every matrix should be gathered in place: {full}"
    assert not full & {slot.chunk for slot in slots}
    return full


def batch(rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(rank))


def step(model: nn.Module, tokens: Tensor, log: Log | None = None) -> None:
    """Forward and backward; the log learns which of the two runs."""
    if log is not None:
        log.phase = "forward"
    loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    if log is not None:
        log.phase = "backward"
    loss.backward()


def log_plain(rank: int, dtype: torch.dtype, full_numels: set[int]) -> Summary:
    """The same step of the same model in one process: what the computing itself copies and allocates."""
    model = Model().to(dtype)
    with Log(full_numels, lambda: 0) as log:
        step(model, batch(rank), log)
    return log.summary


def log_step(
    rank: int, world: int, compute: torch.dtype | None, reshard: bool | None
) -> tuple[Summary, Summary, Bounds]:
    """(log of the third step, log of the plain model, bounds)."""
    precision = hsdp.Precision(param=compute)
    units = [Embed, Block, Head]
    model = hsdp.hybrid_shard(
        Model(), mesh=MESH, units=units, precision=precision, reshard_after_forward=reshard, announce=False
    )
    optimizer = torch.optim.AdamW(model.parameters())
    storages = [segment._storage for unit in units_of(model) for segment in unit.segments]
    sums: set[int] = set()
    for _ in range(2):
        step(model, batch(rank))
        optimizer.step()
        sums = {storage_of(param.grad.to_local()) for param in model.parameters()}
        optimizer.zero_grad()
    assert sum(storage.nbytes() for storage in storages) == 0, "something stayed gathered between two steps"
    full = direct_numels(model)
    with Log(full, lambda: sum(storage.nbytes() for storage in storages), sums) as log:
        step(model, batch(rank), log)
    assert all(param.grad is not None for param in model.parameters())
    return log.summary, log_plain(rank, compute or torch.float32, full), bounds_of(model)


@pytest.mark.parametrize("reshard", [None, True], ids=["default", "reshard"])
@pytest.mark.parametrize("compute", [None, BF16], ids=["fp32", "bf16"])
def test_one_step(compute: torch.dtype | None, reshard: bool | None) -> None:
    for summary, plain, bounds in run_ranks(4, log_step, compute, reshard):
        # The log is of the whole step, backward and its hooks included.
        for phase in ("forward", "backward"):
            assert summary.ops[phase, "_foreach_copy_"] > 0
            assert summary.ops[phase, "send"] > 0
        assert summary.ops["backward", "native_layer_norm_backward"] == 2 * LAYERS + 1
        assert plain.full == {("backward", "mm"), ("backward", "embedding_dense_backward")}

        # Nothing as large as a matrix is written but by the operations that compute its gradient.
        assert summary.full == plain.full

        # Copied: own chunks into the gathered buffers, twice, and the packed small ones. A peer's rows of a gradient
        # arrive in the gradient shard and the own ones are added; of packed ones, and when bf16 is widened, the first
        # to be summed is copied.
        assert bounds.own_chunks <= bounds.total / S
        gathers = 2 * (bounds.own_chunks + bounds.packed_gather)
        reduces = S * bounds.packed_part + (bounds.packed_part if compute is None else bounds.own_rows)
        copied = summary.copied - plain.copied
        assert 0.8 * gathers < copied <= gathers + reduces + SCALARS
        assert summary.added == bounds.own_rows * (S - 1)

        # Allocated beside the gathered buffers: the packed messages and where a peer's part of them arrives; from bf16
        # also where its other rows do.
        inboxes = (S - 1) * (bounds.packed_part if compute is None else bounds.wire_rows)
        assert summary.allocated - plain.allocated <= S * bounds.packed_part + inboxes + SCALARS

        # Two units at once: the one that computes and the one that is fetched.
        for phase in ("forward", "backward"):
            assert bounds.largest < summary.alive[phase] <= bounds.pair < bounds.total


# ---- from step to step -----------------------------------------------------------------------------------------------


def gradient_memory(model: nn.Module) -> dict[str, int]:
    """Where the gradients lie: address of the memory of each."""
    return {
        name: param.grad.to_local().untyped_storage().data_ptr() + param.grad.to_local().storage_offset()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def gradients_of_steps(rank: int, world: int) -> dict[str, list[dict[str, int]]]:
    model = hsdp.hybrid_shard(Model(), mesh=MESH, announce=False)
    found: dict[str, list[dict[str, int]]] = {}

    def run(what: str, steps: int, keep: Callable[[], Any]) -> None:
        kept = []
        for _ in range(steps):
            step(model, batch(rank))
            found.setdefault(what, []).append(gradient_memory(model))
            kept.append(keep())
            model.zero_grad()

    run("cleared", 4, lambda: None)
    run("kept", 3, lambda: next(model.parameters()).grad.to_local()[:1])
    run("cleared again", 3, lambda: None)
    return found


def test_gradients_have_the_same_memory_in_every_step() -> None:
    for found in run_ranks(4, gradients_of_steps):
        assert len(found["cleared"][0]) == 2 + 11 * LAYERS + 3
        assert len(set(found["cleared"][0].values())) == len(found["cleared"][0])
        assert all(memory == found["cleared"][0] for memory in found["cleared"])
        # A kept gradient, even a view of a part of one, keeps its memory: the next step gets another.
        first, second, third = (set(memory.values()) for memory in found["kept"])
        assert not first & second
        assert not second & third
        assert not first & third
        assert all(memory == found["cleared again"][-1] for memory in found["cleared again"][1:])


def live_bytes() -> int:
    """Bytes in the storages of all tensors that Python can see."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if on_cpu(tensor)}.values())


def accumulate_steps(rank: int, world: int, defer: Any) -> tuple[list[list[int]], list[list[Summary]], int, Bounds]:
    """(live bytes before the first and after every microbatch, their logs) of two steps, and what must be there."""
    gc.freeze()  # what was imported so far is not looked at again
    model = hsdp.hybrid_shard(Model(), mesh=MESH, units=[Embed, Block, Head], announce=False)
    for _ in range(2):
        step(model, batch(rank))
        model.zero_grad()
    segments = [segment for unit in units_of(model) for segment in unit.segments]
    shards = sum(segment.shard.numel() * segment.shard.element_size() for segment in segments)
    sums = sum(segment.grads.numel * segment.sum_dtype.itemsize for segment in segments)
    live, logs = [], []
    for _ in range(2):
        live.append([live_bytes()])
        logs.append([])
        for micro in range(4):
            log = Log((), lambda: sum(segment._storage.nbytes() for segment in segments))
            with log, hsdp.accumulate(model, defer) if micro < 3 else contextlib.nullcontext():
                step(model, batch(rank), log)
            live[-1].append(live_bytes())
            logs[-1].append(log.summary)
        model.zero_grad()
    return live, logs, shards + sums, bounds_of(model)


@pytest.mark.parametrize("defer", ["cross-reduce", "reduce"])
def test_microbatches_need_no_more_memory(defer: str) -> None:
    for live, logs, needed, bounds in run_ranks(4, accumulate_steps, defer):
        whole = bounds.total if defer == "reduce" else 0  # gradients that nobody has reduced, about as large as that
        for before, first, second, third, last in live:
            # Between steps there are the shards and the sums, and what the model keeps deferred beside them.
            assert needed <= before == last <= needed + 16 * SCALARS
            assert first == second == third <= needed + whole + 16 * SCALARS
            assert first >= before + 0.98 * whole
        assert live[0] == live[1]
        assert logs[0] == logs[1]
        for first_log, second_log, third_log, last_log in logs:
            assert second_log == third_log
            # A sum that is added to is not received into: every peer's rows arrive beside it, for the moment.
            inboxes = (S - 1) * bounds.own_rows
            for log in (first_log, second_log, last_log):
                assert log.allocated <= S * bounds.packed_part + inboxes + SCALARS
                assert max(log.alive.values()) <= bounds.pair
            assert first_log.allocated <= (2 * S - 1) * bounds.packed_part + SCALARS
