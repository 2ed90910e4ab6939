"""Ways to use a model: units in units, evaluation in between, containers, modules called twice, kinds of modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import ATOL, F64, RECIPE, Encoder, check, data, gather, grads_of, is_sharded, params_of, step, wrap
from harness import RankError, run_ranks
from models import (
    Trained,
    adamw,
    assert_same_training,
    batch,
    brief,
    build,
    loss_of,
    reference,
    train,
)
from torch import nn
from torch.nn import functional as F

import hsdp

# ---- shapes of computation -------------------------------------------------------------------------------------------


def nested(rank: int, world: int) -> Trained:
    model: Any = build(RECIPE)
    hsdp.hybrid_shard(model, mesh=(2, 2), units=["Block", "Attention", "Embedding"], announce=False)
    assert hsdp.describe(model).num_units == 3 + 3 + 2 + 1
    return brief(train(model, RECIPE, part=rank, parts=world), rank)


def test_nested_units() -> None:
    assert_same_training(run_ranks(4, nested), reference(RECIPE), ATOL)


def evaluate_between(rank: int, world: int) -> dict[str, torch.Tensor]:
    model: Any = wrap(build(RECIPE), world)
    inputs, _targets = batch(RECIPE, 9)
    outputs = {}

    def evaluate(name: str) -> None:
        model.eval()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                outputs[f"{name} {context.__name__}"] = model(inputs).clone()
            assert world == 1 or is_sharded(model)
        model.train()

    evaluate("before")
    optimizer = adamw(model.parameters())
    for micro in range(3):
        step(model, rank, world, micro)
        evaluate(f"between {micro}")
        optimizer.step()
        optimizer.zero_grad()
        evaluate(f"after {micro}")
    model(inputs)  # a forward whose backward never comes
    evaluate("after a forward alone")
    step(model, rank, world)
    return params_of(model) | grads_of(model) | outputs


def test_evaluation_before_and_between_steps() -> None:
    check(evaluate_between)


def step_after_a_lone_forward(rank: int, world: int, reshard: bool | None) -> dict[str, torch.Tensor]:
    """Weights change between a forward whose backward never comes and the next one, which must see the new ones."""
    model: Any = wrap(build(RECIPE), world, reshard_after_forward=reshard)
    optimizer = adamw(model.parameters())
    inputs, _ = batch(RECIPE, 9)
    outputs = {}
    for micro in range(2):
        optimizer.zero_grad()
        step(model, rank, world, micro)
        model(inputs)  # for its loss, say
        optimizer.step()
        outputs[f"training {micro}"] = model(inputs).detach().clone()
        with torch.no_grad():
            model(inputs)
            for param in model.parameters():
                param.mul_(0.9)
            outputs[f"evaluation {micro}"] = model(inputs).clone()
    return outputs


@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_step_after_a_lone_forward(reshard: bool | None) -> None:
    check(step_after_a_lone_forward, reshard)


@dataclass
class Output:
    first: torch.Tensor
    second: dict[str, Any]


class Containers(nn.Module):
    """Takes and returns containers; keyword arguments too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(6, 301), nn.Linear(301, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> Any:
        hidden = torch.tanh(self.first(x * scale + more["list"][0]))
        out = self.second(hidden)
        if self.kind == "dict":
            return {"hidden": hidden, "deep": {"out": [out]}, "text": "t"}
        if self.kind == "dataclass":
            return Output(hidden, {"out": out, "none": None})
        return (hidden, (out, 3))


def contain(rank: int, world: int, kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"block": Containers(kind)}).double()
    block: Any = model["block"]
    if world > 1:
        wrap(block, world)
    x = data(rank, world, 6).requires_grad_()
    scale = torch.full((6,), 2.0, dtype=F64, requires_grad=True)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for _ in range(3):
        result = block(x=x, scale=scale, more={"list": [data(rank, world, 6, seed=1)]})
        if kind == "dict":
            hidden, out = result["hidden"], result["deep"]["out"][0]
            assert result["text"] == "t"
        elif kind == "dataclass":
            assert type(result) is Output
            hidden, out = result.first, result.second["out"]
        else:
            hidden, (out, three) = result
            assert three == 3
        (hidden.pow(2).mean() + out.pow(2).mean()).backward()
        optimizer.step()
    assert world == 1 or is_sharded(block)
    grads = {"x": x.grad / world, "scale": scale.grad / world}
    if world > 1:
        torch.distributed.all_reduce(grads["scale"])
        grads["x"] = torch.cat(gather(grads["x"], world))
    return params_of(block) | grads_of(block) | grads


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple"])
def test_containers_and_keyword_arguments(kind: str) -> None:
    check(contain, kind)


