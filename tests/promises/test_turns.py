"""An optimizer that steps in every third step, and a gradient penalty, through a kill and on other ranks."""

from pathlib import Path

import pytest

from tests.support.processes import TRAIN, records, run_forked
from tests.support.small_runs import interrupt, job_of, trained, weights_of
from tests.training.test_compilation import code  # noqa: F401  (a fixture)

pytestmark = pytest.mark.slow

job = job_of("turns_task.py:Turns", "--epochs 2 --batch-size 12 --micro-batch 3 --log-every 1")


@pytest.mark.parametrize("reduce", ["tree", pytest.param("ring", marks=pytest.mark.long)])
def test_turns_go_through_a_kill_and_other_numbers_of_ranks(tmp_path: Path, reduce: str) -> None:
    slow, run_dir, plain = tmp_path / "slow", tmp_path / "run", tmp_path / "undisturbed"
    words = job(run_dir, "--reduce", reduce, "--slow", slow)
    interrupt(2, run_dir, words, step=4, victims=1, slow=slow)
    trained(3, words)
    trained(0, job(plain, "--reduce", reduce))
    losses = [{it["step"]: it["train/d_loss"] for it in records(folder, "train")} for folder in (run_dir, plain)]
    if reduce == "tree":
        assert weights_of(run_dir) == weights_of(plain)
        assert losses[0].items() <= losses[1].items()
    # the short last step of an epoch leaves a rank of three idle
    assert losses[0] == pytest.approx({step: losses[1][step] for step in losses[0]}, rel=1e-3)


@pytest.mark.long
@pytest.mark.usefixtures("code")
def test_a_gradient_penalty_does_not_go_with_compile_and_a_line_says_so(tmp_path: Path) -> None:
    done = run_forked(TRAIN, *job(tmp_path / "run", "--compile"), expect=1)
    assert "evenkeel: --compile: the loss takes the gradient of a gradient" in done.stderr  # torch warns, too
