"""Sharding around tensor parallelism: parameters that are DTensors over another axis of the same mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import check, data, grads_of, params_of
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hsdp

MESHES = {"shard": (1, 2, 2), "replicate": (2, 1, 2), "three": (2, 2, 2)}  # (replicate, shard, tensor)


class Gate(nn.Module):
    """A parameter that is replicated over the tensor axis, one that is plain, and one used on some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor, shifted: bool) -> torch.Tensor:
        factor = self.factor.to_local() if isinstance(self.factor, DTensor) else self.factor
        return x * factor + (self.shift if shifted else 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 130), nn.Linear(130, 6)
        self.gate = Gate()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, shifted: bool = True) -> torch.Tensor:
        return self.head(self.gate(x + self.down(torch.relu(self.up(x))), shifted))


def parallel_net(mesh: DeviceMesh | None, wrap: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net().double()
    if mesh is None:
        return model
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.gate.factor = nn.Parameter(distribute_tensor(model.gate.factor.data, mesh["tensor"], [Replicate()]))
    outer = mesh["replicate", "shard"]
    for module in (model.up, model.down, model) if wrap else ():
        hsdp.fully_shard(module, mesh=outer, **options)
    return model


def make_mesh(world: int, kind: str) -> DeviceMesh | None:
    if world == 1:
        return None
    return init_device_mesh("cpu", MESHES[kind], mesh_dim_names=("replicate", "shard", "tensor"))


def part(mesh: DeviceMesh | None, seed: int) -> torch.Tensor:
    """The batch is split over the outer axes; ranks of the tensor axis work on the same part."""
    if mesh is None:
        return data(0, 1, 6, seed=seed)
    replicate, shard, _ = mesh.get_coordinate() or []
    sizes = mesh.mesh.shape
    return data(replicate * sizes[1] + shard, sizes[0] * sizes[1], 6, seed=seed)


def train(rank: int, world: int, kind: str, how: str) -> dict[str, torch.Tensor]:
    mesh = make_mesh(world, kind)
    model = parallel_net(mesh, shard_placement_fn=largest if how == "largest" else None)
    if how == "copied":
        model = copy.deepcopy(model)
    if mesh is not None:
        assert isinstance(model.up.weight, DTensor)
        assert model.up.weight.device_mesh.mesh_dim_names == ("replicate", "shard", "tensor")
        assert model.up.weight.shape == (130, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    found = {}
    for step in range(3):
        for micro in range(2):
            defers = mesh is not None and micro == 0 and how.startswith("defer")
            loss = model(part(mesh, 2 * step + micro), shifted=step > 0).pow(2).mean()
            if defers:
                with hsdp.accumulate(model, "reduce" if how == "defer all" else "cross-reduce"):
                    loss.backward()
            else:
                loss.backward()
        clip = torch.nn.utils.clip_grad_norm_ if mesh is None else hsdp.clip_grad_norm_
        found[f"norm {step}"] = clip(model.parameters(), 0.1)
        optimizer.step()
        if step < 2:
            optimizer.zero_grad()
    if mesh is not None:
        hsdp.check_replicas(model)
    return found | params_of(model) | grads_of(model)


def largest(param: nn.Parameter) -> Shard:
    return Shard(param.shape.index(max(param.shape)))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("shard", how) for how in ("plain", "largest", "defer", "defer all", "copied")),
        *(("replicate", how) for how in ("plain", "defer")),
        *(("three", how) for how in ("plain", "largest")),
    ],
)
def test_equals_one_process(kind: str, how: str) -> None:
    check(train, kind, how, world=8 if kind == "three" else 4, atol=1e-10)


def save_and_load(rank: int, world: int) -> None:
    mesh = make_mesh(world, "shard")
    assert mesh is not None
    model = parallel_net(mesh)
    model(part(mesh, 0)).pow(2).mean().backward()
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    other = parallel_net(mesh)
    for param in other.parameters():
        param.data.zero_()
    for assign in (False, True):
        other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=assign)
        assert all(torch.equal(value.full_tensor(), before[name]) for name, value in other.state_dict().items())
        other(part(mesh, 0)).pow(2).mean().backward()


def test_a_state_dict_has_the_whole_parameters() -> None:
    run_ranks(4, save_and_load)


def refuse(rank: int, world: int) -> list[str]:
    mesh = make_mesh(world, "shard")
    assert mesh is not None
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    line = init_device_mesh("cpu", (4,))

    def over(mesh: DeviceMesh, outer: DeviceMesh) -> None:
        model = nn.Linear(8, 8)
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)] * mesh.ndim))
        hsdp.fully_shard(model, mesh=outer)

    texts = []
    for inner, outer in ((mesh["shard"], mesh["replicate", "shard"]), (mesh["tensor"], line), (line, other)):
        with pytest.raises(ValueError, match="parameter 'weight' is a DTensor already") as error:
            over(inner, outer)
        texts.append(str(error.value))
    return texts


def test_axes_that_are_not_apart_are_refused() -> None:
    for texts in run_ranks(4, refuse):
        assert all("make one mesh with named axes" in text for text in texts)