def use_modules_oddly(rank: int, world: int, how: str) -> dict[str, torch.Tensor]:
    model: Any = wrap(build(RECIPE), world)
    optimizer = adamw(model.parameters())
    for micro in range(3):
        inputs, targets = batch(RECIPE, 0, micro, rank, world)
        others, _ = batch(RECIPE, 1, micro, rank, world)
        if how == "a block twice":
            model.blocks[1].run = lambda inside, x: inside(inside(x))
            loss_of(model(inputs), targets).backward()
        elif how == "one block called twice":
            model.run = lambda block, x: block(block(x))
            loss_of(model(inputs), targets).backward()
        elif how == "two forwards, one backward":
            (loss_of(model(inputs), targets) + loss_of(model(others), targets)).backward()
        elif how == "two backwards through one graph":
            out = model(inputs)
            loss_of(out, targets).backward(retain_graph=True)
            loss_of(2 * out, targets).backward()
        elif how == "two forwards, two backwards":
            first, second = model(inputs), model(others)
            loss_of(second, targets).backward()
            loss_of(first, targets).backward()
        elif how == "no loss on some steps":
            loss = loss_of(model(inputs), targets)
            if micro == 1:
                del loss
                continue
            loss.backward()
        elif how == "skipped block":
            model.run = (lambda block, x: x if block is model.blocks[micro % 3] else block(x)) if micro else model.run  # noqa: B023
            loss_of(model(inputs), targets).backward()
        elif how == "other order":
            model.blocks._modules = dict(reversed(model.blocks._modules.items()))
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world == 1 or is_sharded(model)
    return dict(sorted(params_of(model).items()))


@pytest.mark.parametrize(
    "how",
    [
        "a block twice",
        "one block called twice",
        "two forwards, one backward",
        "two backwards through one graph",
        "two forwards, two backwards",
        "no loss on some steps",
        "skipped block",
        "other order",
    ],
)
def test_unusual_use(how: str) -> None:
    check(use_modules_oddly, how)


def gradient_of_inputs(rank: int, world: int) -> dict[str, torch.Tensor]:
    """torch.autograd.grad touches no .grad and leaves no unit gathered."""
    torch.manual_seed(0)
    model: Any = wrap(Encoder().double(), world, units=nn.Linear)
    x = data(rank, world, 6).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    assert all(param.grad is None for param in model.parameters())
    assert world == 1 or is_sharded(model)
    model(x.detach()).pow(2).mean().backward()
    return grads_of(model) | {"x": grad if world == 1 else torch.cat(gather(grad, world))}


def test_autograd_grad_of_inputs() -> None:
    check(gradient_of_inputs)


def forward_mode(rank: int, world: int) -> dict[str, torch.Tensor]:
    """torch.func.jvp of the model, and of a part whose input comes from a part before the transform."""
    torch.manual_seed(0)
    model: Any = wrap(Encoder().double(), world, units=nn.Linear)
    x, tangent = data(rank, world, 6), data(rank, world, 6, seed=1)
    output, change = torch.func.jvp(model, (x,), (tangent,))
    hidden = torch.tanh(model.inner(x))
    inside, none = torch.func.jvp(lambda unused: model.outer(hidden), (x,), (tangent,))
    assert torch.equal(none, torch.zeros_like(none))
    inside.pow(2).mean().backward()
    parts = {"output": output.detach(), "change": change.detach()}
    if world > 1:
        parts = {name: torch.cat(gather(value, world)) for name, value in parts.items()}
        assert is_sharded(model)
    return parts | grads_of(model)


def test_forward_mode() -> None:
    check(forward_mode)


