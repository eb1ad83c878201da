"""The newest checkpoint is damaged: the run says so, uses the one before, and ends with the same weights."""

import os
import re
import shutil
import signal
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from evenkeel.run.manifest import MANIFEST, load, step_folders, step_of
from evenkeel.run.state_files import STATE, Damaged
from tests.run.test_checkpoint import unfit
from tests.support.components import has
from tests.support.processes import (
    TRAIN,
    Done,
    checked,
    finish,
    fork,
    names_in,
    read,
    run,
    run_forked,
    wait_beside,
    wait_until,
)
from tests.support.small_runs import job, starts, wait_for_step, weights_of, weights_undisturbed

OPTIONS = ["--checkpoint-every", 2, "--keep", 3, "--eval-every", 1000, "--pause", 0.03]


def train(run_dir: Path, expect: int = 0) -> Done:
    return run_forked(TRAIN, *job(run_dir, *OPTIONS), expect=expect, warm=True)


undisturbed = weights_undisturbed(0, job, *OPTIONS)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    process = fork(TRAIN, *job(run_dir, *OPTIONS))
    wait_for_step(run_dir, 13, process)

    def between_two() -> bool:
        """Stop it; let it go on if it is writing a checkpoint or clearing an old one away."""
        process.send_signal(signal.SIGSTOP)
        complete = len(step_folders(run_dir / "checkpoints")) == len(names_in(run_dir / "checkpoints")) == 3
        if not complete:
            process.send_signal(signal.SIGCONT)
        return complete

    wait_until(between_two, "three checkpoints and no part of another")
    process.kill()
    assert finish(process).returncode == -signal.SIGKILL
    return run_dir


