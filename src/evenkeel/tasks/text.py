"""Text as a memory-mapped stream of tokens, and windows of it, for `lm`.

A stream is `document END document END ...`: the token that ends a document also begins the next one, so no token is
without a prediction, and a model that looks no further back than the last END never sees another document.
"""

from __future__ import annotations

import hashlib
import importlib
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..common.display import say
from ..common.errors import EndedByData, Refusal
from ..common.files import try_lock, write_atomically

BUILT_IN = Path(__file__).parents[1] / "assets" / "persuasion.txt"
"""The text that comes with Evenkeel (assets/persuasion.md)."""

FORM_FEED = b"\f"
"""Between two documents in a file."""

PIECE = 1 << 24
"""Bytes of a text that are in memory at a time, where a token is a byte."""

PAD = -1
"""In place of a token after the end of the stream."""


class Tokenizer:
    """Text to tokens 0 .. size - 1 and back. The last token, `end`, is no text and ends a document.

    Args:
        name: "bytes"; a tokenizer.json of the package `tokenizers`; or a number, the size of an unknown vocabulary.

    Raises:
        Refusal: the file cannot be read, or the package is not installed.
    """

    def __init__(self, name: str) -> None:
        self.name, self._library = name, None
        if name.isdecimal():
            self.size = int(name[:20])
            if not 2 <= self.size < 2**31:
                raise Refusal(f"--tokenizer {name}: a vocabulary has from 2 to {2**31 - 1} tokens")
        elif name == "bytes":
            self.size = 257
        else:
            self._library = _library(Path(name))
            self.size = max(self._library.get_vocab().values()) + 2
        self.end = self.size - 1
        self.dtype = np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)

    def encode(self, text: bytes) -> NDArray[Any]:
        """The tokens of a document, without `end`. Refused if the vocabulary is unknown."""
        if self.name.isdecimal():
            raise Refusal(f"--tokenizer {self.name}: a number cannot tokenize text; use bytes or a tokenizer.json")
        if self._library:
            return np.array(
                self._library.encode(text.decode(errors="replace"), add_special_tokens=False).ids, self.dtype
            )
        return np.frombuffer(text, np.uint8).astype(self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens other than `end`; what is no UTF-8 becomes U+FFFD."""
        if self._library:
            return str(self._library.decode(list(tokens)))
        return bytes(tokens).decode(errors="replace")


def _library(path: Path) -> Any:
    if not path.is_file():
        raise Refusal(f"--tokenizer {path}: no such file; give bytes, a tokenizer.json or the size of a vocabulary")
    try:
        found = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
        found.no_truncation()  # which would lose the rest of a document
        found.no_padding()
        if not found.get_vocab():
            raise ValueError("its vocabulary is empty")
        return found
    except ModuleNotFoundError:
        raise Refusal(f"--tokenizer {path}: needs tokenizers; pip install tokenizers, or use bytes") from None
    except Exception as error:  # the package raises plain ones
        raise Refusal(f"--tokenizer {path}: cannot be read: {str(error).splitlines()[0]}") from None


def tokens_of(text: Path | None, tokenizer: Tokenizer, kept_in: Path) -> NDArray[Any]:
    """The stream of a text, uint16 or uint32 [tokens], memory-mapped.

    Args:
        text: a file; a folder, of which all .txt files are read in the order of their paths; a file of tokens, .bin;
            None: what comes with Evenkeel, which is small and not memory-mapped unless it has a tokenizer of its own.
        tokenizer: of the text.
        kept_in: the folder in which the tokens of a text are stored when it is read for the first time.

    Raises:
        Refusal: there is no such text.
    """
    if text is None and tokenizer.name == "bytes":
        return np.concatenate([*_stream([BUILT_IN], tokenizer)])
    path = text or BUILT_IN
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise Refusal(f"--text {path}: " + ("has no .txt files" if path.is_dir() else "no such file or folder"))
    for file in files:
        if not os.access(file, os.R_OK):
            raise Refusal(f"--text {file}: no permission to read it; fix its permissions")
    if path.is_dir() or path.suffix != ".bin":
        path = _tokenized(files, tokenizer, kept_in)
    if not (size := path.stat().st_size) or size % tokenizer.dtype.itemsize:
        raise Refusal(f"--text {path}: {size} bytes are not {tokenizer.dtype} tokens of --tokenizer {tokenizer.name}")
    return np.memmap(path, tokenizer.dtype, mode="r")


def _stream(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[NDArray[Any]]:
    """The tokens of all documents, piece by piece; `end` after each document."""
    for file in files:
        if not file.stat().st_size:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
            begin = 0
            for end in [*(found.start() for found in re.finditer(FORM_FEED, text)), len(text)]:
                if re.compile(rb"\S").search(text, begin, end):
                    # a library must see all of a document
                    step = PIECE if tokenizer.name == "bytes" else end - begin
                    for place in range(begin, end, step):
                        yield tokenizer.encode(text[place : min(place + step, end)])
                    yield np.array([tokenizer.end], tokenizer.dtype)
                begin = end + 1


def _tokenized(files: Sequence[Path], tokenizer: Tokenizer, folder: Path) -> Path:
    """The file with the tokens of a text. Of several processes one writes it, whole or not at all, and others wait."""
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    tokenizer.encode(b"")  # may be refused
    rules = "" if tokenizer.name == "bytes" else Path(tokenizer.name).read_bytes()
    path = folder / f"tokens-{hashlib.sha256(repr((2, seen, rules)).encode()).hexdigest()[:16]}.bin"

    def write(file: IO[bytes]) -> None:
        for tokens in _stream(files, tokenizer):
            file.write(tokens.tobytes())

    if path.is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".tokens.lock").open("a") as turn:
            try_lock(turn, inf)
            if not path.is_file():
                say(f"evenkeel: --text: tokenizing {len(files)} files to {path}", to_stderr=True)
                write_atomically(path, write)
    except OSError as error:
        raise Refusal(f"--data-dir {folder}: cannot write the tokens there: {error.strerror or error}") from None
    return path


class Windows(Dataset[Tensor]):
    """Windows of a stretch of a stream, each of which begins with the last token of the one before, so that every token
    but the first is predicted once. int64 [length + 1] each, with `PAD` after the end of the stretch.

    Args:
        tokens: the stream.
        start: place of the stretch's first token.
        stop: one past its last.
        length: tokens to predict.
        size: of the vocabulary.
    """

    def __init__(self, tokens: NDArray[Any], start: int, stop: int, length: int, size: int) -> None:
        self.tokens, self.start, self.stop, self.length, self.size = tokens, start, stop, length, size

    def __len__(self) -> int:
        return -(-(self.stop - self.start - 1) // self.length)

    def __getitem__(self, index: int) -> Tensor:
        """Return a window.

        Raises:
            EndedByData: a token is not in the vocabulary.
        """
        begin = self.start + index * self.length
        found = self.tokens[begin : min(begin + self.length + 1, self.stop)].astype(np.int64)
        if (largest := int(found.max())) >= self.size:
            raise EndedByData(
                f"--text: has a token {largest}, but --tokenizer has {self.size}; name the tokenizer of this file"
            )
        return torch.from_numpy(np.pad(found, (0, self.length + 1 - len(found)), constant_values=PAD))

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned loader process, which maps the file itself."""
        state, mapped = {**self.__dict__}, self.tokens
        if isinstance(mapped, np.memmap):
            state["tokens"], state["file"] = None, (str(mapped.filename), mapped.dtype)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if file := state.pop("file", None):
            path, dtype = file
            state["tokens"] = np.memmap(path, dtype, mode="r")
        self.__dict__.update(state)
