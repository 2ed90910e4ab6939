"""What a model is to be sharded over: the device first, then the mesh, from whatever the user gave.

    device, parameters, mesh type --> Target.settle: the current device is the one to train on
    numbers | DeviceMesh | groups --> resolve_mesh:  a mesh whose groups serve it
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hsdp.control import agree
from hsdp.device import DeviceHandle, choose_device
from hsdp.dtensors import local_of
from hsdp.mesh import (
    default_device_type,
    init_mesh,
    mesh_from_groups,
    require_backend,
    require_default_group,
    use_mesh,
)

T = TypeVar("T")
MeshArgument = DeviceMesh | tuple[int, int] | tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None


@dataclass(frozen=True)
class Target:
    """What says where a model is to be sharded: the user, and the parameters that will be."""

    asked: torch.device | str | int | None
    places: dict[str, torch.device]  # of the parameters, by name

    @staticmethod
    def of(
        modules: Sequence[nn.Module],
        ignored: Collection[nn.Parameter] | None,
        asked: torch.device | str | int | None,
    ) -> Target:
        left_out = set(ignored or ())
        prefixes = [""] if len(modules) == 1 else [f"{place}." for place in range(len(modules))]
        return Target(
            asked,
            {
                prefix + name: local_of(param).device
                for prefix, module in zip(prefixes, modules, strict=True)
                for name, param in module.named_parameters()
                if param not in left_out
            },
        )

    def settle(self, mesh: DeviceMesh | None) -> str:
        """Make the device they say this process's current one; returns its type.

        Raises:
            ValueError: see `choose_device`; or there is no such device, or no backend for it.
        """
        if mesh is None:
            device_type, index = choose_device(self.asked, self.places, None, default_device_type())
            require_backend(None, device_type, "the default process group")
        else:
            device_type, index = choose_device(self.asked, self.places, mesh.device_type, mesh.device_type)
            for axis in range(mesh.ndim):
                require_backend(mesh.get_group(axis), device_type, f"the process group of mesh axis {axis}")
        handle = DeviceHandle(device_type)
        if index is not None and device_type != "cpu" and index >= handle.device_count():
            raise ValueError(f"device={self.asked!r}: this process sees {handle.device_count()} of {device_type!r}")
        handle.bind(index)
        return device_type


def resolve_mesh(mesh: MeshArgument, replicate: Any, shard: Any, target: Target, timeout_s: float) -> DeviceMesh:
    """The mesh to use, made after the device is decided: groups are made for the current device."""
    require_default_group("hybrid_shard")
    if mesh is not None and (replicate is not None or shard is not None):
        raise ValueError(f"give either mesh or the two numbers, not both: {mesh=}, {replicate=}, {shard=}")
    if isinstance(mesh, DeviceMesh):
        ours = use_mesh(mesh)
        _agreed(lambda: target.settle(ours), ours)
        return ours
    pair: Sequence[Any] = tuple(mesh) if isinstance(mesh, (tuple, list)) else (replicate, shard)
    if (mesh is not None and not isinstance(mesh, (tuple, list))) or len(pair) != 2:
        raise ValueError(
            f"mesh={mesh!r}: expected a DeviceMesh, the tuple (replicate, shard), or one of their process groups"
        )
    if any(isinstance(each, dist.ProcessGroup) for each in pair):
        return mesh_from_groups(pair[0], pair[1], lambda: target.settle(None))
    device_type = _agreed(lambda: target.settle(None), None)
    return init_mesh(replicate=pair[0], shard=pair[1], device_type=device_type, timeout_s=timeout_s)


def _agreed(function: Callable[[], T], where: DeviceMesh | None) -> T:
    """What `function` returns, or its mistake, raised by every rank."""
    problem, result = None, None
    try:
        result = function()
    except ValueError as error:
        problem = str(error)
    agree(problem, where)
    assert result is not None
    return result
