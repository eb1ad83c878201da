"""The rows and the table of `evenkeel check`, from what is known; the line to blame; and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.cli.check.command import HALTED, Check, CheckCommand, as_table
from evenkeel.cli.check.jobs import JobFailed, Jobs, last_message, together
from evenkeel.cli.check.rows import CHANGED, FAILED, OWN_DICE, PASSED, SUM, UNCHECKED, Row, blame
from evenkeel.cli.check.verdicts import Left, of_probes
from evenkeel.common.errors import Refusal
from evenkeel.distributed.exits import AGAIN, TRYING
from evenkeel.testing import check
from tests.support import bad_tasks
from tests.support.processes import ROOT

BREAKS = [("kill -9", "killed", "kill", 1, 3), ("stop", "SIGTERM", "stop", 1, 1), ("resize", "SIGTERM", "stop", 2, 4)]


def probe(**more: Any) -> dict[str, Any]:
    data = {"length": 9, "samples": {"0": "a", "8": "b"}, "differing": 0, "how": "between two reads", "line": ""}
    good = {"repeats": True, "why": "", "off": 0.0, "name": "loss"}
    lines = dict.fromkeys(("rank", "loss", "state", "kill", "metrics"), "task.py:7")
    shared = {"steps": 5, "precision": "fp32", "batch_size": 8, "weights": "w", "rebuilt": True}
    return {**shared, "sets": {"training": data}, "loss": good, "metrics": good, "lines": lines} | more


def results(rows: Any) -> dict[str, str]:
    return {row.name: row.result for row in rows}


def leave(
    folder: Path, job: str, starts: Any = (0,), bits: Any = (), loss: float = 1.0, sample: str = "x", untold: int = 0
) -> None:
    """A job of six steps as it would be left; ``bits``: steps whose weights are others."""
    lines: list[dict[str, Any]] = [{"kind": "start", "step": step} for step in starts[:1]]
    for step in range(1, 7):
        lines += [{"kind": "start", "step": step - 1}] * (step - 1 in starts[1:])
        lines.append({"kind": "train", "step": step, "train/loss": loss, "train/grad_norm": 2.0})
        digest = {"kind": "digest", "step": step, "digests": {"w": "other" if step in bits else "same"}}
        lines += [digest] * (step != untold)
    lines.append({"kind": "eval", "step": 6, "test/loss": 0.5})
    (folder / job / "run").mkdir(parents=True)
    text = "".join(json.dumps({"time": 1.0, **line}) + "\n" for line in lines)
    (folder / job / "run" / "metrics.jsonl").write_text(text)
    (folder / job / "samples-0-1.jsonl").write_text(json.dumps([0, 0, 0, 8, sample]) + "\n")


def left(folder: Path, **missing: str) -> list[Row]:
    return [*Left(folder, missing, probe()).rows(BREAKS)]


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    for name in ("tree-1", "tree-2", "tree-3", "ring-1", "ring-2", "ring-3"):
        leave(tmp_path, name)
    leave(tmp_path, "kill", starts=(0, 3))
    leave(tmp_path, "stop", starts=(0, 1, 4))
    return tmp_path


def test_all_is_well(jobs: Path) -> None:
    rows = [*of_probes([probe(), probe(), probe()]), *left(jobs)]
    assert results(rows).pop("cost of a step") == UNCHECKED, "nothing has been timed"
    assert {row.result for row in rows[:-1]} == {PASSED}
    assert "no step lost, the same bits" in as_table(rows)


def test_a_job_that_failed_or_was_not_run(jobs: Path) -> None:
    missing = {"tree-2": "exit code 1: a bug", "ring-1": "not run: why", "stop": "not run: why"}
    rows = {row.name: row for row in left(jobs, **missing)}
    assert (rows["bits, 1-3 ranks"].result, rows["bits, 1-3 ranks"].figure) == (FAILED, "exit code 1: a bug")
    for name in ("numbers, 1-3 ranks", "stop", "resize"):
        assert (rows[name].result, rows[name].figure) == (UNCHECKED, "why"), name


def test_what_the_task_has_shown_is_in_its_row() -> None:
    other = probe(weights="v")
    assert results(of_probes([probe(), probe(), other]))["data, each rank"] == FAILED
    odd = probe(loss={"repeats": True, "why": "", "off": 0.5, "name": "loss", "whole": 1.0, "parts": 0.5})
    row = next(row for row in of_probes([odd] * 3) if row.name == "loss, any cut")
    assert (row.result, row.figure) == (FAILED, "loss 1, averaged over its parts 0.5")
    assert row.remedy.endswith("; look at task.py:7")
    untold = probe(metrics={"repeats": True, "why": "it draws", "off": 0.0})
    assert results(of_probes([untold] * 3))["metrics, any cut"] == UNCHECKED


def test_other_samples_numbers_and_bits_on_three_ranks_are_each_in_their_row(jobs: Path, tmp_path: Path) -> None:
    leave(tmp_path / "a", "tree-3", bits=(4,), sample="y")
    leave(tmp_path / "a", "ring-3", loss=1.0001)
    for name in ("tree-3", "ring-3"):
        (tmp_path / "a" / name).rename(jobs / f"{name}-new")
        (jobs / name).rename(jobs / f"{name}-old")
        (jobs / f"{name}-new").rename(jobs / name)
    found = {row.name: row for row in left(jobs)}
    assert found["samples, 1-3 ranks"].figure.startswith("step 1, micro-batch 0: ")
    assert found["numbers, 1-3 ranks"].figure == "step 1: train/loss: 1.0 on 1 rank, 1.0001 on 3"
    assert found["bits, 1-3 ranks"].figure == "step 4: w: same on 1 rank, other on 3"
    assert found["evaluation, 1-3 ranks"].result == UNCHECKED, "of other weights"


@pytest.mark.parametrize(
    ("starts", "bits", "untold", "kill"),
    [
        ((0, 3), (5, 6), 0, FAILED),
        ((0, 2), (), 0, FAILED),
        ((0, 3), (2, 3), 0, UNCHECKED),
        ((0,), (), 0, FAILED),
        ((0, 3), (), 3, PASSED),  # a signal has come before the digest, and no step is lost
    ],
)
def test_a_kill_that_costs_steps_or_bits(jobs: Path, starts: Any, bits: Any, untold: int, kill: str) -> None:
    (jobs / "kill").rename(jobs / "before")
    leave(jobs, "kill", starts=starts, bits=bits, untold=untold)
    assert results(left(jobs))["kill -9"] == kill


def test_of_two_breaks_the_one_after_which_the_bits_differ_has_failed(jobs: Path) -> None:
    (jobs / "stop").rename(jobs / "before")
    leave(jobs, "stop", starts=(0, 1, 4), bits=(5, 6))
    found = results(left(jobs))
    assert (found["stop"], found["resize"]) == (PASSED, FAILED)
    (jobs / "stop").rename(jobs / "then")
    leave(jobs, "stop", starts=(0, 1, 4), bits=(3, 4, 5, 6))
    found = results(left(jobs))
    assert (found["stop"], found["resize"]) == (FAILED, UNCHECKED)


def test_the_line_to_blame() -> None:
    lines = (ROOT / "tests" / "support" / "bad_tasks.py").read_text().splitlines()

    def text(place: str) -> str:
        file, _, number = place.rpartition(":")
        assert file.endswith("bad_tasks.py")
        return lines[int(number) - 1]

    assert "# HERE" in text(blame([bad_tasks.Counts.loss], OWN_DICE, CHANGED))
    assert "# HERE" in text(blame([bad_tasks.Summed.loss], SUM))
    of_one_line = bad_tasks.CountsInALine
    assert "# HERE" in text(blame([of_one_line.loss, of_one_line.after_step, bad_tasks], CHANGED))
    assert "def loss" in text(blame([bad_tasks.Good.loss], SUM)), "without a suspicious line, where it begins"
    assert blame([json.dumps, len]) == "", "nobody's own"


def test_jobs_run_side_by_side_and_a_failure_is_told() -> None:
    seen = []

    def job(name: str, fails: bool = False) -> Iterator[None]:
        for _ in range(2):
            seen.append(name)
            yield
        if fails:
            raise JobFailed(f"broken {ord(name)}")

    told = [*together({"a": job("a"), "b": job("b", fails=True), "c": job("c")}, 2)]
    assert seen == ["a", "b", "a", "b", "c", "c"]
    assert told == [("a", None), ("b", None), ("a", ""), ("b", "broken 98"), ("c", None), ("c", "")]
    checks = Check(Jobs(ROOT, ROOT, []), [])
    checks.missing = dict.fromkeys(("a", "b", "c"), f"not run: {HALTED}")
    with pytest.raises(JobFailed):  # two alike: no third is run
        checks._do({name: job(name, fails=True) for name in checks.missing}, 2)
    assert checks.missing == {
        "a": "broken 97",
        "b": "broken 97",
        "c": "not run: two jobs have failed with the same error",
    }
    rows = [Row(name, "x", FAILED, figure) for name, figure in sorted(checks.missing.items())]
    assert [row.rpartition(": ")[2] for row in as_table(rows).splitlines()][:2] == ["broken 97", "the same error"]


def test_last_message(tmp_path: Path) -> None:
    file = tmp_path / "output"
    file.write_text("evenkeel: the loss is odd\nand so on\n")
    assert last_message(file) == "the loss is odd"
    file.write_text(f"evenkeel: rank 1 failed: KeyError: 3{AGAIN}\nevenkeel: failed at step 0; nothing to save\n")
    assert last_message(file) == "KeyError: 3"
    file.write_text(f"evenkeel: no room{TRYING} (restart 1 of 3)\n")
    assert last_message(file) == "no room"
    file.write_text("Traceback\nValueError: no\n  then\n")
    assert last_message(file) == "ValueError: no"


@pytest.mark.parametrize(
    ("command", "options", "refusal"),
    [
        ({"script": Path("none.py")}, [], "--script none.py: no such file"),
        ({}, ["--max-steps", "3"], "-- --max-steps: check sets it"),
        ({}, ["--task=lm"], "-- --task: give it before the --"),
        ({"keep": ROOT}, [], "exists already"),
    ],
)
def test_refusals(command: Any, options: list[str], refusal: str) -> None:
    with pytest.raises(Refusal, match=refusal):
        CheckCommand(**{"script": ROOT / "train.py"} | command).rows(options)


def test_pytest_shows_no_frame_of_ours() -> None:
    with pytest.raises(Refusal, match="no such file") as error:
        check(script="none.py")
    assert [str(frame.path) for frame in error.traceback.filter(error)] == [__file__]
