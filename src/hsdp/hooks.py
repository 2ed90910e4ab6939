"""Module and autograd hooks: they turn what happens in PyTorch into events of the schedule, and decide nothing.

module called      pre_forward    of its units, inputs cast
module returns     post_forward   outputs cast; hooks on the outputs tell when backward reaches them
backward arrives   pre_backward   the gradient of an output exists
backward leaves    post_backward  the gradients of all inputs are complete
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hsdp.calls import Call
from hsdp.internals import in_transform
from hsdp.schedule import Schedule
from hsdp.tensors import find_tensors, map_tensors
from hsdp.unit import Unit

STATE = "_hsdp_state"  # the attribute of a wrapped module that holds its ModuleState


class ModuleHooks:
    """The hooks of one wrapped module.

    Args:
        units: the units its forward needs: its own, and those that own parameters tied to its own.
        is_root: whether its forward begins and ends a forward of the schedule.
    """

    def __init__(self, module: nn.Module, schedule: Schedule, units: list[Unit], is_root: bool) -> None:
        self.schedule, self.units, self.is_root = schedule, units, is_root
        self.precision = units[0].precision
        self.before_forward: Callable[[nn.Module], None] | None = None  # in training, before anything is gathered
        self._calls: list[Call] = []  # that began and did not end
        self.methods: list[str] = []  # methods other than forward that gather as well
        self.handles = [
            # The engine's bookkeeping is no part of a compiled graph; the module's own forward still is.
            module.register_forward_pre_hook(torch.compiler.disable(self.pre_forward), prepend=True, with_kwargs=True),
            module.register_forward_hook(torch.compiler.disable(self._forward_hook)),
        ]

    @property
    def ids(self) -> set[int]:
        """Keys of these hooks in the module's dicts of hooks."""
        return {handle.id for handle in self.handles}

    @property
    def own_attributes(self) -> set[str]:
        """Attributes of the module that are here for sharding only."""
        return {STATE, *self.methods}

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather, cast the inputs, and watch for the moment when all their gradients are known."""
        if self.is_root:
            self.schedule.begin_forward()
        if self.before_forward is not None and module.training and not self.schedule.in_backward:
            self.before_forward(module)
        call = self.schedule.pre_forward(self.units)
        if not call.is_recomputation:  # earlier ones did not end: checkpointing stops them when it has all it needs
            self._calls = [each for each in self._calls if not each.is_recomputation]
        self._calls.append(call)
        args, kwargs = self.precision.cast_in(args), self.precision.cast_in(kwargs)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(args, kwargs, call)
        return args, kwargs

    def _forward_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self.post_forward(output)

    def post_forward(self, output: Any) -> Any:
        """Release, cast the outputs, and watch for the first gradient that reaches one of them."""
        call = self._calls.pop()
        needs_gradient = torch.is_grad_enabled() and self._watch_outputs(output, call)
        keep = torch.is_grad_enabled() and in_transform()
        self.schedule.post_forward(call, needs_gradient, keep)
        if self.is_root:
            self.schedule.end_forward()
        return self.precision.cast_out(output)

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> tuple[Any, Any]:
        """Give the module views of its inputs: the gradient of the view is that of this use of the input alone."""
        views: list[torch.Tensor] = []
        num_inputs = 0

        def view(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_inputs
            if not tensor.requires_grad:
                return tensor
            num_inputs += 1
            seen = tensor.view_as(tensor)
            # In a transform of torch.func a view belongs to it, and no gradient passes by; the unit is kept then.
            if seen.requires_grad:
                views.append(seen)
            return seen if seen.requires_grad else tensor

        def post_backward(_: Any) -> None:
            self.schedule.post_backward(call)

        args, kwargs = map_tensors(view, args), map_tensors(view, kwargs)
        if len(views) < num_inputs:
            return args, kwargs
        if len(views) == 1:
            views[0].register_hook(post_backward)
        elif views:
            # Inputs that the outputs do not depend on get no gradient, and are not waited for.
            register_multi_grad_hook(views, post_backward, mode="all")
        return args, kwargs

    def _watch_outputs(self, output: Any, call: Call) -> bool:
        tensors = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
        if not tensors:
            return False
        last_backward = [-1]  # with retain_graph the same outputs see several

        def pre_backward(_: torch.Tensor) -> None:
            self.schedule.enter_backward()
            if last_backward[0] == self.schedule.num_backwards:
                return
            last_backward[0] = self.schedule.num_backwards
            self.schedule.pre_backward(call)

        for tensor in tensors:
            tensor.register_hook(pre_backward)
            # Changing a view in place rebuilds its node from the base, and passes by a hook on the view.
            if tensor._base is not None and tensor._base.requires_grad:
                tensor._base.register_hook(pre_backward)
        return True


def wrap_method(module: nn.Module, name: str, hooks: ModuleHooks) -> None:
    """Let calls of `module.<name>` gather and release like calls of its forward."""
    method = getattr(module, name)

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(self, args, kwargs)
        return hooks.post_forward(method(*args, **kwargs))

    setattr(module, name, MethodType(wrapped, module))
    hooks.methods.append(name)
