"""torchmetrics in a run on 1, 2 and 3 ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError

from tests.support.measured_task import PATH, Measured, of_scores
from tests.support.processes import TRAIN, finish, finish_all, fork_ranks, read
from tests.support.small_runs import options, the_line

SHAPE = ["--max-steps", 12, "--batch-size", 16, "--micro-batch", 4, "--reduce", "tree", "--eval-every", 100]


def test_the_same_digits_on_1_2_and_3_ranks_and_those_of_torchmetrics(tmp_path: Path) -> None:
    for ranks in (1, 2, 3):
        finish_all(fork_ranks(ranks, TRAIN, *options(f"{PATH}:Measured", tmp_path / str(ranks), *SHAPE)))
    said = [read(tmp_path / str(ranks))["metrics"] for ranks in (1, 2, 3)]
    assert len(set(map(json.dumps, said))) == 1, "to the last digit"

    task = Measured()
    model = task.model()
    model.load_state_dict(torch.load(tmp_path / "3" / "model.pt", weights_only=True))
    for name, dataset in task.test_dataset().items():
        points, labels, _ = dataset.tensors
        with torch.no_grad():
            scores = model(points)
        found = {f"{name}/{metric}": own(scores.softmax(1), labels) for metric, own in of_scores().items()}
        cells = found.pop(f"{name}/confusion").flatten().tolist()
        assert [said[0][f"{name}/cell_{i}"] for i in range(9)] == cells
        assert sum(cells) == len(dataset), "and not once for each rank"
        assert found == {metric: said[0][metric] for metric in found}
        mse = float(MeanSquaredError()(scores, nn.functional.one_hot(labels, 3).float()))
        assert said[0][f"{name}/mse"] == pytest.approx(mse, rel=1e-6)


def test_a_metric_that_keeps_all_scores_is_refused_in_a_line_before_anything_is_written(tmp_path: Path) -> None:
    (refused,) = fork_ranks(0, TRAIN, *options(f"{PATH}:Refused", tmp_path / "run", *SHAPE))
    done = finish(refused)
    assert done.returncode == 2
    assert the_line(done.stderr).startswith(
        "auroc: the state 'preds' of a MulticlassAUROC is combined by cat, not by sum;"
    )
    assert not (tmp_path / "run").exists()
