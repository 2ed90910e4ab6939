"""Find and replace the tensors in what a module takes and returns: tuples, lists, dicts, dataclasses, nests of them.

Only rebuilds a container in which something changed, so that a caller's own object passes through untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to every tensor in it; the same object where nothing changed."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple takes its items one by one
            return type(value)(*items)
        return type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in fields(value):
            old = getattr(value, field.name, None)
            new = map_tensors(function, old)
            if new is not old:
                changed[field.name] = new
        return _copy_with(value, changed)
    if isinstance(value, Mapping):
        changed = {}
        for key, old in value.items():
            new = map_tensors(function, old)
            if new is not old:
                changed[key] = new
        if not changed:
            return value
        result = copy.copy(value)
        for key, new in changed.items():
            result[key] = new  # type: ignore[index]
        return result
    return value


def _copy_with(value: Any, changed: dict[str, Any]) -> Any:
    """A shallow copy of a dataclass with some fields replaced; frozen ones too, and no `__init__` is run."""
    if not changed:
        return value
    result = copy.copy(value)
    for name, new in changed.items():
        try:
            setattr(result, name, new)
        except AttributeError:  # a frozen dataclass
            object.__setattr__(result, name, new)
    return result


def find_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a nest of containers, in order, each as often as it stands there."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found
