"""What of Slurm's side needs no Slurm: requests, times, the copy of the code, and `follow` without an answer."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.errors import Ended, Refusal
from evenkeel.common.files import write_json
from evenkeel.launch.launchers import check_train_options
from evenkeel.launch.slurm import submission
from evenkeel.launch.slurm.cluster import Partition, choose
from evenkeel.launch.slurm.code import LARGEST, copy_code
from evenkeel.launch.slurm.follow import BACKLOG, Logs
from evenkeel.launch.slurm.jobs import JobRecord, SlurmError, load, slurm
from evenkeel.launch.slurm.node import _count_start
from tests.support import needs
from tests.support.components import has
from tests.support.processes import EVENKEEL, LIMIT, ROOT, evenkeel, start
from tests.support.small_runs import the_line
from tests.support.terminal import Terminal

GPU = Partition("gpu", default=True, nodes=4, gpus=8, minutes=24 * 60)


CPU = Partition("cpu", default=False, nodes=100, gpus=0, minutes=None)


def test_a_request_is_for_the_default_partition_or_the_named_one() -> None:
    assert choose([GPU, CPU], None, 2, None, None) == GPU
    assert choose([GPU, CPU], None, 4, 8, 24 * 60) == GPU, "all that it has"
    assert choose([GPU, CPU], "cpu", 4, 3, 9) == CPU


REFUSED: list[tuple[list[Partition], tuple[str | None, int, int, int | None], str]] = [
    ([GPU, CPU], (None, 5, 1, None), "-n 5: partition gpu has 4 nodes"),
    ([GPU, CPU], (None, 1, 9, None), "-g 9: a node of partition gpu has 8 GPUs"),
    ([GPU, CPU], ("no", 1, 1, None), "--partition no: does not exist; the cluster has gpu, cpu"),
    ([GPU, CPU], ("gpu", 1, 1, 1441), "--time 1-00:01:00: partition gpu allows 1-00:00:00"),
    ([CPU], (None, 1, 1, None), "--partition is missing: the cluster has no default one; the cluster has cpu"),
]


@pytest.mark.parametrize(("partitions", "request_", "line"), REFUSED)
def test_a_request_that_cannot_be_had(partitions: list[Partition], request_: Any, line: str) -> None:
    with pytest.raises(Refusal, match=line):
        choose(partitions, *request_)


@needs.tools("git")
def test_a_copy_of_the_code_is_what_git_would_keep(tmp_path: Path) -> None:
    origin, copy = tmp_path / "origin", tmp_path / "slurm" / "code"
    origin.mkdir()
    copy.parent.mkdir()
    for name, text in {"train.py": "1", "new.py": "2", ".gitignore": "data\n", "data": "3"}.items():
        (origin / name).write_text(text)
    with (origin / "large.bin").open("wb") as large:
        large.truncate(LARGEST + 1)
    assert copy_code(origin, tmp_path / "slurm" / "plain", "digits") == ""  # before there is a repository
    for words in (["init", "-q"], ["add", "train.py", ".gitignore"]):
        subprocess.run(["git", *words], cwd=origin, check=True)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]
    subprocess.run(commit, cwd=origin, check=True)
    (origin / "train.py").write_text("4")
    (tmp_path / "task.py").write_text("5")
    for name in ("mine/state.py", "other/status.json", "other/wandb/old.py", "sweep/slurm/20300101-000000/code/x.py"):
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text("of a run")
    (origin / "latin").write_bytes(b"\xe9")
    subprocess.run(["git", "add", "-N", "latin"], cwd=origin, check=True)
    revision = copy_code(origin, copy, f"{tmp_path / 'task.py'}:Task", leave_out=[origin / "mine"])
    assert revision.endswith("-dirty")
    assert {it.name: it.read_text() for it in copy.rglob("*.py")} == {"train.py": "4", "new.py": "2", "task.py": "5"}
    assert not (copy / "data").exists()
    assert not (copy / "large.bin").exists()
    assert b"+4" in (tmp_path / "slurm" / "code.diff").read_bytes()


@needs.tools("git")
def test_submodules_other_repositories_and_linked_folders_are_copied_and_linked_data_is_not(tmp_path: Path) -> None:
    origin, copy = tmp_path / "origin", tmp_path / "slurm" / "code"
    for folder in (tmp_path / "module", tmp_path / "library", origin, origin / "nested"):
        folder.mkdir()
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        (folder / "code.py").write_text(folder.name)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").touch()
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]
    for words in (["add", "."], commit):
        subprocess.run(["git", *words], cwd=tmp_path / "module", check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path / "library", check=True)
    (tmp_path / "library" / "back").symlink_to(origin)
    for name, to in {"linked": "../library", "data": "../images", "self": ".", "none": "../nowhere"}.items():
        (origin / name).symlink_to(to)
    add = ["-c", "protocol.file.allow=always", "submodule", "add", "-q", "../module", "module"]
    for words in (["add", "code.py", "linked", "data", "self", "none"], add):
        subprocess.run(["git", *words], cwd=origin, check=True)
    (origin / "module" / "code.py").write_text("changed")
    copy.parent.mkdir()
    copy_code(origin, copy, "digits")
    for name, text in {".": "origin", "nested": "nested", "linked": "library", "module": "changed"}.items():
        assert (copy / name / "code.py").read_text() == text
        assert not (copy / name).is_symlink()
    assert (copy / "data").readlink() == tmp_path / "images"
    assert [(copy / path).readlink() for path in ("self/self", "linked/back")] == [origin, origin]
    subprocess.run(["git", "submodule", "deinit", "-q", "-f", "module"], cwd=origin, check=True)
    copy_code(origin, tmp_path / "slurm" / "other", "digits")  # lists "./" there


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (f"--folder {ROOT.parent} --dry-run -- --run-dir runs/no", "--folder .*: has the code in it"),
        ("--array-seeds 0:3 --follow", "--follow: shows one job"),
        ("--array-seeds 0:3 --container x", "--container: does not work with --array-seeds"),
        ("--array-seeds 0:3 --dry-run -- --mirror s3://a", "--array-seeds 0:3 --mirror s3://a: each run needs a URL"),
        ("--max-requeues -1", "--max-requeues -1: must be at least 0"),
        ("--cpus-per-gpu 0", "--cpus-per-gpu 0: must be at least 1"),
        ("--mem much", "--mem much: give a number"),
        ("--partitoin x", "did you mean --partition"),
    ],
)
def test_options_that_cannot_be_meant(words: str, line: str) -> None:
    with pytest.raises(Refusal, match=line):
        submission.main(words.split(), ROOT)


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refusal, match="no Slurm on this machine: sinfo: not found"):
        submission.main(["-n", "2"], ROOT)


SICK = '#!/bin/sh\nfor it in error: error: fatal:; do echo "sinfo: $it no answer" >&2; done\nexit 1\n'


@pytest.mark.parametrize(("sinfo", "why"), [("", "sinfo: not found: "), (SICK, "sinfo: fatal: no answer;")])
def test_a_dry_run_prints_the_script_without_any_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sinfo: str, why: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sinfo").write_text(sinfo)
    (tmp_path / "bin" / "sinfo").chmod(0o755 if sinfo else 0o644)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/nowhere")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    run_dir = tmp_path / "a run"
    words = ["-n", "2:4", "-g", "3", "--time", "2h", "--partition", "big", "--dry-run", "--", "--run-dir", str(run_dir)]
    assert submission.main(words, ROOT) == 0
    script, told = capsys.readouterr()
    lines = ("#!/bin/bash", "#SBATCH --nodes=2-4", "#SBATCH --gpus-per-node=3", "#SBATCH --time=120")
    more = ("#SBATCH --partition=big", "#SBATCH --requeue", "#SBATCH --signal=USR2@90")
    assert {*lines, *more} <= {*script.splitlines()}
    assert told.startswith(f"evenkeel: no Slurm on this machine: {why}")
    assert told.count("\n") == 1
    assert not run_dir.exists()
    assert "wckey" not in script, "or it would replace the user's"
    with pytest.raises(Refusal, match=r"^--lr -1.0: must be at least 0"):
        submission.main([*words, "--lr", "-1"], ROOT)
    monkeypatch.setenv("SBATCH_WCKEY", "mine")
    submission.main(words, ROOT)
    assert os.environ["SBATCH_WCKEY"] == "mine"
    monkeypatch.setenv("SBATCH_TIMELIMIT", "UNLIMITED")
    with pytest.raises(Refusal, match=r"^SBATCH_TIMELIMIT=UNLIMITED: give minutes"):
        submission.main(["--dry-run"], ROOT)


SBATCH = """#!/bin/sh
for it; do script=$it; done
stat -c %a "${script%/*}" >"$FOUND"
echo Submitted batch job 17
"""


def test_options_may_be_secret_also_while_sbatch_has_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"sbatch": SBATCH, "srun": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FOUND", str(tmp_path / "found"))
    (folder := tmp_path / "job").mkdir(mode=0o755)
    node = submission.Node(Path("train.py"), ("--token", "hunter2"), 1, 3, 3, folder, False)
    submission._submit(submission.submitit.SlurmExecutor(folder), [node])
    assert (tmp_path / "found").read_text() == "700\n"
    (pickled,) = (it for it in folder.iterdir() if b"hunter2" in it.read_bytes())
    assert (pickled.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o755)


def test_a_command_that_hangs_or_fails_is_one_line() -> None:
    with pytest.raises(SlurmError, match=r"sleep: no answer within 0.1 s; is Slurm's controller up\?"):
        slurm("sleep", "5", timeout=0.1)
    with pytest.raises(SlurmError, match=r"^one two$"):
        slurm("sh", "-c", "echo one >&2; echo two >&2; exit 3")


def test_starts_that_find_the_run_finished_are_not_fruitless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, record = check_train_options(["--run-dir", str(tmp_path)]), submitted(tmp_path)
    status = tmp_path / "status.json"
    write_json(status, {"state": "finished", "step": 9, "launch": ["slurm-17"], "world_sizes": [1]})
    written = status.read_text()
    monkeypatch.setenv("EVENKEEL_LAUNCH", "slurm-17")
    for number in range(4):
        _count_start(record, number, config, 1)
    assert status.read_text() == written
    monkeypatch.setenv("EVENKEEL_LAUNCH", "slurm-18")  # the control: another job, which has more epochs perhaps
    for number in range(2):
        _count_start(record, number, config, 1)
    with pytest.raises(Ended, match="requeued 1 times without finishing a step after step 9"):
        _count_start(record, 2, config, 1)


needs_follow = pytest.mark.skipif(not has("follow"), reason="this copy has left out the command")
NO_SLURM = {"PATH": str(Path(sys.executable).parent)}


def submitted(run_dir: Path) -> JobRecord:
    """Leave the record of a job in a run's folder."""
    folder = run_dir.resolve() / "slurm"
    places = {"run_dir": str(run_dir.resolve()), "folder": str(folder), "log": str(folder / "job.log")}
    record = JobRecord(job_id="17", **places, nodes="1", revision="", submitted=time.time())
    record.save()
    return record


