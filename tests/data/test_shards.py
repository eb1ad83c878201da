"""Shards: what is read is what was written, in any process; and what is wrong with a folder is told in a line."""

import io
import json
import os
import pickle
import random
import re
import struct
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from evenkeel.common.errors import EndedByData, Refusal
from evenkeel.data.shard_index import MANIFEST, read_index, write_index
from evenkeel.data.shards import Shards, _File
from tests.support.damage import damaged, scratched
from tests.support.raised import refusal_of
from tests.support.shards import numbered, tars, write_lines, write_mds, write_tar


def np_bytes(array: np.ndarray) -> bytes:
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def key_and_size(sample: dict[str, Any]) -> tuple[int, int]:
    return sample["cls"], len(sample["seg.bin"])


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def test_tars(tmp_path: Path) -> None:
    write_index(tars(tmp_path, [30, 1, 20]))
    shards = Shards(tmp_path, {"bin": len}, block=8)
    expected = [{"__key__": f"{n:05}", "cls": n, "seg.bin": n} for n in range(51)]
    assert [shards[n] for n in range(len(shards))] == expected
    assert shards[-1]["cls"] == 50
    assert shards.order_blocks().lengths.tolist() == [8, 8, 8, 6, 1, 8, 8, 4]
    assert Shards(tmp_path, fields=["cls"])[7] == {"__key__": "00007", "cls": 7}
    assert Shards(tmp_path, {"cls": bytes}, ["cls"], lambda it: it["cls"])[7] == b"7"
    assert "its samples have no png; they have cls, seg.bin" in refusal_of(Shards, tmp_path, fields=["png"])


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


def test_columns_of_one_name_in_parquet_are_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array([1, 2]), arrow.array([3, 4])]
    parquet.write_table(arrow.Table.from_arrays(columns, names=["a", "a"]), tmp_path / "a.parquet")
    said = refusal_of(write_index, tmp_path)
    assert "a.parquet: two of its columns have the name 'a', and would be read as one" in said


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
    assert "image is encoded as pkl, which is not supported" in refusal_of(Shards, tmp_path)
    assert Shards(tmp_path, fields=["n"])[0] == {"n": -5}


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_loader_processes_read_the_same(tmp_path: Path, start: str, workers: int) -> None:
    shards = Shards(write_index(tars(tmp_path, [40] * 3)) and tmp_path, transform=key_and_size)
    expected = [(n, n) for n in range(120)]
    assert shards[0] == (0, 0), "a file is open before the fork"
    loader = DataLoader(shards, 10, num_workers=workers, multiprocessing_context=start, collate_fn=as_list)
    assert [sample for batch in loader for sample in batch] == expected


def test_a_pickle_holds_no_file_and_no_table(tmp_path: Path) -> None:
    shards = Shards(write_index(tars(tmp_path, [200])) and tmp_path)
    before = len(pickle.dumps(shards))
    shards[0]
    assert len(pickle.dumps(shards)) == before < 2000


def big_twice(folder: Path, *options: str) -> None:
    """A tar by GNU tar of two files that are one on the disk, and have a hole."""
    with (folder / "big.cls").open("wb") as file:
        file.truncate(1 << 20)
    (folder / "same.cls").hardlink_to(folder / "big.cls")
    command = ["tar", "--create", "--file", folder / "train-001.tar", "--directory", folder, *options]
    subprocess.run([*command, "big.cls", "same.cls"], check=True)


