"""The built-in task `lm`: a small language model on any text, byte by byte unless there is a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.errors import Refusal
from ..config import BELOW_1, Flag, MaybePath, option
from ..training.task import Task
from .text import PAD, Tokenizer, Windows, tokens_of
from .transformer import Decoder


@dataclass
class Lm(Task):
    """Predict the next token of a text with a small decoder-only transformer."""

    text: MaybePath = None
    """A text: a file, a folder of .txt files, or tokens (FILE.bin, uint16 or uint32). Default: Austen's Persuasion."""
    tokenizer: str = "bytes"
    """bytes; a tokenizer.json (extra `text`); or, for a FILE.bin, the number of tokens; the last one ends a text."""
    data_dir: Path = Path("data")
    """Folder for the tokens made from --text."""
    held_out: float = option(0.1, 1e-9, BELOW_1)
    """Share of the text, at its end, that is not trained on: half for validation, half for the test."""
    seq_len: int = option(128, 1, 2**24)
    """Predicted tokens per sample."""
    across_documents: Flag = False
    """Let attention cross the boundaries of documents, which is faster."""
    width: int = option(64, 2, 2**16)
    """Width of the residual stream."""
    layers: int = option(3, 1, 1000)
    """Blocks of attention and SwiGLU."""
    heads: int = option(4, 1, 2**12)
    """Attention heads."""
    dropout: float = option(0.0, 0, BELOW_1)
    """Dropout probability of each block's output."""

    best: ClassVar[tuple[str, Literal["max", "min"]]] = ("loss", "min")
    harmless: ClassVar[frozenset[str]] = frozenset({"text"})  # digests tell other data

    def __post_init__(self) -> None:
        if self.heads and self.width % (2 * self.heads):  # 0 is refused with the other numbers
            raise Refusal(f"--width {self.width}: must be a multiple of {2 * self.heads}, twice --heads {self.heads}")

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokenizer)

    @cached_property
    def _windows(self) -> tuple[Windows, Windows, Windows]:
        """Training, validation and test data. That of the training has whole windows only, so a mean over its samples
        is one over its tokens."""
        tokens, length, size = tokens_of(self.text, self._tokenizer, self.data_dir), self.seq_len, self._tokenizer.size
        last = len(tokens) - 1
        cut = int(last * (1 - self.held_out)) // length * length
        middle = (cut + last) // 2
        if not 0 < cut < middle:
            raise Refusal(
                f"--text {self.text or 'of Evenkeel'}: its {last + 1} tokens are too few for --seq-len {length} and "
                f"--held-out {self.held_out:g}; use smaller ones, or more text"
            )
        parts = ((0, cut + 1), (cut, middle + 1), (middle, last + 1))
        train, validation, test = (Windows(tokens, start, stop, length, size) for start, stop in parts)
        return train, validation, test

    def train_dataset(self) -> Windows:
        """Windows from the beginning of the text, int64 [seq_len + 1]: inputs, and shifted by one the targets."""
        return self._windows[0]

    def validation_dataset(self) -> Windows:
        """The next part of the text; its last window may end in `PAD`."""
        return self._windows[1]

    def test_dataset(self) -> Windows:
        """The end of the text."""
        return self._windows[2]

    def model(self) -> nn.Module:
        """A decoder."""
        end = None if self.across_documents else self._tokenizer.end
        return Decoder(self._tokenizer.size, self.width, self.heads, self.layers, self.dropout, end)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Nats per token. All training windows have the same number of tokens, so all tokens count equally."""
        return self._nats(model, batch).mean()

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        """The nats and the number of predicted tokens of each window."""
        return {"nats": self._nats(model, batch).double().sum(1), "tokens": (batch[:, 1:] != PAD).sum(1)}

    predict = metrics

    def summarize(self, means: dict[str, Tensor]) -> dict[str, float]:
        """Nats per token over all tokens, perplexity, and for bytes the bits per byte."""
        loss = float(means["nats"] / means["tokens"])
        bits = {"bits_per_byte": loss / log(2)} if self.tokenizer == "bytes" else {}
        return {"loss": loss, "perplexity": exp(min(loss, 700.0)), **bits}

    def tokens(self, batch: Tensor) -> int:
        """The tokens to predict."""
        return batch[:, 1:].numel()

    def _nats(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Of each token, [samples, seq_len]; 0 for `PAD`."""
        read, follows = batch[:, :-1].clamp(min=0), batch[:, 1:]
        logits = model(read).float().flatten(0, 1)
        return F.cross_entropy(logits, follows.flatten(), ignore_index=PAD, reduction="none").view_as(follows)

    @torch.no_grad()
    def generate(self, model: nn.Module, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """Continue a text by at most so many tokens, or to the end of the document.

        Args:
            model: in evaluation mode.
            prompt: the beginning of a document; may be empty.
            tokens: the most to add.
            temperature: divides the logits; 0: always the likeliest token.
            top_k: draw from the likeliest tokens only; 0: from all.
            seed: of the draws, which are made on the CPU.
        """
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        made = [self._tokenizer.end, *self._tokenizer.encode(prompt.encode(errors="surrogateescape")).tolist()]
        begin = len(made)
        for _ in range(tokens):
            logits = model(torch.tensor([made[-self.seq_len :]], device=device))[0, -1].double().cpu()
            if top_k:
                logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
            odds = ((logits - logits.max()) / temperature).softmax(0) if temperature else logits
            token = int(torch.multinomial(odds, 1, generator=generator) if temperature else odds.argmax())
            if token == self._tokenizer.end:
                break
            made.append(token)
        return self._tokenizer.decode(made[begin:])
