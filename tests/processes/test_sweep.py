"""`evenkeel sweep` with real runs: one is killed or stopped, and the same command continues it."""

import signal
from pathlib import Path

from tests.support import needs
from tests.support.processes import EVENKEEL, evenkeel, finish, read, start, wait_beside
from tests.support.small_runs import SUPPORT, starts, told_step, weights_of

FILE = f"""
[fixed]
task = "{SUPPORT / "recording_task.py"}:Recorded"
epochs = 20
batch_size = 12
log_every = 1
wandb = "disabled"
[grid]
lr = [0.1, 0.01]
seed = [1, 2]
"""
RUNS = ["lr=0.1,seed=1", "lr=0.1,seed=2", "lr=0.01,seed=1", "lr=0.01,seed=2"]


@needs.no_gpu
def test_a_stopped_sweep_is_continued_and_finished_runs_are_not_run_again(tmp_path: Path) -> None:
    (file := tmp_path / "sweep.toml").write_text(FILE)
    words = ["sweep", file, "-j", 2, "--run-dir", tmp_path / "runs"]
    assert [line.rpartition("/")[2] for line in evenkeel(*words, "--dry-run").stdout.splitlines()] == RUNS
    assert not (tmp_path / "runs").exists()
    first, second, *others = (tmp_path / "runs" / name for name in RUNS)

    stopped = start([*EVENKEEL, *words])
    wait_beside(stopped, lambda: told_step(first) > 3 and told_step(second) > 3, "both run, side by side")
    stopped.send_signal(signal.SIGINT)
    done = finish(stopped)
    assert done.returncode == 75, done.stderr
    for run in (first, second):
        assert read(run, "status.json")["state"] == "stopped"
        assert read(run, "status.json")["step"] > 0
    assert not any(run.exists() for run in others)

    lines = evenkeel(*words).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["lr=0.1", "2/2"], ["lr=0.01", "2/2"]]
    assert all("±" in line for line in lines[1:])
    assert len(starts(first)) == 2
    assert starts(first)[1] > 0, "at the step that was saved"
    assert len({weights_of(tmp_path / "runs" / name) for name in RUNS}) == 4
    before = [starts(tmp_path / "runs" / name) for name in RUNS]
    assert evenkeel(*words).stdout.splitlines() == lines
    assert [starts(tmp_path / "runs" / name) for name in RUNS] == before
    file.write_text(FILE.replace("epochs = 20", "epochs = 21"))
    assert "has finished with --epochs 20, and the file has 21" in evenkeel(*words, expect=2).stderr
    # a run that fails does not keep the others from being run
    file.write_text(FILE.replace("lr = [0.1, 0.01]", "batch_size = [12, 9999]").replace("batch_size = 12\n", ""))
    failed = evenkeel("sweep", file, "--run-dir", tmp_path / "other", expect=1)
    assert failed.stderr.count(" failed: exit code 2; its output is in ") == 2
    assert failed.stdout.splitlines()[1].split()[:2] == ["batch_size=12", "2/2"]
