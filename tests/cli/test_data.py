"""`evenkeel data`: what it prints and returns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenkeel.__main__ import run
from tests.support.shards import tars


def data(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["evenkeel", "data", *map(str, words)])
    return run()


def test_index_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tars(tmp_path, [20, 10])
    assert data(monkeypatch, "index", tmp_path) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/shards.index.json: 30 samples, tar, shards: 2, ")
    assert data(monkeypatch, "verify", tmp_path) == 0
    assert capsys.readouterr().out == "2 of 2 shards match the index\n"

    path = tmp_path / "train-001.tar"
    content = bytearray(path.read_bytes())
    content[-3000] ^= 1  # the size stays
    path.write_bytes(content)
    assert data(monkeypatch, "verify", tmp_path) == 1
    told = capsys.readouterr().out.splitlines()
    assert told == [f"{path}: DAMAGED: its sha256 differs from the index", "1 of 2 shards match the index"]

    tars(tmp_path, [20, 10])
    (table,) = tmp_path.glob("*.npy")
    content = bytearray(table.read_bytes())
    content[-1] ^= 1
    table.write_bytes(content)
    assert data(monkeypatch, "verify", tmp_path) == 1
    assert capsys.readouterr().out == f"{table}: DAMAGED: its contents do not match its name; index the folder again\n"


def test_bad_folders_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, line in [
        (("index", tmp_path), "has no shards"),
        (("index", tmp_path / "none"), "No such file or directory"),
        (("verify", tmp_path), "has no shards"),
    ]:
        assert data(monkeypatch, *words) == 2
        (err,) = capsys.readouterr().err.splitlines()
        assert err.startswith(f"evenkeel: {words[1]}: ")
        assert line in err
