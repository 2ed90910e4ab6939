"""Finding and replacing tensors in containers, without touching anything else."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hsdp.tensors import find_tensors, map_tensors

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: Any
    steps: int = 3
    extra: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    name: str = "frozen"


@dataclass
class Counted:
    """Its `__init__` must not run again."""

    value: torch.Tensor
    num_inits = 0

    def __post_init__(self) -> None:
        type(self).num_inits += 1


class DictOutput(OrderedDict[str, Any]):
    """Like the outputs of some model libraries: a dict whose keys are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


def test_a_bare_tensor() -> None:
    assert map_tensors(double, ONE) == 2
    assert find_tensors(ONE)[0] is ONE


def test_nests_of_tuples_lists_and_dicts() -> None:
    value = (ONE, [TWO, "text"], {"a": ONE, "b": (TWO, None)}, 5)
    got = map_tensors(double, value)
    assert got == (
        torch.tensor(2.0),
        [torch.tensor(4.0), "text"],
        {"a": torch.tensor(2.0), "b": (torch.tensor(4.0), None)},
        5,
    )
    assert value[1][0] is TWO
    assert value[2]["a"] is ONE
    assert [float(tensor) for tensor in find_tensors(value)] == [1, 2, 1, 2]


def test_named_tuples_keep_their_type() -> None:
    got = map_tensors(double, Pair(ONE, "x"))
    assert type(got) is Pair
    assert (got.left, got.right) == (2, "x")


def test_dataclasses() -> None:
    output = Output(None, {"a": ONE}, extra=[TWO])
    got = map_tensors(double, output)
    assert type(got) is Output
    assert (got.loss, got.logits, got.steps, got.extra) == (None, {"a": 2}, 3, [4])
    assert output.logits == {"a": 1}
    frozen = map_tensors(double, Frozen(ONE))
    assert (frozen.logits, frozen.name) == (2, "frozen")


def test_a_dataclass_is_not_made_anew() -> None:
    counted = Counted(ONE)
    assert map_tensors(double, counted).value == 2
    assert Counted.num_inits == 1


def test_dict_types_keep_their_type() -> None:
    ordered = map_tensors(double, DictOutput(logits=ONE, loss=TWO))
    assert type(ordered) is DictOutput
    assert (list(ordered), ordered["logits"], ordered.logits, ordered.loss) == (["logits", "loss"], 2, 2, 4)
    counts = map_tensors(double, defaultdict(int, a=ONE))
    assert (counts["a"], counts["missing"]) == (2, 0)


@pytest.mark.parametrize(
    "value", [(1, [2], {"a": None}), Pair(1, 2), Output(None, 1), DictOutput(a=1), "text", None, Output, [], {}, 1.5]
)
def test_what_holds_no_tensor_is_returned_as_it_is(value: Any) -> None:
    assert map_tensors(double, value) is value
    assert find_tensors(value) == []


@pytest.mark.parametrize("value", [(ONE, [TWO]), Pair(ONE, TWO), Output(ONE, TWO), {"a": [ONE]}, Frozen(ONE)])
def test_what_does_not_change_is_returned_as_it_is(value: Any) -> None:
    assert map_tensors(lambda tensor: tensor, value) is value


def test_only_the_changed_branch_is_rebuilt() -> None:
    unchanged = [TWO]
    value = {"a": unchanged, "b": [ONE]}
    got = map_tensors(lambda tensor: tensor * 3 if tensor is ONE else tensor, value)
    assert got is not value
    assert got["a"] is unchanged
    assert got["b"] == [3]


def test_a_read_only_mapping_is_searched() -> None:
    assert find_tensors(MappingProxyType({"a": ONE})) == [ONE]


def test_a_tensor_is_found_as_often_as_it_stands_there() -> None:
    assert len(find_tensors([ONE, ONE, (ONE,)])) == 3
