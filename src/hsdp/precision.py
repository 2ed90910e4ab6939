"""Which dtype is used where: a frozen choice, and the casts it implies.

shards (the optimizer's)      fp32     stay in the parameter's own dtype
  -> gathered parameters      `param`
  -> inputs of a unit         `param`  when `cast_inputs`
  -> gradients on the wire    `reduce` (sums are kept in fp32 whatever travels)
  -> outputs of the model        `output`
floating point buffers        `buffer`, once, at wrap
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from hsdp.tensors import map_tensors

ParamOverride = Callable[[str, nn.Parameter], "torch.dtype | None"]
_NOT_DTYPES = ("cast_inputs", "param_override")
_GATHERABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Precision:
    """Mixed precision of a wrapped module. `None` leaves a dtype as it is.

    Args:
        param: dtype of the gathered parameters, and so of the computing.
        reduce: dtype in which gradients travel inside a row; `None` means the gradients' own dtype. Sums of gradients,
            over ranks and over microbatches, are kept in fp32 (fp64 for fp64 parameters).
        output: dtype of floating point outputs of the wrapped model's forward; with `fully_shard`, of that module's.
        buffer: dtype to which floating point buffers are cast when the module is wrapped. Left alone by default:
            running statistics lose updates in bf16.
        cast_inputs: cast floating point inputs of a unit's forward to `param`.
        param_override: called with the name and the parameter for every floating point parameter at wrap; the dtype
            in which that one is gathered, or None for `param`. For norms that stay in fp32 inside a bf16 model, say.

    Raises:
        ValueError: a dtype that is not float64, float32, float16 or bfloat16.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffer: torch.dtype | None = None
    cast_inputs: bool = True
    param_override: ParamOverride | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name not in _NOT_DTYPES:
                _check(each.name, getattr(self, each.name))

    def param_dtype(self, name: str, param: nn.Parameter) -> torch.dtype:
        """Dtype in which a parameter is gathered; integers are never cast."""
        if not param.dtype.is_floating_point:
            return param.dtype
        override = self.param_override(name, param) if self.param_override is not None else None
        _check(f"param_override for {name!r}", override)
        return override or self.param or param.dtype

    def wire_dtype(self, grad: torch.dtype, sums_wide: bool = True) -> torch.dtype:
        """Dtype in which a gradient of dtype `grad` travels.

        Where sums are made in a wider dtype anyway (`sums_wide`), a gradient that `reduce` can hold exactly travels as
        it is: widening it on the wire would double the bytes and change nothing.
        """
        if self.reduce is None:
            return grad
        exact = torch.promote_types(grad, self.reduce) == self.reduce
        return grad if exact and sums_wide else self.reduce

    def cast_in(self, value: Any) -> Any:
        """Cast the floating point tensors in a unit's inputs."""
        return cast_floats(value, self.param) if self.param is not None and self.cast_inputs else value

    def cast_out(self, value: Any) -> Any:
        """Cast the floating point tensors in a unit's outputs."""
        return cast_floats(value, self.output) if self.output is not None else value


def _check(name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in _GATHERABLE:
        names = ", ".join(str(each) for each in _GATHERABLE)
        raise ValueError(f"Precision({name}={dtype!r}): expected None or one of {names}")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which gradients of a parameter of `dtype` are summed: at least fp32."""
    if dtype.is_floating_point:
        return dtype if dtype == torch.float64 else torch.float32
    return torch.promote_types(dtype, torch.complex64) if dtype.is_complex else dtype


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating point tensor in a nest of containers to `dtype`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
