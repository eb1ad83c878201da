#!/usr/bin/env python3
"""A character-level GPT in the manner of nanoGPT, on any number of ranks. It was examples/nanogpt_plain.py.

torchrun --standalone --nproc_per_node=2 examples/nanogpt.py --epochs 1 --batch-size 32 --lr 1e-3
"""

import math
import pydoc_data.topics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from evenkeel import Run, Task, parse, start

WARMUP = 20
BLOCK, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
TEXT = Path(pydoc_data.topics.__file__).read_bytes()[:200_000]  # any text; this one is on every machine
SYMBOLS = sorted(set(TEXT))


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of BLOCK characters, and the same one character on. The last tenth of the text is for validation."""

    def __init__(self, part: str) -> None:
        cut = len(TEXT) * 9 // 10
        text = TEXT[:cut] if part == "train" else TEXT[cut:]
        self.data = torch.tensor([SYMBOLS.index(symbol) for symbol in text])

    def __len__(self) -> int:
        return (len(self.data) - 1) // BLOCK

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        piece = self.data[i * BLOCK : (i + 1) * BLOCK + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Causal attention, then two linear layers; both with a norm before and the input added after."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, block, width], and so is the result."""
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Logits of the next character at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(len(SYMBOLS), WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, len(SYMBOLS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss; x and y have the shape [samples, block]."""
        hidden = self.symbols(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return F.cross_entropy(self.head(self.blocks(hidden)).flatten(0, 1), y.flatten())


def rate(step: int, steps: int) -> float:
    """The factor on the learning rate: a linear rise, then a cosine."""
    return min((step + 1) / WARMUP, (1 + math.cos(math.pi * step / steps)) / 2)


class CharGPT(Task):
    def train_dataset(self) -> Text:
        return Text("train")

    def test_dataset(self) -> Text:
        return Text("val")

    def model(self) -> nn.Module:
        return GPT()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(*batch)


def train(arguments: list[str]) -> None:
    with Run.open(*parse(arguments, CharGPT)) as run:
        model = run.distribute()
        for step in run.steps():
            for batch in model.micro_batches(step):
                model.backward(model(batch))
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.state.set_rates(rate(step.number, run.plan.total_steps))
            model.step(norm)
            run.after_step(model, norm)


if __name__ == "__main__":
    start(train)
