"""Parameter objects that no longer are the model's: whoever still holds one, an optimizer above all, must hear of it.

Wrapping puts a sharded parameter in the place of the user's own, and while a unit is gathered its modules show full
parameters that vanish again. An optimizer made from either would find `.grad` empty for ever and quietly train nothing
(pytorch#149205). So such an object is given a gradient that cannot be used.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from hsdp.tensors import find_tensors

_BEFORE = (
    "this is parameter {!r} as it was before it was sharded, and the model does not use it any more: make the "
    "optimizer from model.parameters() after hybrid_shard or fully_shard"
)
_GATHERED = (
    "this is parameter {!r} as it was while it was gathered, a form that does not last: make the optimizer from "
    "model.parameters() while nothing is gathered, after wrapping or after reshard()"
)


class OutdatedGrad(torch.Tensor):
    """A gradient without memory; every operation on it raises RuntimeError with `reason`."""

    reason: str

    @staticmethod
    def make(parameter: torch.Tensor, reason: str) -> OutdatedGrad:
        grad = torch.Tensor._make_wrapper_subclass(
            OutdatedGrad, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        assert isinstance(grad, OutdatedGrad)
        grad.reason = reason
        return grad

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OutdatedGrad({self.reason!r})"

    @classmethod
    def _refuse(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(next(each.reason for each in find_tensors((args, kwargs)) if isinstance(each, cls)))

    # Reading an attribute comes to the first: optimizers ask `grad.is_sparse` before they touch anything.
    __torch_function__ = _refuse
    __torch_dispatch__ = _refuse  # type: ignore[assignment]


def outdated_full(parameter: torch.Tensor, name: str) -> OutdatedGrad:
    """The gradient for the full form of a parameter, which exists in between only."""
    return OutdatedGrad.make(parameter, _GATHERED.format(name))


class Replaced:
    """The user's own parameters that sharding replaced, as long as somebody holds them."""

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def note(self, parameter: torch.Tensor, name: str) -> None:
        """Call before the model lets go of `parameter`."""
        if parameter.is_floating_point() or parameter.is_complex():
            self._held.append((weakref.ref(parameter), name))

    def take(self, other: Replaced) -> None:
        """Take over what another one holds, and mark it."""
        self._held += other._held
        self.mark()

    def mark(self) -> None:
        """Give those that are still held a gradient that raises; again after each backward, for `zero_grad` ends it."""
        self._held = [(ref, name) for ref, name in self._held if ref() is not None]
        for ref, name in self._held:
            parameter = ref()
            if parameter is not None and not isinstance(parameter.grad, OutdatedGrad):
                parameter.grad = OutdatedGrad.make(parameter, _BEFORE.format(name))
