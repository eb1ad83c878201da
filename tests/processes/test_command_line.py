"""The command line: what it understands, and that a refusal is one line, exit code 2, and nothing touched."""

import sys
from pathlib import Path

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.common.processes import REFUSAL, stat
from evenkeel.launch.launchers import topology_in
from tests.support import processes
from tests.support.processes import LIMIT, TRAIN, finish, finish_all, free_port, read, run, start, torchrun
from tests.support.refusals import NONSENSE, REFUSER
from tests.tasks.test_command_line import (
    folder,  # noqa: F401  (a fixture)
    once,
    refused,  # noqa: F401  (a fixture)
)


@pytest.mark.parametrize(("who", "more", "code"), [("01", [], -REFUSAL), ("1", [], -REFUSAL), ("01", ["--tee=3"], 1)])
def test_a_refusal_leaves_no_worker_whoever_refuses(tmp_path: Path, who: str, more: list[str], code: int) -> None:
    """And its line comes once, also through a torchrun that keeps stderr."""
    (tmp_path / "job.py").write_text(REFUSER)
    (out := tmp_path / "out").mkdir()
    done = run(torchrun(2, *more, tmp_path / "job.py", who, restarts=3), env={"OUT": str(out)}, expect=code)
    assert done.stderr.count("evenkeel: no\n") == 1
    assert more or (done.stdout, done.stderr) == ("", "evenkeel: no\n")
    processes.wait_until_gone(once(out), limit=5)


def test_a_refusal_spares_what_the_shell_before_torchrun_has_started(tmp_path: Path) -> None:
    job = torchrun(2, TRAIN, "--task=nonsense", restarts=3)
    process = start(["sh", "-c", 'sleep 60 > /dev/null 2>&1 & echo $!; exec "$@"', "sh", *job])
    monitor = int(process.stdout.readline())
    assert process.wait(LIMIT) == -REFUSAL
    found = stat(monitor)
    assert found is not None
    assert found.state != "Z"
    assert finish(process).stderr == NONSENSE


@pytest.mark.parametrize("to", ["2>/dev/full", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_exit_code_of_a_refusal_where_nobody_can_read_it(to: str) -> None:
    run(["sh", "-c", f"{sys.executable} {TRAIN} --epochs -1 {to}"], expect=2)


@pytest.mark.parametrize("closed", ["", "<&-", "2>&-", "<&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream_and_any_path_can_be_printed(closed: str) -> None:
    code = "import evenkeel, os; print(chr(0xdcff), os.open(os.curdir, 0))"
    started = run(["sh", "-c", f"{sys.executable} -c '{code}' {closed}"], env={"PYTHONIOENCODING": "utf-8"})
    assert started.stdout == "\\udcff 3\n"


# The interface of jobs by `mp.spawn`: python train.py -n 2 -g 4 -nr 0.


@pytest.fixture(autouse=True)
def _no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("-n 1 -g 2 -nr 0 --epochs 3", "--nodes=1 --gpus=2 --node-rank=0 -- --epochs 3"),
        ("--epochs 3 -g2", "--gpus=2 -- --epochs 3"),
        ("--nodes 2:4 --node-rank 1 --master a:1 --lr 1", "--nodes=2:4 --node-rank=1 --master=a:1 -- --lr 1"),
        ("--epochs 3", ""),
        ("", ""),
    ],
)
def test_the_topology_is_taken_out_of_the_options(typed: str, becomes: str) -> None:
    assert topology_in(typed.split()) == becomes.split()


def test_the_variables_of_old_scripts_name_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert "--master=node0:29500" in topology_in(["-n", "2", "-nr", "1"])
    assert "--master=other" in topology_in(["-n", "2", "-nr", "1", "--master", "other"])
    assert topology_in(["-n", "1", "-g", "1"]) == ["--nodes=1", "--gpus=1", "--"]
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert "--master=node0:1234" in topology_in(["-n", "2", "-nr", "1"])


def test_the_old_command_on_one_node_and_two(tmp_path: Path) -> None:
    """On one machine; two nodes find each other as two machines would."""
    train, quick = [sys.executable, TRAIN], ["--epochs", 1, "--wandb", "disabled", "--run-dir"]
    run([*train, "-n", 1, "-g", 2, "-nr", 0, *quick, tmp_path / "one"])
    two = ["-n", 2, "-g", 1, "--master", f"127.0.0.1:{free_port()}", *quick, tmp_path / "two"]
    finish_all([start([*train, "-nr", node, *two]) for node in (0, 1)])
    assert [read(tmp_path / name)["world_sizes"] for name in ("one", "two")] == [[2], [2]]


def test_an_old_command_that_cannot_be_meant_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="-g"):
        topology_in(["-n", "1", "-g"])
    for words, line in (
        (["-n", 2, "-g", 1, "--master", "a"], "-nr is missing: with -n 2 give each node its own, from 0"),
        (["-g", 1, "--lr", -1, "--run-dir", tmp_path / "run"], "--lr -1.0: must be at least 0"),
    ):
        assert run([sys.executable, TRAIN, *words], expect=2).stderr == f"evenkeel: {line}\n"
    done = run(torchrun(2, TRAIN, "-n", "1", "-g", "2"), expect=-REFUSAL)
    assert "evenkeel: --nodes=1: torchrun has started the ranks; leave it out, or type python" in done.stderr
    assert list(tmp_path.iterdir()) == []
