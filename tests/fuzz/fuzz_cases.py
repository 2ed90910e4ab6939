"""Cases of the fuzz test: a model, a mesh, a way to wrap and to train, as plain values; and what they mean.

A case is printed as the Python expression that makes it, to be pasted into test_found.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from models import full
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hsdp
from hsdp import collectives
from hsdp.collectives import GroupedRow, Row

STEPS = 3
ROWS = 12  # of a microbatch; divides by every world size
FEATURES = 6
WIDTHS = (1, 2, 3, 7, 64, 131, 300)
KINDS = ("linear", "bare", "norm", "scalar", "single", "residual", "twice", "branch", "narrow", "cube", "tied",
         "tail", "again", "heads")  # fmt: skip
OFTEN = ("tail", "again", "again", "heads", "branch")  # in these, engines were seen to fail
USES = ("all", "some", "never")
MESHES = ((2, 2), (4, 1), (1, 4), (1, 2), (2, 1), (1, 3), (3, 1), (1, 1))
WRAPS = ("auto", "root", "every layer", "linear", "nested", "nested", "bottom-up", "bottom-up, no units")


@dataclass(frozen=True)
class Layer:
    """One layer. `use` says which parts of the batch use a branch's second weight, or the second of two heads."""

    kind: str = "linear"
    width: int = 7
    frozen: str = "none"  # "none", the "first" half of the parameters, or "all"
    use: str = "all"


