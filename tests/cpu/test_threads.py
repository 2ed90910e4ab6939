"""Ranks as threads of one process, over torch's in-process test backend: the path of backends that are not gloo.

That backend ("threaded") has grouped and plain collectives but no send and recv, as accelerator backends may; its
collectives are Python that copies between the threads' tensors, so what is checked here is the engine's use of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import TOLERANCE, Recipe, Trained, assert_same_training, brief, build, reference, train
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

import hsdp

FP64 = torch.float64
_BUILDING = threading.Lock()  # the seed is the process's, not a thread's


def run_threads(world: int, fn: Callable[[int], Any]) -> list[Any]:
    """`fn(rank)` in `world` threads with a default group over them; the first error is raised here."""
    _install_threaded_pg()  # torch's own tests do the same; this process ends with the run
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = fn(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        threads[0].join(0.05)
    if errors:
        raise errors[0]
    return results


def train_in_threads(rank: int, world: int, mesh: tuple[int, int], recipe: Recipe, options: dict[str, Any]) -> list[Trained]:
    def one(thread_rank: int) -> Trained:
        with _BUILDING:
            model = build(recipe)
        hsdp.hybrid_shard(model, mesh=mesh, announce=False, **options)
        parts = mesh[0] * mesh[1]
        result = train(model, recipe, part=thread_rank, parts=parts, clip=hsdp.clip_grad_norm_)
        hsdp.check_replicas(model)
        return brief(result, thread_rank)

    return run_threads(mesh[0] * mesh[1], one)


@pytest.mark.xfail(reason="the engine passes a timeout to Work.wait(), which this backend's Work does not take")
@pytest.mark.parametrize(
    ("model", "options"),
    [("transformer", {}), ("transformer", {"reshard_after_forward": True}), ("scalars", {"units": "Linear"})],
    ids=["transformer", "resharded", "scalars"],
)
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (1, 3), (2, 1)], ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def test_grouped_collectives(mesh: tuple[int, int], model: str, options: dict[str, Any]) -> None:
    recipe = Recipe(model, FP64, steps=3)
    results = run_ranks(1, train_in_threads, mesh, recipe, options, init_group=False)[0]
    assert_same_training(results, reference(recipe), TOLERANCE[FP64])