def two_models(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Two equal models side by side, one fed by the other, stepped in turn."""
    torch.manual_seed(0)
    first = wrap(Encoder().double(), world, units=nn.Linear)
    torch.manual_seed(0)
    second = wrap(Encoder().double(), world, units=nn.Linear)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for seed in range(4):
        x = data(rank, world, 6, seed=seed)
        second(first(x)).pow(2).mean().backward()
        optimizers[seed % 2].step()
        (first(x).mean() - second(x).pow(2).mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {f"{i} {name}": value for i, model in enumerate((first, second)) for name, value in params_of(model).items()}


def test_two_models() -> None:
    check(two_models)


def fail_and_go_on(rank: int, world: int) -> dict[str, torch.Tensor]:
    """An exception in forward, or in backward, on every rank; the step is then repeated."""
    model: Any = wrap(build(RECIPE), world)
    step(model, rank, world)
    model.zero_grad()
    run = model.run

    def broken(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if block is model.blocks[2]:
            raise KeyError("forward")
        return run(block, x)

    def explode(grad: torch.Tensor) -> None:
        raise KeyError("backward")

    def broken_backward(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = run(block, x)
        if block is model.blocks[1]:
            out.register_hook(explode)
        return out

    if world > 1:
        for wrong in (broken, broken_backward):
            model.run = wrong
            with pytest.raises(KeyError):
                step(model, rank, world)
            model.reset_iter_state()
            assert is_sharded(model)
            model.zero_grad()
        model.run = run
    for micro in range(2):
        step(model, rank, world, micro)
    return grads_of(model)


def test_after_an_exception() -> None:
    check(fail_and_go_on)


# ---- kinds of modules ------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 50, num_layers=2, batch_first=True)
        self.head = nn.Linear(50, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, 60, sparse=True)
        self.head = nn.Linear(60, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed((x.abs() * 100).long() % 301).mean(1))


class Strided(nn.Module):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(6, 301) / 20).t())
        self.conv = nn.Conv1d(301, 5, 2).to(memory_format=torch.contiguous_format)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv((x @ self.weight.t()).transpose(1, 2))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 301))
        self.attention = nn.MultiheadAttention(301, 7, batch_first=True)
        self.head = nn.Linear(301, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Inplace(nn.Module):
    """Every block begins with an operation in place on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(30, 30)) for _ in range(3))
        self.first = nn.Linear(6, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """What a unit returns, a view of its result, is changed in place by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 30)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(30, 301), nn.Tanh(), nn.Linear(301, 30)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y.relu_()
        return x


class Odd(nn.Module):
    """Parameters without elements, and frozen ones of dtypes that have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 30)
        self.no_rows = nn.Parameter(torch.empty(0, 4))
        self.no_columns = nn.Parameter(torch.empty(4, 0))
        self.scales = nn.Parameter(torch.arange(30) % 3, requires_grad=False)
        self.mask = nn.Parameter(torch.arange(30) % 2 == 0, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scales * self.mask + self.no_rows.sum() + self.no_columns.sum()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "lstm": Recurrent,
    "sparse": SparseEmbedding,
    "strided": Strided,
    "parametrized": Normed,
    "in-place": Inplace,
    "in-place residual": Residual,
    "odd": Odd,
    "encoder-layer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 301, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
}


