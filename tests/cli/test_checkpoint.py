"""`python -m evenkeel checkpoint` as a user types it."""

import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import MANIFEST, Provenance, step_folders
from evenkeel.run.state_files import STATE
from evenkeel.training.state_dicts import sha256
from tests.run.test_checkpoint import as_it_was_before_kinds, edit_manifest, flip_a_bit, state, unfit
from tests.support.processes import EVENKEEL, checked, contents_of, run
from tests.support.small_runs import the_line
from tests.support.typed import typed

BEST = ("accuracy", "max")


def checkpoint(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return checked(subprocess.CompletedProcess(arguments, *typed("checkpoint", *arguments)), expect)


def refusal(*arguments: object) -> str:
    done = checkpoint(*arguments, expect=2)
    assert done.stdout == ""
    return the_line(done.stderr)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder with checkpoints at 5, 10 and 200, a snapshot at 210, and one that was set aside."""
    run_dir = tmp_path / "run"
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=9, provenance=Provenance(BEST))
    for step, metrics in {5: {}, 10: {"accuracy": 0.9, "loss": 0.1}, 200: {"accuracy": 0.8, "loss": 0.2}}.items():
        checkpoints.save(state(step), metrics)
    checkpoints.save_if_new(state(210))
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


def test_list_says_which_are_kept_for_ever(run_dir: Path) -> None:
    Checkpoints(run_dir / "checkpoints", keep=9, provenance=Provenance(BEST), keep_every=50).save(state(250), {})
    _, *lines = checkpoint("list", run_dir).stdout.splitlines()
    assert [line.split()[0] for line in lines if "(each 50)" in line] == ["250"], "200 was saved without the option"


def test_list_of_one_and_of_old_ones_and_of_broken_ones(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    assert "(best)" in checkpoint("list", folder / "step-00000010").stdout.splitlines()[1]
    edit_manifest(folder / "step-00000210", as_it_was_before_kinds)
    (folder / "step-00000010" / MANIFEST).unlink()
    _, _, broken, _, old, *_ = checkpoint("list", run_dir).stdout.splitlines()
    assert broken.split()[:2] == ["10", "damaged"]
    assert broken.endswith(f"{MANIFEST}: cannot be read: No such file or directory")
    assert old.split()[:2] == ["210", "checkpoint"], "what it was is not known any more"


@pytest.mark.parametrize("time", [1e20, -1e300, math.nan, math.inf])
def test_list_and_inspect_of_a_time_that_no_run_has_written(run_dir: Path, time: float) -> None:
    edit_manifest(run_dir / "checkpoints" / step(210), lambda manifest: manifest.update(time=time))
    assert checkpoint("list", run_dir).stdout.splitlines()[4].split()[:3] == ["210", "snapshot", "?"]
    assert ": snapshot of step 210, written ? on " in checkpoint("inspect", run_dir).stdout


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
    """Bytes that have changed or are gone, no manifest, and files that a manifest of the right sums makes no state."""
    done = checkpoint("verify", run_dir)
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [f"{step(n)}: ok" for n in (5, 10, 200, 210)]
    folder = run_dir / "checkpoints"
    for number in (300, 400):
        Checkpoints(folder, keep=9, provenance=Provenance(BEST)).save(state(number), {})
    flip_a_bit(folder / step(10) / STATE)
    os.truncate(folder / step(200) / STATE, 7)
    (folder / step(210) / MANIFEST).unlink()
    unfit(folder / step(300) / STATE, "no model")
    unfit(folder / step(400) / STATE, "refused by weights_only")
    before = contents_of(run_dir)
    good, *damaged = checkpoint("verify", run_dir, expect=1).stdout.splitlines()
    assert good.startswith("step-00000005: ok, ")
    expected = {
        10: f"{STATE}: sha256 is ",
        200: f"{STATE}: has 7 bytes, should have ",
        210: f"{MANIFEST}: cannot be read",
        300: f"{STATE}: is not the state of a run: has no step, model, optimizers",
        400: f"{STATE}: does not load: ",
    }
    for line, (number, why) in zip(damaged, expected.items(), strict=True):
        assert line.startswith(f"{step(number)}: DAMAGED: {folder / step(number)}/{why}")
    assert contents_of(run_dir) == before, "nothing is set aside"
    checkpoint("verify", folder / step(5))
    checkpoint("verify", folder / step(10), expect=1)


def test_verify_leaves_out_what_a_run_at_work_deletes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch.load

    def meanwhile(*arguments: object, **options: object) -> object:
        shutil.rmtree(run_dir / "checkpoints" / step(10), ignore_errors=True)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", meanwhile)
    done = checkpoint("verify", run_dir)
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == [f"{step(n)}: ok" for n in (5, 200, 210)]


def step(number: int) -> str:
    return f"step-{number:08d}"


def test_export(run_dir: Path, tmp_path: Path) -> None:
    before, model = contents_of(run_dir), tmp_path / "model.pt"
    done = checkpoint("export", run_dir, "--step", 10, "-o", model)
    weights = torch.load(model, weights_only=True)
    assert list(weights) == ["w"]
    assert torch.equal(weights["w"], torch.full((10,), 10.0))
    assert done.stdout.endswith(f"sha256 of the weights {sha256(weights)}\n")
    assert contents_of(run_dir) == before
    content = model.read_bytes()
    assert refusal("export", run_dir, "--output", model) == f"--output {model}: exists already; name another file"
    assert model.read_bytes() == content
    assert "dp" in refusal("export", run_dir, "--output", tmp_path / "other.pt", "--as", "ddp")
    checkpoint("export", run_dir, "--output", tmp_path / "newest.pt")
    assert torch.load(tmp_path / "newest.pt", weights_only=True)["w"][0] == 210
    for form in ("dp", "safetensors"):
        again = checkpoint("export", run_dir, "--step", 10, "--output", tmp_path / form, "--as", form)
        assert again.stdout.split()[-1] == done.stdout.split()[-1], "the same weights"
    assert list(torch.load(tmp_path / "dp", weights_only=True)) == ["module.w"]
    assert sha256(load_file(tmp_path / "safetensors")) == sha256(weights)


def test_a_damaged_one_is_not_exported_and_not_shown(run_dir: Path, tmp_path: Path) -> None:
    newest = step_folders(run_dir / "checkpoints")[-1]
    flip_a_bit(newest / STATE)
    for action in (["inspect"], ["export", "-o", tmp_path / "model.pt"]):
        line = the_line(checkpoint(*action, run_dir, expect=1).stderr)
        assert line.startswith(f"damaged: {newest / STATE}: sha256 is ")
    assert not (tmp_path / "model.pt").exists()
    checkpoint("export", run_dir, "-o", tmp_path / "model.pt", "--step", 200)


def test_an_export_that_does_not_fit_leaves_nothing(run_dir: Path) -> None:
    # a limit of the kernel's: no file of this process may be longer
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 1; exec "$@"', "bash"]
    output = run_dir / "model.pt"
    done = run([*limited, *EVENKEEL, "checkpoint", "export", run_dir, "-o", output], expect=1)
    assert the_line(done.stderr) == f"--output {output}: cannot write it: File too large"
    assert not list(run_dir.glob("*model.pt*"))


def test_refusals(run_dir: Path, tmp_path: Path) -> None:
    places = "name a run directory, its checkpoints folder or one step-* folder"
    missing, empty, file, aside = (tmp_path / name for name in ("missing", "empty", "file", "aside"))
    empty.mkdir()
    file.touch()
    (aside / "damaged-step-00000042-1").mkdir(parents=True)
    model, absent, nowhere = tmp_path / "model.pt", run_dir / "checkpoints" / step(7), missing / "model.pt"
    for action in (["list"], ["inspect"], ["verify"], ["export", "-o", model]):
        assert refusal(*action, missing) == f"{missing}: No such file or directory; {places}"
        assert refusal(*action, empty) == f"{empty}: no checkpoint there; {places}"
    there_are = f"--step 6: {run_dir} has no such checkpoint; it has 5, 10, 200, 210"
    for words, line in (
        (["verify", file], f"{file}: Not a directory; {places}"),
        (["verify", absent], f"{absent}: No such file or directory; {places}"),
        (["verify", aside], f"{aside}: no checkpoint there, but 1 set aside as damaged; {places}"),
        (["inspect", run_dir, "--step", 6], there_are),
        (["export", run_dir, "--step", 6, "-o", model], there_are),
        (["export", run_dir, "-o", nowhere], f"--output {nowhere}: there is no folder {missing}; make it first"),
    ):
        assert refusal(*words) == line
    assert "--output FILE is missing" in refusal("export", run_dir)
    assert "train.py" in refusal("list", run_dir, "--", "--lr", "1")
    assert not model.exists()
