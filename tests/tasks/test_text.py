"""Text as tokens: documents, tokenizers, the file that keeps the tokens, and windows of it."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evenkeel.common.errors import EndedByData, Refusal
from evenkeel.tasks import text
from evenkeel.tasks.text import BUILT_IN, PAD, Tokenizer, Windows, tokens_of

BYTES = Tokenizer("bytes")


def test_what_comes_with_evenkeel_is_one_novel_in_24_documents(tmp_path: Path) -> None:
    tokens = tokens_of(None, BYTES, tmp_path / "unused")
    text = BUILT_IN.read_bytes()
    assert text.isascii()
    assert (tokens == BYTES.end).sum() == 24
    parts = np.split(tokens, np.flatnonzero(tokens == BYTES.end) + 1)
    assert BYTES.decode(parts[23][:10].tolist()) == "Chapter 24"
    assert b"\f".join(bytes(part[:-1].tolist()) for part in parts[:-1]) == text
    assert not (tmp_path / "unused").exists(), "it needs no folder that can be written to"


def test_a_text_is_tokenized_once_and_memory_mapped(tmp_path: Path) -> None:
    folder, kept = tmp_path / "texts", tmp_path / "kept"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "1.txt").write_bytes(b"third")
    (folder / "a.txt").write_bytes(b"first\fsecond\f \n")
    (folder / "notes.md").write_bytes(b"no text")
    expected = [*b"first", 256, *b"second", 256, *b"third", 256]
    tokens = tokens_of(folder, BYTES, kept)
    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == expected
    (file,) = kept.glob("*.bin")
    written = file.stat().st_mtime_ns
    assert tokens_of(folder, BYTES, kept).tolist() == expected
    assert file.stat().st_mtime_ns == written
    assert tokens_of(file, BYTES, tmp_path / "none").tolist() == expected, "it is a --text of its own"
    (folder / "b" / "1.txt").write_bytes(b"another")
    assert tokens_of(folder, BYTES, kept)[-8:].tolist() == [*b"another", 256]


def test_windows_predict_every_token_but_the_first_once() -> None:
    tokens = np.arange(100, 111, dtype=np.uint16)
    windows = Windows(tokens, 0, len(tokens), 4, 257)
    assert [windows[i].tolist() for i in range(len(windows))] == [
        [100, 101, 102, 103, 104],
        [104, 105, 106, 107, 108],
        [108, 109, 110, PAD, PAD],
    ]
    assert windows[0].dtype == torch.int64
    assert len(Windows(tokens, 0, 9, 4, 257)) == 2, "no window of nothing"
    with pytest.raises(EndedByData, match="has a token 110, but --tokenizer has 110"):
        Windows(tokens, 0, len(tokens), 4, 110)[2]


def test_a_spawned_process_maps_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 100_000)
    windows = Windows(tokens_of(tmp_path / "a.txt", BYTES, tmp_path), 10, 90_001, 8, 257)
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert isinstance(again.tokens, np.memmap)
    assert torch.equal(again[3], windows[3])
    assert len(again) == len(windows)


def test_a_long_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 3)
    (tmp_path / "a.txt").write_bytes(b"0123456\f \f789")
    (tmp_path / "b.txt").write_bytes(b"")
    expected = [*b"0123456", 256, *b"789", 256]
    assert tokens_of(tmp_path, BYTES, tmp_path / "kept").tolist() == expected


def test_a_vocabulary_above_65536_tokens_has_four_bytes_each(tmp_path: Path) -> None:
    np.array([7, 100_000], np.uint32).tofile(tmp_path / "t.bin")
    assert tokens_of(tmp_path / "t.bin", Tokenizer("100001"), tmp_path).tolist() == [7, 100_000]
    assert Tokenizer("50257").end == 50256, "as nanoGPT writes GPT-2's"
    assert Tokenizer("65536").dtype == np.uint16


def test_a_tokenizer_of_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    vocabulary = {"anne": 0, "elliot": 1, "?": 2}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.enable_truncation(max_length=1)
    made.enable_padding(length=9)
    made.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer(str(tmp_path / "t.json"))
    assert (tokenizer.size, tokenizer.end) == (4, 3), "its own, and one that ends a document"
    (tmp_path / "a.txt").write_bytes(b"anne elliot\fanne wentworth")
    assert tokens_of(tmp_path / "a.txt", tokenizer, tmp_path / "kept").tolist() == [0, 1, 3, 0, 2, 3]
    assert tokens_of(tmp_path / "a.txt", BYTES, tmp_path / "kept")[0] == ord("a"), "another file of tokens"
    assert tokenizer.decode([0, 1]) == "anne elliot"
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(Refusal, match=r"^--tokenizer .*t.json: cannot be read: "):
        Tokenizer(str(tmp_path / "t.json"))


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "t.json").write_text("{}")

    def refused(said: str, text: str, tokenizer: str = "bytes", kept: str = "kept") -> None:
        with pytest.raises(Refusal, match=said):
            tokens_of(tmp_path / text, Tokenizer(tokenizer), tmp_path / kept)

    refused("^--text .*odd.bin: 3 bytes are not uint16 tokens of --tokenizer bytes$", "odd.bin")
    refused("^--text .*nowhere: no such file or folder$", "nowhere")
    refused("^--text .*empty: has no .txt files$", "empty")
    refused("^--data-dir .*a.txt: cannot write the tokens there: File exists$", "a.txt", kept="a.txt")
    refused("^--tokenizer 300: a number cannot tokenize text; use bytes or a tokenizer.json$", "a.txt", "300")
    refused("^--tokenizer 1: a vocabulary has from 2 to", "a.txt", "1")
    refused("^--tokenizer gpt2: no such file; give bytes, a tokenizer.json or the size", "a.txt", "gpt2")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(r"needs tokenizers; pip install tokenizers, or use bytes$", "a.txt", str(tmp_path / "t.json"))
