"""Bad input is one line and one attempt, under torchrun and on two nodes as well."""

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from evenkeel.common.files import write_json
from tests.support.processes import (
    TRAIN,
    Done,
    checked,
    finish,
    finish_all,
    fork,
    free_port,
    rank_variables,
    read,
    run,
    start,
    torchrun,
)
from tests.support.refusals import NONSENSE, REFUSER
from tests.support.small_runs import interrupt, job, kept_job, own_task
from tests.tasks.test_command_line import once


def test_a_real_refusal(tmp_path: Path) -> None:
    done = run([sys.executable, str(TRAIN), "--batch-size", "0"], cwd=tmp_path, expect=2)
    assert (done.stdout, done.stderr) == ("", "evenkeel: --batch-size 0: must be at least 1\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "expected"),
    [("torch.distributed.run", -signal.SIGALRM), pytest.param("evenkeel.launch.agent", 2, marks=pytest.mark.slow)],
)
def test_a_real_refusal_under_torchrun(tmp_path: Path, command: str, expected: int) -> None:
    typed = torchrun(2, TRAIN, "--task=nonsense", restarts=3)
    argv = [word.replace("torch.distributed.run", command) for word in typed]
    done = run(argv, cwd=tmp_path, expect=expected)
    assert (done.stdout, own_lines(done)) == ("", NONSENSE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_refusal_by_a_fork_is_printed_once(tmp_path: Path) -> None:
    """Its keeper has SIGTERM blocked, which the agent sends before it ends: they waited for each other."""
    refused = "from evenkeel.common.errors import Refusal"
    task = own_task(tmp_path, "def model(self):\n    raise Refusal('no')", refused)
    done = run(torchrun(2, TRAIN, *kept_job(tmp_path / "run", "--task", task)), expect=-signal.SIGALRM)
    assert own_lines(done) == "evenkeel: no\n"


@pytest.mark.slow
def test_a_run_on_each_of_two_nodes_is_not_continued_as_one(tmp_path: Path) -> None:
    """Each with a disk of its own, on which somebody has trained alone. The control: a copy without a step."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        interrupt(0, folder, job(folder), 1, signal.SIGTERM)
    refused = "another run there than rank 0's; move one of them away, name another folder, or start over with --fresh"
    assert refused in on_two_nodes(folders, 2).stderr
    shutil.rmtree(folders[1] / "checkpoints")
    (folders[1] / "metrics.jsonl").unlink()
    write_json(folders[1] / "status.json", read(folders[1], "status.json") | {"state": "running", "step": 0})
    assert "finished in" in on_two_nodes(folders, 0).stdout


def on_two_nodes(folders: list[Path], code: int) -> Done:
    """Rank 0 of two ranks with a disk of their own, which must both end with this code."""
    return finish_all(
        [
            fork(TRAIN, *job(folder), env=variables | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
            for folder, variables in zip(folders, rank_variables(2), strict=True)
        ],
        code,
    )[0]


def own_lines(done: Done) -> str:
    """What we say. torch warns beside it where no name server answers."""
    return re.sub(r"^\[W.*hostname of the client socket cannot be retrieved.*\n", "", done.stderr, flags=re.MULTILINE)


def test_without_that_torchrun_starts_the_refused_again(tmp_path: Path) -> None:
    """The control, and what is spared a launcher that only looks like torchrun: it is not ended."""
    (tmp_path / "job.py").write_text(REFUSER)
    (out := tmp_path / "out").mkdir()
    wrapped = ["--no-python", "sh", "-c", f"{sys.executable} {tmp_path}/job.py 0; exit $?"]
    done = run(torchrun(1, *wrapped, restarts=3), env={"OUT": str(out)}, expect=1)
    assert done.stderr.count("evenkeel: no\n") == len(list(out.iterdir())) == 4
    assert len(done.stderr.splitlines()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("refusing", ["23", *(pytest.param(it, marks=pytest.mark.long) for it in ("0123", "01"))])
def test_two_nodes_refuse_together(tmp_path: Path, refusing: str) -> None:
    script = REFUSER.replace("time.sleep(120)", "job_store_of(os.environ)")
    (tmp_path / "job.py").write_text(script.replace("def main", TWO_NODES + "def main", 1))
    (out := tmp_path / "out").mkdir()
    port = free_port()
    nodes = [
        start(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", "--max-restarts=3",
             "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(node == 0)}",
             "--local-addr=127.0.0.1", str(tmp_path / "job.py"), refusing],
            env={"OUT": str(out)},
        )
        for node in range(2)
    ]  # fmt: skip
    lines = sorted(own_lines(checked(finish(node), -signal.SIGALRM)) for node in nodes)
    assert once(out)
    assert lines[0] == "evenkeel: no\n"
    assert lines[1] in ("evenkeel: no\n", "evenkeel: refused by rank 0: no\n", "evenkeel: refused by rank 2: no\n")
    assert (lines[1] == lines[0]) == (refusing == "0123")


TWO_NODES = """
def job_store_of(environ):
    from datetime import timedelta
    from evenkeel.distributed.rendezvous import fresh_store, job_store
    place = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    fresh_store(job_store(*place, timedelta(minutes=2)), *place, timedelta(minutes=2))

"""