@dataclass(frozen=True)
class Case:
    layers: tuple[Layer, ...] = (Layer(),)
    mesh: tuple[int, int] = (2, 2)
    wrap: str = "auto"
    reshard: bool | None = None
    last_dim: bool = False  # matrices are cut along their last dim
    micro: tuple[str, ...] = ("plain",)  # "plain", "cross-reduce" or "reduce", of each microbatch of a step
    pipeline: bool = False  # the forwards of all microbatches of a step come first
    zero: str = "none"  # how gradients are cleared: "none", "zero" or "never"
    adam: bool = False
    clip: bool = False
    evaluate: bool = False  # between microbatches
    lone: bool = False  # a forward whose backward never comes before every optimizer step
    recompute: bool = False  # activation checkpointing around every layer
    grouped: bool = False  # rows as on every backend but gloo
    seed: int = 0

    @property
    def world(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def is_refused(self) -> bool:
        """Some ranks recompute a layer when others do not, and in it units are called: an error that names them."""
        own_heads = any(layer.kind == "heads" and layer.use == "some" for layer in self.layers)
        return own_heads and self.recompute and self.mesh[1] > 1 and self.wrap in ("linear", "nested", "auto")

    @property
    def atol(self) -> float:
        return 1e-5 if any(layer.kind == "narrow" for layer in self.layers) else 1e-10


layers = st.builds(
    Layer,
    kind=st.sampled_from(KINDS + OFTEN),
    width=st.sampled_from(WIDTHS),
    frozen=st.sampled_from(("none", "none", "first", "all")),
    use=st.sampled_from(USES),
)
deferrals = st.lists(st.sampled_from(("plain", "cross-reduce", "reduce")), max_size=2)
cases = st.builds(
    Case,
    layers=st.lists(layers, min_size=1, max_size=5).map(tuple),
    mesh=st.sampled_from(MESHES),
    wrap=st.sampled_from(WRAPS),
    reshard=st.sampled_from((None, True, False)),
    last_dim=st.booleans(),
    micro=deferrals.map(lambda first: (*first, "plain")),
    pipeline=st.booleans(),
    zero=st.sampled_from(("none", "none", "zero", "never")),
    adam=st.booleans(),
    clip=st.booleans(),
    evaluate=st.booleans(),
    lone=st.booleans(),
    recompute=st.sampled_from((False, False, True)),
    grouped=st.sampled_from((False, False, True)),
    seed=st.integers(0, 3),
).filter(lambda case: not case.is_refused)


# ---- the model -------------------------------------------------------------------------------------------------------


class FuzzLayer(nn.Module):
    """Features (B, inputs) to (B, outputs)."""

    def __init__(self, layer: Layer, inputs: int, tie: nn.Parameter | None) -> None:
        super().__init__()
        self.kind, self.use = layer.kind, layer.use
        width = layer.width
        self.inputs = self.outputs = inputs
        if layer.kind in ("linear", "bare", "narrow"):
            self.linear = nn.Linear(inputs, width, bias=layer.kind != "bare")
            self.outputs = width
        elif layer.kind == "norm":
            self.norm = nn.LayerNorm(inputs, eps=0.1)  # a small eps amplifies rounding up to 300 times
        elif layer.kind == "scalar":
            self.factor = nn.Parameter(torch.tensor(0.8))
        elif layer.kind == "single":
            self.factor = nn.Parameter(torch.full((1,), 1.2))
        elif layer.kind in ("residual", "twice"):
            self.up, self.down = nn.Linear(inputs, width), nn.Linear(width, inputs)
        elif layer.kind == "tail":
            self.factor, self.linear = nn.Parameter(torch.randn(inputs, width) / inputs), nn.Linear(width, inputs)
        elif layer.kind == "heads":
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(inputs, width), nn.Linear(width, inputs)) for _ in "ab")
        elif layer.kind == "branch":
            self.weight = nn.Parameter(torch.randn(inputs, inputs) / inputs)
            self.other = nn.Parameter(torch.randn(inputs, inputs) / inputs)
        elif layer.kind == "cube":
            self.cube = nn.Parameter(torch.randn(3, inputs, 2) / 4)
        elif layer.kind == "tied" and tie is not None:
            self.weight = tie  # (anything, inputs)
            self.outputs = tie.shape[0]
        if layer.kind == "narrow":
            self.linear.float()
        own = list(self.parameters()) if layer.kind != "tied" else []
        for param in {"none": [], "first": own[: max(1, len(own) // 2)], "all": own}[layer.frozen]:
            param.requires_grad_(False)

    def forward(self, x: Tensor, part: int) -> Tensor:
        if self.kind in ("linear", "bare"):
            return torch.tanh(self.linear(x))
        if self.kind == "narrow":
            return torch.tanh(self.linear(x.float())).double()
        if self.kind == "norm":
            return self.norm(x)
        if self.kind in ("scalar", "single"):
            return x * self.factor
        if self.kind in ("residual", "twice"):
            for _ in range(2 if self.kind == "twice" else 1):
                x = x + self.down(torch.tanh(self.up(x)))
            return x
        if self.kind == "tail":
            return self.linear(torch.tanh(x @ self.factor))  # gradients reach the part and the whole at once
        uses_other = self.use == "all" or (self.use == "some" and part % 2 == 1)
        if self.kind == "heads":
            first, second = (head(x) for head in self.heads)  # all parts run both
            return second if uses_other else first
        if self.kind == "branch":
            return F.linear(x, self.weight) + (F.linear(x, self.other) if uses_other else 0)
        if self.kind == "cube":
            return x * self.cube.sum((0, 2))
        return F.linear(x, self.weight) if hasattr(self, "weight") else torch.relu(x)


class FuzzModel(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.recompute = case.recompute
        made: list[FuzzLayer] = []
        width = FEATURES
        for layer in case.layers:
            fitting = [each.linear.weight for each in made if each.kind in ("linear", "bare")
                       and each.linear.weight.shape[1] == width]  # fmt: skip
            usable = [each for each in made if each.inputs == each.outputs == width]
            again = layer.kind == "again" and usable
            made.append(usable[-1] if again else FuzzLayer(layer, width, fitting[0] if fitting else None))
            width = made[-1].outputs
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, part: int) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, part, use_reentrant=False) if self.recompute else layer(x, part)
        return self.head(x)


def build(case: Case) -> FuzzModel:
    torch.manual_seed(case.seed)
    model = FuzzModel(case)
    narrow = [module for module in model.modules() if isinstance(module, FuzzLayer) and module.kind == "narrow"]
    model.double()
    for module in narrow:
        module.float()
    return model


def wrap(model: FuzzModel, case: Case) -> None:
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(param.ndim - 1) if case.last_dim and param.ndim > 1 else None

    options: dict[str, Any] = {"reshard_after_forward": case.reshard, "shard_placement_fn": placement, "timeout_s": 20}
    with grouped_rows() if case.grouped else contextlib.nullcontext():
        wrap_as(model, case, options)


@contextlib.contextmanager
def grouped_rows() -> Iterator[None]:
    """Rows made inside go the way of backends without tags, over gloo."""

    def make_row(group: dist.ProcessGroup, *args: Any) -> Row:
        return GroupedRow(group, args[0]) if group.size() > 1 else collectives.make_row(group, *args)

    with mock.patch("hsdp.wrap.make_row", make_row):
        yield


def wrap_as(model: FuzzModel, case: Case, options: dict[str, Any]) -> None:
    if case.wrap.startswith("bottom-up"):
        mesh = hsdp.init_mesh(replicate=case.mesh[0], shard=case.mesh[1])
        for layer in dict.fromkeys([*model.layers, model.head]) if case.wrap == "bottom-up" else []:
            hsdp.fully_shard(layer, mesh=mesh, **options)
        hsdp.fully_shard(model, mesh=mesh, **options)
    else:
        units = {"auto": None, "root": FuzzModel, "every layer": FuzzLayer, "linear": nn.Linear,
                 "nested": [FuzzLayer, nn.Linear]}[case.wrap]  # fmt: skip
        hsdp.hybrid_shard(model, mesh=case.mesh, units=units, announce=False, **options)


# ---- training --------------------------------------------------------------------------------------------------------


def batch(case: Case, number: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * case.seed + number)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    rows = slice(part * ROWS // case.world, (part + 1) * ROWS // case.world)
    return x[rows], x[rows, :3].sin()


def losses_of(model: nn.Module, case: Case, number: int, rank: int | None) -> list[Tensor]:
    """Of this rank's part; in one plain process of all parts."""
    losses = []
    for part in range(case.world) if rank is None else [rank]:
        x, target = batch(case, number, part)
        loss = (model(x, part) - target).pow(2).mean()
        losses.append(loss / case.world if rank is None else loss)
    return losses


def train(case: Case, rank: int | None) -> dict[str, Tensor]:
    """Everything to compare, by name. `rank` None: one plain process on all parts."""
    model = build(case)
    if rank is not None:
        wrap(model, case)
    trained = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(trained, lr=1e-2, eps=1e-2) if case.adam else torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    )
    clip = torch.nn.utils.clip_grad_norm_ if rank is None else hsdp.clip_grad_norm_
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        losses: dict[int, list[Tensor]] = {}
        for micro, how in enumerate(case.micro):
            number = 10 * step + micro
            for later in range(micro, len(case.micro)) if case.pipeline else [micro]:
                if later not in losses:
                    losses[later] = losses_of(model, case, 10 * step + later, rank)
            if rank is not None and case.pipeline:
                model.set_is_last_backward(micro == len(case.micro) - 1)  # type: ignore[operator]
            defers = rank is not None and how != "plain"
            with hsdp.accumulate(model, how) if defers else contextlib.nullcontext():  # type: ignore[arg-type]
                for loss in losses[micro]:
                    loss.backward()
            if case.evaluate:
                found[f"{number} output"] = evaluate(model, case)
        if case.clip:
            found[f"{step} norm"] = full(clip(trained, 0.05)).double()
        for name, param in model.named_parameters():
            if param.grad is not None:
                found[f"{step} grad {name}"] = full(param.grad)
        if case.lone:
            model(batch(case, 0, 0)[0], 1)
        optimizer.step()
        if case.lone:
            found[f"{step} output after a lone forward"] = model(batch(case, 0, 0)[0], 1).detach().clone()
        if case.zero != "never":
            optimizer.zero_grad(set_to_none=case.zero == "none")
    found.update((name, full(param)) for name, param in model.named_parameters())
    found["output"] = evaluate(model, case)
    if rank is not None:
        hsdp.check_replicas(model)
    return found


def evaluate(model: nn.Module, case: Case) -> Tensor:
    model.eval()
    with torch.no_grad():
        output = model(torch.linspace(-1, 1, FEATURES, dtype=torch.float64)[None], 1).clone()
    model.train()
    return output
