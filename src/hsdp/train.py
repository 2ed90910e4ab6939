"""Train a small transformer on a replicate x shard mesh: the loop of `hsdp train`, and the example of how hsdp is used.

Runs in every rank, once the default process group exists. Knows nothing of how the ranks were started (launch.py) or
what the user typed (commands.py). The lines that make it hybrid sharded are the ones that say `hsdp.`:

    mesh = hsdp.init_mesh(replicate=2, shard=2)
    with torch.device("meta"): model = Transformer(...)         no memory yet
    hsdp.hybrid_shard(model, mesh=mesh)                         each rank gets its part, with real values
    optimizer = torch.optim.AdamW(model.parameters())           any optimizer, made afterwards

    with hsdp.accumulate(model): loss.backward()                all but the last microbatch of a step
    hsdp.clip_grad_norm_(model, 1.0); optimizer.step()
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import hsdp
from hsdp import runs
from hsdp.control import agree, exchange, first_difference
from hsdp.data import Text, find_files, load_text, sample_starts, spread_starts, unigram_entropy, windows
from hsdp.device import DeviceHandle
from hsdp.model import Transformer, next_byte_loss
from hsdp.options import TrainOptions
from hsdp.progress import METRICS, Progress, StepMetrics, draw_curve, loss_text

MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.1
WARM_UP_SHARE = 0.05  # of all steps
LAST_LR_SHARE = 0.1  # of the peak, at the last step
HELD_OUT_WINDOWS = 128
PRECISIONS = {"fp32": hsdp.Precision(), "bf16": hsdp.Precision(param=torch.bfloat16)}

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What a run ends with. Losses in nats a byte; `unigram` is the entropy of the held-out text's bytes."""

    train_loss: float
    held_out_loss: float
    unigram: float
    checkpoint: Path


def train(options: TrainOptions) -> Result:
    """Train as `options` say and return how it ended; every rank calls this.

    Raises:
        ValueError: on every rank alike: bad input that shows only now, such as data that differs between ranks.
        RuntimeError: the loss is no longer a number.
    """
    device = DeviceHandle(options.device)
    mesh = hsdp.init_mesh(replicate=options.replicate, shard=options.shard, device_type=options.device)
    batch = options.global_batch(mesh.size())
    text = read_text(options)
    model = make_model(options, mesh)
    optimizer = make_optimizer(model, options)

    resumed = runs.find_checkpoint(options.resume) if options.resume else None
    if resumed:
        runs.load(resumed.path, model, optimizer)
    first_step = resumed.step if resumed else 0

    leads = dist.get_rank() == 0
    out = Path(options.out)
    if leads:
        print(hsdp.describe(model), *announce(options, mesh, text), sep="\n", flush=True)
    with Progress(out, runs.start_in(out, resumed), first_step, options.steps) if leads else nullcontext() as progress:
        for step in range(first_step + 1, options.steps + 1):
            started_s = time.perf_counter()
            lr = set_lr(optimizer, options, step)
            loss, grad_norm = train_step(model, optimizer, microbatches(text, options, step, device.device))
            step_s = time.perf_counter() - started_s

            last = step == options.steps
            held_out_loss = None
            if last or is_due(step, options.eval_every):
                held_out_loss = evaluate(model, text, options, device.device)
            if last or is_due(step, options.save_every):
                checkpoint = runs.save(out, model, optimizer, step=step, global_batch=batch, options=options)
            if progress:
                speed, peak = batch * options.seq / step_s, device.peak_memory_bytes()
                progress.step(StepMetrics(step, loss, lr, grad_norm, speed, step_s * 1000, peak, held_out_loss))

    assert held_out_loss is not None, "the last step measures it"
    result = Result(loss, held_out_loss, unigram_entropy(text.held_out), checkpoint)
    if progress:
        draw_curve(out / runs.CURVE, progress.entries, result.unigram)
        print(*summary(result, out), sep="\n", flush=True)
    return result


# ---- set-up ----------------------------------------------------------------------------------------------------------


def read_text(options: TrainOptions) -> Text:
    """The text, which every rank reads for itself; all of them must find the same bytes."""
    text = together(lambda: load_text(find_files(options.data), options.seq))
    found = {"files": text.num_files, "bytes": len(text.train) + len(text.held_out), "checksum": text.checksum}
    difference = first_difference(exchange(found))
    if difference:
        raise ValueError(f"the ranks read different data ({difference}); --data must be the same on every host")
    return text


