"""Augmented and mixed images: the same bits on any number of ranks and loader processes."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.processes import read
from tests.support.small_files import TRAIN as SAMPLES
from tests.support.small_files import write_cifar
from tests.support.small_runs import interrupt, small_job, told_step, trained, weights_of

pytestmark = pytest.mark.slow


def test_augmented_and_mixed_bits_are_the_same_on_any_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_FILES", json.dumps({"CIFAR10": write_cifar(tmp_path, 10)}))
    moved = tmp_path / "moved"  # on another node the data lie elsewhere
    moved.symlink_to(tmp_path)
    mixed = ["--augment", "basic", "--mixup", 0.2, "--cutmix", 1.0, "--label-smoothing", 0.1]
    options = ["--dataset", "cifar10", "--model", "shufflenet_v2_x0_5", *mixed, "--data-dir"]
    options = ["--hold", tmp_path / "slow", *options]
    trained(0, small_job(tmp_path / "alone", *options, tmp_path))

    run_dir = tmp_path / "stopped"
    for ranks, number in ((2, signal.SIGTERM), (3, signal.SIGKILL)):
        words = small_job(run_dir, *options, moved, "--checkpoint-every", 1, "--num-workers", ranks - 1)
        interrupt(ranks, run_dir, words, told_step(run_dir) + 1, number, slow=tmp_path / "slow")
    assert 1 <= read(run_dir, "status.json")["step"] < 8
    trained(1, small_job(run_dir, *options, moved))
    assert read(run_dir)["world_sizes"] == [2, 3, 1]
    assert read(run_dir)["samples_seen"] == 2 * SAMPLES
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")
    assert read(run_dir)["metrics"] == read(tmp_path / "alone")["metrics"]


def test_the_control_mixed_by_a_generator_of_the_process_the_bits_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (0, 2):
        trained(ranks, small_job(tmp_path / str(ranks), "--max-steps", 2, task="OwnDice"))
        trained(ranks, small_job(tmp_path / f"{ranks} ours", "--max-steps", 2, "--mixup", 0.4))
    assert weights_of(tmp_path / "0") != weights_of(tmp_path / "2")
    assert weights_of(tmp_path / "0 ours") == weights_of(tmp_path / "2 ours")
