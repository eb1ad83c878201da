"""`evenkeel data`: what it prints and returns."""

from pathlib import Path

import pytest

from tests.run.test_checkpoint import flip_a_bit
from tests.support.shards import tars
from tests.support.typed import typed


def test_index_and_verify(tmp_path: Path) -> None:
    tars(tmp_path, [20, 10])
    code, out, _ = typed("data index", tmp_path)
    assert (code, out.partition(", shards: 2, ")[0]) == (0, f"{tmp_path}/shards.index.json: 30 samples, tar")
    assert typed("data verify", tmp_path) == (0, "2 of 2 shards match the index\n", "")

    flip_a_bit(path := tmp_path / "train-001.tar")  # the size stays
    told = f"{path}: DAMAGED: its sha256 differs from the index\n1 of 2 shards match the index\n"
    assert typed("data verify", tmp_path) == (1, told, "")

    tars(tmp_path, [20, 10])
    (table,) = tmp_path.glob("*.npy")
    flip_a_bit(table)
    told = f"{table}: DAMAGED: its contents do not match its name; index the folder again\n"
    assert typed("data verify", tmp_path) == (1, told, "")


@pytest.mark.parametrize(
    ("words", "line"),
    [("index", "has no shards"), ("index/none", "No such file or directory"), ("verify", "has no shards")],
)
def test_bad_folders_are_refused_in_a_line(tmp_path: Path, words: str, line: str) -> None:
    action, *below = words.split("/")
    code, _, err = typed("data", action, folder := tmp_path.joinpath(*below))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"evenkeel: {folder}: ")
    assert line in err
