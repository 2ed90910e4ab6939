"""A small byte-level, decoder-only transformer: the model `hsdp train` trains.

Holds the model and nothing else. It must not know about meshes, ranks or training: sharding is put on from outside. To
be built on the `meta` device, every module that owns parameters has a `reset_parameters`, and there are no buffers.

    bytes (B, T) -> embedding + position -> Block x layers -> norm -> head -> logits (B, T, 256)

    Block    x = x + attention(norm(x));  x = x + mlp(norm(x))

Shapes: B sequences, T bytes of a sequence, W width, H heads.
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
        seq: bytes of the longest sequence.

    Raises:
        ValueError: a size below 1, or a width that the heads do not divide.
    """

    layers: int
    width: int
    heads: int
    seq: int

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not divide into {self.heads} heads; make it a multiple of heads")


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


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = Linear(shape.width, 3 * shape.width)
        self.out = Linear(shape.width, shape.width, gain=(2 * shape.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, W // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, W / H)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Predicts the next byte: `forward` takes bytes (B, T) of an integer type, gives logits (B, T, 256).

    Raises:
        ValueError: T is larger than `shape.seq`.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(VOCABULARY, shape.width, std=0.5)
        self.position = Embedding(shape.seq, shape.width, std=0.1)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = Linear(shape.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        T = tokens.shape[1]
        if self.shape.seq < T:
            raise ValueError(f"the sequence has {T} bytes, the model takes {self.shape.seq} at most (seq)")
        x = self.embedding(tokens) + self.position(torch.arange(T, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte, in fp32, of logits (B, T, 256) against the bytes that follow (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
