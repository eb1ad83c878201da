"""The built-in task `classify` in training: bad images, files of MNIST, and another decoder."""

import sys
from pathlib import Path

import pytest

from evenkeel.tasks.decoding import jpeg_decoders
from tests.support.processes import TRAIN, read, records, run
from tests.support.small_files import TRAIN as SAMPLES
from tests.support.small_files import write_folder, write_idx
from tests.support.small_runs import model_of, refusal, small_job, trained, weights_of


def test_bad_images_end_a_run_or_are_skipped_alike_on_any_number_of_ranks_and_loaders(tmp_path: Path) -> None:
    paths = write_folder(tmp_path)
    # the test's is not in the first micro-batch, which comes before training
    bad, bad_test = paths[10], sorted((tmp_path / "val").rglob("*.jpg"))[-2]
    for path in (bad, bad_test):
        path.write_bytes(path.read_bytes()[:300])
    options = ["--dataset", "imagefolder", "--data-dir", tmp_path, "--image-size", 16, "--augment", "trivial"]
    skip = [*options, "--on-bad-sample", "skip"]
    trained(0, small_job(tmp_path / "alone", *skip))
    trained(3, small_job(tmp_path / "three", *skip, "--num-workers", 2))
    assert weights_of(tmp_path / "alone") == weights_of(tmp_path / "three")
    assert read(tmp_path / "alone")["metrics"] == read(tmp_path / "three")["metrics"]
    assert read(tmp_path / "alone")["metrics"]["test/left_out"] == pytest.approx(1 / 20)
    for path in (bad, bad_test):
        for run_dir in (tmp_path / "alone", tmp_path / "three"):
            told = [log.read_text().count(str(path)) for log in (run_dir / "logs").rglob("rank-*.log")]
            assert max(told) == 1, "in two epochs and two evaluations, by either of two loader processes, and only once"

    line = refusal(small_job(tmp_path / "ended", *options, "--num-workers", 2), code=1)
    assert line.startswith(f"training sample 10, {bad}, does not decode: OSError: ")
    assert line == read(tmp_path / "ended", "status.json")["reason"]

    content = bad.read_bytes()
    bad.unlink()
    line = refusal(small_job(tmp_path / "ended", *skip))
    assert f"the training data had {SAMPLES} samples and has {SAMPLES - 1} now" in line
    bad.write_bytes(content)
    trained(0, small_job(tmp_path / "ended", *skip))
    assert weights_of(tmp_path / "ended") == weights_of(tmp_path / "alone"), "continued as its message advises"


def test_the_old_command_trains_mnist_from_files(tmp_path: Path) -> None:
    write_idx(tmp_path / "MNIST" / "raw")
    own = ["--dataset", "mnist", "--data-dir", tmp_path, "--run-dir", tmp_path / "run", "--max-steps", 3]
    run([sys.executable, TRAIN, "-n", 1, "-g", 1, "-nr", 0, *own, "--log-every", 1, "--wandb", "disabled"])
    summary = read(tmp_path / "run")
    assert (summary["state"], summary["world_sizes"]) == ("finished", [1])
    assert len(records(tmp_path / "run", "train")) == 3
    assert model_of(tmp_path / "run")["classifier.weight"].shape == (10, 64 * 14 * 14)


def test_a_run_that_goes_on_with_another_decoder_says_so_and_has_the_same_weights(tmp_path: Path) -> None:
    if "TorchCodec" not in jpeg_decoders():
        pytest.skip("TorchCodec has no decoder that loads here")
    write_folder(tmp_path)
    (tmp_path / "torchcodec.py").write_text("raise ImportError('as if it were not installed')\n")
    without = {"PYTHONPATH": str(tmp_path)}
    options = ["--dataset", "imagefolder", "--data-dir", tmp_path, "--image-size", 16, "--augment", "basic"]
    options += ["--batch-size", 8, "--micro-batch", 4, "--reduce", "tree", "--schedule", "constant"]

    def train(name: str, steps: int, env: dict[str, str]) -> str:
        command = [TRAIN, *options, "--run-dir", tmp_path / name, "--max-steps", steps, "--wandb", "disabled"]
        return run([sys.executable, *map(str, command)], env=env).stderr

    train("one", 6, without)
    train("two", 3, without)
    line = "evenkeel: WARNING: from step 3 on bit-for-bit equality is void: torchcodec (none) -> "
    assert [text for text in train("two", 6, {}).splitlines() if text.startswith(line)]
    one, two = (read(tmp_path / name)["weights_sha256"] for name in ("one", "two"))
    assert one == two, "the bits might have differed and did not"