@pytest.fixture
def copied(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run"))


def test_the_only_checkpoint_was_being_written_again_when_the_run_was_killed(copied: Path, undisturbed: str) -> None:
    """Between two renames it has no name that is found."""
    *older, newest = step_folders(copied / "checkpoints")
    for path in older:
        shutil.rmtree(path)
    newest.rename(newest.with_name(f".{newest.name}.old"))
    train(copied)
    assert starts(copied)[-1] == step_of(newest)
    assert weights_of(copied) == undisturbed


def test_a_replaced_checkpoint_without_its_name_ends_the_run(copied: Path) -> None:
    """Its folder cannot be written. Without it the run would begin at an older step; a start looked for ever."""
    folder = copied / "checkpoints"
    newest = step_folders(folder)[-1]
    old = newest.rename(newest.with_name(f".{newest.name}.old"))
    folder.chmod(0o555)
    command = [*bound_by_permissions(), sys.executable, str(TRAIN), *job(copied, *OPTIONS)]
    done = run(command, expect=1)
    assert f"Permission denied: '{old}' -> '{newest}'" in done.stderr.splitlines()[-1]
    assert not list(folder.glob("damaged-*"))
    folder.chmod(0o755)
    train(copied)
    assert starts(copied)[-1] == step_of(newest)


def flip_a_bit_of_a_weight(file: Path) -> None:
    """The highest bit of the exponent of the first float in the archive that torch.save wrote."""
    with zipfile.ZipFile(file) as archive:
        (start,) = (info.header_offset for info in archive.infolist() if info.filename.endswith("data/0"))
    content = bytearray(file.read_bytes())
    name, extra = struct.unpack("<HH", content[start + 26 : start + 30])
    content[start + 30 + name + extra + 3] ^= 1 << 6
    file.write_bytes(content)


def damaged(newest: Path, how: str) -> Path:
    """Damage a checkpoint; the file that will be named."""
    state, manifest = newest / STATE, newest / MANIFEST
    if how in ("truncated", "half-written", "last byte missing"):
        os.truncate(state, state.stat().st_size - 1 if "byte" in how else state.stat().st_size // 2)
    elif how == "one bit flipped":
        flip_a_bit_of_a_weight(state)
    elif how == "without a model":  # every sum is right
        unfit(state, "no model")
    if how not in ("manifest missing", "half-written"):
        return state
    manifest.unlink()
    if how == "half-written":  # as a file system that keeps no order leaves it, hidden and not
        shutil.copytree(newest, newest.with_name(f".step-{step_of(newest) + 2:08d}.elsewhere-1.tmp"))
    return manifest


DAMAGES = ["truncated", "one bit flipped", "half-written", "without a model"]
# the first and the third show nearly the same
DAMAGES_TOO = [pytest.param(how, marks=pytest.mark.slow) for how in ("last byte missing", "manifest missing")]


@pytest.mark.parametrize("how", [*DAMAGES, *DAMAGES_TOO])
def test_a_damaged_newest_checkpoint_leaves_the_weights_the_same(copied: Path, undisturbed: str, how: str) -> None:
    folder = copied / "checkpoints"
    before, newest = step_folders(folder)[-2:]
    named = damaged(newest, how)
    contents = {file.name: file.read_bytes() for file in newest.iterdir()}
    done = train(copied)
    aside = the_one_set_aside(folder, named, done.stderr)
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == contents
    assert not list(folder.glob(".step-*")), "what was half-written under a hidden name is cleared away"
    assert starts(copied)[-1] == step_of(before)
    assert weights_of(copied) == undisturbed


def the_one_set_aside(folder: Path, named: Path, stderr: str) -> Path:
    """The folder that now holds a damaged checkpoint; a line on stderr says so, and what was wrong."""
    (aside,) = folder.glob("damaged-*")
    assert aside.name.startswith(f"damaged-{named.relative_to(folder).parts[0]}-")
    (line,) = (line for line in stderr.splitlines() if aside.name in line)
    assert line.startswith(f"evenkeel: ERROR: {named}: ")
    assert "Traceback" not in stderr
    return aside


def test_a_run_whose_newest_checkpoint_is_whole_uses_it(copied: Path, undisturbed: str) -> None:
    """The control: the one before is used for the damage alone."""
    newest = step_folders(copied / "checkpoints")[-1]
    assert "ERROR" not in train(copied).stderr
    assert list((copied / "checkpoints").glob("damaged-*")) == []
    assert starts(copied)[-1] == step_of(newest)
    assert weights_of(copied) == undisturbed


def test_ruined_status_and_metrics_leave_the_weights_the_same(killed: Path, copied: Path, undisturbed: str) -> None:
    run_dir = copied
    (run_dir / "status.json").write_text("")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('null\n[1]\n{"kind": "train"}\n{"kind": "train", "step": "7", "time": 1.0}\n{"kind": "tr\n')
    done = train(run_dir)
    status, metrics = (line for line in done.stderr.splitlines() if not line.startswith("wandb"))
    assert status.startswith(f"evenkeel: WARNING: {run_dir}/status.json cannot be read: ")
    assert status.endswith("; the run goes on from its checkpoints")
    lines = "some of its lines are damaged and are left out"
    assert metrics == f"evenkeel: WARNING: {run_dir}/metrics.jsonl: {lines}"
    assert (read(run_dir)["weights_sha256"], read(run_dir)["restarts"]) == (undisturbed, 1)
    for command in (["status", run_dir], ["compare", run_dir, killed], ["checkpoint", "list", run_dir]):
        if has(command[0]):
            assert "Traceback" not in run_forked("-m", "evenkeel", *command, expect=None).stderr


def test_torch_load_takes_a_flipped_bit_for_a_weight(killed: Path, tmp_path: Path) -> None:
    """The control: without the sha256, the run would go on from other weights and say nothing."""
    newest = tmp_path / step_folders(killed / "checkpoints")[-1].name
    shutil.copytree(step_folders(killed / "checkpoints")[-1], newest)
    whole = load(newest)["model"]
    flip_a_bit_of_a_weight(newest / STATE)
    flipped = torch.load(newest / STATE, weights_only=True)["model"]
    different = [name for name in whole if not torch.equal(whole[name], flipped[name])]
    assert len(different) == 1
    (worst,) = ((whole[name] - flipped[name]).abs().max().item() for name in different)
    assert not worst < 1, "and by far"
    with pytest.raises(Damaged, match="sha256"):
        load(newest)


def bound_by_permissions() -> list[str]:
    """A prefix for commands, so that permissions bind them even if they are run by root."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("not installed: setpriv, because permissions do not bind root")
    without = "-dac_override,-dac_read_search"
    return ["setpriv", f"--inh-caps={without}", f"--bounding-set={without}", "--"]


@pytest.mark.parametrize("closed", [STATE, *(pytest.param(it, marks=pytest.mark.slow) for it in (MANIFEST, "."))])
def test_an_unreadable_newest_checkpoint_leaves_the_same_weights(copied: Path, undisturbed: str, closed: str) -> None:
    folder = copied / "checkpoints"
    before, newest = step_folders(folder)[-2:]
    (newest / closed).chmod(0)
    named = newest / (MANIFEST if closed == "." else closed)
    bound = bound_by_permissions()
    seen = run([*bound, "cat", str(named)], expect=1)
    assert "Permission denied" in seen.stderr, "the control: it may really not look"
    done = run([*bound, sys.executable, str(TRAIN), *job(copied, *OPTIONS)])
    aside = the_one_set_aside(folder, named, done.stderr)
    assert f"{named}: cannot be read: Permission denied" in done.stderr
    (aside / closed).chmod(0o755)
    assert {file.name for file in aside.iterdir()} == {STATE, MANIFEST}
    assert starts(copied)[-1] == step_of(before)
    assert weights_of(copied) == undisturbed


@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_a_disk_that_fails_for_a_moment_costs_no_step(copied: Path, undisturbed: str, name: str) -> None:
    newest = step_folders(copied / "checkpoints")[-1]
    whole, file = newest.parent / "whole", newest / name
    file.rename(whole)
    file.symlink_to("/proc/self/mem" if name == MANIFEST else file)  # EIO; for a file with a size ELOOP
    process = fork(TRAIN, *job(copied, *OPTIONS))

    def tried() -> bool:
        return any(f"{file}: cannot" in log.read_text() for log in copied.glob("logs/*/rank-0.log"))

    wait_beside(process, tried, "the error")
    whole.replace(file)
    done = checked(finish(process), 0)
    assert re.search(f"{file}: cannot be read: (Input/output error|Too many .*); trying again in 0.5 s", done.stderr)
    assert not list(newest.parent.glob("damaged-*"))
    assert starts(copied)[-1] == step_of(newest)
    assert weights_of(copied) == undisturbed


def test_a_disk_that_fails_for_longer_costs_the_steps_of_a_checkpoint(copied: Path, undisturbed: str) -> None:
    """A bad sector may not end the run."""
    folder = copied / "checkpoints"
    before, newest = step_folders(folder)[-2:]
    named = newest / MANIFEST
    named.unlink()
    named.symlink_to("/proc/self/mem")
    done = train(copied)
    assert done.stderr.count("trying again in") == 3
    assert f"{named}: cannot be read: Input/output error; set aside as" in done.stderr
    assert starts(copied)[-1] == step_of(before)
    assert weights_of(copied) == undisturbed


def test_checkpoints_that_are_gone_are_missed(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    came = read(killed, "status.json")["step"]
    assert f"the run had reached step {came}, but its newest checkpoint is of step 0" in train(tmp_path / "run").stderr


def test_a_run_without_a_whole_checkpoint_asks_what_to_do(copied: Path, killed: Path, undisturbed: str) -> None:
    """To begin again at step 0 would cost a week of training without a question."""
    folder = copied / "checkpoints"
    newest = step_folders(folder)[-1].name
    for path in step_folders(folder):
        flip_a_bit_of_a_weight(path / STATE)
    for _ in range(2):  # the second time all of them have been set aside before
        line = train(copied, expect=2).stderr.splitlines()[-1]
        assert line.startswith(f"evenkeel: {copied}: every checkpoint is damaged (set aside, such as {folder}/damaged-")
        assert line.endswith(f"copy a whole one into {folder}, or start over with --fresh")
        assert step_folders(folder) == []
    shutil.copytree(killed / "checkpoints" / newest, folder / newest)
    train(copied)
    assert weights_of(copied) == undisturbed
