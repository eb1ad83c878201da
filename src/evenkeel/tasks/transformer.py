"""The network of `lm`: a decoder-only transformer like the Llama family.

Norms before each part (RMSNorm), rotary positions (RoPE), SwiGLU, no biases. SwiGLU, because it has the lower loss at
the same number of parameters (Shazeer, "GLU Variants Improve Transformer", 2020). The output layer shares its matrix
with the embedding (Press and Wolf, 2017), which in a small model with a large vocabulary is most of all parameters.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = 10_000.0
"""Of the wavelengths of RoPE (Su et al., "RoFormer", 2021)."""


class Decoder(nn.Module):
    """Logits of the next token at each place.

    Args:
        vocabulary: tokens.
        width: of the residual stream, a multiple of twice the `heads`.
        layers: blocks of attention and SwiGLU.
        dropout: probability of a zero in what a block adds.
        end: the token at which a document begins; None: attention crosses the boundaries of documents.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, dropout: float, end: int | None) -> None:
        super().__init__()
        self.end, self.head_width = end, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # as GPT-2: what adds to the residual stream begins smaller
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """[samples, length] -> [samples, length, vocabulary]."""
        x = self.embed(tokens)
        turns = rotation(tokens.shape[1], self.head_width, x.device)
        mask = None if self.end is None else same_document(tokens, self.end)
        for block in self.blocks:
            x = block(x, turns, mask)
        return F.linear(self.norm(x), self.embed.weight)


class Block(nn.Module):
    """Causal attention, then SwiGLU; each is added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        hidden = -(-8 * width // 3 // 32) * 32  # three matrices with as many parameters as two of 4 x width
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor | None) -> Tensor:
        """[samples, length, width], and so is the result."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotated(part, turns).to(v.dtype) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=2)
        return x + cast(Tensor, self.drop(self.down(F.silu(gate) * value)))


def same_document(tokens: Tensor, end: int) -> Tensor:
    """The places that each place may attend to: itself and those before it, back to the last `end`. Bool
    [samples, 1, length, length] of tokens [samples, length]."""
    document = (tokens == end).cumsum(1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def rotation(length: int, width: int, device: torch.device) -> Tensor:
    """Cosine and sine of RoPE's angles, float32 [2, length, width / 2]. Only the distance of two places counts, so a
    document is the same wherever it begins."""
    frequencies = BASE ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(length, device=device), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs (i, i + width / 2) of the last dimension of [..., length, width] by the angles of their places."""
    (cos, sin), (a, b) = turns, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