def rewrite(*samples: tuple[str, dict[str, bytes]], after: int = 0) -> Callable[[Path], object]:
    """Write the second of two tars anew, with so many of its samples before these."""
    return lambda folder: write_tar(folder / "train-001.tar", [*numbered(10, after), *samples])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut in a member": (lambda it: os.truncate(it / "train-001.tar", 600), "train-001.tar: is truncated or damaged"),
    "cut between members": (
        lambda it: os.truncate(it / "train-001.tar", 4096),
        "train-001.tar: is truncated or damaged: it has no end mark",
    ),
    "joined": (
        lambda it: (it / "train-001.tar").write_bytes((it / "train-001.tar").read_bytes() * 2),
        "train-001.tar: is truncated or damaged: there is data after its end mark",
    ),
    "missing": (rewrite(("00050", {"cls": b"1"}), after=2), "train-001.tar: sample 00050 has no seg.bin"),
    "more": (
        rewrite(("00050", {"cls": b"1", "seg.bin": b"", "txt": b""}), after=2),
        "train-001.tar: sample 00050 has txt, which",
    ),
    "key twice": (rewrite(*numbered(10, 1), after=2), "train-001.tar: the key 00010 comes twice"),
    "member twice": (rewrite(("1", {"cls": b"1", "CLS": b"1"})), "train-001.tar: sample 1 has two members cls"),
    "others": (
        rewrite(("1", {"txt": b"1"})),
        "train-001.tar: its samples have txt, but those of train-000.tar cls, seg.bin",
    ),
    "no samples": (rewrite(), "train-001.tar: has no samples"),
    "copy": (
        lambda it: (it / "train-001.tar").write_bytes((it / "train-000.tar").read_bytes()),
        "train-001.tar: is a copy of train-000.tar",
    ),
    "compressed": (
        lambda it: (it / "train-001.tar").rename(it / "train-001.tar.gz"),
        "train-001.tar.gz: is compressed",
    ),
    "formats": (lambda it: write_lines(it / "a.jsonl", [{"a": 1}]), "has shards of several formats, jsonl, tar"),
    "link": (big_twice, "same.cls is a link, so its content is not here; make the tar with --hard-deref"),
    "sparse": (
        lambda it: big_twice(it, "--hard-dereference", "--sparse"),
        "train-001.tar: big.cls is sparse, so its content is not here; make the tar without --sparse",
    ),
    "nothing": (lambda it: [file.unlink() for file in it.iterdir()], "has no shards"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_indexed_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    harm, line = BROKEN[name]
    harm(tars(tmp_path, [10, 10]))
    assert line in refusal_of(write_index, tmp_path)
    assert not (tmp_path / MANIFEST).exists()


def mds(
    offsets: Sequence[int] = (0, 12, 24),
    names: Any = ("n", "t"),
    encodings: Any = ("int64", "str"),
    sizes: Any = (8, None),
    samples: int = 2,
    heads: Sequence[int] = (0, 0),
) -> bytes:
    """An MDS file of two samples; offsets are from where samples begin."""
    about = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    header, contents = json.dumps(about).encode(), b"".join(struct.pack("<Iq", size, 7) for size in heads)
    begin = 4 + 4 * len(offsets) + len(header)
    return struct.pack(f"<{1 + len(offsets)}I", samples, *(begin + at for at in offsets)) + header + contents


LOOP = tarfile.TarInfo("loop")
LOOP.size = -512


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (mds(samples=2**32 - 1), "damaged: its header says 4,294,967,295 samples, whose offsets do not fit into its"),
        (
            mds(samples=2**32 - 1)[:30],
            "damaged: its header says 4,294,967,295 samples, whose offsets do not fit into its 30 b",
        ),
        (b"\2\0", "damaged: error: unpack requires a buffer of 4 bytes"),
        (mds(offsets=(0, 18, 12, 24), samples=3), "damaged: its offset 2 is 1"),
        (mds(offsets=(-100, 12, 24)), "damaged: its offset 0 is "),
        (mds(offsets=(0, 12, 25)), "damaged: it should have "),
        (mds(offsets=(0, 4, 24)), "damaged: its sample 0 has 4 bytes, its columns need at least 12"),
        (mds(names="nt"), "damaged: its names, encodings and sizes of columns are not lists"),
        (mds(sizes=[8]), "damaged: zip() argument 3 is shorter"),
        (mds(names=["n", 3]), "[3, 'str', None] is not a column; create it again"),
        (mds(names=["n", ["t"]]), "[['t'], 'str', None] is not a column"),
        (mds(encodings=["int64", ["str"]]), "['t', ['str'], None] is not a column"),
        (mds(sizes=[-8, None]), "['n', 'int64', -8] is not a column"),
        (mds(sizes=[8, 1e400]), "['t', 'str', inf] is not a column"),
        (mds(names=["n", "\ud800"]), "damaged: 'utf-8' codec can't encode character '\\ud800'"),
        (mds(names=["n", "n"]), "two of its columns have the name 'n', and would be read as one; create it again"),
        (mds().replace(b'{"column_names"', b'["column_names"').replace(b"}", b"]"), "damaged: "),
        # tarfile goes round and round in a negative size; some releases refuse it themselves, in other words
        (tarfile.TarInfo("a").tobuf() + LOOP.tobuf(tarfile.GNU_FORMAT) + bytes(4096), "is truncated or damaged: "),
        (b'{"a": 1}\n{"a": ', "is truncated or damaged"),
    ],
)
def test_files_that_others_have_made_are_refused_in_a_line(tmp_path: Path, content: bytes, line: str) -> None:
    name = "a.tar" if content[257:262] == b"ustar" else "a.jsonl" if content[:1] == b"{" else "a.mds"
    (tmp_path / name).write_bytes(content)
    said = refusal_of(write_index, tmp_path)
    assert said.startswith(f"{tmp_path / name}: ")
    assert line in said


