"""The task `regress`: it learns, and its options go through a file."""

from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.tasks.command_line import parse
from evenkeel.tasks.regress import Regress
from tests.support.processes import TRAIN, read, run_forked


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_the_linear_model_learns_its_random_data(loss: Any, tmp_path: Path) -> None:
    shape = ["--outputs", 2, "--samples", 512, "--epochs", 12, "--lr", 0.1, "--wandb", "disabled"]
    run_forked(TRAIN, "--task", "regress", "--loss", loss, *shape, "--run-dir", tmp_path)
    metrics = read(tmp_path)["metrics"]
    if loss == "mse":
        assert metrics["test/loss"] < 0.05, "the noise has a variance of 0.01, and the targets one of about 1.6"
    else:
        assert metrics["test/accuracy"] > 0.9
    assert f'loss = "{loss}"' in (tmp_path / "config.toml").read_text()
    task = Regress(loss_=loss, outputs=2, samples=512)
    assert parse(["--config", str(tmp_path / "config.toml")])[1] == task
    (tmp_path / "wrong.toml").write_text('task = "regress"\nloss = "l1"\n')
    with pytest.raises(Refusal, match=r"wrong.toml: loss = 'l1' has the wrong type; expected Literal\['mse', 'bce'\]"):
        parse(["--config", str(tmp_path / "wrong.toml")])


def test_it_refuses_what_cannot_be() -> None:
    with pytest.raises(Refusal, match=r"^--outputs 0: must be at least 1"):
        parse(["--task", "regress", "--outputs", "0"])
