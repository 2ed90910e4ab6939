"""Small messages between ranks: who has what, do we all agree, and one error for everybody.

Holds: JSON values exchanged over a process group or over a mesh's own groups, the first difference between them,
and errors that every rank raises together. Must not know: models, units, layouts, hosts. No pickle, no globals, so it
also works where ranks are threads of one process.

    rank 0: {"shape": [4, 8]} --+                 +--> [{"shape": [4, 8]}, {"shape": [4, 9]}]      on every rank
    rank 1: {"shape": [4, 9]} --+-- exchange() ---+--> first_difference() = "shape: rank 0: (4, 8); rank 1: (4, 9)"

These are collectives: every rank of the group must call them, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_VARIABLE = "HSDP_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 60.0  # torch gives a mesh's groups 30 minutes, whatever the default group has
MAX_MESSAGE_BYTES = 16 * 2**20  # one rank's value; a caller with more has no small message
_DIGEST_WORDS = 4  # sha256 as int64
_SHOWN_CHARS = 200  # of one value in an error text
_SHOWN_VALUES = 4  # different values named in an error text
_FLAT_LIST_ITEMS = 8  # a list of so few plain items is shown whole: (4, 8)


def exchange(value: Any, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> list[Any]:
    """Give `value` to every rank of `group`, get every rank's value, in order of group rank.

    Values pass through JSON (tuples come back as lists, keys as strings). Where all ranks sent the same, nothing but a
    digest travels and the entries are one shared object: treat the result as read-only.

    Args:
        value: anything JSON can hold, up to 16 MiB of text.
        group: default: the default group.
        device: where the messages live; default: what `group_device(group)` says.

    Raises:
        RuntimeError: on every rank, when a rank's value is no JSON or too long; the rank is named.
    """
    return _opened(dict(zip(_ranks(group), _exchange_json(_envelope(value), group, device), strict=True)))


def exchange_over_mesh(value: Any, mesh: DeviceMesh, device: torch.device | str | None = None) -> list[Any]:
    """Like `exchange`, over all ranks of a 1-D or 2-D mesh and through its own groups only: the row, then the column.

    Returns:
        one value a rank, in the order of `mesh.mesh.flatten()`.
    """
    assert mesh.ndim in (1, 2), f"exchange_over_mesh knows 1-D and 2-D meshes, got {mesh.ndim}-D"
    row_group = mesh.get_group(mesh.ndim - 1)
    # Groups are sorted by rank unless asked otherwise, mesh rows are not: go by rank, never by position in the group.
    by_rank = dict(zip(_ranks(row_group), _exchange_json(_envelope(value), row_group, device), strict=True))
    if mesh.ndim == 2:
        for pairs in _exchange_json(list(by_rank.items()), mesh.get_group(0), device):
            by_rank.update(dict(pairs))
    return _opened({rank: by_rank[rank] for rank in mesh.mesh.flatten().tolist()})


def agree(
    error: str | None,
    where: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Raise the same ValueError on every rank if any rank found a mistake (`error` is its text, or None).

    The text names the ranks, unless all of them say the same.
    """
    if isinstance(where, DeviceMesh):
        errors = dict(zip(where.mesh.flatten().tolist(), exchange_over_mesh(error, where, device), strict=True))
    else:
        errors = dict(zip(_ranks(where), exchange(error, where, device), strict=True))
    found: dict[str, list[int]] = {}
    for rank, text in errors.items():
        if text is not None:
            found.setdefault(text, []).append(rank)
    if not found:
        return
    if list(found.values()) == [list(errors)]:
        raise ValueError(next(iter(found)))
    shown = [f"{format_ranks(sorted(ranks))}: {text}" for text, ranks in list(found.items())[:_SHOWN_VALUES]]
    raise ValueError("; ".join(shown))


def first_difference(values: Sequence[Any], ranks: Sequence[int] | None = None) -> str | None:
    """Say where the ranks' values differ first, or None where they do not. Pure.

    Walks nested dicts and lists in the order of the first rank that has an entry. The order of a dict's keys does not
    count, the order of a list does; 1, 1.0 and True differ; nan equals nan.

    Args:
        values: one a rank.
        ranks: the ranks' numbers for the text; default 0, 1, ...

    >>> first_difference([{"weight": {"shape": [4, 8]}}, {"weight": {"shape": [4, 9]}}])
    'weight.shape: rank 0: (4, 8); rank 1: (4, 9)'
    >>> first_difference([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}])
    "rank 2 has no 'b'"
    """
    assert values, "no rank, no difference"
    numbers = list(range(len(values))) if ranks is None else list(ranks)
    return _difference("", list(zip(numbers, values, strict=True)))


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people: "rank 3", "ranks 0-2, 5"; runs of three or more are joined, the order is kept."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def default_timeout_s() -> float:
    """How long a rank waits for another one where the caller says nothing: the variable HSDP_TIMEOUT_S, else 60 s.

    Raises:
        ValueError: the variable is no number of seconds above 0.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    check_timeout(seconds if seconds == seconds else text, TIMEOUT_VARIABLE)
    return seconds


def check_timeout(timeout_s: object, name: str = "timeout_s") -> None:
    """
    Raises:
        ValueError: not a finite number of seconds above 0.
    """
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (number and 0 < float(timeout_s) < math.inf):  # type: ignore[arg-type]
        raise ValueError(f"{name}={timeout_s!r} has to be a number of seconds above 0")


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Which backend of `group` serves which device type: {"cpu": "gloo", ...}."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device_type: backend for device_type, _, backend in pairs}


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where control messages of `group` live: on the CPU where the group serves it, else on the accelerator."""
    served = backends(group)
    if "cpu" in served:
        return torch.device("cpu")
    device_type = next(iter(served))
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