@pytest.mark.parametrize("heads", [(40, 0), (2**32 - 1, 0)])
def test_nothing_is_read_outside_a_sample(tmp_path: Path, heads: Sequence[int]) -> None:
    (tmp_path / "a.mds").write_bytes(mds(heads=heads))
    write_index(tmp_path)
    with pytest.raises(EndedByData, match=r"a.mds: sample 0 .*: its columns have \d+ bytes, but the sample 12"):
        Shards(tmp_path)[0]
    assert Shards(tmp_path)[1] == {"n": 7, "t": ""}


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"x\\udC00y"', b'"\xed\xa0\x80"'])
def test_half_a_character_in_json_is_refused_with_its_place(tmp_path: Path, text: bytes) -> None:
    whole = '{"a": "\\ud83d\\ude00", "\\ud83d\\ude00": "😀"}\n'.encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(whole + b'{"a": %s}\n' % text + whole)
    write_index(tmp_path)
    assert Shards(tmp_path)[2] == {"a": "😀", "😀": "😀"}
    with pytest.raises(EndedByData, match=r"a.jsonl: sample 1 of the file: sample cannot be read: Unicode\w+Error"):
        Shards(tmp_path)[1]
    path.write_bytes(b'{"a": %s}\n' % text)
    with pytest.raises(Refusal, match=r"a.jsonl: is truncated or damaged: the line at byte 0: 'utf-8' codec can't"):
        write_index(tmp_path)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "its version is True": lambda index: index.update(version=True),
    "its format is ['tar']": lambda index: index.update(format=["tar"]),
    "it is of 'mds' files, but the folder has tar": lambda index: index.update(format="mds", fields=[["a", "b", 1]]),
    "its shards is [{'name': 3": lambda index: index["shards"][0].update(name=3),
    "its shards is [{'name': {}": lambda index: index["shards"][0].update(name={}),
    "its shards is 7": lambda index: index.update(shards=7),
    "its shards is [{'more'": lambda index: index["shards"].insert(0, {"more": 1, **index["shards"].pop(0)}),
    "it says 10 samples": lambda index: index.update(table=""),
    "its table is '../../x.npy'": lambda index: index.update(table="../../x.npy"),
    "its table is 3": lambda index: index.update(table=3),
    "3 is not a name of a field": lambda index: index.update(fields=[3, "cls"]),
    "['cls'] is not a name of a field": lambda index: index.update(fields=[["cls"], "x"]),
    "two of its columns have the name 'cls'": lambda index: index.update(fields=["cls", "cls"]),
    "TypeError: 'int' object is not": lambda index: index.update(fields=3),
    "does not have 10 samples of 3 fields": lambda index: index.update(fields=["a", "b", "c"]),
    "does not have 11 samples of 2 fields": lambda index: index["shards"][0].update(samples=11),
    "its shards is [{'name': 'train-000.tar', 'samples': -1": lambda index: index["shards"][0].update(samples=-1),
    "it says 10 samples, in row groups 10": lambda index: index["shards"][0].update(groups=[10]),
    "KeyError: 'version'": lambda index: index.pop("version"),
    "TypeError: ": lambda index: index.update(other=1),
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_manifest_that_was_changed_is_refused_in_a_line(tmp_path: Path, line: str) -> None:
    write_index(tars(tmp_path, [10]))
    index = json.loads((tmp_path / MANIFEST).read_text())
    CHANGES[line](index)
    (tmp_path / MANIFEST).write_text(json.dumps(index))
    with pytest.raises(Refusal, match=re.escape(line)) as refused:
        Shards(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / MANIFEST}: cannot be read: ")


