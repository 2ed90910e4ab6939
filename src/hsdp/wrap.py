"""From a plan to a wrapped model: memory for the units, equal values on every rank, hooks.

Every function here is a collective over the mesh: all ranks of it call it with the same model.
"""

from __future__ import annotations

import uuid
import warnings
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hsdp.buffers import POLICIES, broadcast_buffers, place_buffers
from hsdp.collectives import Column, broadcast_first, make_column, make_row
from hsdp.control import DEFAULT_TIMEOUT_S, check_timeout, exchange_over_mesh, first_difference
from hsdp.copying import deepcopy_wrapped
from hsdp.device import DeviceHandle
from hsdp.dtensors import local_of
from hsdp.hooks import ModuleHooks
from hsdp.ignored import IgnoredGradients
from hsdp.internals import joint_mesh
from hsdp.materialize import Init, materialize
from hsdp.module import HSDPModule, ModuleState, attach, state_of
from hsdp.outdated import Replaced
from hsdp.param import Inner, Param
from hsdp.precision import Precision
from hsdp.schedule import Schedule
from hsdp.topology import discover
from hsdp.unit import Unit
from hsdp.units import UnitPlan, own_modules
from hsdp.waits import Waits

ShardPlacement = Callable[[nn.Parameter], "Shard | None"]


@dataclass(frozen=True)
class Options:
    """What the user chose for a wrap, beside the model and the mesh; `hybrid_shard` says what each means."""

    precision: Precision
    reshard_after_forward: bool | None = None
    sync_replicas: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S
    init: Init | None = None
    shard_placement_fn: ShardPlacement | None = None
    ignored_params: Collection[nn.Parameter] = ()
    reduce_ignored: bool = False
    sync_buffers: str = "wrap"
    keep_meta: bool = False  # leave what is on the meta device there, for the user to make real


def check_plans(plans: Sequence[UnitPlan], mesh: DeviceMesh, options: Options) -> None:
    """Refuse what cannot be sharded, and settle how every parameter is.

    Raises:
        ValueError: a parameter that is sharded already or sparse, or an option that does not fit.
    """
    check_timeout(options.timeout_s)
    if options.sync_buffers not in POLICIES:
        raise ValueError(f"sync_buffers={options.sync_buffers!r}: expected one of {', '.join(map(repr, POLICIES))}")
    for plan in plans:
        for param in plan.params:
            tensor = param.sharded
            if param.inner is not None:
                _check_inner(param.name, param.inner, mesh)
            if tensor.layout != torch.strided:
                raise ValueError(f"parameter {param.name!r} has layout {tensor.layout}; only dense ones can be sharded")
            param.dim = _dim_of(param, options.shard_placement_fn)
            param.gathered_dtype = options.precision.param_dtype(param.name, tensor)


def _check_inner(name: str, inner: Inner, mesh: DeviceMesh) -> None:
    """A parameter that is distributed already can be cut further over other axes of the same mesh, and only there."""
    ours, theirs = mesh.mesh_dim_names, inner.mesh.mesh_dim_names
    try:
        if not ours or not theirs or set(ours) & set(theirs):
            raise RuntimeError("their axes are not told apart")
        joint_mesh(mesh, inner.mesh)
    except RuntimeError as error:
        raise ValueError(
            f"parameter {name!r} is a DTensor already, over {inner.mesh}, and cannot be sharded over {mesh}: {error}; "
            "for tensor parallelism inside, make one mesh with named axes and give each its own, mesh['shard'] here"
        ) from error


def _dim_of(param: Param, choose: ShardPlacement | None) -> int:
    chosen = choose(param.sharded) if choose is not None else None
    if chosen is None:
        return 0
    ndim = param.sharded.ndim
    if not isinstance(chosen, Shard) or not -ndim <= chosen.dim < ndim:
        raise ValueError(
            f"shard_placement_fn returned {chosen!r} for parameter {param.name!r} of shape "
            f"{tuple(param.sharded.shape)}: expected None or Shard(dim) with a dim of that shape"
        )
    return chosen.dim % ndim


