"""HSDPModule: the class a wrapped module gets, and the state behind it.

It subclasses torch's `FSDPModule` and gives each of its methods the same meaning here, so that trainers that know FSDP2
treat our modules as that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hsdp.hooks import STATE, ModuleHooks
from hsdp.schedule import Schedule, UnitState
from hsdp.unit import Unit


@dataclass(eq=False)
class ModuleState:
    """What hangs on a wrapped module.

    Attributes:
        copier: makes a deep copy of the module; it wraps modules itself, so it stands above this one.
    """

    unit: Unit
    hooks: ModuleHooks
    copier: Callable[[Any, dict[Any, Any]], Any]

    @property
    def schedule(self) -> Schedule:
        return self.hooks.schedule

    @property
    def unit_state(self) -> UnitState:
        return self.schedule.states[self.unit]


class UnshardHandle:
    """Returned by `HSDPModule.unshard(async_op=True)`."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    def wait(self) -> None:
        """Wait until the full parameters exist; may be called more than once."""
        self._state.schedule.gather(self._state.unit)


class HSDPModule(FSDPModule):
    """Mixed into the class of every wrapped module. The methods speak of this module's own unit unless they recurse."""

    _orig_cls_mro_index = 3  # HSDP<Class>, HSDPModule, FSDPModule, <Class>: where torch finds the user's class

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's parameters; with `async_op`, return a handle to wait on."""
        state = state_of(self)
        state.unit.start_gather()
        state.unit.exposed = True
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release this module's full parameters."""
        state_of(self).unit.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever, also between forward and backward: what the module shows then may be full, and has no gradients."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for state in self._states(recurse=True):
            for param in state.unit.params:
                grad = param.sharded.grad
                if grad is not None and set_to_none:
                    param.sharded.grad = None
                elif grad is not None:
                    grad.detach_().zero_()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether backwards of forwards that already ran still follow; then what was recorded for them is kept."""
        state_of(self).schedule.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether a backward communicates at all. See `hsdp.accumulate`."""
        for state in self._states(recurse):
            state.unit.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether a backward reduces over the replicate axis. See `hsdp.accumulate`."""
        for state in self._states(recurse):
            state.unit.cross_reduces = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are released between forward and backward."""
        for state in self._states(recurse):
            state.unit_state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are released after backward; if not, the next forward uses them as they are."""
        for state in self._states(recurse):
            state.unit_state.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to start gathering when this one's forward begins, instead of the recorded next one."""
        state_of(self).unit_state.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to start gathering when this one's backward begins, instead of the recorded one before."""
        state_of(self).unit_state.backward_prefetch = _units_of(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by `factor` instead of by the number of ranks."""
        if not factor:
            raise ValueError("set_gradient_divide_factor(0): gradients cannot be divided by zero")
        state_of(self).unit.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name for `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing to do: gradients are always summed, and divided afterwards."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Nothing to do: a unit always reduces all its trainable parameters."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Nothing to do: reductions in flight are limited by bytes."""

    def set_post_optim_event(self, event: Any) -> None:
        """Nothing to do: a gather copies from the shards on the current stream, behind the optimizer."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not need this module's parameters (an embedding's does not), so it gathers none."""
        state_of(self).unit_state.unshard_in_backward = unshard_in_backward

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this unit's reduced and divided gradients, a flat tensor to be changed in place."""
        if stream is not None:
            raise NotImplementedError("set_all_reduce_hook(stream=...): hooks run where autograd does")
        state_of(self).unit.all_reduce_hook = hook

    def reset_iter_state(self) -> None:
        """Back to the state between two steps, after an exception in forward or backward."""
        state_of(self).schedule.recover()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to do: gathers are always asynchronous."""

    def _unsupported(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("this FSDP2 setting has no counterpart in hsdp")

    set_allocate_memory_from_process_group_for_comm = _unsupported
    set_custom_all_gather = _unsupported
    set_custom_reduce_scatter = _unsupported
    set_separate_reduce_scatter_group = _unsupported
    set_symm_mem_for_comm = _unsupported
    _get_fsdp_state = _unsupported

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """`.to(dtype)`, `.half()` and the like change the shards; what would change their device is refused.

        Parameters on the meta device become real with `to_empty()`.
        """
        units = [state.unit for state in self._states(recurse=True)]
        holds_sums = any(state.schedule.holds_sums for state in self._states(recurse=True))
        for unit in units:
            for segment in unit.segments:
                name, device = segment.params[0].name, segment.shard.device
                found = fn(torch.empty(0, dtype=segment.dtype, device=device))
                if found.device not in (device, unit.device):
                    raise ValueError(
                        f"parameter {name!r} is sharded on {device} and cannot move to {found.device}: its process "
                        "groups are made for that device; change the device before wrapping"
                    )
                if found.dtype != segment.dtype and holds_sums:
                    raise RuntimeError(
                        f"parameter {name!r} cannot become {found.dtype} while gradients of earlier microbatches wait "
                        "to be reduced; change dtypes between steps"
                    )
        for unit in units:
            unit.release()
        result = nn.Module._apply(self, fn, recurse)  # type: ignore[arg-type]
        for unit in units:
            unit.adopt()
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} cannot be pickled: it belongs to process groups; save model.state_dict() with "
            "torch.distributed.checkpoint, or get_model_state_dict(model, full_state_dict=True)"
        )

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return state_of(self).copier(self, memo)

    def __copy__(self) -> Any:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def _states(self, recurse: bool) -> Iterator[ModuleState]:
        for module in self.modules() if recurse else [self]:  # type: ignore[attr-defined]
            if isinstance(module, HSDPModule):
                yield state_of(module)


def _units_of(modules: list[FSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise ValueError(f"cannot prefetch {type(module).__name__}: it was not wrapped by hsdp")
    return [state_of(module).unit for module in modules]


def state_of(module: Any) -> ModuleState:
    """The state of a wrapped module."""
    state = module.__dict__.get(STATE)
    if state is None:
        raise ValueError(f"{type(module).__name__} was not wrapped by hsdp.hybrid_shard or hsdp.fully_shard")
    assert isinstance(state, ModuleState)
    return state


def attach(module: nn.Module, state: ModuleState) -> ModuleHooks:
    """Give `module` its new class, its state, and hooks for state dicts."""
    old = type(module)
    module.__class__ = type(f"HSDP{old.__name__}", (HSDPModule, old), {})
    module.__dict__[STATE] = state
    state.schedule.hooks.append(state.hooks)

    def to_sharded(module: nn.Module, *_: Any) -> None:
        state_of(module).unit.release()

    def adopt(module: nn.Module, _: Any) -> None:
        for each in state_of(module).hooks.units:
            each.adopt()

    state.hooks.handles += [
        module.register_state_dict_pre_hook(to_sharded),
        module.register_load_state_dict_pre_hook(to_sharded),
        module.register_load_state_dict_post_hook(adopt),
    ]
    return state.hooks


def wrapped_modules(model: nn.Module) -> list[HSDPModule]:
    """All wrapped modules in `model`, parents first.

    Raises:
        ValueError: there is none.
    """
    found: list[HSDPModule] = [module for module in model.modules() if isinstance(module, HSDPModule)]
    if not found:
        raise ValueError(f"{type(model).__name__} holds no module wrapped by hsdp.hybrid_shard or hsdp.fully_shard")
    return found


def schedules_of(model: nn.Module) -> list[Schedule]:
    """The schedules of all wrapped modules in `model`; one where the model itself is wrapped."""
    return list(dict.fromkeys(state_of(module).schedule for module in wrapped_modules(model)))
