"""The replicate x shard mesh with its process groups: made from two numbers, or taken from what the user brings.

Holds: `init_mesh`; `use_mesh` for a DeviceMesh of the user's and `mesh_from_groups` for process groups. Which ranks
form a row is decided in placement.py. Must not know: models, units, parameters, printing.

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
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hsdp.control import agree, backends, check_timeout, default_timeout_s, exchange, first_difference
from hsdp.device import DeviceHandle
from hsdp.placement import World, arrange, resolve_sizes
from hsdp.topology import discover

MESH_AXES = ("replicate", "shard")
MESH_AXES_ALIASES = ("dp_replicate", "dp_shard")

logger = logging.getLogger(__name__)


# ---- from two numbers ------------------------------------------------------------------------------------------------


def init_mesh(
    *,
    replicate: int | str | None = None,
    shard: int | str | None = None,
    device_type: str | None = None,
    ranks_per_host: int | None = None,
    timeout_s: float | None = None,
    dp_replicate: int | str | None = None,
    dp_shard: int | str | None = None,
) -> DeviceMesh:
    """Make the mesh with axes ("replicate", "shard") over all ranks of the default group; every rank calls this.

    Shard groups stay inside a host wherever they can, whatever order the launcher numbered the ranks in (`arrange`).
    A host is as large as the number of ranks on it, never as the number of its devices. Every call makes new groups,
    with the default group's backends.

    Args:
        replicate, shard: see `resolve_sizes`; dp_replicate and dp_shard are other spellings of the two.
        device_type: "cpu", "cuda", ...; default: the current accelerator where the default group has a backend for it
            beside gloo, else "cpu".
        ranks_per_host: take every so many ranks in the order of their numbers for one host, whatever the hosts say of
            themselves (pytorch#100622 asked for this); default: who has the same hostname and boot id, or HSDP_HOST.
        timeout_s: how long a collective of the mesh's groups may wait, in seconds; default: HSDP_TIMEOUT_S, else 60.

    Raises:
        RuntimeError: there is no default group.
        ValueError: on every rank, when arguments are wrong or differ between ranks.
    """
    require_default_group("init_mesh")
    try:
        problem = None
        timeout_s = default_timeout_s() if timeout_s is None else timeout_s
        replicate = _one_of("replicate", replicate, "dp_replicate", dp_replicate)
        shard = _one_of("shard", shard, "dp_shard", dp_shard)
        chosen_type = _check_device_type(device_type)
        DeviceHandle(chosen_type).bind()
        check_timeout(timeout_s)
    except ValueError as error:
        problem = str(error)
    agree(problem)
    assert timeout_s is not None
    asked = {"replicate": replicate, "shard": shard, "device_type": chosen_type, "timeout_s": float(timeout_s)}
    asked["ranks_per_host"] = ranks_per_host
    difference = first_difference(exchange({name: repr(value) for name, value in asked.items()}))
    if difference:
        raise ValueError(f"init_mesh was called with different arguments: {difference}")

    world = discover(device_type=chosen_type)
    if ranks_per_host is not None:
        world = world.with_ranks_per_host(ranks_per_host)
    elif dist.get_rank() == 0:
        _warn_of_launchers(world)
    sizes = resolve_sizes(world, replicate, shard)
    per_host = world.ranks_per_host()
    if replicate is None and shard is None and len(set(per_host.values())) > 1 and dist.get_rank() == 0:
        logger.warning(
            "hosts have unequally many ranks (%s): shard=%d, their greatest common divisor, and replicate=%d",
            ", ".join(f"{name}: {count}" for name, count in per_host.items()), sizes[1], sizes[0],
        )  # fmt: skip
    return _make_mesh(arrange(world.hosts, *sizes), chosen_type, timedelta(seconds=timeout_s))


def require_default_group(caller: str) -> None:
    """
    Raises:
        RuntimeError: there is no default process group; the text says how to make one.
    """
    if dist.is_available() and dist.is_initialized():
        return
    if "WORLD_SIZE" in os.environ:
        fix = f"a launcher started WORLD_SIZE={os.environ['WORLD_SIZE']} ranks: call that first"
    else:
        fix = (
            "start the script with `torchrun --nproc-per-node N script.py` and call that first; for a single process "
            "without a launcher: init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
        )
    raise RuntimeError(f"{caller} needs the default process group of torch.distributed.init_process_group(); {fix}")


def _one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    if value is not None and other is not None and value != other:
        raise ValueError(f"{name}={value!r} and {alias}={other!r} are two spellings of one size; give one of them")
    return other if value is None else value


def default_device_type() -> str:
    """The current accelerator where the default group has a backend for it, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator()
    # gloo alone can carry accelerator tensors too, but who set up gloo alone means to train on the CPU.
    return accelerator.type if accelerator is not None and backends().get(accelerator.type, "gloo") != "gloo" else "cpu"


def _check_device_type(asked: str | None) -> str:
    if asked is None:
        return default_device_type()
    if not isinstance(asked, str) or ":" in asked:
        raise ValueError(f"device_type={asked!r} has to be a type without an index, such as 'cpu'")
    require_backend(None, asked, "the default process group")
    return asked


def require_backend(group: dist.ProcessGroup | None, device_type: str, name: str) -> None:
    """
    Raises:
        ValueError: `group` (for people: `name`) cannot carry tensors of that device.
    """
    served = backends(group)
    if device_type not in served:
        raise ValueError(
            f"device_type={device_type!r}: {name} has backends for {', '.join(served)} only; call "
            f"init_process_group('cpu:gloo,{device_type}:<its backend>'), after "
            "torch.distributed.Backend.register_backend for a backend that torch does not bring"
        )


def _warn_of_launchers(world: World) -> None:
    """Say when a launcher started fewer or more ranks on a host than are found there: one of the two is mistaken."""
    per_host = world.ranks_per_host()
    for name, said in dict(zip(world.names, world.local_world_sizes, strict=True)).items():
        if said is not None and said != per_host[name]:
            logger.warning(
                "host %s has %d ranks, and LOCAL_WORLD_SIZE=%d there: several launchers run on it, or several machines "
                "are taken for one; HSDP_HOST=<a name a host> or ranks_per_host tells them apart",
                name, per_host[name], said,
            )  # fmt: skip
            return


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
    return _from_groups([mine["replicate"], mine["shard"]], rows, device_type)


def _groups_keep_order() -> bool:
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def _from_groups(groups: list[dist.ProcessGroup], rows: list[list[int]], device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=MESH_AXES)


# ---- from a mesh of the user's ---------------------------------------------------------------------------------------


def use_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a user's mesh that hybrid sharding uses; every rank of that part calls this.

    That is the axes "replicate" and "shard" (or "dp_replicate", "dp_shard"). One that is missing counts as 1, and all
    others are left alone: they are for tensor or pipeline parallelism, which this engine knows nothing of.

    Returns:
        a mesh of one or two axes whose last one is the shard axis.

    Raises:
        ValueError: on every rank, with what was found and what would do.
    """
    names = mesh.mesh_dim_names or ()
    problem = mesh_problem(tuple(mesh.mesh.shape), mesh.mesh_dim_names)
    if problem is None and mesh.get_coordinate() is None:
        rank = dist.get_rank()
        problem = f"rank {rank} is not in the mesh of {format_mesh(mesh)}; only its own ranks shard a model over it"
    if problem is not None:
        raise ValueError(problem)
    ours = tuple(name for name in names if name in MESH_AXES + MESH_AXES_ALIASES)
    part = mesh if ours == names else mesh[ours if len(ours) > 1 else ours[0]]
    agree(_order_problem(part), part)
    if ours[-1] in (MESH_AXES[0], MESH_AXES_ALIASES[0]):
        return mesh_from_groups(part.get_group(), None, lambda: mesh.device_type)
    return part


def format_mesh(mesh: DeviceMesh) -> str:
    """A mesh for people: its axes, sizes and ranks."""
    axes = ", ".join(mesh.mesh_dim_names or ("(no names)",))
    return f"axes {axes}, shape {tuple(mesh.mesh.shape)}, ranks {mesh.mesh.tolist()}"


def mesh_problem(shape: Sequence[int], axis_names: Sequence[str] | None) -> str | None:
    """What is wrong with the axes of a mesh, None where nothing is. Pure."""
    accepted = f"the axes to use have to be named {MESH_AXES} or {MESH_AXES_ALIASES}, in that order"
    if axis_names is None:
        return (
            f"the mesh of shape {tuple(shape)} has no axis names, so nothing says which axis holds copies; "
            f"{accepted}: pass mesh_dim_names={MESH_AXES} to init_device_mesh, or use hsdp.init_mesh"
        )
    found = f"the mesh has axes {tuple(axis_names)} of sizes {tuple(shape)}"
    copies, sharing = ([n for n in axis_names if n in pair] for pair in zip(MESH_AXES, MESH_AXES_ALIASES, strict=True))
    if not copies and not sharing:
        return f"{found}; {accepted}"
    if len(copies) > 1 or len(sharing) > 1:
        return f"{found}: {(copies if len(copies) > 1 else sharing)} are two spellings of one axis; {accepted}"
    if copies and sharing and list(axis_names).index(copies[0]) > list(axis_names).index(sharing[0]):
        return f"{found}; {accepted}"
    return None


def _order_problem(mesh: DeviceMesh) -> str | None:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside of the mesh"
    for axis in range(mesh.ndim):
        place = [slice(None) if other == axis else at for other, at in enumerate(coordinate)]
        line = mesh.mesh[tuple(place)].tolist()
        group_ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        if group_ranks != line:
            assert mesh.mesh_dim_names is not None
            return (
                f"along axis {mesh.mesh_dim_names[axis]!r} the mesh has ranks {line}, its process group {group_ranks}: "
                "torch sorts the ranks of a group, so DTensors would be cut in another order than the mesh says; "
                "use hsdp.init_mesh, which makes groups in mesh order, or ranks that ascend along both axes"
            )
    return None


# ---- from process groups of the user's -------------------------------------------------------------------------------


def mesh_from_groups(
    replicate: dist.ProcessGroup | None, shard: dist.ProcessGroup | None, choose_type: Callable[[], str]
) -> DeviceMesh:
    """The mesh whose column through this rank is `replicate` and whose row is `shard`; every rank of it calls this.

    Args:
        replicate, shard: in the order of the mesh's axes; None counts as one rank.
        choose_type: gives the device type on this rank, or raises ValueError; a mistake of one rank is one of all.

    Raises:
        ValueError: on every rank that the groups reach, when they do not form a mesh or do not serve the device.
    """
    rank = dist.get_rank()
    groups = [_alone(rank) if group is None else group for group in (replicate, shard)]
    column, row = (dist.get_process_group_ranks(group) for group in groups)
    problem = None if set(column) & set(row) == {rank} else f"they share more than rank {rank}"
    rows = exchange(row, groups[0])
    told = exchange({"rows": rows, "column": column}, groups[1])
    if len({len(each) for each in rows}) > 1 or len({each for line in rows for each in line}) < sum(map(len, rows)):
        problem = problem or f"the shard groups down this column are {rows}"
    elif any(other["rows"] != rows for other in told):
        problem = problem or f"ranks {row} of one row see the rows {[other['rows'] for other in told]}"
    elif [other["column"] for other in told] != [list(each) for each in zip(*rows, strict=True)]:
        problem = problem or f"the replicate groups along this row are {[other['column'] for other in told]}"
    if problem is not None:
        problem = f"replicate group {column} and shard group {row} of rank {rank} form no mesh: {problem}"
    device_type = "cpu"
    try:
        device_type = choose_type()
        for group, axis in zip(groups, MESH_AXES, strict=True):
            require_backend(group, device_type, f"the {axis} group")
    except ValueError as error:
        problem = problem or str(error)
    found = [text for texts in exchange(exchange(problem, groups[1]), groups[0]) for text in texts if text]
    if found:
        raise ValueError(found[0])
    return _from_groups(groups, rows, device_type)


def _alone(rank: int) -> dist.ProcessGroup:
    """A group of this rank only; no other rank takes part in making it."""
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is in its own group"
    return group
