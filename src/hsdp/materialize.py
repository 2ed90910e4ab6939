"""Make real what is on the meta device, unit by unit, so that no rank ever holds the whole model.

Every module initialises itself (`reset_parameters`, or the user's `init`) with a seed of its own, made from one base
seed and the module's name: the weights depend neither on the mesh nor on how the model was cut into units.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Init = Callable[[nn.Module], Any]


def materialize(
    model: nn.Module, modules: list[tuple[str, nn.Module]], device: torch.device, seed: int, init: Init | None
) -> None:
    """Give memory and values to all meta parameters and buffers that `modules` own directly.

    Args:
        model: the root, only to keep ties: a parameter that stands in several places stays one parameter.
        modules: with their names, children before parents, so that a parent's initialisation has the last word.
        init: called with each module that owns something on the meta device; default: its `reset_parameters()`.

    Raises:
        ValueError: a parameter or buffer that nothing initialises; its name is in the text.
    """
    pending: list[tuple[str, nn.Module, str, torch.Tensor, int]] = []
    owners: list[tuple[str, nn.Module]] = []
    made: dict[torch.Tensor, torch.Tensor] = {}
    for name, module in modules:
        owns = False
        for attribute, old in [*module._parameters.items(), *module._buffers.items()]:
            if old is None or old.device.type != "meta":
                continue
            owns = True
            if old not in made:
                made[old] = _poisoned(old, device)
            new = made[old]
            store = module._parameters if attribute in module._parameters else module._buffers
            store[attribute] = new  # type: ignore[assignment]
            pending.append((f"{name}.{attribute}" if name else attribute, module, attribute, new, new._version))
        if owns:
            owners.append((name, module))
    _keep_ties(model, made)
    for name, module in owners:
        _initialise(name, module, device, seed, init)
    for name, module, attribute, tensor, version in pending:
        current = getattr(module, attribute)
        if current is tensor and tensor._version == version and _is_poison(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ValueError(
                f"{kind} {name!r} was on the meta device and nothing initialised it: let "
                f"{type(module).__name__}.reset_parameters() set it, or pass init= to hybrid_shard"
            )


def _keep_ties(model: nn.Module, made: dict[torch.Tensor, torch.Tensor]) -> None:
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter in made:
                module._parameters[attribute] = made[parameter]  # type: ignore[assignment]


def _initialise(name: str, module: nn.Module, device: torch.device, seed: int, init: Init | None) -> None:
    reset = getattr(module, "reset_parameters", None) if init is None else lambda: init(module)
    if reset is None:
        return  # what stays uninitialised is reported by name afterwards
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        torch.manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
        with torch.no_grad():
            reset()


def _poisoned(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a meta tensor, filled with a value that shows when it was forgotten."""
    tensor = torch.empty_like(meta, device=device)
    with torch.no_grad():
        tensor.fill_(_poison(meta.dtype))
    if isinstance(meta, nn.Parameter):
        parameter = nn.Parameter(tensor, requires_grad=meta.requires_grad)
        parameter.__dict__.update(meta.__dict__)
        return parameter
    return tensor


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _is_poison(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().all()) and tensor.numel() > 0
    return bool((tensor == _poison(tensor.dtype)).all()) and tensor.numel() > 0
