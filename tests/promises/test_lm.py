"""The task `lm` through a kill and on other numbers of ranks: the same bits (the control: test_tree.py)."""

from pathlib import Path

import pytest

from tests.support.small_runs import interrupt, job_of, starts, trained, weights_of

NET = "--seq-len 16 --width 16 --layers 2 --heads 2 --dropout 0.1 --batch-size 8 --micro-batch 1 --reduce tree"
job = job_of("lm", f"{NET} --max-steps 60 --log-every 1 --eval-every 1000 --checkpoint-every 10")


@pytest.mark.slow
def test_the_bits_are_the_same_through_a_kill_and_on_other_numbers_of_ranks(tmp_path: Path, run_dir: Path) -> None:
    trained(1, job(tmp_path / "undisturbed"))
    interrupt(3, run_dir, job(run_dir, "--checkpoint-activations"), step=20)
    trained(2, job(run_dir))
    assert len(starts(run_dir)) == 2
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