@needs_follow
@pytest.mark.parametrize("text", ["{", '{"job_id": "17"}', "[1]"])
def test_a_record_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job.json").write_text(text)
    line = the_line(evenkeel("follow", tmp_path, expect=2).stderr)
    assert line.startswith(f"{tmp_path}: its slurm/job.json cannot be read: ")


def test_a_record_is_read_as_it_was_saved_and_the_errors_are_of_the_last_start(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    record = submitted(tmp_path)
    assert load(tmp_path) == record
    for number in (0, 2, 12):
        record.errors(number).mkdir(parents=True)
    assert record.errors(None) == record.errors(12)


@needs_follow
def test_without_an_answer_the_log_is_shown_and_slurm_asked_again_until_ctrl_c(tmp_path: Path) -> None:
    """A controller that is down for a while ends nothing."""
    run_dir = tmp_path / "it's mine"
    record = submitted(run_dir)
    with Terminal([*EVENKEEL, "follow", str(run_dir)], columns=250, env=NO_SLURM) as terminal:
        terminal.read_until("job 17: Slurm does not answer, trying again: squeue: not found")
        Path(record.log).write_bytes(b"one line\nand half of an")
        terminal.read_until("one line\nand half of an")
        with Path(record.log).open("ab") as log:
            log.write(b"other\n")
        terminal.read_until("half of another\n")
        terminal.press_ctrl_c()
        assert terminal.end() == 130
        again = f"python -m evenkeel follow '{tmp_path}/it'\"'\"'s mine'"
        assert terminal.text.endswith(f"job 17: continues; `{again}` follows it again, `scancel 17` ends it\n")
        assert terminal.text.count("does not answer") == 1
        assert "Traceback" not in terminal.text


def test_of_a_long_log_the_end_is_shown(tmp_path: Path) -> None:
    record, out = submitted(tmp_path), io.BytesIO()
    Path(record.log).write_text("".join(f"line {n}\n" for n in range(10_000)))
    logs = Logs(record)
    assert logs.shortened
    logs.copy(out)
    lines = out.getvalue().decode().splitlines()
    assert lines[-1] == "line 9999"
    assert lines == [f"line {n}" for n in range(10_000 - len(lines), 10_000)], "whole lines"
    assert BACKLOG - 10 < len(out.getvalue()) <= BACKLOG
    logs.copy(out)
    assert len(out.getvalue()) <= BACKLOG, "nothing is new"


@needs_follow
def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """`follow | head` ends at the next line, without a traceback."""
    record = submitted(tmp_path)
    process = start([*EVENKEEL, "follow", tmp_path], env=NO_SLURM)
    assert process.stdout and process.stderr  # noqa: PT018
    assert "does not answer" in process.stdout.readline()
    process.stdout.close()
    Path(record.log).write_text("a line\n")
    assert process.stderr.read() == ""
    assert process.wait(timeout=LIMIT) == 0
