"""`python -m evenkeel checkpoint` as a user types it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evenkeel.run.checkpoint import MANIFEST, STATE, Checkpoints, step_folders
from evenkeel.training.state import sha256
from tests.run.test_checkpoint import as_it_was_before_kinds, edit_manifest, flip_a_bit, state, unfit
from tests.support.processes import contents_of, run, run_forked

BEST = ("accuracy", "max")


def checkpoint(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return run_forked("-m", "evenkeel", "checkpoint", *arguments, expect=expect)


def refusal(*arguments: object) -> str:
    done = checkpoint(*arguments, expect=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("evenkeel: ")
    return line.removeprefix("evenkeel: ")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with checkpoints at 5, 10 and 200, a snapshot at 210, and one that was set aside."""
    run_dir = tmp_path / "run"
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=9, best=BEST)
    for step, metrics in {5: {}, 10: {"accuracy": 0.9, "loss": 0.1}, 200: {"accuracy": 0.8, "loss": 0.2}}.items():
        checkpoints.save(state(step), metrics)
    checkpoints.rescue(state(210))
    (checkpoints.folder / "damaged-step-00000042-1700000000000000000").mkdir()
    return run_dir


@pytest.mark.parametrize("part", ["", "checkpoints"])
def test_list(run_dir: Path, part: str) -> None:
    before = contents_of(run_dir)
    header, *lines = checkpoint("list", run_dir / part).stdout.splitlines()
    assert header.split() == ["STEP", "KIND", "WRITTEN", "SIZE"]
    time, size = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", r"[\d.]+ kB"
    expected = [
        rf"   5  checkpoint  {time}  {size}",
        rf"  10  checkpoint  {time}  {size}  test/accuracy 0\.9000  test/loss 0\.1000  \(best\)",
        rf" 200  checkpoint  {time}  {size}  test/accuracy 0\.8000  test/loss 0\.2000",
        rf" 210  snapshot    {time}  {size}  \(newest\)",
        r"  42  set aside  +damaged-step-00000042-1700000000000000000",
    ]
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)
    assert contents_of(run_dir) == before, "it only looks"


def test_list_of_one_and_of_old_ones_and_of_broken_ones(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    assert "(best)" in checkpoint("list", folder / "step-00000010").stdout.splitlines()[1]
    edit_manifest(folder / "step-00000210", as_it_was_before_kinds)
    (folder / "step-00000010" / MANIFEST).unlink()
    lines = checkpoint("list", run_dir).stdout.splitlines()
    assert lines[2].split()[:2] == ["10", "damaged"]
    assert lines[2].endswith(f"{MANIFEST}: cannot be read: No such file or directory")
    assert lines[4].split()[:2] == ["210", "checkpoint"], "what it was is not known any more"


def test_a_list_does_not_wait_for_torch(run_dir: Path) -> None:
    code = "import sys, evenkeel.__main__ as m; m.main(); sys.exit('torch' in sys.modules)"
    run([sys.executable, "-c", code, "checkpoint", "list", str(run_dir)])


def test_inspect(run_dir: Path) -> None:
    lines = checkpoint("inspect", run_dir, "--step", 200).stdout.splitlines()
    path = run_dir / "checkpoints" / "step-00000200"
    assert lines[0].startswith(f"{path}: checkpoint of step 200, written ")
    assert lines[1] == "metrics: test/accuracy 0.8000  test/loss 0.2000"
    assert lines[2].startswith(f"file {STATE}: ")
    assert lines[3:] == ["model: 10 parameters, buffers counted too", "  w  float32 [10]", "optimizers: []"]
    newest = checkpoint("inspect", run_dir).stdout.splitlines()
    assert "snapshot of step 210" in newest[0]
    assert newest[1] == "metrics: no evaluation at this step"


def test_verify(run_dir: Path) -> None:
    done = checkpoint("verify", run_dir)
    assert [line.split(", ")[0] for line in done.stdout.splitlines()] == [
        f"step-{step:08d}: ok" for step in (5, 10, 200, 210)
    ]
    assert done.stderr == ""
    folder = run_dir / "checkpoints"
    flip_a_bit(folder / "step-00000010" / STATE)
    os.truncate(folder / "step-00000200" / STATE, 7)
    (folder / "step-00000210" / MANIFEST).unlink()
    before = contents_of(run_dir)
    five, ten, two_hundred, last = checkpoint("verify", run_dir, expect=1).stdout.splitlines()
    assert five.startswith("step-00000005: ok")
    assert ten.startswith(f"step-00000010: DAMAGED: {folder}/step-00000010/{STATE}: sha256 is ")
    assert two_hundred.startswith(f"step-00000200: DAMAGED: {folder}/step-00000200/{STATE}: has 7 bytes, should have ")
    assert last.startswith(f"step-00000210: DAMAGED: {folder}/step-00000210/{MANIFEST}: cannot be read")
    assert contents_of(run_dir) == before, "nothing is set aside"
    checkpoint("verify", folder / "step-00000005")
    checkpoint("verify", folder / "step-00000010", expect=1)


def test_verify_loads_what_it_verifies(run_dir: Path) -> None:
    """A manifest of the right sums makes no state of a file."""
    folder = run_dir / "checkpoints"
    unfit(folder / "step-00000010" / STATE, "no model")
    unfit(folder / "step-00000200" / STATE, "refused by weights_only")
    before = contents_of(run_dir)
    five, ten, two_hundred, last = checkpoint("verify", run_dir, expect=1).stdout.splitlines()
    assert ": ok, " in five
    assert ": ok, " in last
    expected = f"step-00000010: DAMAGED: {folder}/step-00000010/{STATE}: is not the state of a run: has no "
    assert ten == f"{expected}step, model, optimizers"
    assert two_hundred.startswith(f"step-00000200: DAMAGED: {folder}/step-00000200/{STATE}: does not load: ")
    assert contents_of(run_dir) == before


def test_export(run_dir: Path, tmp_path: Path) -> None:
    before, model = contents_of(run_dir), tmp_path / "model.pt"
    done = checkpoint("export", run_dir, "--step", 10, "-o", model)
    weights = torch.load(model, weights_only=True)
    assert torch.equal(weights["w"], torch.full((10,), 10.0))
    assert list(weights) == ["w"]
    assert done.stdout.endswith(f"sha256 of the weights {sha256(weights)}\n")
    assert contents_of(run_dir) == before
    content = model.read_bytes()
    assert refusal("export", run_dir, "--output", model) == f"--output {model}: exists already; name another file"
    assert model.read_bytes() == content
    checkpoint("export", run_dir, "--output", tmp_path / "newest.pt")
    assert torch.load(tmp_path / "newest.pt", weights_only=True)["w"][0] == 210
    assert "dp" in refusal("export", run_dir, "--output", tmp_path / "other.pt", "--as", "ddp")
    again = checkpoint("export", run_dir, "--step", 10, "--output", tmp_path / "dp.pt", "--as", "dp")
    assert again.stdout.split()[-1] == done.stdout.split()[-1], "the same weights"
    assert list(torch.load(tmp_path / "dp.pt", weights_only=True)) == ["module.w"]
    checkpoint("export", run_dir, "--step", 10, "-o", tmp_path / "model.safetensors", "--as", "safetensors")
    assert sha256(load_file(tmp_path / "model.safetensors")) == sha256(weights)


def test_a_damaged_one_is_not_exported_and_not_shown(run_dir: Path, tmp_path: Path) -> None:
    newest = step_folders(run_dir / "checkpoints")[-1]
    flip_a_bit(newest / STATE)
    for action in (["inspect"], ["export", "-o", tmp_path / "model.pt"]):
        done = checkpoint(*action, run_dir, expect=1)
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"evenkeel: damaged: {newest / STATE}: sha256 is ")
    assert not (tmp_path / "model.pt").exists()
    checkpoint("export", run_dir, "-o", tmp_path / "model.pt", "--step", 200)


