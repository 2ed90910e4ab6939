"""Learn who sits on which host, and make the replicate x shard mesh with its process groups.

Holds: `discover`, `init_mesh`, and `check_mesh` for a mesh that the user made. What to make is decided in placement.py,
whose names are given on from here. Must not know: models, units, parameters, printing.

                   column {0, 1}   column {2, 3}
    row {0, 2}          0               2          <- all-gather, reduce-scatter along a row
    row {1, 3}          1               3          <- all-reduce down a column

[Note: rank order] A rank's coordinate in the mesh and its rank in the axis' group must be the same number: DTensor cuts
by group rank, checkpoint offsets come from coordinates. torch's groups sort their ranks unless told not to, and columns
made from hosts need not ascend; so every group is made here, in mesh order, and a foreign mesh whose groups say
otherwise is refused.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hsdp.control import agree, backends, exchange, exchange_over_mesh, first_difference, format_ranks
from hsdp.placement import Placement, World, arrange, describe_rows, resolve_sizes

__all__ = [
    "MESH_AXES",
    "MESH_AXES_ALIASES",
    "Placement",
    "World",
    "arrange",
    "check_mesh",
    "describe_rows",
    "discover",
    "init_mesh",
    "resolve_sizes",
]

MESH_AXES = ("replicate", "shard")
MESH_AXES_ALIASES = ("dp_replicate", "dp_shard")
DEFAULT_TIMEOUT_S = 120.0  # torch gives a mesh's groups 30 minutes, whatever the default group has
HOST_VARIABLE = "HSDP_HOST"

_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"

logger = logging.getLogger(__name__)


# ---- the world -------------------------------------------------------------------------------------------------------


def discover(where: dist.ProcessGroup | DeviceMesh | None = None, device: torch.device | str | None = None) -> World:
    """Learn the world by one exchange over a group (default: the default one); every rank gets the same picture.

    Over a mesh, the entries go by position in `mesh.mesh.flatten()` instead of by rank.

    A host is its hostname plus the kernel's boot id where that can be read, or the text of the variable HSDP_HOST.
    """
    local_rank = os.environ.get("LOCAL_RANK", "")
    facts = {"host": _host_identity(), "local_rank": int(local_rank) if local_rank.isdecimal() else None}
    if isinstance(where, DeviceMesh):
        return _world(exchange_over_mesh(facts, where, device))
    return _world(exchange(facts, where, device))


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
    return World(tuple(hosts), tuple(local_ranks), tuple(names[host] for host in hosts))


# ---- the mesh --------------------------------------------------------------------------------------------------------


def init_mesh(
    *,
    replicate: int | str | None = None,
    shard: int | str | None = None,
    device_type: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    dp_replicate: int | str | None = None,
    dp_shard: int | str | None = None,
) -> DeviceMesh:
    """Make the mesh with axes ("replicate", "shard") over all ranks of the default group; every rank calls this.

    Shard groups stay inside a host wherever they can, whatever order the launcher numbered the ranks in (`arrange`).
    Every call makes new groups, with the default group's backends.

    Args:
        replicate, shard: see `resolve_sizes`; dp_replicate and dp_shard are other spellings of the two.
        device_type: "cpu", "cuda", ...; default: the current accelerator where the default group has a backend for it
            beside gloo, else "cpu".
        timeout_s: how long a collective of the mesh's groups may wait, in seconds.

    Raises:
        RuntimeError: there is no default group.
        ValueError: on every rank, when arguments are wrong or differ between ranks.
    """
    _require_default_group()
    try:
        problem = None
        replicate = _one_of("replicate", replicate, "dp_replicate", dp_replicate)
        shard = _one_of("shard", shard, "dp_shard", dp_shard)
        chosen_type = _choose_device_type(device_type)
        _bind_device(chosen_type)
        _check_timeout(timeout_s)
    except ValueError as error:
        problem = str(error)
    agree(problem)
    asked = {"replicate": replicate, "shard": shard, "device_type": chosen_type, "timeout_s": float(timeout_s)}
    difference = first_difference(exchange({name: repr(value) for name, value in asked.items()}))
    if difference:
        raise ValueError(f"init_mesh was called with different arguments: {difference}")

    world = discover()
    sizes = resolve_sizes(world, replicate, shard)
    per_host = world.ranks_per_host()
    if replicate is None and shard is None and len(set(per_host.values())) > 1 and dist.get_rank() == 0:
        logger.warning(
            "hosts have unequally many ranks (%s): shard=%d, their greatest common divisor, and replicate=%d",
            ", ".join(f"{name}: {count}" for name, count in per_host.items()), sizes[1], sizes[0],
        )  # fmt: skip
    return _make_mesh(arrange(world.hosts, *sizes), chosen_type, timedelta(seconds=timeout_s))


def check_mesh(mesh: DeviceMesh, world_size: int | None = None) -> DeviceMesh:
    """Refuse a user's mesh that hybrid sharding cannot use; every rank of the default group calls this.

    Wanted: two axes, replicate before shard, named ("replicate", "shard") or ("dp_replicate", "dp_shard"), over every
    rank of the world once, its groups in mesh order ([Note: rank order]).

    Args:
        world_size: default: that of the default group.

    Returns:
        the mesh.

    Raises:
        ValueError: on every rank, with what was found and what would do.
    """
    size = dist.get_world_size() if world_size is None else world_size
    problem = mesh_problem(mesh.mesh.tolist(), mesh.mesh_dim_names, size)
    agree(problem or _order_problem(mesh))
    return mesh


def mesh_problem(ranks: Any, axis_names: Sequence[str] | None, world_size: int) -> str | None:
    """What is wrong with a mesh, from its nested list of ranks and its axes' names; None where nothing is. Pure."""
    accepted = f"the axes have to be {MESH_AXES} or {MESH_AXES_ALIASES}, in that order"
    shape = tuple(torch.tensor(ranks).shape)
    if axis_names is None:
        return (
            f"the mesh of shape {shape} has no axis names, so nothing says which axis holds copies; "
            f"{accepted}: pass mesh_dim_names={MESH_AXES} to init_device_mesh, or use hsdp.init_mesh"
        )
    if tuple(axis_names) not in (MESH_AXES, MESH_AXES_ALIASES):
        return f"the mesh has axes {tuple(axis_names)} of sizes {shape}; {accepted}"
    found = torch.tensor(ranks).flatten().tolist()
    missing = sorted(set(range(world_size)) - set(found))
    if missing:
        return (
            f"the mesh of shape {shape} has {len(found)} ranks, the world has {world_size}: "
            f"{format_ranks(missing)} would be left out; make the mesh over the whole world"
        )
    return None