def check_equal(plans: Sequence[UnitPlan], mesh: DeviceMesh, options: Options) -> int:
    """Refuse, on every rank, a model or options that differ between ranks; return a number they all share.

    Raises:
        ValueError: with the first difference and the ranks that have it.
    """
    description: dict[str, Any] = {
        "options": {
            "precision": repr(options.precision),
            "reshard_after_forward": repr(options.reshard_after_forward),
            "sync_replicas": options.sync_replicas,
            "reduce_ignored": options.reduce_ignored,
            "sync_buffers": options.sync_buffers,
            "mesh": list(mesh.mesh.shape),
        },
        "units": {
            plan.name or "(root)": {
                param.name: {
                    "shape": list(param.shape),
                    "dtype": str(param.sharded.dtype),
                    "requires_grad": param.sharded.requires_grad,
                    "gathered dtype": str(param.gathered_dtype),
                    "sharded dim": param.dim,
                }
                for param in plan.params
            }
            for plan in plans
        },
    }
    ranks = mesh.mesh.flatten().tolist()
    difference = first_difference(exchange_over_mesh(description, mesh), ranks)
    if difference:
        raise ValueError(f"the model or its options differ between ranks: {difference}")
    return zlib.crc32(repr(description).encode())


def build(plans: Sequence[UnitPlan], mesh: DeviceMesh, options: Options, salt: int) -> Schedule:
    """Make the units of `plans` (children first, the root last), their schedule and their hooks."""
    handle = DeviceHandle(mesh.device_type)
    device = handle.device
    timeout = timedelta(seconds=options.timeout_s)
    row = make_row(mesh.get_group(mesh.ndim - 1), mesh.device_type, timeout)
    column = make_column(mesh.get_group(0), mesh.device_type, timeout) if mesh.ndim == 2 and mesh.size(0) > 1 else None
    seed, key = exchange_over_mesh([torch.initial_seed(), uuid.uuid4().hex], mesh)[0]
    record_event = handle.record_event if handle.has_events else None
    rows = mesh.mesh.view(-1, mesh.size(mesh.ndim - 1)).tolist()
    waits = Waits(dist.get_rank(), rows, key, options.timeout_s, record_event)
    replaced = Replaced()
    for param in (param for plan in plans for param in plan.params):
        if param.inner is None:
            replaced.note(param.sharded, param.name)
    owner_of = {param.sharded: param.owners[0] for plan in plans for param in plan.params}
    units: dict[int, Unit] = {}
    for plan in plans:
        if not options.keep_meta:
            for name, module in zip(plan.names, plan.modules, strict=True):
                materialize(own_modules(module, name, plans), owner_of, device, seed, options.init)
            _refresh(plan)
        if options.sync_replicas:
            sync_rows(plan, mesh, device)
        # The output dtype is that of the wrapped model; between its units the compute dtype stays.
        precision = options.precision if plan is plans[-1] else replace(options.precision, output=None)
        unit = Unit(plan.name, tuple(plan.modules), plan.params, mesh, row, precision, device)
        if options.sync_replicas and unit.is_meta:
            unit.before_first_gather = partial(_sync_late, mesh=mesh)
        elif options.sync_replicas:
            sync_columns(unit, mesh)
        units[id(plan)] = unit
    schedule = _schedule(plans, [units[id(plan)] for plan in plans], mesh, column, salt, waits)
    schedule.world = discover(mesh)
    schedule.replaced.take(replaced)
    for plan in plans:
        unit = units[id(plan)]
        schedule.states[unit].reshard_after_forward = options.reshard_after_forward
        needs = [unit, *(units[id(tie)] for tie in plan.ties), *plan.foreign_ties]
        for module in plan.modules:
            hooks = ModuleHooks(module, schedule, needs, is_root=plan is plans[-1])
            attach(module, ModuleState(unit, hooks, deepcopy_wrapped))
    if len(plans[-1].modules) == 1:
        _name_from(plans[-1].modules[0], schedule)
    return schedule


