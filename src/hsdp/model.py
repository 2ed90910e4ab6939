"""A small byte-level, decoder-only transformer: the model `hsdp train` trains.

Holds the model and nothing else. It must not know about meshes, ranks or training: sharding is put on from outside. To
be built on the `meta` device, every module that owns parameters has a `reset_parameters`, and there are no buffers.

    bytes (B, T) -> embedding -> Block x layers -> norm -> head -> logits (B, T, 256)

    Block    x = x + attention(norm(x));  x = x + mlp(norm(x))

Shapes: B sequences, T bytes of a sequence, W width, H heads, D = W / H features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # one token for each value of a byte


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a `Transformer`.

    Args:
        layers: number of blocks.
        width: features of a token, divisible by `heads`.
        heads: attention heads of a block.

    Raises:
        ValueError: a size below 1, or a width that the heads do not divide into an even number of features each.
    """

    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not divide into {self.heads} heads of an even size; "
                f"make it a multiple of 2 x heads = {2 * self.heads}"
            )


class Linear(nn.Module):
    """`x @ weight.T` without a bias, weights drawn from N(0, (gain / sqrt(inputs))^2)."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain * self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """A table of `rows` vectors, drawn from N(0, std^2)."""

    def __init__(self, rows: int, width: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight)


def rotations(num_positions: int, size: int, device: torch.device) -> Tensor:
    """Cosine and sine of the angle by which each position turns each pair of features: (2, T, D / 2).

    Rotary position embedding (arXiv:2104.09864): a score between two positions then depends on their distance.
    """
    speeds = 10_000.0 ** (-torch.arange(size // 2, device=device) / (size // 2))
    angles = torch.arange(num_positions, device=device)[:, None] * speeds
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs (x[..., i], x[..., i + D / 2]) of x (B, H, T, D) by `turns` (2, T, D / 2)."""
    cosine, sine = turns
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width, gain=(2 * shape.layers) ** -0.5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        B, T, W = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, W // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        mixed = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, W))


class Block(nn.Module):
    """One layer, and one unit of the sharding: `x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.norm_mlp = nn.LayerNorm(shape.width, bias=False)
        self.up = Linear(shape.width, 4 * shape.width)
        # The two branches of every layer add up in x: scaled down so that x keeps its size over the layers.
        self.down = Linear(4 * shape.width, shape.width, gain=(2 * shape.layers) ** -0.5)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), turns)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Predicts the next byte: `forward` takes bytes (B, T) of an integer type, gives logits (B, T, 256)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(VOCABULARY, shape.width, std=0.5)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = Linear(shape.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        turns = rotations(tokens.shape[1], self.shape.width // self.shape.heads, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte, in fp32, of logits (B, T, 256) against the bytes that follow (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
