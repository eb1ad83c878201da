"""Shards: what is read is what was written, in any process; and what is wrong with a folder is told in a line."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from evenkeel.common.errors import EndedByData, Refusal
from evenkeel.data import shards as shards_module
from evenkeel.data.shard_index import MANIFEST, read_index, write_index
from evenkeel.data.shards import Shards
from tests.support.shards import numbered, tars, write_lines, write_mds, write_tar


def key_and_size(sample: dict[str, Any]) -> tuple[int, int]:
    return sample["cls"], len(sample["seg.bin"])


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def test_tars(tmp_path: Path) -> None:
    write_index(tars(tmp_path, [30, 1, 20]))
    shards = Shards(tmp_path, {"bin": len}, block=8)
    assert [shards[n] for n in range(len(shards))] == [
        {"__key__": f"{n:05}", "cls": n, "seg.bin": n} for n in range(51)
    ]
    assert shards[-1]["cls"] == 50
    assert shards.order_blocks().lengths.tolist() == [8, 8, 8, 6, 1, 8, 8, 4]
    assert Shards(tmp_path, fields=["cls"])[7] == {"__key__": "00007", "cls": 7}
    assert Shards(tmp_path, {"cls": bytes}, ["cls"], lambda it: it["cls"])[7] == b"7"
    with pytest.raises(Refusal, match=r"its samples have no png; they have cls, seg.bin"):
        Shards(tmp_path, fields=["png"])


def test_members_that_webdataset_leaves_out(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x/0.5/a", {"TXT": b"t"}), ("x/__meta__/b", {"txt": b""}), ("c", {"txt": b"c"})])
    write_index(tmp_path)
    assert [dict(it) for it in Shards(tmp_path)] == [  # the key of the first ends at the last folder's first dot
        {"__key__": "x/0.5/a", "txt": "t"},
        {"__key__": "x/__meta__/b", "txt": ""},
        {"__key__": "c", "txt": "c"},
    ]


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "é" * n, "n": n} for n in range(20)]
    write_lines(tmp_path / "a.jsonl", rows[:12])
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows[12:])))  # no newline at the end
    write_index(tmp_path)
    assert list(Shards(tmp_path)) == rows
    assert Shards(tmp_path, {"n": str}, ["n"])[3] == {"n": "3"}


def test_parquet_keeps_a_few_row_groups(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(3):
        table = arrow.table({"n": list(range(10 * number, 10 * number + 10)), "x": [[1.5, 2.0]] * 10})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    write_index(tmp_path)
    shards = Shards(tmp_path, window=2)
    assert list(shards) == [{"n": n, "x": [1.5, 2.0]} for n in range(30)]
    assert len(shards._kept) == 3
    assert shards.order_blocks().lengths.tolist() == [4, 4, 2] * 3
    assert Shards(tmp_path, fields=["n"], transform=lambda it: it["n"])[29] == 29


def test_mds(tmp_path: Path) -> None:
    columns = {"n": "int64", "name": "str", "image": "png"}
    rows = [{"n": struct.pack("<q", -n), "name": b"n" * n, "image": b"i" * (3 * n)} for n in range(9)]
    write_mds(tmp_path / "shard.00000.mds", columns, rows[:5], 8)
    write_mds(tmp_path / "shard.00001.mds", columns, rows[5:], 8)
    write_index(tmp_path)
    shards = Shards(tmp_path)
    assert list(shards) == [{"n": -n, "name": "n" * n, "image": b"i" * (3 * n)} for n in range(9)]
    write_mds(tmp_path / "shard.00001.mds", columns | {"image": "pkl"}, rows[5:], 8)
    (tmp_path / "shard.00000.mds").unlink()
    write_index(tmp_path)
    with pytest.raises(Refusal, match="image is encoded as pkl, which is not read"):
        Shards(tmp_path)
    assert Shards(tmp_path, fields=["n"])[0] == {"n": -5}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_processes_read_the_same(tmp_path: Path, start: str) -> None:
    shards = Shards(write_index(tars(tmp_path, [40] * 3)) and tmp_path, transform=key_and_size)
    expected = [(n, n) for n in range(120)]
    assert shards[0] == (0, 0), "a file is open before the fork"
    loader = DataLoader(shards, 10, num_workers=2, multiprocessing_context=start, collate_fn=as_list)
    assert [sample for batch in loader for sample in batch] == expected


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "_opened", shards_module.lru_cache(4)(shards_module._File))
    write_index(tars(tmp_path, [2] * 20))
    before = len([*Path("/proc/self/fd").iterdir()])
    assert len(list(Shards(tmp_path))) == 40
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 5, "four and the table"


def test_a_pickle_holds_no_file_and_no_table(tmp_path: Path) -> None:
    shards = Shards(write_index(tars(tmp_path, [200])) and tmp_path)
    before = len(pickle.dumps(shards))
    shards[0]
    assert len(pickle.dumps(shards)) == before < 2000


def broken(folder: Path, how: str) -> None:
    path = folder / "train-001.tar"
    if how == "cut in a member":
        os.truncate(path, 600)
    elif how == "cut between members":
        os.truncate(path, 4096)
    elif how == "joined":
        path.write_bytes(path.read_bytes() * 2)
    elif how == "missing":
        write_tar(path, [*numbered(10, 2), ("00050", {"cls": b"1"})])
    elif how == "more":
        write_tar(path, [*numbered(10, 2), ("00050", {"cls": b"1", "seg.bin": b"", "txt": b""})])
    elif how == "key twice":
        write_tar(path, [*numbered(10, 2), *numbered(10, 1)])
    elif how == "member twice":
        write_tar(path, [("1", {"cls": b"1", "CLS": b"1"})])
    elif how == "others":
        write_tar(path, [("1", {"txt": b"1"})])
    elif how == "copy":
        path.write_bytes((folder / "train-000.tar").read_bytes())
    elif how == "compressed":
        path.rename(folder / "train-001.tar.gz")
    elif how == "formats":
        write_lines(folder / "a.jsonl", [{"a": 1}])
    elif how in ("link", "sparse"):
        with (path.parent / "big.cls").open("wb") as file:
            file.truncate(1 << 20)
        (path.parent / "same.cls").hardlink_to(path.parent / "big.cls")
        both = ["--hard-dereference", "--sparse"] if how == "sparse" else []
        names = [*both, "big.cls", "same.cls"]
        subprocess.run(["tar", "--create", "--file", path, "--directory", path.parent, *names], check=True)
    elif how == "no samples":
        write_tar(path, [])
    elif how == "nothing":
        for file in folder.iterdir():
            file.unlink()


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("cut in a member", "train-001.tar: is truncated or damaged"),
        ("cut between members", "train-001.tar: is truncated or damaged: it has no end mark"),
        ("joined", "train-001.tar: is truncated or damaged: there is more after its end mark"),
        ("missing", "train-001.tar: sample 00050 has no seg.bin"),
        ("more", "train-001.tar: sample 00050 has txt, which"),
        ("key twice", "train-001.tar: the key 00010 comes twice"),
        ("member twice", "train-001.tar: sample 1 has two members cls"),
        ("others", "train-001.tar: its samples have txt, and those of train-000.tar cls, seg.bin"),
        ("copy", "train-001.tar: is a copy of train-000.tar"),
        ("compressed", "train-001.tar.gz: is compressed"),
        ("formats", "holds shards of several formats, jsonl, tar"),
        ("link", "train-001.tar: same.cls is a link, so its bytes do not stand here; make the tar with --hard-deref"),
        ("sparse", "train-001.tar: big.cls is sparse, so its bytes do not stand here; make the tar without --sparse"),
        ("no samples", "train-001.tar: has no samples"),
        ("nothing", "holds no shards"),
    ],
)
def test_what_cannot_be_indexed_is_refused_in_a_line(tmp_path: Path, how: str, line: str) -> None:
    broken(tars(tmp_path, [10, 10]), how)
    with pytest.raises(Refusal) as refused:
        write_index(tmp_path)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / MANIFEST).exists()


def test_lines_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": ')
    with pytest.raises(Refusal, match=r"a.jsonl: is truncated or damaged"):
        write_index(tmp_path)


def test_opening_checks_the_sizes(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"has no index of its shards; run .python -m evenkeel data index"):
        Shards(tars(tmp_path, [10, 10]))
    write_index(tmp_path)
    assert read_index(tmp_path).samples == 20
    os.truncate(tmp_path / "train-001.tar", 5000)
    with pytest.raises(Refusal, match=r"train-001.tar: has 5000 bytes, where the index says 30720"):
        Shards(tmp_path)
    (tmp_path / "train-001.tar").unlink()
    with pytest.raises(Refusal, match=r"train-001.tar: is gone"):
        Shards(tmp_path)
    write_index(tmp_path)
    tars(tmp_path, [10, 10])
    with pytest.raises(Refusal, match=r"train-001.tar is not in its index; run"):
        Shards(tmp_path)
    for content in ("{", '{"version": 1, "samples": "10"}'):
        (tmp_path / MANIFEST).write_text(content)
        with pytest.raises(Refusal, match="cannot be read"):
            Shards(tmp_path)


def test_a_window_of_row_groups_is_decoded_once(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"n": list(range(110))}), tmp_path / "a.parquet", row_group_size=10)
    write_index(tmp_path)
    shards, decoded = Shards(tmp_path, window=8), set[int]()  # 11 groups: one window, longer than 8
    for number in shards.order_blocks().shuffled(np.arange(110, dtype=np.uint64), 0, 0).tolist():
        assert shards[number] == {"n": number}
        decoded |= shards._kept.keys()
    assert decoded == set(range(11)) == set(shards._kept), "none had to go and come back"


def test_a_bad_sample_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("x", {"cls": b"1"}), ("y", {"cls": b"one"})])
    write_index(tmp_path)
    with pytest.raises(EndedByData, match=r"a.tar: sample 1 of the file \(y\): cls cannot be read: ValueError"):
        Shards(tmp_path)[1]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.jsonl").write_text('{"a": 1}\n{broken}\n  \r\n[1]\n{"a": 2}\n')
    write_index(tmp_path / "b")
    assert len(Shards(tmp_path / "b")) == 4, "a blank line is none"
    with pytest.raises(EndedByData, match=r"a.jsonl: sample 2 of the file: .* it is no JSON object"):
        Shards(tmp_path / "b")[2]
    with pytest.raises(EndedByData, match=r"a.jsonl: sample 1 of the file: .* cannot be read: JSONDecodeError"):
        Shards(tmp_path / "b")[1]
    (tmp_path / "c").mkdir()
    array = np.array([object()])
    np.save(tmp_path / "object.npy", array)
    write_tar(tmp_path / "c" / "a.tar", [("x", {"npy": (tmp_path / "object.npy").read_bytes()})])
    write_index(tmp_path / "c")
    with pytest.raises(EndedByData, match="Object arrays cannot be loaded"):
        Shards(tmp_path / "c")[0]


def test_an_index_that_is_made_again_replaces_the_old_one(tmp_path: Path) -> None:
    write_index(tars(tmp_path, [10]))
    old = Shards(tmp_path)
    assert old[3]["cls"] == 3
    write_tar(tmp_path / "train-001.tar", numbered(10, 5))
    write_index(tmp_path)
    assert len(Shards(tmp_path)) == 15
    assert old[4]["cls"] == 4, "a set that is open goes on"
    assert len(list(tmp_path.glob("shards.index.*"))) == 2
