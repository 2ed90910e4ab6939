"""The private corners of torch: when one of these fails, torch has changed and `hsdp/internals.py` must follow."""

from __future__ import annotations

import torch

from hsdp.internals import call_after_backward, is_backward_running, storage_use_count


def test_storage_use_count_sees_who_keeps_a_part() -> None:
    buffer = torch.zeros(8)
    alone = storage_use_count(buffer)
    part = buffer[2:4]
    assert storage_use_count(buffer) > alone
    del part
    assert storage_use_count(buffer) == alone


def test_storage_use_count_sees_a_gradient_that_was_kept() -> None:
    buffer, parameter = torch.zeros(8), torch.nn.Parameter(torch.zeros(2))
    alone = storage_use_count(buffer)
    parameter.grad = buffer[2:4]
    kept = parameter.grad
    parameter.grad = None
    assert storage_use_count(buffer) > alone
    assert kept is not None
    del kept
    assert storage_use_count(buffer) == alone


def test_call_after_backward_runs_once_and_last() -> None:
    events: list[str] = []
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product = first * second
    product.register_hook(lambda grad: call_after_backward(lambda: events.append("end")))
    first.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    second.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    product.sum().backward()
    assert events == ["gradient", "gradient", "end"]


def test_is_backward_running() -> None:
    seen: list[bool] = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_post_accumulate_grad_hook(lambda _: seen.append(is_backward_running()))
    assert not is_backward_running()
    tensor.sum().backward()
    assert seen == [True]
    assert not is_backward_running()