def together(make: Callable[[], T]) -> T:
    """`make()`; where it raises ValueError on any rank, every rank raises."""
    value, problem = None, None
    try:
        value = make()
    except ValueError as error:
        problem = str(error)
    agree(problem)
    assert value is not None
    return value


def make_model(options: TrainOptions, mesh: DeviceMesh) -> nn.Module:
    """The model, sharded, with weights that depend on the seed but not on the mesh."""
    torch.manual_seed(options.seed)
    with torch.device("meta"):
        model = Transformer(options.shape)
    return hsdp.hybrid_shard(model, mesh=mesh, precision=PRECISIONS[options.precision], announce=False)


def make_optimizer(model: nn.Module, options: TrainOptions) -> Optimizer:
    """AdamW that decays the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)


# ---- one step --------------------------------------------------------------------------------------------------------


def microbatches(text: Text, options: TrainOptions, step: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of the step's global batch, as `accumulate` pairs (inputs, targets) of (batch, seq)."""
    rank, world, batch = dist.get_rank(), dist.get_world_size(), options.batch
    global_batch = options.global_batch(world)
    starts = sample_starts(text.train, options.seq, seed=options.seed, step=step, batch=global_batch)
    for first in range(rank * batch, global_batch, world * batch):
        inputs, targets = windows(text.train, starts[first : first + batch], options.seq)
        yield inputs.to(device), targets.to(device)


def train_step(model: nn.Module, optimizer: Optimizer, parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """One optimizer step from several microbatches; returns the loss over all ranks and the gradients' global norm.

    Raises:
        RuntimeError: on every rank, the loss is no longer a number.
    """
    parts = list(parts)
    losses = []
    for number, (inputs, targets) in enumerate(parts, 1):
        with hsdp.accumulate(model) if number < len(parts) else nullcontext():
            loss = next_byte_loss(model(inputs), targets) / len(parts)
            loss.backward()
        losses.append(loss.detach())
    grad_norm = hsdp.clip_grad_norm_(model, MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()

    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    mean = total.item() / dist.get_world_size()
    if not math.isfinite(mean):
        raise RuntimeError(f"the loss is {mean}, so training has diverged; a smaller --lr may help")
    return mean, grad_norm.item()


def set_lr(optimizer: Optimizer, options: TrainOptions, step: int) -> float:
    """Set and return the learning rate of step 1, 2, ...: a linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, round(WARM_UP_SHARE * options.steps))
    done = (step - warm_up) / max(1, options.steps - warm_up)
    cosine = LAST_LR_SHARE + (1 - LAST_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done))
    lr = options.lr * (step / warm_up if step <= warm_up else cosine)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


# ---- measuring and telling -------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: nn.Module, text: Text, options: TrainOptions, device: torch.device) -> float:
    """Mean loss in nats a byte over the same held-out windows every time, each read by one rank."""
    rank, world, batch = dist.get_rank(), dist.get_world_size(), options.batch
    starts = spread_starts(text.held_out, options.seq, HELD_OUT_WINDOWS)
    sums = torch.zeros(2, dtype=torch.float64)  # loss of all windows, number of windows
    model.eval()
    # A forward is collective, so every rank makes equally many; one that has run out repeats a window and counts none.
    for first in range(rank * batch, rank * batch + len(starts), world * batch):
        mine = starts[first : first + batch]
        inputs, targets = windows(text.held_out, mine or starts[:1], options.seq)
        loss = next_byte_loss(model(inputs.to(device)), targets.to(device)).item()
        sums += torch.tensor([loss * len(mine), len(mine)], dtype=torch.float64)
    model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def announce(options: TrainOptions, mesh: DeviceMesh, text: Text) -> list[str]:
    replicate, shard = mesh.shape
    batch = options.global_batch(mesh.size())
    return [
        f"text: {text.num_files:,} files, {len(text.train):,} bytes to train on, {len(text.held_out):,} held out "
        f"with a unigram entropy of {loss_text(unigram_entropy(text.held_out))}",
        f"batch: {options.batch} sequences x {replicate} replicate x {shard} shard x {options.accumulate} accumulate "
        f"= {batch} sequences of {options.seq} bytes = {batch * options.seq:,} bytes a step",
    ]


def summary(result: Result, out: Path) -> list[str]:
    return [
        "",
        f"training loss      {loss_text(result.train_loss)}, last step",
        f"held-out loss      {loss_text(result.held_out_loss)}",
        f"unigram entropy    {loss_text(result.unigram)}, held-out text",
        f"loss curve         {out / runs.CURVE}",
        f"metrics            {out / METRICS}",
        f"checkpoint         {result.checkpoint}",
    ]
