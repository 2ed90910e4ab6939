"""Small models, their data, and the one training loop that a plain process and every rank of a mesh run alike.

A test trains a `Recipe` twice, in one plain process on the whole batch (`reference`) and on the ranks of a mesh, each
on its part of the batch, and compares the two: `assert_same_training`.

[Note: Adam and rounding] Adam divides a gradient by its own size, so that where eps is tiny a gradient that is nothing
but rounding moves a weight as far as any other. With eps = 1e-3, about the size of the clipped gradients here, a
difference of d in a gradient moves a weight by at most about lr / eps * d = 10 d a step; fp32 gradients of two
summation orders differ by some 1e-9. So 1e-6 (1e-12 in fp64) bounds errors of the engine and not of the rounding,
while the weights themselves move by some 1e-2.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS, SEQ = 37, 64, 1024, 4, 3, 4
BATCH = 24  # divides by 1, 2, 3, 4 and 8
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def call(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """`up` and `down` are 256 KiB in fp32, so gathered in place on up to 4 ranks; norms and biases are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Callable[..., Tensor] = call  # how the block runs its inside: a test puts checkpointing here
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def inside(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inside, x)


class Transformer(nn.Module):
    """Tokens (B, T) to logits (B, T, VOCABULARY)."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.run: Callable[..., Tensor] = call  # how a block is called: a test puts checkpointing here
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


class TiedTransformer(Transformer):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Awkward(nn.Module):
    """Features (B, 6) to (B, 4) through parameters of every shape that divides badly over 2, 3, 4 or 8 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 2)  # fewer rows than ranks
        self.wide = nn.Linear(2, 131)
        self.big = nn.Linear(131, 1030)  # 540 kB: in place, the last rank has fewer rows
        self.few = nn.Parameter(torch.randn(3, 18_000) / 150)  # 72 kB a row: in place, some ranks have none
        self.cube = nn.Parameter(torch.randn(5, 3, 2))
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.out = nn.Linear(1030, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.big(torch.tanh(self.wide(torch.tanh(self.narrow(x))))))
        x = x * (1 + self.few[:, :1030].sum(0) * self.few[:, 1030:2060].mean(0)) * self.scale
        return self.out(x) + torch.tanh(self.cube).sum((0, 2)).sum() + self.few[:, 2060:].pow(2).sum()


class Scalars(Awkward):
    """With parameters that have no dims, so no rows to share out: every rank has them. torch's own refuses such."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature + self.shift


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "tied": TiedTransformer,
    "awkward": Awkward,
    "scalars": Scalars,
}


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; equal on every rank and in the plain process.

    Attributes:
        model: a key of `MODELS`.
        micro: microbatches of BATCH a step; the loss is the mean over all of them.
        max_norm: gradients are clipped to it; well below the norms that occur, so that clipping changes every step.
    """

    model: str = "transformer"
    dtype: torch.dtype = torch.float32
    steps: int = 10
    micro: int = 1
    max_norm: float = 0.2
    seed: int = 0


@dataclass
class Trained:
    """What a training left behind: full parameters and last gradients, and a norm and a loss for every step."""

    params: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digest: str = ""  # of params and grads


def build(recipe: Recipe) -> nn.Module:
    """The recipe's model, the same weights wherever it is called."""
    torch.manual_seed(recipe.seed)
    return MODELS[recipe.model]().to(recipe.dtype)


