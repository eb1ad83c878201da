"""The built-in optimizers keep the same bits through a kill and on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import read
from tests.support.small_runs import interrupt, recipe_job, refusal, trained, weights_of
from tests.training.test_optimizers import WITH_MUON

KINDS = {
    "muon": ["--optimizer", "muon", "--momentum", 0.9, "--betas", 0.9, 0.95],
    "adamw": ["--betas", 0.8, 0.95],
    "sgd": ["--optimizer", "sgd", "--momentum", 0.5],
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("muon", marks=WITH_MUON),
        pytest.param("adamw", marks=pytest.mark.slow),
        pytest.param("sgd", marks=pytest.mark.long),
    ],
)
def test_killed_on_two_ranks_and_finished_on_one_the_bits_are_the_same(tmp_path: Path, kind: str) -> None:
    run_dir, slow, options = tmp_path / "run", tmp_path / "slow", ["--reduce", "tree", *KINDS[kind]]
    words = recipe_job(run_dir, *options, "--checkpoint-every", 2, "--slow", slow)
    interrupt(2, run_dir, words, step=5, slow=slow)
    trained(1, words)
    trained(2, recipe_job(tmp_path / "plain", *options))
    assert read(run_dir)["world_sizes"] == [2, 1]
    assert weights_of(run_dir) == weights_of(tmp_path / "plain")
    other = [*options[:-1], 0.3]
    line = refusal(recipe_job(run_dir, *other))
    assert "has another run: --momentum was" in line or "has another run: --betas was" in line
    trained(0, recipe_job(tmp_path / "other", *other))
    assert weights_of(tmp_path / "other") != weights_of(run_dir), "the control: the option has an effect"
