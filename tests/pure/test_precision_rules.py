"""Precision: which dtype each thing gets, and what the casts leave alone. (Training with it: cpu/test_precision.py.)"""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from hsdp import Precision
from hsdp.precision import cast_floats, sum_dtype

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("name", ["param", "reduce", "output", "buffer"])
@pytest.mark.parametrize("value", [torch.int32, torch.float8_e4m3fn, torch.complex64, "bf16", 16])
def test_a_dtype_that_does_not_fit_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Precision\({name}=.*expected None or one of torch.float64") as error:
        Precision(**{name: value})
    assert repr(value) in str(error.value)


def test_it_is_frozen_and_comparable() -> None:
    with pytest.raises(FrozenInstanceError):
        Precision().param = BF16  # type: ignore[misc]
    assert Precision(param=BF16) == Precision(param=BF16) != Precision(param=F16)
    assert Precision() == Precision(None, None, None, None, cast_inputs=True)


@pytest.mark.parametrize(
    ("param", "dtype", "want"),
    [
        (None, F32, F32),
        (None, torch.int64, torch.int64),
        (BF16, F32, BF16),
        (BF16, torch.int64, torch.int64),
        (F32, F64, F32),
    ],
)
def test_dtype_of_gathered_parameters(param: torch.dtype | None, dtype: torch.dtype, want: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)
    assert Precision(param=param).param_dtype("weight", parameter) == want


@pytest.mark.parametrize(
    ("reduce", "grad", "want"),
    [
        (None, F32, F32),
        (None, BF16, BF16),
        (BF16, F32, BF16),
        (BF16, F64, BF16),
        (F16, F32, F16),
        (F32, F64, F32),
        (F32, BF16, BF16),  # fp32 holds it exactly: it travels as it is
        (F32, F16, F16),
        (F64, F32, F32),
        (BF16, F16, BF16),  # neither holds the other: what the user chose
        (F16, BF16, F16),
    ],
)
def test_dtype_of_gradients_on_the_wire(reduce: torch.dtype | None, grad: torch.dtype, want: torch.dtype) -> None:
    assert Precision(reduce=reduce).wire_dtype(grad) == want


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (F64, F64),
        (F32, F32),
        (F16, F32),
        (BF16, F32),
        (torch.complex64, torch.complex64),
        (torch.complex128, torch.complex128),
    ],
)
def test_dtype_of_sums(dtype: torch.dtype, want: torch.dtype) -> None:
    assert sum_dtype(dtype) == want


def test_cast_floats_leaves_other_tensors_alone() -> None:
    tokens, mask, z = torch.tensor([1]), torch.tensor([True]), torch.tensor([1j])
    half = torch.ones(2, dtype=BF16)
    value = {"x": torch.ones(2), "tokens": tokens, "mask": mask, "z": z, "half": half, "text": "t"}
    got = cast_floats(value, BF16)
    assert got["x"].dtype == BF16
    assert value["x"].dtype == F32
    for name in ("tokens", "mask", "z", "half", "text"):
        assert got[name] is value[name]


def test_casts_of_inputs_and_outputs() -> None:
    x = torch.ones(2)
    assert Precision(param=BF16).cast_in((x, [x]))[1][0].dtype == BF16
    assert Precision(param=BF16, cast_inputs=False).cast_in(x) is x
    assert Precision().cast_in(x) is x
    assert Precision(param=BF16).cast_out(x) is x
    assert Precision(output=F64).cast_out([x])[0].dtype == F64


def test_gradients_flow_through_a_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    Precision(param=BF16).cast_in(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == F32
    assert x.grad.tolist() == [1, 1]