def test_an_export_that_does_not_fit_leaves_nothing(run_dir: Path) -> None:
    # a limit of the kernel's: no file of this process may be longer
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 1; exec "$@"', "bash"]
    output = run_dir / "model.pt"
    command = [sys.executable, "-m", "evenkeel", "checkpoint", "export", str(run_dir), "-o", str(output)]
    done = run([*limited, *command], expect=1)
    assert done.stderr.splitlines() == [f"evenkeel: --output {output}: cannot be written: File too large"]
    assert not list(run_dir.glob("*model.pt*"))


def test_refusals(run_dir: Path, tmp_path: Path) -> None:
    places = "name a run directory, its checkpoints folder or one step-* folder"
    missing, empty, file = tmp_path / "missing", tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.touch()
    model = tmp_path / "model.pt"
    for action in (["list"], ["inspect"], ["verify"], ["export", "-o", model]):
        assert refusal(*action, missing) == f"{missing}: No such file or directory; {places}"
        assert refusal(*action, empty) == f"{empty}: no checkpoint there; {places}"
    assert refusal("verify", file) == f"{file}: Not a directory; {places}"
    absent = run_dir / "checkpoints" / "step-00000007"
    assert refusal("verify", absent) == f"{absent}: No such file or directory; {places}"
    there_are = f"--step 6: {run_dir} has no such checkpoint; there are 5, 10, 200, 210"
    assert refusal("inspect", run_dir, "--step", 6) == there_are
    assert refusal("export", run_dir, "--step", 6, "-o", model) == there_are
    nowhere = missing / "model.pt"
    no_folder = f"--output {nowhere}: there is no folder {missing}; make it first"
    assert refusal("export", run_dir, "-o", nowhere) == no_folder
    assert "required" in refusal("export", run_dir)
    assert "train.py" in refusal("list", run_dir, "--", "--lr", "1")
    aside = tmp_path / "aside"
    (aside / "damaged-step-00000042-1").mkdir(parents=True)
    assert refusal("verify", aside) == f"{aside}: no checkpoint there, but 1 set aside as damaged-*; {places}"
    assert not model.exists()