# ---- messages --------------------------------------------------------------------------------------------------------
# A value travels in an envelope, ["ok", value] or ["failed", why]: a rank that has nothing sendable still takes part in
# every collective, so the others do not wait for it.


def _envelope(value: Any) -> list[Any]:
    try:
        size_bytes = len(json.dumps(value))
    except (TypeError, ValueError) as error:
        return ["failed", f"cannot be sent as JSON: {error}"]
    if size_bytes > MAX_MESSAGE_BYTES:
        return ["failed", f"is too long to be sent: {size_bytes} bytes, at most {MAX_MESSAGE_BYTES}"]
    return ["ok", value]


def _opened(by_rank: dict[int, list[Any]]) -> list[Any]:
    for rank, (status, content) in by_rank.items():
        if status != "ok":
            raise RuntimeError(f"rank {rank}: its control message {content}")
    return [content for _, content in by_rank.values()]


def _exchange_json(value: Any, group: dist.ProcessGroup | None, device: torch.device | str | None) -> list[Any]:
    """One JSON value a rank, by group rank: lengths and digests first, the padded texts only where they differ."""
    text = json.dumps(value).encode()
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return [json.loads(text)]
    on = group_device(group) if device is None else torch.device(device)
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.int64)
    header = torch.cat([torch.tensor([len(text)]), digest]).to(on)
    headers = [torch.empty(1 + _DIGEST_WORDS, dtype=torch.int64, device=on) for _ in range(num_ranks)]
    dist.all_gather(headers, header, group=group)
    known = [row.tolist() for row in headers]
    if all(row == known[0] for row in known):
        return [json.loads(text)] * num_ranks

    longest = max(row[0] for row in known)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8, device=on) for _ in range(num_ranks)]
    dist.all_gather(texts, padded.to(on), group=group)
    return [json.loads(bytes(got.cpu().tolist()[: row[0]])) for got, row in zip(texts, known, strict=True)]


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks by group rank."""
    return dist.get_process_group_ranks(group)


# ---- differences -----------------------------------------------------------------------------------------------------


def _difference(path: str, held: list[tuple[int, Any]]) -> str | None:
    """`held`: (rank, value) pairs; `path`: where in the ranks' values these were found."""
    first = held[0][1]
    if all(value is first for _, value in held):
        return None
    if all(isinstance(value, dict) for _, value in held):
        return _dict_difference(path, held)
    if all(isinstance(value, list | tuple) and not _is_flat(value) for _, value in held):
        return _list_difference(path, held)
    shown: dict[str, list[int]] = {}
    for rank, value in held:
        shown.setdefault(repr(tuple(value) if isinstance(value, list) else value), []).append(rank)
    return None if len(shown) == 1 else _say(path, shown)


def _dict_difference(path: str, held: list[tuple[int, dict[str, Any]]]) -> str | None:
    keys = list(dict.fromkeys(key for _, value in held for key in value))
    for key in keys:
        having = [(rank, value[key]) for rank, value in held if key in value]
        if len(having) < len(held):
            lacking = [rank for rank, value in held if key not in value]
            at = f"{path}: " if path else ""
            if len(having) < len(lacking):
                owners = format_ranks([rank for rank, _ in having])
                return f"{at}only {owners} {'has' if len(having) == 1 else 'have'} {key!r}"
            return f"{at}{format_ranks(lacking)} {'has' if len(lacking) == 1 else 'have'} no {key!r}"
        found = _difference(f"{path}.{key}" if path else str(key), having)
        if found:
            return found
    return None


def _list_difference(path: str, held: list[tuple[int, Sequence[Any]]]) -> str | None:
    for index in range(min(len(value) for _, value in held)):
        found = _difference(f"{path}[{index}]", [(rank, value[index]) for rank, value in held])
        if found:
            return found
    lengths: dict[str, list[int]] = {}
    for rank, value in held:
        lengths.setdefault(f"{len(value)} entries", []).append(rank)
    return None if len(lengths) == 1 else _say(path, lengths)


def _say(path: str, shown: dict[str, list[int]]) -> str:
    """`shown`: what is held, and by which ranks; long texts are cut to the part where they begin to differ."""
    same_chars = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*shown, strict=False)))
    start = max(0, same_chars - _SHOWN_CHARS // 4) if max(map(len, shown)) > _SHOWN_CHARS else 0
    parts = [
        f"{format_ranks(ranks)}: {'...' if start else ''}{text[start : start + _SHOWN_CHARS]}"
        + ("..." if len(text) > start + _SHOWN_CHARS else "")
        for text, ranks in list(shown.items())[:_SHOWN_VALUES]
    ]
    more = len(shown) - _SHOWN_VALUES
    return (f"{path}: " if path else "") + "; ".join(parts) + (f"; and {more} more values" if more > 0 else "")


def _is_flat(value: Sequence[Any]) -> bool:
    return len(value) <= _FLAT_LIST_ITEMS and not any(isinstance(item, dict | list | tuple) for item in value)