def train_kind(rank: int, world: int, kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(KINDS[kind]().double(), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        model(data(rank, world, 4, 6, seed=seed)).pow(2).mean().backward()
        optimizer.step()
        if seed < 2:
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        out = model(data(0, 1, 4, 6, seed=9))
    grads = {name: grad.to_dense() for name, grad in grads_of(model).items()}
    return params_of(model) | grads | {"out": out.clone()}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_modules(kind: str) -> None:
    check(train_kind, kind)


class Chain(nn.ModuleList):
    """A list of modules that can be called, as no `ModuleList` can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = torch.tanh(module(x))
        return x


class Branches(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["left"](x) * self["right"](x)


def train_containers(rank: int, world: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    chain = Chain([nn.Linear(6, 301), nn.Linear(301, 6)])
    branches = Branches({"left": nn.Linear(6, 300), "right": nn.Linear(6, 300)})
    model = nn.Sequential(chain, branches, nn.Linear(300, 3)).double()
    if world > 1:
        for module in (chain, branches, model):
            hsdp.fully_shard(module, mesh=hsdp.init_mesh(replicate=2, shard=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        model(data(rank, world, 6, seed=seed)).pow(2).mean().backward()
        optimizer.step()
        assert world == 1 or (is_sharded(chain) and is_sharded(branches))
    return params_of(model) | grads_of(model)


def test_containers_with_a_forward_are_units() -> None:
    check(train_containers)


def train_a_list(rank: int, world: int, root: bool) -> dict[str, torch.Tensor]:
    """Two modules that are one unit, with another between them; with or without a unit around them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 301), nn.Linear(301, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    first, middle, _tanh, last = model
    if world > 1:
        for module in ([first, last], middle, *([model] if root else ())):
            hsdp.fully_shard(module, mesh=hsdp.init_mesh(replicate=2, shard=2))
        assert hsdp.describe(model if root else first).num_units == (2 if root else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        if seed == 1:  # by hand, and not all of the unit
            middle(first(data(rank, world, 6, seed=seed)).relu()).tanh().mean().backward()
        else:
            model(data(rank, world, 6, seed=seed)).pow(2).mean().backward()
        optimizer.step()
        assert world == 1 or is_sharded(model)
    return params_of(model) | grads_of(model)


@pytest.mark.parametrize("root", [False, True])
def test_a_list_of_modules_is_one_unit(root: bool) -> None:
    check(train_a_list, root)


class Box:
    """Not a container that anyone can look into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Hidden(nn.Module):
    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.up, self.norm = nn.Linear(6, 301), nn.LayerNorm(301)
        self.down = nn.Linear(301, 6)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.down(self.norm(torch.tanh(self.up(x))))
        return Box(out) if self.hidden else out


def hide_outputs(rank: int, world: int, hidden: int, reshard: bool | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    blocks: Any = nn.ModuleList(Hidden(i == hidden) for i in range(3)).double()
    if world > 1:
        for block in blocks:
            hsdp.fully_shard(block, mesh=hsdp.init_mesh(replicate=2, shard=2), reshard_after_forward=reshard)
    x = data(rank, world, 6)
    for block in blocks:
        out = block(x)
        x = out.tensor if isinstance(out, Box) else out
    x.pow(2).mean().backward()
    return grads_of(blocks)


@pytest.mark.parametrize("hidden", range(3))
def test_outputs_that_cannot_be_found_are_an_error(hidden: int) -> None:
    """Nothing tells when backward reaches such a unit. It must fail, and not compute with what is not there."""
    with pytest.raises(RankError, match=r"for storage of size 0|return outputs as tensors"):  # torch sees it, or we do
        run_ranks(4, hide_outputs, hidden, True)


def test_outputs_that_cannot_be_found_do_no_harm_where_nothing_was_released() -> None:
    check(hide_outputs, 2, None)


def run_statistics(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Buffers that a forward changes stay the rank's own, as with DDP without its broadcast."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 301), nn.BatchNorm1d(301), nn.Linear(301, 3)).double()
    wrap(model, world)
    x = data(0, 1, 6)  # the same on every rank, so that the statistics of the batch are too
    for _ in range(2):
        model.zero_grad()
        model(x).pow(2).mean().backward()
    buffers = {name: buffer.clone().double() for name, buffer in model.named_buffers()}
    assert float(buffers["1.num_batches_tracked"]) == 2
    return grads_of(model) | buffers


def test_batch_norm() -> None:
    check(run_statistics)


def functional(rank: int, world: int) -> dict[str, torch.Tensor]:
    """User hooks on modules and on parameters' use see full tensors."""
    model: Any = wrap(build(RECIPE), world)
    shapes = []
    model.blocks[0].register_forward_hook(lambda module, args, out: shapes.append(tuple(module.up.weight.shape)))
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.blocks[1].register_forward_hook(lambda module, args, out: F.dropout(out, 0.0) * 3)
    step(model, rank, world)
    assert shapes == [(1024, 64)]
    return grads_of(model)


def test_user_hooks() -> None:
    check(functional)
