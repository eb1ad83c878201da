"""A tracker of one's own: on rank 0 only, each step at most once through a kill, refused before anything is written."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.run.test_own_trackers import notes, steps
from tests.support.processes import ROOT, TRAIN, finish_all, fork_ranks, read, records
from tests.support.small_runs import SUPPORT, interrupt, job, options, refusal, starts, trained

NOTES = f"{SUPPORT / 'note_tracker.py'}:Notes"
SHOWN = f"{SUPPORT / 'shown_task.py'}:Shown"


def test_killed_and_resumed_it_has_each_step_once_from_rank_0(tmp_path: Path) -> None:
    """All ranks are killed between two checkpoints, so steps are done again."""
    run_dir = tmp_path / "run"
    slow = ["--pause", 0.05, "--hold", tmp_path / "slow"]
    more = ["--tracker", NOTES, "--checkpoint-every", 5, "--keeper", "off", *slow]
    interrupt(2, run_dir, job(run_dir, *more), step=8, slow=tmp_path / "slow")
    shutil.copytree(run_dir, tmp_path / "control")
    trained(2, job(run_dir, *more))
    assert starts(run_dir)[1] < 8, "some steps are done again"
    # at `kill -9` one report may have been on its way
    assert steps(run_dir) == sorted(set(steps(run_dir)))
    assert len(steps(run_dir)) >= 26
    assert sum("made" in note for note in notes(run_dir)) == 2, "once an attempt"
    assert [note["closed"] for note in notes(run_dir) if "closed" in note] == ["finished"]

    trained(0, job(run_dir, *more, "--fresh"))  # another run in this folder
    assert steps(run_dir)[-27:] == [*range(1, 28)]

    # the control: without the record of what it was given
    shutil.rmtree(tmp_path / "control" / "trackers")
    trained(2, job(tmp_path / "control", *more))
    assert len(steps(tmp_path / "control")) > len(set(steps(tmp_path / "control")))


def test_its_error_ends_no_training_and_changes_no_bit(tmp_path: Path) -> None:
    (first,) = trained(0, job(tmp_path / "run", "--tracker", f"{SUPPORT / 'note_tracker.py'}:Broken"))
    (warning,) = [line for line in first.stderr.splitlines() if "WARNING" in line]
    assert "Broken is off from here on: OSError: the server is gone at " in warning
    trained(0, job(tmp_path / "other"))
    assert read(tmp_path / "run")["weights_sha256"] == read(tmp_path / "other")["weights_sha256"]


@pytest.mark.slow
def test_a_finished_run_that_waits_for_it_is_no_hang(run_dir: Path) -> None:
    trained(2, job(run_dir, "--hang-timeout", 2, "--tracker", f"{SUPPORT / 'note_tracker.py'}:SlowEnd"))
    assert notes(run_dir)[-1]["closed"] == "finished"


@pytest.mark.parametrize("ranks", [0, 1])
def test_what_is_no_tracker_is_refused_before_anything_is_written(tmp_path: Path, ranks: int) -> None:
    name = f"{SUPPORT / 'note_tracker.py'}:NoClose"
    words = job(tmp_path / "run", "--tracker", name)
    line = f"--tracker {name}: NoClose must define log(metrics, step) and close(status)"
    if ranks:
        (done,) = finish_all(fork_ranks(1, TRAIN, *words), 2)
        assert line in done.stderr
    else:
        assert refusal(words) == line
    assert not (tmp_path / "run").exists()


def logged_in_mlflow(folder: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    import mlflow

    client = mlflow.MlflowClient(f"file://{folder}")
    assert client.get_run(run).info.status == "FINISHED"
    assert [it.path for it in client.list_artifacts(run)] == ["scores"]
    names = client.get_run(run).data.metrics
    return {name: [(it.step, it.value) for it in client.get_metric_history(run, name)] for name in names}


def logged_in_the_stand_in(file: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    assert {call["run"] for call in calls} == {run}
    assert [call["new"] for call in calls if call["call"] == "start_run"] == [True, False]
    assert sum(call["call"] == "log_params" for call in calls) == 1
    assert calls[-1] | {"status": "FINISHED"} == calls[-1]
    assert {call["to"] for call in calls if call["call"] == "log_artifact"} == {"scores"}
    found: dict[str, list[tuple[int, float]]] = {}
    for call in calls:
        if call["call"] == "log_metric":
            found.setdefault(call["key"], []).append((call["step"], call["value"]))
    return found


def test_the_example_for_mlflow_has_one_run_over_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tracking.md").read_text(), re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(example)
    real = find_spec("mlflow") is not None
    if not real:
        shutil.copy(SUPPORT / "mlflow_stand_in.py", tmp_path / "mlflow.py")
    monkeypatch.setenv("MLFLOW_STAND_IN", str(tmp_path / "calls"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_dir = tmp_path / "run"
    shape = ["--batch-size", 4, "--epochs", 6, "--log-every", 1, "--checkpoint-every", 7, "--keeper", "off"]
    shape += ["--notes", tmp_path]
    words = options(SHOWN, run_dir, *shape, "--tracker", f"{tmp_path / 'my_tracker.py'}:MLflow")
    interrupt(0, run_dir, words, step=12)
    trained(0, words)
    run = (run_dir / "trackers" / "mlflow-run").read_text()
    found = logged_in_mlflow(tmp_path / "mlruns", run) if real else logged_in_the_stand_in(tmp_path / "calls", run)
    losses = [step for step, _ in found["train/loss"]]
    assert losses == sorted(set(losses))
    told = [record["step"] for record in records(run_dir, "eval")]
    assert {step for step, _ in found["test/loss"]} <= set(told)
    assert found["best/step"]