def batch(recipe: Recipe, step: int, micro: int = 0, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one microbatch, cut to the `part`-th of `parts` equal parts."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    if recipe.model in ("awkward", "scalars"):
        inputs = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64).to(recipe.dtype)
        targets = inputs[:, :4] * inputs[:, 1:5]
    else:
        inputs = torch.randint(VOCABULARY, (BATCH, SEQ), generator=generator)
        targets = (3 * inputs + 1) % VOCABULARY
    rows = slice(part * BATCH // parts, (part + 1) * BATCH // parts)
    return inputs[rows], targets[rows]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean loss, at least in fp32."""
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    if target.is_floating_point():
        return F.mse_loss(output, target.to(output.dtype))
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def adamw(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    """See [Note: Adam and rounding]."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1, **options)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, a copy; every rank calls this for a DTensor."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def digest(tensors: dict[str, Tensor]) -> str:
    """Equal for bit-equal tensors."""
    text = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        text.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        text.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and checkpoint_wrapper put into it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def snapshot(model: nn.Module) -> Trained:
    """Full parameters and gradients as they are now."""
    named = {plain_name(name): param for name, param in model.named_parameters()}
    params = {name: full(param) for name, param in named.items()}
    grads = {name: full(param.grad) for name, param in named.items() if param.grad is not None}
    return Trained(params, grads, digest=digest({**params, **{f"grad {name}": grad for name, grad in grads.items()}}))


def train(
    model: nn.Module,
    recipe: Recipe,
    *,
    part: int = 0,
    parts: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    micro_context: Callable[[bool], contextlib.AbstractContextManager[Any]] = lambda last: contextlib.nullcontext(),
    clip: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
    set_to_none: bool = True,
) -> Trained:
    """Train and return what came out.

    Args:
        part, parts: which part of every microbatch this process computes.
        micro_context: entered around the forward and backward of a microbatch; told whether it is the step's last.
    """
    optimizer = adamw(model.parameters()) if optimizer is None else optimizer
    norms, losses = [], []
    for step in range(recipe.steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(0.0)
        for micro in range(recipe.micro):
            inputs, targets = batch(recipe, step, micro, part, parts)
            with micro_context(micro == recipe.micro - 1):
                loss = loss_of(model(inputs), targets) / recipe.micro
                loss.backward()
            losses[-1] += float(loss.detach())
        norm = clip(model.parameters(), recipe.max_norm)
        norms.append(float(full(norm)))
        optimizer.step()
    return replace(snapshot(model), norms=norms, losses=losses)


def train_plain(rank: int, world: int, recipe: Recipe) -> Trained:
    return train(build(recipe), recipe)


@functools.cache
def reference(recipe: Recipe) -> Trained:
    """`recipe` trained in one plain process, without a process group, on the whole batch."""
    return run_ranks(1, train_plain, recipe, init_group=False)[0]


def largest_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest absolute difference and the name of the tensor that has it; the names must be the same."""
    assert list(got) == list(want), f"names differ: {list(got)} and {list(want)}"
    worst = (0.0, "")
    for name, tensor in got.items():
        assert tensor.shape == want[name].shape, f"{name}: {tuple(tensor.shape)}, expected {tuple(want[name].shape)}"
        assert tensor.dtype == want[name].dtype, f"{name}: {tensor.dtype}, expected {want[name].dtype}"
        difference = (tensor.double() - want[name].double()).abs()
        assert difference.isfinite().all(), f"{name} is not finite"
        if difference.numel():
            worst = max(worst, (float(difference.max()), name))
    return worst


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], atol: float, what: str = "parameter") -> None:
    difference, name = largest_difference(got, want)
    assert difference <= atol, f"{what} {name} differs by {difference:.2e}, more than {atol:.0e}"


def assert_same_training(results: list[Trained], want: Trained, atol: float, rtol: float | None = None) -> None:
    """Every rank's result is bit-equal to rank 0's, and rank 0's equals `want`: parameters, gradients, norms, loss.

    `atol` is for parameters and gradients, `rtol` (10 x atol) for norms and losses.
    """
    rtol = 10 * atol if rtol is None else rtol
    assert {result.digest for result in results} == {results[0].digest}, "full tensors differ between ranks"
    got = results[0]
    assert_close(got.params, want.params, atol)
    assert_close(got.grads, want.grads, atol, "gradient")
    for step, (norm, expected) in enumerate(zip(got.norms, want.norms, strict=True)):
        assert abs(norm - expected) <= rtol * expected, f"norm of step {step}: {norm!r}, expected {expected!r}"
        assert all(result.norms[step] == norm for result in results), f"norm of step {step} differs between ranks"
    for step, expected in enumerate(want.losses):
        mean = sum(result.losses[step] for result in results) / len(results)
        assert abs(mean - expected) <= rtol * expected, f"loss of step {step}: {mean!r}, expected {expected!r}"


def brief(result: Trained, rank: int) -> Trained:
    """What a rank needs to send back: the tensors of rank 0 stand for all, the digest tells whether they may."""
    return result if rank == 0 else replace(result, params={}, grads={})
