"""Make real what is on the meta device, unit by unit, so that no rank ever holds the whole model.

Every module initialises itself (`reset_parameters`, or the user's `init`) with a seed of its own, made from one base
seed and the module's name: the weights depend neither on the mesh nor on how the model was cut into units.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Init = Callable[[nn.Module], Any]


def materialize(
    modules: list[tuple[str, nn.Module]],
    owner_of: dict[nn.Parameter, tuple[nn.Module, str]],
    device: torch.device,
    seed: int,
    init: Init | None,
) -> None:
    """Give memory and values to all meta parameters and buffers that `modules` own directly.

    Args:
        modules: with their names, children before parents, so that a parent's initialisation has the last word.
        owner_of: for each tied parameter the one place that initialises it, whatever the other places do.
        seed: equal on every rank.
        init: called with each module that owns something on the meta device; default: its `reset_parameters()`.

    Raises:
        ValueError: a parameter or buffer that nothing initialises; its name is in the text.
    """
    fresh: list[_Fresh] = []
    for name, module in modules:
        made = _give_memory(name, module, owner_of, device)
        if made:
            with _tied_elsewhere(module, owner_of, device):
                _initialise(name, module, device, seed, init)
            fresh += made
    for item in fresh:
        item.check()


@dataclass
class _Fresh:
    """A parameter or buffer that was just given memory."""

    name: str
    module: nn.Module
    attribute: str
    tensor: torch.Tensor
    version: int

    def check(self) -> None:
        """Raise if nothing has written it: no in-place change, no new object in its place, still the poison."""
        current = getattr(self.module, self.attribute)
        if current is not self.tensor or self.tensor._version != self.version or not _is_poison(self.tensor):
            return
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        raise ValueError(
            f"{kind} {self.name!r} was on the meta device and nothing initialised it: let "
            f"{type(self.module).__name__}.reset_parameters() set it, or pass init= to hybrid_shard"
        )


def _give_memory(
    name: str, module: nn.Module, owner_of: dict[nn.Parameter, tuple[nn.Module, str]], device: torch.device
) -> list[_Fresh]:
    made = []
    for attribute, old in [*module._parameters.items(), *module._buffers.items()]:
        if old is None or old.device.type != "meta":
            continue
        if isinstance(old, nn.Parameter) and owner_of.get(old, (module, attribute)) != (module, attribute):
            continue  # another place initialises it
        new = _poisoned(old, device)
        store = module._parameters if attribute in module._parameters else module._buffers
        store[attribute] = new  # type: ignore[assignment]
        made.append(_Fresh(f"{name}.{attribute}" if name else attribute, module, attribute, new, new._version))
    return made


@contextmanager
def _tied_elsewhere(
    module: nn.Module, owner_of: dict[nn.Parameter, tuple[nn.Module, str]], device: torch.device
) -> Iterator[None]:
    """While `module` initialises itself, let it fill throw-away tensors where a parameter belongs to another place."""
    hidden = {
        attribute: parameter
        for attribute, parameter in module._parameters.items()
        if parameter is not None and (parameter.device.type == "meta" or isinstance(parameter, DTensor))
    }
    for attribute, parameter in hidden.items():
        scratch = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[attribute] = nn.Parameter(scratch, requires_grad=False)
    try:
        yield
    finally:
        module._parameters.update(hidden)


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
