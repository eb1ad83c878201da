"""The folder of a run: who may use it, and that two jobs never do."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from evenkeel.common import keeper_link, processes
from evenkeel.common.errors import Ended, Refusal
from evenkeel.common.files import read_json, write_atomically, write_json
from evenkeel.distributed.world import RESTART_TIMEOUT
from evenkeel.run import crash_loop, run_directory
from evenkeel.run.earlier_run import is_run, is_untrained
from evenkeel.run.identity import Identity, prepare_folder
from evenkeel.run.launch_token import launch_token
from evenkeel.run.records import read_config, read_facts
from evenkeel.run.run_directory import RunDirectory, copy_run_records
from evenkeel.tasks.classify import Classify
from tests.support.processes import ROOT
from tests.support.raised import refusal_of
from tests.tasks.test_command_line import contents

OLD_RUNS = ROOT / "tests" / "fixtures" / "runs"
OPTIONS = {"schedule": "cosine", "batch_size": 64, "seed": 0, "task": "digits", "num_workers": 0}
OPTIONS |= {"grace": 25.0, "keep": 2, "on_nonfinite": "stop"}
NOBODY = 65534
FORK = multiprocessing.get_context("fork")


def claim(path: Path, options: dict[str, Any], fresh: bool, **more: Any) -> RunDirectory:
    return run_directory.claim(path, Identity(options, **more), fresh)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 0.3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "mine"


def started(path: Path, **changes: Any) -> None:
    """Leave a run in a folder, as a process that has ended does."""
    directory = claim(path, OPTIONS | changes, fresh=False)
    directory.begin(OPTIONS | changes, [""])
    directory.update("stopped", step=7)


def refusal(path: Path, options: dict[str, Any] = OPTIONS, fresh: bool = False) -> str:
    """The message of the refusal that must come, and that it came without touching anything."""
    root = path.parent if path.parent.is_dir() else path.parent.parent
    before = contents(root)
    message = refusal_of(claim, path, options, fresh)
    assert contents(root) == before
    assert message.startswith(f"--run-dir {path}: ")
    return message.removeprefix(f"--run-dir {path}: ")


def test_a_new_folder_is_made_with_its_parents(path: Path) -> None:
    directory = claim(path, OPTIONS, fresh=False)
    assert path.is_dir()
    assert directory.status == {}
    assert directory.attempts == 0
    directory.begin(OPTIONS, ["", ""])
    assert read_config(path / "config.toml") == OPTIONS
    assert read_json(path / "status.json") == directory.status
    assert directory.status["state"] == "running"
    assert directory.status["world_sizes"] == [2]


def test_a_run_is_continued(path: Path) -> None:
    started(path)
    for attempt, world_size in enumerate([3, 1], start=2):
        directory = claim(path, OPTIONS, fresh=False)
        assert directory.status["step"] == 7
        directory.begin(OPTIONS, [""] * world_size)
        assert directory.attempts == attempt
        del directory
    assert read_json(path / "status.json")["world_sizes"] == [1, 3, 1]
    assert read_json(path / "status.json")["step"] == 7, "facts stay until they are told anew"


def test_the_number_of_samples_must_stay(path: Path) -> None:
    before, now = {"training": 96, "test": 20}, {"training": 95, "test": 20}
    started(path)
    claim(path, OPTIONS, fresh=False, samples=now)  # the run is older than the check
    directory = claim(path, OPTIONS, fresh=False, samples=before)
    directory.begin(OPTIONS, [""], samples=before)
    del directory
    claim(path, OPTIONS, fresh=False, samples=before)
    for check_it in (run_directory.claim, prepare_folder):  # rank 0, and the first rank of another node
        with pytest.raises(Refusal, match=r"the training data had 96 samples and has 95 now, .*--fresh$"):
            check_it(path, Identity(OPTIONS, samples=now), fresh=False)
    with pytest.raises(Refusal, match="the test data had 20 samples and has 21 now"):
        claim(path, OPTIONS, fresh=False, samples=before | {"test": 21})
    claim(path, OPTIONS, fresh=True, samples=now)


def test_harmless_changes_and_a_fresh_start_are_not_refused(path: Path) -> None:
    started(path, on_bad_sample="raise")
    options = OPTIONS | {"on_bad_sample": "skip", "num_workers": 4}
    assert "--on-bad-sample was raise and is now skip" in refusal(path, options)
    claim(path, options, fresh=False, harmless=Classify.harmless)
    claim(path, options | {"batch_size": 32}, fresh=True)
    assert read_config(path / "config.toml") == OPTIONS | {"on_bad_sample": "raise"}, "to claim is not to change"


def test_a_reason_that_is_not_in_utf_8(path: Path) -> None:
    directory = claim(path, OPTIONS, fresh=False)
    directory.begin(OPTIONS, [""])
    directory.update("failed", reason=f"no image: {os.fsdecode(b'b' + bytes([0xE9]))}.jpg")
    assert read_json(path / "status.json")["reason"] == r"no image: b\udce9.jpg"


def test_an_end_that_cannot_be_written_is_none(path: Path) -> None:
    """Else a full disk at the end would leave "running" for ever: after an end nothing is written."""
    directory = claim(path, OPTIONS, fresh=False)
    directory.begin(OPTIONS, [""])
    file = path / "status.json"
    file.rename(path / "aside")
    file.mkdir()
    with pytest.raises(OSError, match="status"):
        directory.update_at_step("finished", 9)
    file.rmdir()
    directory.update_at_step("failed", 9, reason="no space")
    assert (read_json(file)["state"], read_json(file)["reason"]) == ("failed", "no space")
    assert directory.status == read_json(file)


def test_a_file(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    assert refusal(path) == "is a file; name a folder"
    assert refusal(path / "below").startswith("cannot be written: Not a directory")
    assert path.read_text() == "precious"


def test_an_empty_folder_and_what_a_start_that_came_to_nothing_left(path: Path) -> None:
    (path / "logs" / "attempt-0001").mkdir(parents=True)
    (path / ".lock").touch()
    (path / ".config.toml.123.tmp").touch()
    (path / "slurm").mkdir()
    (path / "slurm" / "job.json").touch()
    claim(path, OPTIONS, fresh=False)


def project(path: Path) -> None:
    """Somebody's work, with a run's configuration to start from, and folders that are called as a run's."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(tomli_w.dumps(OPTIONS))
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "last.pt").write_text("precious")
    (path / "logs").mkdir()
    (path / "train.py").write_text("precious")