def _order_problem(mesh: DeviceMesh) -> str | None:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside a mesh over the whole world"
    row, column = coordinate[0], coordinate[1]
    for axis, line in ((0, mesh.mesh[:, column].tolist()), (1, mesh.mesh[row].tolist())):
        group_ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        if group_ranks != line:
            assert mesh.mesh_dim_names is not None
            return (
                f"along axis {mesh.mesh_dim_names[axis]!r} the mesh has ranks {line}, its process group {group_ranks}: "
                "torch sorts the ranks of a group, so DTensors would be cut in another order than the mesh says; "
                "use hsdp.init_mesh, which makes groups in mesh order, or ranks that ascend along both axes"
            )
    return None


def _require_default_group() -> None:
    if dist.is_available() and dist.is_initialized():
        return
    if "WORLD_SIZE" in os.environ:
        fix = f"a launcher started WORLD_SIZE={os.environ['WORLD_SIZE']} ranks: call that first"
    else:
        fix = (
            "start the script with `torchrun --nproc-per-node N script.py` and call that first; for a single process "
            "without a launcher: init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
        )
    raise RuntimeError(f"init_mesh needs the default process group of torch.distributed.init_process_group(); {fix}")


def _one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None and value != other:
        raise ValueError(f"{name}={value!r} and {alias}={other!r} are two spellings of one size; give one of them")
    return other if value is None else value


def _choose_device_type(asked: str | None) -> str:
    served = backends()
    accelerator = torch.accelerator.current_accelerator()
    if asked is None:
        # gloo alone can carry accelerator tensors too, but who set up gloo alone means to train on the CPU.
        return accelerator.type if accelerator is not None and served.get(accelerator.type, "gloo") != "gloo" else "cpu"
    if not isinstance(asked, str) or ":" in asked:
        raise ValueError(f"device_type={asked!r} has to be a type without an index, such as 'cpu'")
    if asked not in served:
        raise ValueError(
            f"device_type={asked!r}: the default process group has backends for {', '.join(served)} only; call "
            f"init_process_group('cpu:gloo,{asked}:<its backend>'), after torch.distributed.Backend.register_backend "
            "for a backend that torch does not bring"
        )
    return asked


def _check_timeout(timeout_s: object) -> None:
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (number and 0 < float(timeout_s) < math.inf):  # type: ignore[arg-type]
        raise ValueError(f"timeout_s={timeout_s!r} has to be a number of seconds above 0")


def _bind_device(device_type: str) -> None:
    """Take the launcher's device for this process unless it uses one already, as torch's init_device_mesh does."""
    module = torch.get_device_module(device_type)
    unused = hasattr(module, "is_initialized") and not module.is_initialized()
    local_rank = os.environ.get("LOCAL_RANK", "")
    if device_type != "cpu" and unused and local_rank.isdecimal():
        module.set_device(int(local_rank) % module.device_count())  # one visible device a process: always 0


def _make_mesh(rows: list[list[int]], device_type: str, timeout: timedelta) -> DeviceMesh:
    """The mesh of `rows`, whose groups have the ranks in that very order ([Note: rank order])."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    for line in rows + columns:
        if line != sorted(line) and not _groups_keep_order():
            raise RuntimeError(
                f"the hosts ask for rows {rows} and so for a group in the order {line}, and torch {torch.__version__} "
                "can only make sorted groups; number the ranks host by host, or use a torch whose "
                "torch.distributed.new_group has sort_ranks"
            )
    rank = dist.get_rank()
    mine: dict[str, dist.ProcessGroup] = {}
    # Every rank makes every group, in this one order, or they would wait for each other.
    for axis, lines in (("shard", rows), ("replicate", columns)):
        for line in lines:
            keep_order: dict[str, Any] = {} if line == sorted(line) else {"sort_ranks": False}
            group = dist.new_group(line, timeout=timeout, group_desc=f"hsdp_{axis}", **keep_order)
            if rank in line:
                mine[axis] = group
    return DeviceMesh.from_group(
        [mine["replicate"], mine["shard"]], device_type, mesh=torch.tensor(rows), mesh_dim_names=MESH_AXES
    )


def _groups_keep_order() -> bool:
    return "sort_ranks" in inspect.signature(dist.new_group).parameters
