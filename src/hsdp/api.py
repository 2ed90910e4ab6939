"""`hybrid_shard` and `fully_shard`: wrap a model in place. `accumulate`: several microbatches, one cross-reduction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from hsdp.control import agree, default_timeout_s
from hsdp.describe import describe
from hsdp.hooks import wrap_method
from hsdp.materialize import Init
from hsdp.mesh import default_device_type
from hsdp.module import HSDPModule, schedules_of, state_of, wrapped_modules
from hsdp.precision import Precision
from hsdp.target import MeshArgument, Target, resolve_mesh
from hsdp.units import UnitPlan, UnitsArgument, choose_units, plan_group, plan_units
from hsdp.wrap import Options, ShardPlacement, build, check_equal, check_plans, settle_rest

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def hybrid_shard(
    model: ModuleT,
    *,
    replicate: int | str | None = None,
    shard: int | str | None = None,
    mesh: MeshArgument = None,
    device: torch.device | str | int | None = None,
    units: UnitsArgument = None,
    precision: Precision | None = None,
    reshard_after_forward: bool | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    reduce_ignored: bool = False,
    shard_placement_fn: ShardPlacement | None = None,
    sync_replicas: bool = True,
    sync_buffers: Literal["wrap", "forward"] = "wrap",
    init: Init | None = None,
    timeout_s: float | None = None,
    announce: bool = True,
) -> ModuleT:
    """Shard `model` in place over a replicate x shard mesh, and return it. Every rank calls this with the same model.

    Make the optimizer afterwards, from parameters that are DTensors `(Replicate(), Shard(0))`. Gradients are means.

    Args:
        model: any module; one on the meta device is made real unit by unit.
        replicate, shard: number of copies of the model, of ranks that share one copy; see `init_mesh`.
        mesh: instead of the two numbers, a tuple of them; or a mesh with axes "replicate" and "shard", of which one may
            be missing and beside which others may be; or a tuple (replicate group, shard group).
        device: where to train; default: where the parameters are, else the mesh's type, else the current accelerator
            if the default group serves it, else the CPU. What is on the CPU moves. It becomes the current device.
        units: what is gathered together: module classes, their names, a predicate, or None for the repeated block.
        precision: mixed precision; None computes in the parameters' own dtype.
        reshard_after_forward: release a unit between its forward and backward. None: but for what backward needs first.
        ignored_params: stay as they are: whole, never moved, not reduced, not made equal; warned of when trained.
        reduce_ignored: make ignored parameters equal at wrap, and average their gradients over all ranks.
        shard_placement_fn: `Shard(dim)` for a parameter that is to be cut along another dim than 0, else None.
        sync_buffers: make buffers equal at "wrap" only, or before each training "forward" too, for running statistics.
        sync_replicas: make parameters and buffers those of the first rank, whatever the others hold.
        init: called with every module that owns something on the meta device; default: its `reset_parameters()`.
        timeout_s: how long this rank waits for another one, in seconds; default: HSDP_TIMEOUT_S, else 60.
        announce: print what was set up, once, on the first rank, to standard error.

    Raises:
        ValueError: on every rank alike: whatever is wrong with an argument, or differs between ranks.
    """
    timeout_s = default_timeout_s() if timeout_s is None else timeout_s
    mesh = resolve_mesh(mesh, replicate, shard, Target.of([model], ignored_params, device), timeout_s)
    options = Options(
        precision or Precision(), reshard_after_forward, sync_replicas, timeout_s, init, shard_placement_fn,
        ignored_params or (), reduce_ignored, sync_buffers,
    )  # fmt: skip

    def plan() -> list[UnitPlan]:
        _check_can_be_wrapped(model, set(ignored_params or ()))
        return plan_units(choose_units(model, units), ignored_params or ())

    _wrap([model], plan, mesh, options)
    if announce and mesh.mesh.flatten()[0] == dist.get_rank():
        print(describe(model), file=sys.stderr, flush=True)
    return model


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacement | None = None,
    mp_policy: Precision | MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    sync_replicas: bool = True,
    init: Init | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Make one unit of `module`, with the meaning of `torch.distributed.fsdp.fully_shard`: call it bottom-up.

    Args:
        module: a module, or a list of modules that are gathered together.
        mesh: 1-D to shard, 2-D (replicate, shard) to do both; default: 1-D over the world.
        reshard_after_forward: see `hybrid_shard`. A number of ranks, to keep cut over so many, is taken as True.
        shard_placement_fn, ignored_params, sync_replicas, timeout_s: see `hybrid_shard`.
        init: see `hybrid_shard`. Without it, what is on the meta device stays there until the user calls `to_empty()`
            and initialises it, or loads a state dict with `assign=True`.
        mp_policy: a `Precision`, or torch's `MixedPrecisionPolicy`.
        offload_policy: only its default so far; on CPU any, for parameters are in host memory anyway.

    Returns:
        what was given, wrapped in place.

    Raises: ValueError, see `hybrid_shard`.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    if mesh is None:
        mesh = init_device_mesh(default_device_type(), (dist.get_world_size(),))
    timeout_s = default_timeout_s() if timeout_s is None else timeout_s
    reshard = None if reshard_after_forward is None else bool(reshard_after_forward)
    options = Options(
        _precision_of(mp_policy), reshard, sync_replicas, timeout_s, init, shard_placement_fn, ignored_params or (),
        keep_meta=init is None,
    )  # fmt: skip
    if mesh.ndim not in (1, 2):  # every rank holds the same mesh
        raise ValueError(f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; fully_shard takes 1 or 2")
    target = Target.of(modules, ignored_params, None)

    def plan() -> list[UnitPlan]:
        target.settle(mesh)
        offloads = offload_policy is not None and type(offload_policy) is not OffloadPolicy
        if offloads and mesh.device_type != "cpu":
            raise ValueError(f"offload_policy={offload_policy!r}: offloading is not supported")
        for one in modules:
            if isinstance(one, (nn.ModuleList, nn.ModuleDict)) and type(one).forward is nn.Module.forward:
                raise ValueError(f"{type(one).__name__} has no forward; wrap the modules in it")
            if isinstance(one, HSDPModule):
                raise ValueError(f"{type(one).__name__} is sharded already")
        return [plan_group(modules, ignored_params or (), lambda child: isinstance(child, HSDPModule))]

    _wrap(modules, plan, mesh, options)
    return module


def _wrap(modules: Sequence[nn.Module], plan: Callable[[], list[UnitPlan]], mesh: DeviceMesh, options: Options) -> None:
    """The part that both entry points share. A mistake on any rank is the same error on all of them."""
    problem, plans = None, []
    with torch.device("cpu"):  # the user may wrap inside `with torch.device("meta")`; that is for the model alone
        try:
            plans = plan()
            check_plans(plans, mesh, options)
        except ValueError as error:
            problem = str(error)
        agree(problem, mesh)
        salt = check_equal(plans, mesh, options)
        schedule = build(plans, mesh, options, salt)
        settle_rest(modules, schedule, mesh, options)


def _check_can_be_wrapped(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    if all(param in ignored for param in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters to shard")
    for name, module in model.named_modules():
        if isinstance(module, HSDPModule):
            where = f"its module {name!r}" if name else "it"
            raise ValueError(f"{type(model).__name__} cannot be wrapped: {where} is sharded already")


def _precision_of(policy: Precision | MixedPrecisionPolicy | None) -> Precision:
    if isinstance(policy, MixedPrecisionPolicy):
        return Precision(
            param=policy.param_dtype,
            reduce=policy.reduce_dtype,
            output=policy.output_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )
    return policy or Precision()


@contextmanager
def accumulate(model: nn.Module, defer: Literal["cross-reduce", "reduce"] = "cross-reduce") -> Iterator[None]:
    """Context for the forward and backward of all but the last microbatch of a step.

    Gradients then are the sum over the microbatches, kept in fp32, and the mean over ranks: divide the loss by the
    number of microbatches if a mean over them is wanted.

    Args:
        model: a wrapped model, or one that holds wrapped modules.
        defer: "cross-reduce" reduces inside rows and skips the slow axis: gradient memory stays that of the shards.
            "reduce" communicates nothing, and keeps whole gradients on every rank.

    Raises:
        ValueError: `defer` is something else, or nothing in `model` is wrapped.
    """
    if defer not in ("cross-reduce", "reduce"):
        raise ValueError(f'accumulate(defer={defer!r}): expected "cross-reduce" or "reduce"')
    units = [state_of(module).unit for module in wrapped_modules(model)]
    before = [(unit.reduces, unit.cross_reduces) for unit in units]
    for unit in units:
        unit.cross_reduces = False
        unit.reduces = unit.reduces and defer == "cross-reduce"
    try:
        yield
    finally:
        for unit, (reduces, cross_reduces) in zip(units, before, strict=True):
            unit.reduces, unit.cross_reduces = reduces, cross_reduces


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context in which every rank holds the full parameters of `model`, for generation above all.

    Forwards inside communicate nothing, so that ranks may call the model differently often and with other lengths.
    Needs memory for the whole model. What is written to the full parameters is lost when they are released.

    Raises:
        ValueError: nothing in `model` is wrapped.
    """
    schedules = schedules_of(model)
    for schedule in schedules:
        schedule.hold()
    try:
        yield
    finally:
        for schedule in schedules:
            schedule.let_go()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let `module.<name>(...)` gather and release the parameters of a wrapped module like its forward does.

    Raises:
        ValueError: the module is not wrapped, or has no such method.
    """
    state = state_of(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{type(module).__name__} has no method {name!r}")
    wrap_method(module, name, state.hooks)