def _name_from(root: nn.Module, schedule: Schedule) -> None:
    """Units that were wrapped before were named from a module further down; texts name all from the root."""
    names = {id(module): name for name, module in root.named_modules()}
    for unit in schedule.units:
        unit.name = names.get(id(unit.modules[0]), unit.name)
        for param in unit.params:
            module, attribute = param.owners[0]
            if id(module) in names:
                param.name = ".".join(filter(None, (names[id(module)], attribute)))


def _schedule(
    plans: Sequence[UnitPlan], units: list[Unit], mesh: DeviceMesh, column: Column | None, salt: int, waits: Waits
) -> Schedule:
    """One schedule for the new units and for those that were wrapped before below or beside them."""
    modules = {id(module): module for plan in plans for top in plan.modules for module in top.modules()}
    for plan in plans:
        for tie in plan.foreign_ties:
            modules.update((id(module), module) for module in tie.modules)
    wrapped = [module for module in modules.values() if isinstance(module, HSDPModule)]
    earlier = list(dict.fromkeys(state_of(module).schedule for module in wrapped))
    # Units on another mesh keep a schedule of their own: their order is theirs.
    earlier = [schedule for schedule in earlier if schedule.mesh == mesh]
    schedule = Schedule([unit for old in earlier for unit in old.units] + units, mesh, column, salt, waits)
    for old in earlier:
        schedule.take_over(old)
    return schedule


def _refresh(plan: UnitPlan) -> None:
    """Take up the parameters that materialisation put in the place of those on the meta device."""
    for param in plan.params:
        module, attribute = param.owners[0]
        current = module._parameters[attribute]
        assert current is not None, f"parameter {param.name!r} vanished"
        param.sharded = current
        param.show(current)


def settle_rest(modules: Sequence[nn.Module], schedule: Schedule, mesh: DeviceMesh, options: Options) -> None:
    """What is not sharded: buffers and ignored parameters."""
    device = DeviceHandle(mesh.device_type).device
    for module in modules:
        place_buffers(module, device, options.precision)
        if options.sync_replicas:
            broadcast_buffers(module, mesh)
        if options.sync_buffers == "forward":
            state_of(module).hooks.before_forward = partial(broadcast_buffers, mesh=mesh)
    named = {param: name for module in modules for name, param in module.named_parameters()}
    ignored = [(named[param], param) for param in named if param in set(options.ignored_params)]
    if options.reduce_ignored and ignored:
        schedule.ignored = IgnoredGradients(ignored, mesh)
        for _, param in ignored if options.sync_replicas else []:
            for axis in reversed(range(mesh.ndim)):
                broadcast_first(param, mesh.get_group(axis), device)
    trainable = [name for name, param in ignored if param.requires_grad]
    if trainable and not options.reduce_ignored and mesh.size() > 1 and mesh.mesh.flatten()[0] == dist.get_rank():
        warnings.warn(
            f"ignored_params: {', '.join(trainable)} require gradients, which nobody reduces: every rank trains its "
            "own; freeze them, reduce them yourself, or use hybrid_shard(..., reduce_ignored=True)",
            stacklevel=4,
        )


def sync_rows(plan: UnitPlan, mesh: DeviceMesh, device: torch.device) -> None:
    """Give the ranks of the first row the whole parameters of the mesh's first rank, before they are cut."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh"
    if mesh.ndim == 2 and coordinate[0] != 0:
        return
    group = mesh.get_group(mesh.ndim - 1)
    for param in plan.params:
        if not param.sharded.is_meta:
            broadcast_first(local_of(param.sharded), group, device)


def sync_columns(unit: Unit, mesh: DeviceMesh) -> None:
    """Give every row the shards of the first one."""
    if mesh.ndim == 2:
        for segment in unit.segments:
            broadcast_first(segment.shard, mesh.get_group(0), segment.shard.device)


def _sync_late(unit: Unit, mesh: DeviceMesh) -> None:
    """For what was on the meta device when it was wrapped and has been made real since."""
    sync_columns(unit, mesh)
    for module in unit.modules:
        broadcast_buffers(module, mesh)
