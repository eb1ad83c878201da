"""`replay` and `audit` of runs whose data is a stream, made by the model, in shards, or a folder of images."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.support.processes import TRAIN, run_forked
from tests.support.shards import tars
from tests.support.small_runs import SUPPORT, options

SHAPE = "--batch-size 12 --micro-batch 3 --max-steps 10 --reduce tree --digest-every 1 --keep-every 4"


def images(folder: Path) -> Path:
    """Sixteen pictures of two classes, and as many for the test."""
    for part in ("train", "val"):
        for number in range(16):
            path = folder / part / f"class-{number % 2}" / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (24, 24), (16 * number, 255 - 16 * number, 90)).save(path)
    return folder


def shards(folder: Path) -> Path:
    """54 samples in four shards, with their index."""
    tars(folder, [9, 14, 11, 20])
    run_forked("-m", "evenkeel", "data", "index", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "refresh", "shards", "images"])
def test_steps_are_run_again_in_every_bit_and_samples_have_names(tmp_path: Path, kind: str) -> None:
    """On one process, from a checkpoint of any step. The control: with pictures that were changed it does not agree."""
    words = {
        "stream": lambda: (f"{SUPPORT / 'streams_task.py'}:Streamed",),
        "refresh": lambda: (f"{SUPPORT / 'refreshed_task.py'}:Refreshed",),
        "shards": lambda: (f"{SUPPORT / 'shards_task.py'}:Sharded", "--folder", shards(tmp_path / "data")),
        "images": lambda: ("classify", "--dataset", "imagefolder", "--data-dir", images(tmp_path / "data")),
    }
    task, *more = words[kind]()
    run = tmp_path / "run"
    run_forked(TRAIN, *options(task, run, *SHAPE.split(), "--log-every", 1, *more))
    found = run_forked("-m", "evenkeel", "replay", run, "--step", "6").stdout
    assert found.splitlines()[0] == "evenkeel: replayed from the checkpoint of step 4"
    assert found.splitlines()[-1] == "evenkeel: agrees in every bit (steps 5 to 6 compared)"
    if kind in ("shards", "images"):
        assert f"({tmp_path / 'data'}" in found, "the file of a sample, or its shard"
    audited = run_forked("-m", "evenkeel", "audit", run, "--segments", 9).stdout
    assert "WRONG" not in audited
    assert "shown by running them again: 1-10\n" in audited
    assert ("which a stream has not" in audited) == (kind == "stream")
    if kind == "images":
        for path in (tmp_path / "data" / "train").rglob("*.png"):
            Image.new("RGB", (24, 24), (90, 16, 255)).save(path)
        again = ("-m", "evenkeel", "replay", run, "--step", "6")
        assert "the training data has changed" in run_forked(*again, expect=2).stderr
        found = run_forked(*again, "--", "--other-data", expect=1).stdout
        assert found.splitlines()[-1].startswith("evenkeel: differs: from step 5 on"), found
