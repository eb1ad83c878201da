"""The built-in tasks in training: augmentation, mixing, label smoothing, and the promises with all of them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenkeel.classify import Classify
from evenkeel.cli import parse
from evenkeel.data import Seeded
from evenkeel.errors import Refusal
from evenkeel.regress import Regress

from .processes import ROOT, TRAIN, finish, finish_all, fork_ranks, read, records, run, run_forked
from .small_files import TRAIN as SAMPLES
from .small_files import write_cifar, write_folder, write_idx
from .test_train import wait_for_step

TASKS = ROOT / "tests" / "small_task.py"


class Fixed(nn.Module):
    """A network whose outputs are given."""

    def __init__(self, *outputs: torch.Tensor) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, images: torch.Tensor) -> Any:
        self.seen = images
        return self.outputs if len(self.outputs) > 1 else self.outputs[0]


def small_batch(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = Classify().train_dataset().__getitems__(list(range(count)))  # type: ignore[attr-defined]
    return images, labels


@pytest.mark.parametrize("kind", ["basic", "trivial", "rand"])
@pytest.mark.parametrize("dataset", ["digits", "fake"])
def test_augmentation_is_the_samples_own(kind: Any, dataset: Any) -> None:
    task = Classify(dataset=dataset, augment=kind, image_size=16 if dataset == "fake" else 0)
    whole = Classify(dataset=dataset, image_size=task.image_size).train_dataset()
    train = Seeded(task.train_dataset(), seed=0, purpose="train")
    first = train._sample(0, 5)[0]
    assert (first.shape, first.dtype) == (whole[5][0].shape, torch.uint8)
    assert torch.equal(train._sample(0, 5)[0], first)
    found = [train._sample(epoch, 5)[0] for epoch in range(20)]
    assert len({image.numpy().tobytes() for image in found}) > 5, "each epoch has its own"
    assert isinstance(task.test_dataset(), type(whole)), "nothing random in the test"


def test_digits_are_not_mirrored_and_photographs_are() -> None:
    """A shift by at most one pixel and no flip: each result is one of nine."""
    plain = Classify().train_dataset()[5][0]
    padded = F.pad(plain, (1, 1, 1, 1))
    shifts = {padded[:, y : y + 8, x : x + 8].numpy().tobytes() for x in range(3) for y in range(3)}
    train = Seeded(Classify(augment="basic").train_dataset(), seed=0, purpose="train")
    assert {train._sample(epoch, 5)[0].numpy().tobytes() for epoch in range(60)} == shifts
    fake = Classify(dataset="fake", augment="basic", image_size=8)
    whole = fake._whole(train=True)[5][0]
    padded = F.pad(torch.stack([whole, whole.flip(-1)]), (1, 1, 1, 1))
    both = {p[:, y : y + 8, x : x + 8].numpy().tobytes() for p in padded for x in range(3) for y in range(3)}
    train = Seeded(fake.train_dataset(), seed=0, purpose="train")
    assert {train._sample(epoch, 5)[0].numpy().tobytes() for epoch in range(200)} == both


@pytest.mark.parametrize("options", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}], ids=str)
def test_mixing_is_the_micro_batchs_own_and_only_in_training(options: dict[str, float]) -> None:
    task, batch = Classify(**options), small_batch()
    model = Fixed(torch.randn(6, 10, requires_grad=True))
    plain = Classify().loss(model, batch)
    found = []
    for seed in (1, 1, *range(2, 12)):
        torch.manual_seed(seed)
        loss = task.loss(model, batch).item()
        found.append((loss, model.seen.numpy().tobytes()))
    assert found[0] == found[1]
    assert len(set(found)) > 8
    assert sum(loss != plain.item() for loss, _ in found) > 8, "the labels are mixed as well"
    assert task.loss(model.eval(), batch).item() == plain.item()
    assert torch.equal(model.seen, task.inputs(batch[0]))
    assert batch[0].dtype == torch.uint8, "what came is as it was"


def test_label_smoothing_and_auxiliary_outputs() -> None:
    torch.manual_seed(0)
    batch, outputs = small_batch(), [torch.randn(6, 10) for _ in range(3)]
    smooth = Classify(label_smoothing=0.1).loss(Fixed(outputs[0]), batch)
    log = F.log_softmax(outputs[0], 1)
    expected = -(0.9 * log[range(6), batch[1]] + 0.1 * log.mean(1)).mean()
    torch.testing.assert_close(smooth, expected)
    values = Classify(label_smoothing=0.1).metrics(Fixed(outputs[0]), batch)["loss"]
    torch.testing.assert_close(values, F.cross_entropy(outputs[0], batch[1], reduction="none"))
    each = [F.cross_entropy(output, batch[1]) for output in outputs]
    torch.testing.assert_close(Classify().loss(Fixed(*outputs), batch), each[0] + 0.4 * (each[1] + each[2]))


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_outputs_train(name: str) -> None:
    task = Classify(dataset="fake", image_size=299, model_=name, fake_classes=3)
    batch = torch.utils.data.default_collate([task.train_dataset()[i] for i in range(2)])
    model = task.model()
    task.loss(model, batch).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert task.metrics(model.eval(), batch)["accuracy"].shape == (2,)


def test_grey_images_for_a_network_of_colour_ones_are_enlarged_and_repeated() -> None:
    task = Classify(model_="resnet18", image_size=32)
    seen = task.inputs(small_batch()[0])
    assert seen.shape == (6, 3, 32, 32)
    assert torch.equal(seen[:, 0], seen[:, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "--label-smoothing 1.0: must be below 1"),
        ({"mixup": -0.1}, "--mixup -0.1: must be at least 0"),
        ({"cutmix": float("nan")}, "--cutmix nan: must be at least 0"),
        ({"image_size": -1}, "--image-size -1: must be at least 0"),
        ({"model_": "resnet19"}, "--model resnet19: is neither cnn nor"),
        ({"pretrained": True}, "--pretrained: there are no published weights of --model cnn"),
        ({"fake_samples": 0}, "--fake-samples 0"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        Classify(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.multiprocess
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


def test_the_linear_model_refuses_what_cannot_be() -> None:
    with pytest.raises(Refusal, match=r"^--outputs 0: must be at least 1"):
        Regress(outputs=0)


def job(ranks: int, run_dir: Path, *more: object, task: str = "Small") -> list[subprocess.Popen[str]]:
    """A small run on so many ranks; 0: without a process group."""
    shape = ["--epochs", 2, "--batch-size", 24, "--micro-batch", 4, "--reduce", "tree", "--log-every", 1]
    options = ["--task", f"{TASKS}:{task}", "--run-dir", run_dir, "--wandb", "disabled", *shape, *more]
    return fork_ranks(ranks, TRAIN, *options)


def weights_of(run_dir: Path) -> str:
    return str(read(run_dir)["weights_sha256"])


@pytest.mark.multiprocess
def test_augmented_and_mixed_the_bits_are_the_same_on_any_number_of_ranks_and_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a SIGTERM on two ranks, `kill -9` of all on three, and an end on one."""
    monkeypatch.setenv("SMALL_FILES", json.dumps({"CIFAR10": write_cifar(tmp_path, 10)}))
    moved = tmp_path / "moved"  # on another node the data lie elsewhere
    moved.symlink_to(tmp_path)
    mixed = ["--augment", "basic", "--mixup", 0.2, "--cutmix", 1.0, "--label-smoothing", 0.1]
    options = ["--dataset", "cifar10", "--model", "shufflenet_v2_x0_5", *mixed, "--data-dir"]
    options = ["--hold", tmp_path / "slow", *options]
    finish_all(job(0, tmp_path / "alone", *options, tmp_path))

    run_dir = tmp_path / "stopped"
    (tmp_path / "slow").touch()
    for ranks, number in ((2, signal.SIGTERM), (3, signal.SIGKILL)):
        done = records(run_dir, "train")[-1]["step"] if ranks == 3 else 0
        started = job(ranks, run_dir, *options, moved, "--checkpoint-every", 1, "--num-workers", ranks - 1)
        wait_for_step(run_dir, done + 1, started[0])
        for rank in started:
            rank.send_signal(number)
        for rank in started:
            finish(rank)
    assert 1 <= read(run_dir, "status.json")["step"] < 8
    (tmp_path / "slow").unlink()
    finish_all(job(1, run_dir, *options, moved))
    assert read(run_dir)["world_sizes"] == [2, 3, 1]
    assert read(run_dir)["samples_seen"] == 2 * SAMPLES
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")
    assert read(run_dir)["metrics"] == read(tmp_path / "alone")["metrics"]


