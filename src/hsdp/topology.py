"""Learn who sits on which host: one exchange, after which every rank has the same picture.

Holds: `discover` and what a rank tells of itself. What follows from it is decided in placement.py and made in mesh.py.
Must not know: models, units, parameters, printing.

    rank 0 tells: host a, local rank 0, 2 x xpu --+
    rank 1 tells: host b, local rank 0, 2 x xpu +--> World(hosts=(a, b, a, b), local_ranks=(0, 0, 1, 1), ...)
    ...                                           --+
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hsdp.control import exchange, exchange_over_mesh
from hsdp.device import DeviceHandle
from hsdp.placement import World

HOST_VARIABLE = "HSDP_HOST"

_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


def discover(
    where: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    *,
    device_type: str = "cpu",
) -> World:
    """Learn the world by one exchange over a group (default: the default one); every rank gets the same picture.

    Over a mesh, the entries go by position in `mesh.mesh.flatten()` instead of by rank.

    A host is its hostname plus the kernel's boot id where that can be read, or the text of the variable HSDP_HOST.

    Args:
        device: where the messages live; default: see `exchange`.
        device_type: the type whose devices are counted.
    """
    facts = {
        "host": _host_identity(),
        "local_rank": _number("LOCAL_RANK"),
        "local_world_size": _number("LOCAL_WORLD_SIZE"),
        "devices": DeviceHandle(device_type).device_count(),
        "device_type": device_type,
    }
    if isinstance(where, DeviceMesh):
        return _world(exchange_over_mesh(facts, where, device))
    return _world(exchange(facts, where, device))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def _host_identity() -> list[str]:
    """[name for people, what tells apart two hosts of the same name]."""
    given = os.environ.get(HOST_VARIABLE)
    if given:
        return [given, ""]
    try:
        with open(_BOOT_ID_PATH, encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return [socket.gethostname(), boot_id]


def _world(facts: Sequence[dict[str, Any]]) -> World:
    hosts = ["/".join(fact["host"]) for fact in facts]
    position: Counter[str] = Counter()
    local_ranks: list[int] = []
    for host, fact in zip(hosts, facts, strict=True):
        local_ranks.append(position[host] if fact["local_rank"] is None else fact["local_rank"])
        position[host] += 1
    plain = {host: fact["host"][0] for host, fact in zip(hosts, facts, strict=True)}
    seen: Counter[str] = Counter()
    names: dict[str, str] = {}
    for host, name in plain.items():
        seen[name] += 1
        names[host] = name if seen[name] == 1 else f"{name} ({seen[name]})"  # cloned machines share a hostname
    return World(
        tuple(hosts),
        tuple(local_ranks),
        tuple(names[host] for host in hosts),
        tuple(fact["local_world_size"] for fact in facts),
        tuple((fact["device_type"], fact["devices"]) for fact in facts),
    )
