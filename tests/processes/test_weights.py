"""Weights from files of all kinds: real wrappers write them, and no file is taken in part without a word."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evenkeel.run.manifest import step_folders
from evenkeel.run.state_files import STATE
from evenkeel.run.weights import read_weights
from evenkeel.training.state_dicts import sha256
from tests.run.test_checkpoint import flip_a_bit
from tests.run.test_weights import (
    convert,
    file,  # noqa: F401  (a fixture)
    refusal,
)
from tests.support.processes import TRAIN, fork, read, records, run, run_forked
from tests.support.small_runs import failed, job, stop_at, the_line, trained


def test_a_class_of_the_main_program_needs_its_name_there(file: Path, tmp_path: Path) -> None:
    program = "import torch\nclass Mine(torch.nn.Linear): pass\n"
    (tmp_path / "my_training.py").write_text(program)
    save = f"{program}torch.manual_seed(1); torch.save(Mine(2, 2), {str(file)!r})"
    run([sys.executable, "-c", save])
    message = refusal(nn.Linear(2, 2), file)
    assert '"from SCRIPT import Mine; import sys' in message
    convert(message.replace("SCRIPT", "my_training"), tmp_path)
    read_weights(nn.Linear(2, 2), tmp_path / "old-weights.pt")


def test_our_own_runs_and_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("evenkeel.cli.checkpoint")
    old, frozen = tmp_path / "old", ["--lr", 0, "--weight-decay", 0, "--max-steps", 1]
    run_forked(TRAIN, *job(old, "--max-steps", 6, "--checkpoint-every", 3, "--keep", 9))
    learned = read(old)["weights_sha256"]
    steps = step_folders(old / "checkpoints")
    assert [path.name for path in steps] == ["step-00000003", "step-00000006"]
    for form in ("bare", "dp", "safetensors"):
        export = ["checkpoint", "export", old, "-o", tmp_path / form, "--as", form]
        assert run_forked("-m", "evenkeel", *export).stdout.endswith(f"sha256 of the weights {learned}\n")
    model = torch.nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    files = [tmp_path / "bare", tmp_path / "dp", tmp_path / "safetensors", old / "model.pt"]
    for path in (old, old / "checkpoints", steps[-1], steps[-1] / STATE, *files):
        nn.init.zeros_(model[0].weight)
        read_weights(model, path)
        assert sha256(model.state_dict()) == learned, path
    read_weights(model, steps[0])
    assert sha256(model.state_dict()) != learned, "the control"

    # two ranks read the file of DataParallel; with a learning rate of 0 its weights come out again
    new = tmp_path / "new"
    trained(2, job(new, *frozen, "--init-from", tmp_path / "dp"))
    assert read(new)["weights_sha256"] == learned
    told = "--init-from " + f"{tmp_path / 'dp'}: all 4 tensors of the model are from it"
    assert told in (new / "logs" / "attempt-0001" / "rank-0.log").read_text()

    # what does not fit, in a run of two ranks: refused before there is a process group, or taken in part aloud
    weights: dict[str, Tensor] = torch.load(tmp_path / "dp", weights_only=True)
    weights["module.2.wait"] = weights.pop("module.2.weight")
    torch.save(weights, tmp_path / "misfit")
    misfit = [*frozen, "--init-from", tmp_path / "misfit"]
    first, second = failed(2, job(tmp_path / "no", *misfit), code=2)
    assert "1 missing: 2.weight (nearest in the file: module.2.wait)" in the_line(first.stderr)
    assert (first.stdout, second.stdout, second.stderr) == ("", "", first.stderr), "without torchrun each says it"
    assert not (tmp_path / "no").exists()
    done = run_forked(TRAIN, *job(tmp_path / "part", *misfit, "--init-partial"))
    assert "evenkeel: WARNING: --init-from " in done.stderr
    assert "1 stayed as initialised: 2.weight (not in the file)" in done.stderr
    assert records(tmp_path / "part", "start")[0]["step"] == 0

    # a run that has checkpoints no longer needs the file
    more = ["--init-from", tmp_path / "bare", "--pause", 0.1, "--checkpoint-every", 2]
    stop_at(tmp_path / "on", 5, fork(TRAIN, *job(tmp_path / "on", *more)), expect=75)
    (tmp_path / "bare").unlink()
    shutil.copytree(tmp_path / "on", tmp_path / "gone")
    run_forked(TRAIN, *job(tmp_path / "on", *more))
    assert records(tmp_path / "on", "start")[1]["step"] >= 5
    shutil.rmtree(tmp_path / "gone" / "checkpoints")
    told = run_forked(TRAIN, *job(tmp_path / "gone", *more), expect=2).stderr
    assert told.endswith("bare: no such file or folder\n")
    (tmp_path / "gone" / "checkpoints" / "step-renamed").mkdir(parents=True)
    told = run_forked(TRAIN, *job(tmp_path / "gone", *more), expect=2).stderr
    assert "bare: no such file or folder, and the run has no checkpoint" in told

    flip_a_bit(steps[-1] / STATE)
    assert ": ".join(read_weights(model, old)).startswith(f"{old} at step-00000003 (1 newer damaged): all 4")
    assert f"no whole checkpoint: {steps[-1] / STATE}: sha256 is " in refusal(model, steps[-1])
