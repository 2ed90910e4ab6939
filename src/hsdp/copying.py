"""`copy.deepcopy` of a wrapped module: a second model over the same groups, each rank copying its own shards.

Nothing is communicated; all ranks make their copies in the same order, as they do everything else. What an average of
weights (`torch.optim.swa_utils.AveragedModel`) needs.
"""

from __future__ import annotations

import copy
import zlib
from dataclasses import replace
from typing import Any

from torch import nn

from hsdp.dtensors import clone_parameter, local_of
from hsdp.hooks import ModuleHooks, wrap_method
from hsdp.module import HSDPModule, ModuleState, attach, state_of
from hsdp.schedule import Schedule
from hsdp.unit import Unit

_COPIED = "hsdp: wrapped modules copied so far"  # a key in deepcopy's memo, which otherwise holds ids


def deepcopy_wrapped(module: Any, memo: dict[Any, Any]) -> Any:
    """The `__deepcopy__` of wrapped modules."""
    copied: list[HSDPModule] | None = memo.get(_COPIED)
    if copied is not None:  # the copy of a wrapped module that this one is in
        copied.append(module)
        return _copy_plain(module, memo)
    copied = memo[_COPIED] = [module]
    inner = [each for each in module.modules() if isinstance(each, HSDPModule)]
    for unit in dict.fromkeys(unit for each in inner for unit in state_of(each).hooks.units):
        unit.release()
        for param in unit.params:
            memo[id(param.sharded)] = clone_parameter(param.sharded)
    try:
        new = _copy_plain(module, memo)
    finally:
        del memo[_COPIED]
    for schedule in dict.fromkeys(state_of(each).schedule for each in copied):
        mine = [each for each in copied if state_of(each).schedule is schedule]
        _wire(mine, schedule, memo)
    return new


def _copy_plain(module: Any, memo: dict[Any, Any]) -> Any:
    """A copy as it would be without sharding: the user's class, without our hooks and our state."""
    plain_class: Any = type(module).__mro__[HSDPModule._orig_cls_mro_index]
    new = plain_class.__new__(plain_class)
    memo[id(module)] = new
    hooks = state_of(module).hooks
    contents = {}
    for name, value in module.__dict__.items():
        if name in hooks.own_attributes:
            continue
        if name.endswith(("_hooks", "_with_kwargs", "_always_called")) and isinstance(value, dict):
            value = type(value)((key, hook) for key, hook in value.items() if key not in hooks.ids)
        contents[name] = value
    new.__dict__.update(copy.deepcopy(contents, memo))
    return new


def _wire(modules: list[HSDPModule], old: Schedule, memo: dict[Any, Any]) -> None:
    """Units, schedule and hooks for the copies of `modules`, like those they were copied from."""
    whole = [unit for unit in old.units if all(id(module) in memo for module in unit.modules)]
    units = {unit: _copy_unit(unit, memo) for unit in whole}
    old.num_copies += 1
    salt = zlib.crc32(f"{old.salt}/{old.num_copies}".encode())
    waits = old.waits.for_copy(old.num_copies)
    schedule = Schedule(list(units.values()), old.mesh, old.column, salt, waits)
    schedule.world = old.world
    for unit, new_unit in units.items():
        schedule.states[new_unit].take_settings(old.states[unit], units)
    top = modules[0]
    for module in modules:
        hooks: ModuleHooks = state_of(module).hooks
        new: nn.Module = memo[id(module)]
        needs = [units[unit] for unit in hooks.units if unit in units]
        is_root = hooks.is_root or module is top
        new_hooks = attach(new, ModuleState(needs[0], ModuleHooks(new, schedule, needs, is_root), deepcopy_wrapped))
        new_hooks.before_forward = hooks.before_forward
        for name in hooks.methods:
            wrap_method(new, name, new_hooks)


def _copy_unit(unit: Unit, memo: dict[Any, Any]) -> Unit:
    params = []
    for param in unit.params:
        owners = [(memo[id(module)], attribute) for module, attribute in param.owners if id(module) in memo]
        first, attribute = owners[0]
        sharded = first._parameters[attribute]
        copied = replace(param, owners=owners, sharded=sharded)
        copied.local = local_of(sharded)
        params.append(copied)
    modules = tuple(memo[id(module)] for module in unit.modules)
    new = Unit(unit.name, modules, params, unit.mesh, unit.row, unit.precision, unit.device)
    new.reduces, new.cross_reduces, new.divide_factor = unit.reduces, unit.cross_reduces, unit.divide_factor
    new.all_reduce_hook, new.before_first_gather = unit.all_reduce_hook, unit.before_first_gather
    return new