@pytest.mark.multiprocess
def test_the_control_mixed_by_a_generator_of_the_process_the_bits_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (0, 2):
        finish_all(job(ranks, tmp_path / str(ranks), "--max-steps", 2, task="OwnDice"))
        finish_all(job(ranks, tmp_path / f"{ranks} ours", "--max-steps", 2, "--mixup", 0.4))
    assert weights_of(tmp_path / "0") != weights_of(tmp_path / "2")
    assert weights_of(tmp_path / "0 ours") == weights_of(tmp_path / "2 ours")


def told_of(path: str, run_dir: Path) -> list[int]:
    """How often each rank's log names a file."""
    logs: Sequence[Path] = sorted((run_dir / "logs").rglob("rank-*.log"))
    return [log.read_text().count(path) for log in logs]


@pytest.mark.multiprocess
def test_bad_images_end_a_run_or_are_skipped_alike_on_any_number_of_ranks_and_loaders(tmp_path: Path) -> None:
    paths = write_folder(tmp_path)
    # the test's is not in the first micro-batch, which comes before training
    bad, bad_test = paths[10], sorted((tmp_path / "val").rglob("*.jpg"))[-2]
    for path in (bad, bad_test):
        path.write_bytes(path.read_bytes()[:300])
    options = ["--dataset", "imagefolder", "--data-dir", tmp_path, "--image-size", 16, "--augment", "trivial"]
    skip = [*options, "--on-bad-sample", "skip"]
    finish_all(job(0, tmp_path / "alone", *skip))
    finish_all(job(3, tmp_path / "three", *skip, "--num-workers", 2))
    assert weights_of(tmp_path / "alone") == weights_of(tmp_path / "three")
    assert read(tmp_path / "alone")["metrics"] == read(tmp_path / "three")["metrics"]
    assert read(tmp_path / "alone")["metrics"]["test/left_out"] == pytest.approx(1 / 20)
    for path in (bad, bad_test):
        assert told_of(str(path), tmp_path / "alone") == [1], "in two epochs and two evaluations once"
        told = told_of(str(path), tmp_path / "three")
        assert sum(told) >= 1
        assert max(told) == 1, "by either of two loader processes, and only once"

    (failed,) = job(0, tmp_path / "ended", *options, "--num-workers", 2)
    done = finish(failed)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"evenkeel: training sample 10, {bad}, does not decode: OSError: ")
    status = read(tmp_path / "ended", "status.json")
    assert line == f"evenkeel: {status['reason']}"

    content = bad.read_bytes()
    bad.unlink()
    (refused,) = job(0, tmp_path / "ended", *skip)
    line = finish(refused).stderr
    assert f"the training data had {SAMPLES} samples and has {SAMPLES - 1} now" in line
    bad.write_bytes(content)
    finish_all(job(0, tmp_path / "ended", *skip))
    assert weights_of(tmp_path / "ended") == weights_of(tmp_path / "alone"), "continued as its message advises"


def test_the_default_job_does_not_wait_for_torchvision() -> None:
    made = "task.train_dataset(), task.test_dataset(), task.model()"
    script = (
        f"import sys; from evenkeel.cli import parse; _, task = parse([]); {made}; print('torchvision' in sys.modules)"
    )
    assert run([sys.executable, "-c", script]).stdout == "False\n"


@pytest.mark.multiprocess
def test_the_old_command_trains_mnist_from_files(tmp_path: Path) -> None:
    write_idx(tmp_path / "MNIST" / "raw")
    own = ["--dataset", "mnist", "--data-dir", tmp_path, "--run-dir", tmp_path / "run", "--max-steps", 3]
    typed = [sys.executable, TRAIN, "-n", 1, "-g", 1, "-nr", 0, *own, "--log-every", 1, "--wandb", "disabled"]
    run([str(word) for word in typed])
    summary = read(tmp_path / "run")
    assert summary["state"] == "finished"
    assert summary["world_sizes"] == [1]
    assert len(records(tmp_path / "run", "train")) == 3
    weights = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert weights["classifier.weight"].shape == (10, 64 * 14 * 14)
