"""`python -m evenkeel scaling` with real runs on one and two ranks."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.processes import run

SCALING = [sys.executable, "-m", "evenkeel", "scaling", "-g", "1,2", "--steps", "24", "--rounds", "1"]


def test_real_runs_give_tables_a_labelled_prediction_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run([*SCALING, "--json", "--output", str(tmp_path / "plot.svg"), "--", "--batch-size", "16"])
    found = json.loads(done.stdout)
    assert [row["batch"] for row in found["fixed global batch"]["rows"]] == [16, 16]
    assert [row["batch"] for row in found["fixed batch a rank"]["rows"]] == [16, 32]
    for table in found.values():
        assert table["prediction"]["measured"] is False
        assert table["prediction"]["ranks"] == 4
        for row in table["rows"]:
            assert row["efficiency"] + sum(row["lost"].values()) == pytest.approx(1)
    assert "round 1 of 1: 2 ranks, batch 32" in done.stderr, "progress"
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_a_run_that_cannot_start_is_explained_in_its_own_words() -> None:
    done = run([*SCALING, "--", "--batch-size", "4000"], expect=1)
    assert "the run on 1 rank ended with code 2: --batch-size 4000: the training data has only" in done.stderr