@pytest.mark.parametrize(
    ("name", "value"), [("offset", -512), ("size", -1), ("size", 2**40), ("offset", 2**62), ("size", 10**6)]
)
def test_a_table_that_leads_out_of_the_file_is_not_followed(tmp_path: Path, name: str, value: int) -> None:
    write_index(tars(tmp_path, [10]))
    (path,) = tmp_path.glob("*.npy")
    table = np.load(path)
    table[name][3, 1] = value
    np.save(path, table)
    with pytest.raises(EndedByData, match=r"train-000.tar: sample 3 of the file: .*: the index has offsets \["):
        Shards(tmp_path)[3]
    assert Shards(tmp_path)[4]["cls"] == 4


@pytest.mark.parametrize("harm", [b"", b"PK\3\4", b"\x93NUMPY\1\0\x10\0{'a': ((((((((((((", b"[" * 300])
def test_a_table_that_is_none_is_refused(tmp_path: Path, harm: bytes) -> None:
    write_index(tars(tmp_path, [10]))
    (path,) = tmp_path.glob("*.npy")
    path.write_bytes(harm)
    assert "shards.index.json: cannot be read" in refusal_of(Shards, tmp_path)


def in_a_line(folder: Path, act: Callable[..., Any], *arguments: Any) -> Any:
    """What this returns; None if it was refused in a short line with the folder in it."""
    told = str(folder)
    try:
        return act(*arguments)
    except (Refusal, EndedByData) as error:
        told = str(error)
    assert str(folder) in told
    assert len(told) < 1000
    return None