@pytest.mark.parametrize("fresh", [False, True])
def test_a_project_with_a_config_is_no_run(path: Path, fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    project(path)
    told = "is not empty and not a run: it has checkpoints and 2 more; name another folder"
    assert refusal(path, fresh=fresh) == told
    monkeypatch.chdir(path)
    before = contents(path)
    assert refusal_of(claim, Path(), OPTIONS, fresh) == f"--run-dir .: {told}"
    assert contents(path) == before
    (path / "status.json").write_text("{}")  # of another program, as is then the config.toml
    (path / "config.toml").write_text("task = 1\n")
    assert refusal(path, fresh=fresh).startswith("is not empty and not a run: it has checkpoints and 3 more")


@pytest.mark.parametrize("entry", ["thesis.tex", "logs/mine.txt", "precious.tmp", ".precious.tmp", "slurm/a.out"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_files_of_others_is_no_runs(path: Path, entry: str, fresh: bool) -> None:
    (path / entry).parent.mkdir(parents=True)
    (path / entry).write_text("precious")
    told = f"is not empty and not a run: it has {entry.partition('/')[0]}; name another folder"
    assert refusal(path, fresh=fresh) == told


@pytest.mark.parametrize("name", ["finished", "defaults", "typed", "tree"])
@pytest.mark.parametrize("lost", ["", "status.json", "config.toml"])
def test_a_run_of_an_older_version_is_known(tmp_path: Path, name: str, lost: str) -> None:
    run_dir = shutil.copytree(OLD_RUNS / name, tmp_path / "run")
    if lost:
        (run_dir / lost).unlink()
    assert is_run(run_dir)
    if lost == "status.json":
        shutil.rmtree(run_dir / "checkpoints")
        assert not is_run(run_dir), "the control: of a copied config.toml nobody can tell"


def test_a_run_without_its_config_is_not_continued_blindly(path: Path) -> None:
    started(path)
    (path / "config.toml").unlink()
    claim(path, OPTIONS, fresh=False)  # killed before it was written: there is no step to continue
    (path / "checkpoints" / "step-00000003").mkdir(parents=True)
    message = "has a run without its config.toml, which identifies it; restore that file, name another folder"
    assert refusal(path) == f"{message}, or start over with --fresh"
    assert claim(path, OPTIONS, fresh=True).start_over([""])


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without the rights of root, to whom everything is allowed."""
    user = os.geteuid()
    os.seteuid(user or NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that can be read and not written, in one that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "closed"
        folder.mkdir(mode=0o555)
        yield folder


def test_a_folder_that_cannot_be_written_or_read(closed: Path) -> None:
    mend = "Permission denied; fix that or name another folder"
    with unprivileged():
        assert refusal(closed) == f"cannot be written: {mend}"
        assert refusal(closed / "run") == f"cannot be written: {mend}"
    closed.chmod(0)
    for path in (closed, closed / "run"):
        with unprivileged(), pytest.raises(Refusal, match="Permission denied"):
            claim(path, OPTIONS, fresh=False)


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Lustre without its option `flock`, for example."""

    def flock(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    why = "its file system has no locks (flock): mount it with flock"
    line = f"--run-dir {tmp_path}: cannot be written: {why}; fix that or name another folder"
    assert refusal_of(claim, tmp_path, OPTIONS, fresh=False) == line


def test_a_run_that_cannot_be_written(closed: Path) -> None:
    closed.chmod(0o755)
    started(closed)
    closed.chmod(0o555)
    (closed / ".lock").chmod(0o444)
    (closed / "config.toml").chmod(0o644)
    with unprivileged():
        assert refusal(closed).startswith("cannot be written: Permission denied")


@pytest.mark.parametrize("mode", [0, 0o444, 0o111], ids=["nothing", "read", "enter"])
def test_a_run_whose_checkpoints_are_hidden_is_refused_and_not_started_over(closed: Path, mode: int) -> None:
    closed.chmod(0o777)
    started(closed)
    (closed / ".lock").chmod(0o666)
    (closed / "config.toml").chmod(0o644)
    (closed / "checkpoints").mkdir()
    (closed / "checkpoints").chmod(mode)
    with unprivileged():
        hidden = "its checkpoints cannot be read: Permission denied; fix that or name another folder"
        assert refusal(closed) == hidden
    (closed / "checkpoints").chmod(0o777)
    with unprivileged():
        claim(closed, OPTIONS, fresh=False)


def test_a_run_whose_checkpoints_are_on_a_disk_that_is_not_there(path: Path, tmp_path: Path) -> None:
    started(path)
    (path / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(Refusal, match=f"checkpoints cannot be read: it is a link to {tmp_path}/disk, and nothing is"):
        claim(path, OPTIONS, fresh=False)
    (tmp_path / "disk").mkdir()
    claim(path, OPTIONS, fresh=False)


def test_another_run_is_refused_by_name_with_both_values(path: Path) -> None:
    started(path)
    message = refusal(path, OPTIONS | {"batch_size": 32, "seed": 1})
    assert message == (
        "has another run: --batch-size was 64 and is now 32, --seed was 0 and is now 1; "
        "continue it with the old values, name another folder, or start over with --fresh"
    )
    started(short := path.with_name("short"), max_steps=2)
    longer = "to train longer, name another folder and add --init-from"
    why = "since the learning rate depends on the length"
    assert refusal(short, OPTIONS | {"max_steps": 3}).endswith(f"; {longer} {short}: only weights are taken, {why}")
    (short / "model.pt").touch()
    assert f"{longer} {short / 'model.pt'}: " in refusal(short, OPTIONS | {"max_steps": 3})
    assert refusal(short, OPTIONS | {"max_steps": 1}).endswith("or start over with --fresh")
    path.with_name("stepless").mkdir()
    claim(path.with_name("stepless"), OPTIONS, fresh=False).begin(OPTIONS, [""])
    nothing = refusal(path.with_name("stepless"), OPTIONS | {"max_steps": 3})
    assert nothing.endswith("or start over with --fresh (it has not finished a step)")
    assert "--task was digits and is now mine.py:Mine" in refusal(path, OPTIONS | {"task": "mine.py:Mine"})
    assert "--width was unset and is now 3" in refusal(path, OPTIONS | {"width": 3})
    started(path.with_name("other"), width=3)
    assert "--width was 3 and is now unset" in refusal(path.with_name("other"))


def test_a_config_that_is_no_toml(path: Path) -> None:
    started(path)
    for text in (b"seed =\n", b"\xff\xfe"):
        (path / "config.toml").write_bytes(text)
        assert "config.toml: not TOML: " in refusal_of(claim, path, OPTIONS, fresh=False)


def hold(path: Path, ready: Any) -> None:
    """Be another job at work in the folder, for ever."""
    directory = claim(path, OPTIONS, fresh=False)
    directory.begin(OPTIONS, [""])
    ready.set()
    signal.pause()


@pytest.fixture
def other_job(path: Path) -> Iterator[BaseProcess]:
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(path, ready))
    process.start()
    assert ready.wait(120)
    yield process
    process.kill()
    process.join()


def test_two_jobs_cannot_have_one_folder(
    path: Path, other_job: BaseProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(path)
    who, _, remedy = message.partition("; ")
    assert who.startswith(f"is in use by process {other_job.pid} on ")
    assert remedy == "stop that job or name another folder"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 2.0)
    assert refusal(path, fresh=True) == message
    assert capsys.readouterr().err == f"evenkeel: --run-dir {path}: {who}; waiting up to 1 s, in case it is ending\n"


def test_of_a_job_whose_launch_is_alive_it_is_said_at_once(
    path: Path, other_job: BaseProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status names what would restart it; a second is for a predecessor that is dying."""
    known, _ = read_facts(path / "status.json")
    host, started = known["host"], processes.stat(other_job.pid).started
    write_json(path / "status.json", known | {"launch": [f"{host}:{other_job.pid}:{started}"]})
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 0.3)
    assert refusal(path).endswith(f"; stop that job (kill -INT {other_job.pid}) or name another folder")
    assert "is in use by" in capsys.readouterr().err


def test_a_restarted_job_waits_for_the_old(path: Path, other_job: BaseProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 60.0)
    begun = time.monotonic()
    assassin = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {other_job.pid}"])
    claim(path, OPTIONS, fresh=False)
    assassin.wait()
    assert 0.4 < time.monotonic() - begun < 30
    assert RESTART_TIMEOUT.total_seconds() > run_directory.MAX_LOCK_TIMEOUT, "the other ranks wait for rank 0"


def change_and_end(path: Path, ready: Any) -> None:
    """Be another job that makes another run of the folder before it ends."""
    directory = claim(path, OPTIONS, fresh=True)
    ready.set()
    time.sleep(0.4)
    directory.begin(OPTIONS | {"seed": 5}, [""])


def test_a_run_that_has_trained_nothing_is_started_again(path: Path) -> None:
    claim(path, OPTIONS, fresh=False).begin(OPTIONS, ["its launch"])
    other = OPTIONS | {"seed": 5}
    assert "--seed was 0" in refusal(path, other), "it may still run"
    directory = claim(path, OPTIONS, fresh=False)
    directory.update("failed", step=0, samples={"training": 3})
    directory.release()
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / ".lock").touch()  # of a save that a full disk has ended
    directory = claim(path, other, fresh=False, samples={"training": 4})
    assert directory.start_over(["its launch"]) == "", "a restart"
    assert directory.start_over(["another"]) == f"nothing was trained in {path}; starting again"
    directory.begin(other, ["another"])
    assert (directory.attempts, directory.status["fruitless"], directory.status.get("samples")) == (2, 1, None)
    directory.update("failed", step=0)
    directory.release()
    assert is_untrained(path)
    for made in ("checkpoints/step-00000007", "checkpoints/.step-00000007.old", "model.pt", "metrics.jsonl"):
        (path / made).write_text('{"kind": "train", "step": 7, "time": 1.0}\n')
        assert "--seed was 5" in refusal(path), "the control: there is something to lose"
        (path / made).unlink()


def test_who_waits_looks_again_at_whose_run_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 60.0)
    started(path)
    ready = FORK.Event()
    process = FORK.Process(target=change_and_end, args=(path, ready))
    process.start()
    try:
        assert ready.wait(120)
        assert "--seed was 5 and is now 0" in refusal_of(claim, path, OPTIONS, fresh=False)
    finally:
        process.join(120)
        process.kill()


def old_ones(path: Path) -> list[Path]:
    return sorted(path.parent.glob("mine.old-*"))


def test_to_start_over_where_nothing_was_moves_nothing(path: Path) -> None:
    claim(path, OPTIONS, fresh=True).start_over([""])
    assert old_ones(path) == [], "nothing was there"


def test_to_start_over_moves_the_old_run_aside_and_leaves_alone_what_is_not_the_runs(path: Path) -> None:
    started(path)
    (path / "thesis.tex").write_text("precious")
    (path / "slurm").mkdir()
    (path / "model.pt").write_text("precious")
    (path / "streams").mkdir()  # states of the old run's data
    directory = claim(path, OPTIONS | {"seed": 1}, fresh=True)
    line = directory.start_over([""])
    (old,) = old_ones(path)
    assert (old / "model.pt").read_text() == "precious"
    assert read_json(old / "status.json")["step"] == 7
    assert sorted(entry.name for entry in old.iterdir()) == ["config.toml", "model.pt", "status.json", "streams"]
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", "slurm", "status.json", "thesis.tex"]
    assert line == f"--fresh: the run that was in {path} is now in {old}"
    assert (directory.status, directory.attempts) == ({}, 0)
    assert "is in use" in refusal_of(claim, path, OPTIONS, fresh=False)
    directory.begin(OPTIONS | {"seed": 1}, [""])
    assert read_config(path / "config.toml")["seed"] == 1


def test_to_start_over_twice_in_a_second_keeps_both_old_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _format: "20300101-000000")
    for seed in (0, 1, 2):
        directory = claim(path, OPTIONS, fresh=True)
        directory.start_over([""])
        directory.begin(OPTIONS | {"seed": seed}, [""])
        del directory
    assert [old.name for old in old_ones(path)] == ["mine.old-20300101-000000", "mine.old-20300101-000000-2"]
    assert [read_config(old / "config.toml")["seed"] for old in old_ones(path)] == [0, 1]


def test_to_start_over_in_this_folder_names_the_old_one_after_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(path)
    monkeypatch.chdir(path)
    assert claim(Path(), OPTIONS, fresh=True).start_over([""]).endswith(f" is now in {old_ones(path)[0]}")


def test_to_start_over_behind_a_link_to_another_file_system(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as there:
        if Path(there).stat().st_dev == path.parent.parent.stat().st_dev:
            pytest.skip("/dev/shm is no other file system here")
        target = Path(there) / "target"
        target.mkdir()
        path.parent.mkdir()
        path.symlink_to(target)
        started(path)
        with pytest.raises(OSError, match="cross-device"):  # the control: beside the link there is no way
            (target / "config.toml").rename(path.parent / "config.toml")
        aside = Path(claim(path, OPTIONS, fresh=True).start_over([""]).rpartition(" is now in ")[2])
        assert aside.parent == target.parent
        assert read_config(aside / "config.toml") == OPTIONS
        assert path.is_symlink()


MOUNT = """
import sys
from pathlib import Path
from tests.run.test_run_directory import OPTIONS, claim, read_config, started
for path in map(Path, sys.argv[1:]):
    started(path)
    for _ in range(2):
        aside = Path(claim(path, OPTIONS, fresh=True).start_over([""]).rpartition(" is now in ")[2])
        assert aside.parent == path and read_config(aside / "config.toml") == OPTIONS, aside
        claim(path, OPTIONS, fresh=False).begin(OPTIONS, [""])
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["mine"]
"""


def test_to_start_over_on_a_mount(path: Path, tmp_path: Path) -> None:
    """In a name space of mounts that ends with the test. A bind mount may be of the very same file system."""
    bound = tmp_path / "bound" / "mine"
    for folder in (path, bound):
        folder.mkdir(parents=True)
    script = 'mount -t tmpfs tmpfs "$4" && mount --bind . "$5" && exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", script, "bash", sys.executable, "-c", MOUNT, path, bound]
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False, timeout=60).returncode:
        pytest.skip("needs root to make a mount namespace")
    source = path.parent.parent / "source"
    source.mkdir()
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, check=False,
        cwd=source, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_moved_is_left_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(path)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "status.json" and self.parent == path:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    before = contents(path)
    with pytest.raises(Ended, match="cannot be moved aside: Device or resource busy; move it away yourself"):
        claim(path, OPTIONS, fresh=True).start_over([""])
    assert contents(path) == before
    assert old_ones(path) == []


@pytest.mark.parametrize(
    ("launches", "moved"),
    [
        ([["a"], ["a"]], False),
        ([["a", "b"], ["b"]], False),
        ([["a"], ["a", "c"]], False),
        ([["a"], ["a", "b"], ["a"], ["b"]], False),  # a node that comes and goes
        ([["a"], ["b"]], True),
        ([["a", "b"], ["c", "d"]], True),
        ([[""], [""]], True),
        ([["a", ""], [""]], True),
    ],
)
def test_a_restart_by_torchrun_does_not_start_over_again(path: Path, launches: list[list[str]], moved: bool) -> None:
    """Else each lost node would cost the whole training; without torchrun there are no restarts."""
    for tokens in launches:
        directory = claim(path, OPTIONS, fresh=True)
        directory.start_over(tokens)
        directory.begin(OPTIONS, tokens)
        attempts = directory.attempts
        del directory
    assert len(old_ones(path)) == moved
    assert attempts == (1 if moved else len(launches))


@pytest.mark.parametrize(("token", "counted"), [("", [1] * 5), ("agent", [1, 2, 3, 4, 5])], ids=["typed", "restarted"])
def test_a_command_that_is_typed_again_begins_a_new_count(path: Path, token: str, counted: list[int]) -> None:
    """Its user may have repaired the code; a restart of the same launch (the control) has not."""
    fruitless = []
    for _ in range(5):
        directory = claim(path, OPTIONS, fresh=False)
        directory.begin(OPTIONS, [token])
        fruitless.append(directory.status["fruitless"])
        directory.update("failed", reason="a bug")
        del directory
    assert fruitless == counted


def test_a_crash_loop_names_the_signal_where_no_error_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"fruitless": crash_loop.MAX_FRUITLESS + 1, "last_failure": None}
    assert crash_loop.reason_to_end(status).endswith("without an error: killed from outside, perhaps out of memory")
    monkeypatch.setenv(keeper_link.LAST_END, "rank 1 was killed by SIGSEGV")  # as a keeper does
    assert crash_loop.reason_to_end(status).endswith("; the last: rank 1 was killed by SIGSEGV")


def test_the_loss_of_rank_0s_node_after_a_finished_step_is_no_crash_loop(tmp_path: Path) -> None:
    """Two nodes without a shared disk: each has a copy of the run, and rank 0 moves to the one that is left."""
    nodes = [tmp_path / "a", tmp_path / "b"]
    nodes[1].mkdir()
    for attempt in range(5):
        here, other = nodes if attempt % 2 == 0 else reversed(nodes)
        directory = claim(here, OPTIONS, fresh=False)
        directory.begin(OPTIONS, ["agent of a", "agent of b"])
        assert directory.status["fruitless"] == 1, attempt
        copy_run_records(other, OPTIONS, directory.status, fresh=False)
        directory.record_progress()
        directory.release()


def test_another_node_leaves_a_folder_alone_that_rank_0_has_on_a_shared_disk(path: Path) -> None:
    """Also if a stale cache shows it the status of an older launch, which --fresh would move aside."""
    directory = claim(path, OPTIONS, fresh=False)
    directory.begin(OPTIONS, ["old"])
    before = contents(path.parent)
    for fresh in (False, True):
        assert copy_run_records(path, OPTIONS, directory.status | {"launch": ["new"]}, fresh) is None
        assert contents(path.parent) == before
    directory.release()
    assert copy_run_records(path, OPTIONS, directory.status | {"launch": ["new"]}, fresh=True), (
        "the control: not rank 0's own"
    )


def test_a_launch_is_known_by_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch_token() == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (token := launch_token()) == launch_token() != ""
    monkeypatch.setattr(os, "getppid", os.getpid)  # as a child of this process would see it
    assert launch_token() != token


def test_the_status_is_whole_at_any_moment(path: Path) -> None:
    """A reader in a loop, while the status changes its length from write to write."""
    directory = claim(path, OPTIONS, fresh=False)
    directory.begin(OPTIONS, [""])
    stop, looked = FORK.Event(), FORK.Value("i", 0)

    def look() -> None:
        while not stop.is_set():
            json.loads((path / "status.json").read_text())
            looked.value += 1

    process = FORK.Process(target=look)
    process.start()
    deadline = time.monotonic() + 120
    for number in range(200):
        directory.update("running", reason="x" * (number % 2) * 200_000)
    while looked.value < 20 and time.monotonic() < deadline:
        directory.update("running", reason="x" * (looked.value % 2) * 200_000)
    stop.set()
    process.join(120)
    assert process.exitcode == 0
    assert looked.value >= 20
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", "config.toml", "status.json"]


def test_a_file_is_written_so_that_it_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content to the disk, then the name, then the folder to the disk."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        done.append("fsync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "fsync file")
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_json(tmp_path / "a.json", {"x": 1})
    assert done == ["fsync file", "rename", "fsync folder"]
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert read_json(tmp_path / "b.json") == {}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})

    def half(file: Any) -> None:
        file.write(b"{")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a.json", half)
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o600), (0o077, 0o600), (0o002, 0o660), (0o007, 0o660)])
def test_options_are_for_the_user_and_a_group_that_shares_its_files(path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        started(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((path / "config.toml").stat().st_mode) == mode
    assert stat.S_IMODE((path / "status.json").stat().st_mode) == 0o666 & ~mask, "the control"


def test_a_folder_that_is_deleted_under_a_run_is_a_run_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = claim(path, OPTIONS, fresh=False)
    directory.begin(OPTIONS, [""])
    shutil.rmtree(path)
    directory.update("running", step=7)
    (told,) = caplog.messages
    assert told == f"{path} was deleted during the run and has been made again"
    assert "is in use" in refusal_of(claim, path, OPTIONS, fresh=False)
    directory.update("finished", step=9)
    del directory
    assert claim(path, OPTIONS, fresh=False).status["step"] == 9
    assert len(caplog.messages) == 1


def test_a_run_that_finds_another_one_in_the_folder_that_is_made_again_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, exists = claim(path, OPTIONS, fresh=False), Path.exists
    directory.begin(OPTIONS, [""])
    (path / "config.toml").unlink()
    # as if the lock's file came only after the look; the lock is this run's own, which another file cannot get
    monkeypatch.setattr(Path, "exists", lambda self: self.name != ".lock" and exists(self))
    directory.update("running", step=7)
    assert "is in use by" in caplog.text
    assert read_facts(path / "status.json")[0]["step"] == 7


RUINED = ["", "[]", "null", "{", "\\x00", "[" * 100_000, '{"world_sizes": "x"}', '{"world_sizes": ["x"], "step": []}']


@pytest.mark.parametrize("text", RUINED, ids=range(len(RUINED)))
def test_a_status_that_was_ruined_costs_what_was_only_there(path: Path, text: str) -> None:
    started(path)
    (path / "status.json").write_text(text)
    record = {"kind": "start", "step": 0, "time": 1.0, "world_size": 3}
    lines = [json.dumps(line) for line in (record, None, record | {"world_size": "3"}, record)]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    directory = claim(path, OPTIONS, fresh=False)
    assert directory.trouble.startswith("status.json ")
    assert directory.status == {"world_sizes": [3, 3]}
    directory.begin(OPTIONS, [""])
    assert read_facts(path / "status.json")[1] == ""
    del directory
    assert claim(path, OPTIONS, fresh=False).attempts == 3


def test_a_fact_of_another_type_is_left_out_and_the_others_stay(path: Path) -> None:
    started(path)
    facts = read_json(path / "status.json") | {"launch": [1], "samples": {"training": "x"}, "step": True, "seconds": 3}
    facts |= {"restarts_in_place": "x", "order": 1}  # a start adds to the one, and compares the other
    write_json(path / "status.json", facts | {"of a later version": [{}]})
    directory = claim(path, OPTIONS, fresh=False, samples={"training": 5})
    assert directory.trouble == "status.json has been changed: launch is [1]"
    assert not {"launch", "samples", "step", "restarts_in_place", "order"} & directory.status.keys()
    assert (directory.attempts, directory.status["seconds"], directory.status["of a later version"]) == (1, 3, [{}])
