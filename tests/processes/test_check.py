"""`evenkeel check` on real tasks: one mistake each, found in its row with its line; and good ones, which pass."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from evenkeel.cli.check.rows import FAILED, PASSED, UNCHECKED, Row
from evenkeel.cli.check.verdicts import of_probes
from evenkeel.testing import check
from tests.support.chaos import still_running, wait_until_nothing_runs
from tests.support.processes import ROOT, TRAIN, checked, finish, finish_all, fork, rank_variables, start, wait_until

BAD = ROOT / "tests" / "support" / "bad_tasks.py"


def guilty(task: str) -> int:
    """The number of the line of a task, or of what it uses, that ends in `# HERE`."""
    lines = BAD.read_text().splitlines()
    users = {"OtherAtEachRead": "Noisy", "OwnGenerator": "OwnNoise"}
    first = next(i for i, line in enumerate(lines) if line.startswith(f"class {users.get(task, task)}("))
    return next(i for i in range(first, len(lines)) if lines[i].endswith("# HERE")) + 1


def rows_of(task: str, folder: Path, *options: str) -> dict[str, Row]:
    """The rows about a task that need no jobs."""
    words = ["--task", task, "--max-steps", 12, *options]
    ranks = enumerate(rank_variables(3))
    finish_all(
        [fork("-m", "evenkeel.cli.check.probe", folder / f"{rank}.json", *words, env=env) for rank, env in ranks]
    )
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]
    return {row.name: row for row in of_probes(found)}


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("OtherAtEachRead", "data, each read"),
        ("OtherOnEachRank", "data, each rank"),
        ("OwnGenerator", "same seed, same loss"),
        ("Summed", "loss, any cut"),
        ("NoMean", "metrics, any cut"),
    ],
)
def test_a_mistake_is_in_its_row_with_its_line(task: str, row: str, tmp_path: Path) -> None:
    found = rows_of(f"{BAD}:{task}", tmp_path)
    assert found[row].result == FAILED, found
    assert found[row].remedy.endswith(f"look at tests/support/bad_tasks.py:{guilty(task)}"), found[row]
    others = {name: it for name, it in found.items() if name != row}
    assert FAILED not in {it.result for it in others.values()}, "only there"


@pytest.mark.parametrize(
    ("task", "row", "result", "figure"),
    [
        ("PredictsWrong", "predict", FAILED, r".* at \S+bad_tasks.py:{}"),
        # it ends the jobs too, whose rows have failed
        ("Broadcasts", "loss, any cut", UNCHECKED, r"a loss .* at \S+bad_tasks.py:{}, .* take .squeeze\(1\) .*"),
    ],
)
def test_an_error_of_a_method_is_shown_with_its_place(
    task: str, row: str, result: str, figure: str, tmp_path: Path
) -> None:
    found = rows_of(f"{BAD}:{task}", tmp_path)[row]
    assert found.result == result
    assert re.fullmatch(figure.format(guilty(task)), found.figure)


def test_what_the_jobs_would_refuse_is_refused_before_them(tmp_path: Path) -> None:
    words = ["-m", "evenkeel", "check", "--script", str(TRAIN), "--keep", str(tmp_path / "jobs")]
    done = checked(finish(fork(*words, "--task", "regress", "--", "--batch-size", "100000")), 2)
    *_, line = done.stderr.splitlines()
    begin, end = "evenkeel: --batch-size 100000: the training data has only ", " samples; use at most that"
    assert re.fullmatch(rf"{begin}\d+{end}", line)
    assert not [path for path in (tmp_path / "jobs").iterdir() if path.is_dir()], "no job has begun"
    done = checked(
        finish(start([sys.executable, *words[:-2], "--task", "none.py:None"], env={"TMPDIR": str(tmp_path)})), 2
    )
    assert done.stderr.splitlines()[-1] == "evenkeel: --task none.py:None: no file none.py"
    assert not [*tmp_path.glob("evenkeel-check-*")]
    (tmp_path / "pyproject.toml").write_text('[tool.evenkeel]\ntask = "evenkeel.tasks:Gone"\n')
    done = checked(finish(start([sys.executable, *words[:-1], str(tmp_path / "more")], cwd=tmp_path)), 2)
    *_, line = done.stderr.splitlines()
    place = tmp_path / "pyproject.toml"
    assert (
        line
        == f"evenkeel: {place}: task = 'evenkeel.tasks:Gone': Gone does not exist in evenkeel.tasks, which has no task"
    )


GOOD: Any = [
    (f"{BAD}:Good", ()),
    ("lm", ("--width=16", "--seq-len=16")),
    ("regress", ()),
    (f"{ROOT / 'tests/support/streams_task.py'}:Streamed", ()),
    (f"{ROOT / 'tests/support/odd_tasks.py'}:Usual", ("--batch-size=4",)),
    (f"{ROOT / 'tests/support/odd_tasks.py'}:OwnBatches", ("--batch-size=4",)),
    (f"{ROOT / 'tests/support/odd_tasks.py'}:Everything", ("--batch-size=4",)),
    (f"{ROOT / 'tests/support/turns_task.py'}:Turns", ()),
    (f"{ROOT / 'tests/support/recording_task.py'}:Recorded", ("--die-at=13",)),
    (f"{ROOT / 'tests/support/ragged_task.py'}:Mixed", ("--batch-size=12",)),
    (f"{ROOT / 'tests/support/ragged_task.py'}:Nested", ("--batch-size=12",)),
    (f"{ROOT / 'tests/support/remembering_task.py'}:Remembering", ()),
]


@pytest.mark.parametrize(("task", "options"), GOOD)
def test_no_false_alarm(task: str, options: tuple[str, ...], tmp_path: Path) -> None:
    rows = rows_of(task, tmp_path, *options)
    assert {row.result for row in rows.values()} <= {PASSED, UNCHECKED}, rows
    if task.endswith((":Good", "regress", "lm")):
        assert {row.result for row in rows.values()} == {PASSED}, rows


@pytest.mark.promise
def test_jobs_of_a_good_task_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(f"{BAD}:Good", ["--batch-size", "20"])


def test_the_kill_shows_what_is_outside_of_the_committed_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(AssertionError) as error:
        check(f"{BAD}:Counts", ["--batch-size", "20"])
    text = str(error.value)
    assert re.search(
        r"^kill -9 +FAILED .*\n.*-> .*look at tests/support/bad_tasks.py:" + str(guilty("Counts")), text, re.M
    )
    assert "data, each rank" not in text, "only what has failed"


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evenkeel", "check", "--task", f"{BAD}:Good", "--script", str(TRAIN)]
    process, begun = start(command, env={"TMPDIR": str(tmp_path)}), ""
    while "--reduce tree" not in begun:
        begun += process.stderr.readline()
    assert re.match(r"evenkeel: +0\.0 s  first .*, then 8 short jobs; .*\n.* about two minutes", begun)
    assert " s  job 1 of 8: --reduce tree on 2 ranks" in begun
    (folder,) = tmp_path.glob("evenkeel-check-*")
    run_dir = folder / "tree-2" / "run"
    wait_until(lambda: any(str(run_dir) in line for line in still_running(Path(f"--run-dir={run_dir}"))), "a rank")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    table = process.stdout.read()
    assert re.search(r"^same seed, same loss +passed", table, re.M), "what is known is printed"
    assert re.search(r"^bits, 1-3 ranks +not checked .*: interrupted$", table, re.M)
    wait_until_nothing_runs(Path(f"--run-dir={run_dir}"))
    assert not [*tmp_path.glob("evenkeel-check-*")]


def test_ctrl_c_passes_no_test(tmp_path: Path) -> None:
    """What was not checked before it has no result."""
    (tmp_path / "test_task.py").write_text(
        f"from evenkeel.testing import check\ndef test_it() -> None: check('{BAD}:Good', script='{TRAIN}')\n"
    )
    process = start([sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(tmp_path / "test_task.py")])
    while " s  job 1 of 8: " not in process.stderr.readline():
        pass
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == pytest.ExitCode.INTERRUPTED
    assert re.search(r"^=+ no tests ran in ", process.stdout.read(), re.M)
