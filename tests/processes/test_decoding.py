"""A run that goes on with another decoder of JPEGs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenkeel.tasks.decoding import jpeg_decoders
from tests.support.processes import TRAIN, read, run
from tests.support.small_files import write_folder


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
