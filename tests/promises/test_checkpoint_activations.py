"""--checkpoint-activations changes no bit, on any number of ranks, and may change when a run is continued."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import read, records
from tests.support.small_runs import interrupt, job_of, refusal, trained, weights_of

SHAPE = "--epochs 2 --batch-size 16 --micro-batch 4 --reduce tree --log-every 1"
job = job_of("blocks_task.py:Blocks", SHAPE)
OPTION = "--checkpoint-activations"


def results_of(run_dir: Path) -> tuple[str, Any, list[float]]:
    return weights_of(run_dir), read(run_dir)["metrics"], [line["train/loss"] for line in records(run_dir, "train")]


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("Blocks", []),
        pytest.param("Blocks", ["--precision", "bf16", "--ema", 0.9], marks=pytest.mark.slow),
        pytest.param("Blocks", ["--model-parallel", 2], marks=pytest.mark.long),
        pytest.param("Contrast", [], marks=pytest.mark.slow),
        pytest.param("Adversaries", [], marks=pytest.mark.long),
        pytest.param("Adversaries", ["--place", "generator=0,critic=1"], marks=pytest.mark.slow),
        pytest.param("Chosen", [], marks=pytest.mark.long),
    ],
)
def test_the_bits_are_those_of_runs_without_it_on_one_and_two_ranks(tmp_path: Path, task: str, more: list[Any]) -> None:
    trained(1, job(tmp_path / "without", *more, task=task))
    for ranks in (1, 2):
        trained(ranks, job(tmp_path / str(ranks), OPTION, *more, task=task))
        assert results_of(tmp_path / str(ranks)) == results_of(tmp_path / "without")


def test_the_control_a_naive_checkpoint_changes_the_model(tmp_path: Path) -> None:
    for task in ("Blocks", "NaiveBlocks"):
        trained(0, job(tmp_path / task, task=task))
    assert weights_of(tmp_path / "Blocks") != weights_of(tmp_path / "NaiveBlocks")


@pytest.mark.slow
def test_a_killed_run_goes_on_without_it(tmp_path: Path, run_dir: Path) -> None:
    shape = ["--epochs", 8, "--checkpoint-every", 1, "--keeper", "off"]
    trained(0, job(tmp_path / "without", *shape))
    interrupt(2, run_dir, job(run_dir, *shape, OPTION), step=4)
    trained(1, job(run_dir, *shape))
    assert read(run_dir)["world_sizes"] == [2, 1]
    assert weights_of(run_dir) == weights_of(tmp_path / "without")


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["tree", pytest.param("ring", marks=pytest.mark.long)])
def test_ranks_that_exchange_statistics_do_so_again(tmp_path: Path, reduce: str) -> None:
    words = ["--micro-batch", 8, "--sync-batchnorm", "--reduce", reduce]
    for name, more in (("without", []), ("with", [OPTION])):
        trained(2, job(tmp_path / name, *words, *more))
    assert results_of(tmp_path / "with") == results_of(tmp_path / "without")


def test_a_network_without_blocks_is_refused(run_dir: Path) -> None:
    line = refusal(job(run_dir, OPTION, task="Flat"))
    assert line.startswith("--checkpoint-activations: a Sequential has no repeated blocks")
    assert not run_dir.exists()
