"""The task `lm` and `evenkeel sample`, by real processes."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import small_runs as runs
from tests.support.processes import TRAIN, contents_of, evenkeel, read, records, run_forked
from tests.support.small_runs import evaluation_of, options, the_line

SHAPE = ["--seq-len", 64, "--width", 32, "--layers", 1, "--heads", 2, "--batch-size", 32, "--micro-batch", 8]
STEPS = ["--max-steps", 400, "--lr", 0.01, "--clip-norm", 1, "--log-every", 50]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run_dir = tmp_path_factory.mktemp("runs") / "lm"
    runs.trained(2, options("lm", run_dir, *SHAPE, *STEPS))
    before = contents_of(run_dir)
    yield run_dir
    assert contents_of(run_dir) == before, "sample and --eval-only only read the run"


def sample(*arguments: object, expect: int = 0) -> str:
    done = evenkeel("sample", *arguments, expect=expect)
    return the_line(done.stderr) if expect else done.stdout


def test_it_learns_and_counts_tokens(trained: Path) -> None:
    metrics = read(trained)["metrics"]
    assert metrics["test/bits_per_byte"] < 4, "bytes without their neighbours have 4.4"
    assert metrics["validation/perplexity"] == pytest.approx(math.exp(metrics["validation/loss"]))
    assert records(trained, "train")[-1]["train/tokens_per_s"] > 0


def test_the_perplexity_has_the_same_digits_on_1_2_and_3_ranks(trained: Path) -> None:
    said = []
    for ranks in (1, 2, 3):
        done = runs.trained(ranks, options("lm", trained, *SHAPE, *STEPS, "--eval-only"))
        said.append(evaluation_of(done[0]))
    assert said[0] == said[1] == said[2]
    assert said[0]["metrics"]["validation/perplexity"] == read(trained)["metrics"]["validation/perplexity"]


def test_a_text_is_continued_by_the_seed(trained: Path) -> None:
    text = sample(trained, "It is a truth", "--tokens", 40)
    assert text.startswith("It is a truth")
    assert len(text) > 30
    assert sample(trained, "It is a truth", "--tokens", 40, "--checkpoint", "best", "--seed", 0) == text
    assert sample(trained, "It is a truth", "--tokens", 40, "--seed", 1) != text


def test_what_is_refused(trained: Path, tmp_path: Path) -> None:
    digits = tmp_path / "digits"
    run_forked(TRAIN, *options("classify", digits, "--max-steps", 1))
    assert sample(trained, "--checkpoint", 7, expect=2).startswith("--checkpoint 7: give last, best")
    assert sample(trained, "--temperature", -1, expect=2) == "--temperature -1.0: must be at least 0"
    assert sample(tmp_path, "x", expect=2) == f"{tmp_path}: no checkpoint there; name a run directory"
    assert sample(digits, "x", expect=2).startswith("the task Classify generates no text: define")
