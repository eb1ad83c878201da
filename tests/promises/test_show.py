"""What a task shows of its evaluations: once, of the first batch, by rank 0; and all ranks hear of the metrics."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.support import needs
from tests.support.processes import TRAIN, checked, finish, fork_ranks, read, records
from tests.support.small_runs import SUPPORT, options, trained, weights_of

SHOWN = f"{SUPPORT / 'shown_task.py'}:"
SHAPE = ["--batch-size", 20, "--micro-batch", 5, "--epochs", 2, "--reduce", "tree", "--keeper", "off"]


def test_rank_0_shows_the_first_batch_and_all_ranks_hear_of_the_metrics(tmp_path: Path) -> None:
    for ranks in (0, 2):
        run_dir = tmp_path / str(ranks)
        trained(ranks, options(f"{SHOWN}Shown", run_dir, *SHAPE, "--notes", run_dir))
        steps = [record["step"] for record in records(run_dir, "eval")]
        assert len(steps) == 2
        found = sorted((run_dir / "media").rglob("*"))
        assert [path.name for path in found if path.is_file()] == [f"step-{step:08d}.png" for step in steps]
        assert Image.open(found[-1]).size == (4, 5), "a row for each sample of the first micro-batch"
        for rank in range(max(1, ranks)):
            heard = [json.loads(line) for line in (run_dir / f"heard-{rank}").read_text().splitlines()]
            assert [step for step, _ in heard] == steps
            assert heard[-1][1] == read(run_dir)["metrics"]
    # dice thrown in show() are nobody else's
    trained(0, options(f"{SHOWN}Silent", tmp_path / "silent", *SHAPE))
    assert weights_of(tmp_path / "0") == weights_of(tmp_path / "2") == weights_of(tmp_path / "silent")
    assert read(tmp_path / "0")["metrics"] == read(tmp_path / "silent")["metrics"]


def test_what_cannot_be_shown_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    (rank,) = fork_ranks(0, TRAIN, *options(f"{SHOWN}Wrong", tmp_path / "run", *SHAPE))
    done = checked(finish(rank), 1)
    assert "'scores' is [5, 4, 1, 1] in torch.float32: give a number, a picture" in done.stderr
    assert read(tmp_path / "run", "status.json")["step"] == 0


@pytest.mark.slow
def test_only_the_set_that_decides_is_shown_and_nothing_without_a_run(tmp_path: Path) -> None:
    run_dir, calls = tmp_path / "run", tmp_path / "shown"
    words = options(f"{SHOWN}Counting", run_dir, *SHAPE, "--validation", 0.2, "--notes", tmp_path)
    trained(0, words)
    assert calls.read_text() == "x" * 3, "in the rehearsal, and after each epoch; not for the test data at the end"
    trained(0, [*words, "--eval-only"])
    assert calls.read_text() == "x" * 3


@needs.sharding
def test_with_shards_the_picture_and_the_predictions_are_those_of_one_rank(tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2, 3):
        run_dir = tmp_path / str(ranks)
        more = ["--shard", "on", "--save-predictions", "--notes", run_dir]
        trained(ranks, options(f"{SHOWN}Shown", run_dir, *SHAPE, *more))
        pictures = [path.read_bytes() for path in sorted((run_dir / "media").rglob("*.png"))]
        assert len(pictures) == 2
        found.append((pictures, json.loads((run_dir / "predictions" / "test.json").read_text()), weights_of(run_dir)))
    assert len(found[0][1]["predictions"]) == 23
    assert found[0] == found[1] == found[2]