def indexed(folder: Path) -> dict[str, Path]:
    """A folder with shards and their index, of each format."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folders = {name: folder / name for name in ("tar", "lines", "mds", "rows", "work")}
    for path in folders.values():
        path.mkdir()
    tars(folders["tar"], [4])
    write_lines(folders["lines"] / "a.jsonl", [{"a": n, "t": "é" * n} for n in range(4)])
    rows = [{"n": b"8" * 8, "t": b"x" * n} for n in range(4)]
    write_mds(folders["mds"] / "a.mds", {"n": "int64", "t": "str"}, rows, 8)
    table = arrow.table({"n": [*range(9)], "t": ["é"] * 9})
    parquet.write_table(table, folders["rows"] / "a.parquet", row_group_size=4)
    work = folders.pop("work")
    for path in folders.values():
        write_index(path)
    return folders | {"work": work}


def test_random_damage_is_told_in_a_line(tmp_path: Path) -> None:
    """A few of some ten thousand that were tried: no other error, and no end of the memory."""
    folders = indexed(tmp_path)
    work, dice, outcomes = folders.pop("work"), random.Random(1), Counter[bool]()
    for _ in range(120):
        for path in work.iterdir():
            path.unlink()
        files = {path.name: path.read_bytes() for path in folders[dice.choice([*folders])].iterdir()}
        name = dice.choice(sorted(files))
        if name == MANIFEST and dice.random() < 0.8:
            files[name] = json.dumps(damaged(json.loads(files[name]), dice)).encode()
        else:
            files[name] = scratched(files[name], dice)
        for each, content in files.items():
            (work / each).write_bytes(content)
        is_shard = not name.startswith("shards.index.")
        data = (not is_shard or in_a_line(work, write_index, work)) and in_a_line(work, Shards, work)
        outcomes[bool(data)] += 1
        for number in range(min(len(data or ()), 5)):
            in_a_line(work, data.__getitem__, number)
    assert min(outcomes.values()) > 10, "the control: some are read, and some are not"


def test_opening_checks_the_sizes(tmp_path: Path) -> None:
    def refused(line: str) -> None:
        with pytest.raises(Refusal, match=line):
            Shards(tmp_path)

    tars(tmp_path, [10, 10])
    refused(r"has no index of its shards; run .python -m evenkeel data index")
    write_index(tmp_path)
    assert read_index(tmp_path).samples == 20
    os.truncate(tmp_path / "train-001.tar", 5000)
    refused(r"train-001.tar: has 5000 bytes, but the index says 30720")
    (tmp_path / "train-001.tar").unlink()
    refused(r"train-001.tar: is gone")
    write_index(tmp_path)
    tars(tmp_path, [10, 10])
    refused(r"train-001.tar is not in its index; run")
    for content in ("{", '{"version": 1, "samples": "10"}'):
        (tmp_path / MANIFEST).write_text(content)
        refused("cannot be read")


@pytest.mark.parametrize(
    ("name", "content", "sample", "line"),
    [
        ("a.tar", [{"cls": b"1"}, {"cls": b"one"}], 1, r"\(1\): cls cannot be read: ValueError"),
        ("a.tar", [{"npy": np_bytes(np.array([object()]))}], 0, "Object arrays cannot be loaded"),
        ("a.jsonl", '{"a": 1}\n{broken}\n  \r\n[1]\n{"a": 2}\n', 2, "it is not a JSON object"),  # a blank line is none
        ("a.jsonl", '{"a": 1}\n{broken}\n  \r\n[1]\n{"a": 2}\n', 1, "cannot be read: JSONDecodeError"),
    ],
)
def test_a_bad_sample_is_named(tmp_path: Path, name: str, content: Any, sample: int, line: str) -> None:
    if name == "a.tar":
        write_tar(tmp_path / name, [(str(key), members) for key, members in enumerate(content)])
    else:
        (tmp_path / name).write_text(content)
    write_index(tmp_path)
    with pytest.raises(EndedByData, match=rf"{name}: sample {sample} of the file.*{line}"):
        Shards(tmp_path)[sample]


def test_an_index_that_is_made_again_replaces_the_old_one(tmp_path: Path) -> None:
    write_index(tars(tmp_path, [10]))
    old = Shards(tmp_path)
    assert old[3]["cls"] == 3
    write_tar(tmp_path / "train-001.tar", numbered(10, 5))
    write_index(tmp_path)
    assert len(Shards(tmp_path)) == 15
    assert old[4]["cls"] == 4, "a set that is open goes on"
    assert len(list(tmp_path.glob("shards.index.*"))) == 2


@pytest.mark.slow
def test_a_sample_of_more_than_two_gibibytes_is_read(tmp_path: Path) -> None:
    """Although Linux reads less at a time."""
    path, size = tmp_path / "huge", (2 << 30) + 10
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 3)
        file.write(b"end")
    content = _File(path, size).read(0, size)
    assert (len(content), content[-4:]) == (size, b"\0end")
