"""control.py: values exchanged between real ranks, errors raised by all of them, and the (pure) first difference."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed as dist
from harness import RankError, run_ranks
from torch.distributed.device_mesh import DeviceMesh

from hsdp import control
from hsdp.control import agree, exchange, exchange_over_mesh, first_difference, format_ranks

SORT_RANKS = "sort_ranks" in inspect.signature(dist.new_group).parameters

# ---- exchange --------------------------------------------------------------------------------------------------------


def exchange_values(rank: int, world: int) -> dict[str, Any]:
    value = {"rank": rank, "name": "layer \u00e9" * rank, "shape": (4, 8 + rank), "none": None}
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    keep_order = {"sort_ranks": False} if SORT_RANKS else {}
    unsorted = dist.new_group([3, 1, 0, 2], **keep_order)
    return {
        "different": exchange(value),
        "same": exchange({"a": [1, 2.5, True]}),
        "empty": exchange("" if rank else "x" * 10000),
        "pair": exchange(rank, pairs[rank % 2]),
        "unsorted": exchange(rank, unsorted),
    }


def test_exchange() -> None:
    for rank, got in enumerate(run_ranks(4, exchange_values)):
        assert got["different"] == [
            {"rank": other, "name": "layer \u00e9" * other, "shape": [4, 8 + other], "none": None} for other in range(4)
        ]
        assert got["same"] == [{"a": [1, 2.5, True]}] * 4
        assert got["empty"] == ["x" * 10000, "", "", ""]
        assert got["pair"] == ([0, 2] if rank in (0, 2) else [1, 3])
        assert got["unsorted"] == ([3, 1, 0, 2] if SORT_RANKS else [0, 1, 2, 3])


def exchange_counting(rank: int, world: int) -> tuple[int, int, int]:
    sent: list[int] = []
    gather = dist.all_gather

    def counted(outputs: Any, tensor: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return gather(outputs, tensor, **kwargs)

    dist.all_gather = counted
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    assert exchange({"big": "x" * 1000}, alone) == [{"big": "x" * 1000}]
    num_alone = len(sent)
    exchange({"big": "x" * 1000})
    num_same = len(sent) - num_alone
    exchange({"big": "x" * 1000, "rank": rank})
    return num_alone, num_same, sum(sent)


def test_only_what_differs_travels() -> None:
    # Alone: nothing. The same: one header of length and digest, 40 bytes. Different: a header and the text.
    for num_alone, num_same, sent_bytes in run_ranks(2, exchange_counting):
        assert (num_alone, num_same) == (0, 1)
        assert sent_bytes == 40 + 40 + len('["ok", {"big": "", "rank": 0}]') + 1000


def exchange_over_meshes(rank: int, world: int) -> list[list[int]]:
    meshes = [
        DeviceMesh("cpu", [[0, 1], [2, 3]]),
        DeviceMesh("cpu", [[0, 3], [1, 2]]),  # torch sorts the column {3, 2}
        DeviceMesh("cpu", [[3, 1], [0, 2]]),
        DeviceMesh("cpu", [[0], [1], [2], [3]]),
        DeviceMesh("cpu", [[0, 1, 2, 3]]),
        DeviceMesh("cpu", [2, 0, 3, 1]),
    ]
    return [exchange_over_mesh(rank, mesh) for mesh in meshes]


def test_exchange_over_mesh() -> None:
    expected = [[0, 1, 2, 3], [0, 3, 1, 2], [3, 1, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 3, 1]]
    for got in run_ranks(4, exchange_over_meshes):
        assert got == expected


def exchange_no_json(rank: int, world: int, over_mesh: bool) -> None:
    value = {"device": object()} if rank == 3 else {"device": "cpu"}
    if over_mesh:
        exchange_over_mesh(value, DeviceMesh("cpu", [[0, 1], [2, 3]]))
    else:
        exchange(value)


@pytest.mark.parametrize("over_mesh", [False, True])
def test_every_rank_hears_of_a_value_that_is_no_json(over_mesh: bool) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(4, exchange_no_json, over_mesh, timeout_s=60)
    text = "rank 3: its control message cannot be sent as JSON: Object of type object is not JSON serializable"
    assert error.value.errors == dict.fromkeys(range(4), ("RuntimeError", text))


def exchange_too_much(rank: int, world: int) -> None:
    control.MAX_MESSAGE_BYTES = 100
    exchange("x" * 99 if rank else "x")


def test_every_rank_hears_of_a_value_that_is_too_long() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, exchange_too_much, timeout_s=60)
    text = "rank 1: its control message is too long to be sent: 101 bytes, at most 100"
    assert error.value.errors == dict.fromkeys(range(2), ("RuntimeError", text))


# ---- agree -----------------------------------------------------------------------------------------------------------


def raise_together(rank: int, world: int, errors: list[str | None], over_mesh: bool) -> str | None:
    where = DeviceMesh("cpu", [[3, 1], [0, 2]]) if over_mesh else None
    agree(None, where)
    try:
        agree(errors[rank], where)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("errors", "over_mesh", "text"),
    [
        ([None, None, None, "no such file"], False, "rank 3: no such file"),
        ([None, None, None, "no such file"], True, "rank 3: no such file"),
        (["a", "b", "b", None], False, "rank 0: a; ranks 1, 2: b"),
        (["same"] * 4, False, "same"),
        ([None] * 4, True, None),
    ],
)
def test_agree(errors: list[str | None], over_mesh: bool, text: str | None) -> None:
    assert run_ranks(4, raise_together, errors, over_mesh) == [text] * 4


# ---- first difference ------------------------------------------------------------------------------------------------

MANY = list(range(20))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"a": 1}], None),
        ([{"a": {"b": [1, {"c": None}]}}] * 3, None),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], None),
        ([{"a": float("nan")}, {"a": float("nan")}], None),
        ([{"w": [4, 8]}, {"w": (4, 8)}], None),
        ([{"w": {"shape": [4, 8]}}] * 3 + [{"w": {"shape": [4, 9]}}], "w.shape: ranks 0-2: (4, 8); rank 3: (4, 9)"),
        ([{"a": 1}, {"a": 1.0}], "a: rank 0: 1; rank 1: 1.0"),
        ([{"a": 1}, {"a": True}], "a: rank 0: 1; rank 1: True"),
        ([{"a": 1}, {"a": {"b": 1}}], "a: rank 0: 1; rank 1: {'b': 1}"),
        ([{"a": 0, "x": 1, "y": 1}, {"a": 0, "x": 2, "y": 2}], "x: rank 0: 1; rank 1: 2"),
        ([{"p": {"l.weight": 1, "z": 0}}] * 2 + [{"p": {"z": 1}}], "p: rank 2 has no 'l.weight'"),
        ([{"l.weight": 1}, {}, {}, {"l.weight": 1}], "ranks 1, 2 have no 'l.weight'"),
        ([{}, {"extra": 1}, {}], "only rank 1 has 'extra'"),
        ([[{"n": "a"}, {"n": "b"}], [{"n": "a"}, {"n": "c"}]], "[1].n: rank 0: 'b'; rank 1: 'c'"),
        ([{"x": MANY}, {"x": [*MANY[:-1], 0]}], "x[19]: rank 0: 19; rank 1: 0"),
        ([{"x": MANY}, {"x": [*MANY, 5]}], "x: rank 0: 20 entries; rank 1: 21 entries"),
        ([0, 1, 2, 3, 4, 5], "rank 0: 0; rank 1: 1; rank 2: 2; rank 3: 3; and 2 more values"),
        (["a", "b"], "rank 0: 'a'; rank 1: 'b'"),
    ],
)
def test_first_difference(values: list[Any], text: str | None) -> None:
    assert first_difference(values) == text


def test_first_difference_names_the_ranks_it_is_told() -> None:
    assert first_difference([1, 2, 1], ranks=[4, 0, 2]) == "ranks 4, 2: 1; rank 0: 2"


def test_first_difference_shows_where_long_texts_part() -> None:
    text = first_difference(["x" * 1000 + "left", "x" * 1000 + "right" + "y" * 1000])
    assert text is not None
    assert len(text) < 500
    assert "left'" in text
    assert "right" in text
    assert text.startswith("rank 0: ...x")
    assert text.endswith("y...")


def test_format_ranks() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert format_ranks([0, 1, 4, 3]) == "ranks 0, 1, 4, 3"
