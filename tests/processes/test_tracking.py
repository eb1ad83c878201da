"""What a run tells: metrics.jsonl, logs, and Weights & Biases, which never ends a training nor learns a secret."""

import base64
import csv
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from evenkeel.resilience.interruption import STOPPED
from tests.run.test_trackers import scalars
from tests.run.test_tracking import (
    KEY,
    no_credentials,  # noqa: F401  (a fixture, for all tests)
)
from tests.support import processes
from tests.support.components import has
from tests.support.small_runs import wait_for_step


def files_with(text: str, folder: Path) -> list[Path]:
    """As grep -r: the files that hold a text, also as it stands in an HTTP header, or have it in their names."""
    needles = [text.encode(), base64.b64encode(f"api:{text}".encode())]
    found = [path for path in folder.rglob("*") if path.is_file() and any(n in path.read_bytes() for n in needles)]
    return found + [path for path in folder.rglob("*") if text in path.name]


def job(run_dir: Path, steps: int, mode: str) -> list[object]:
    """A run that may be prolonged, as its learning rate is constant."""
    options = ["--run-dir", run_dir, "--schedule", "constant", "--max-steps", steps, "--wandb", mode, "--log-every", 1]
    return [sys.executable, processes.TRAIN, *options]


def test_two_attempts_offline_are_one_run_and_tell_no_secret(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "mine"
    environment = {"WANDB_API_KEY": KEY, "HOME": str(tmp_path / "home")}
    ids, said = [], ""
    for steps in (2, 4):
        done = processes.run(job(run_dir, steps, "offline"), cwd=tmp_path, env=environment)
        said += done.stdout + done.stderr
        ids.append(processes.read(run_dir, "status.json")["wandb_id"])
    assert ids[0] == ids[1]
    offline = sorted(path.name for path in (run_dir / "wandb").glob("offline-run-*"))
    assert len(offline) == 2
    assert all(name.endswith(f"-{ids[0]}") for name in offline)
    assert len(list((run_dir / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))) == 2
    assert [record["attempt"] for record in processes.records(run_dir, "start")] == [1, 2]
    assert not (tmp_path / "wandb").exists(), "all that a run leaves is in its folder"

    assert len(files_with(ids[0], run_dir)) >= 3, "the search finds what is there"
    assert files_with(KEY, tmp_path) == []
    assert KEY not in said
    assert "resume" not in said, "nothing for the reader to wonder about"


KILLED_IN_INIT = """
import os, signal
def init(**asked):
    with open(os.environ["ASKED"], "a") as file:
        print(asked["id"], file=file)
    os.kill(os.getpid(), signal.SIGKILL)
Settings = dict
"""


def test_starts_that_are_killed_while_wandb_begins_are_one_run(tmp_path: Path) -> None:
    """The server may have made the run by then."""
    (tmp_path / "wandb.py").write_text(KILLED_IN_INIT)
    asked, path = tmp_path / "asked", f"{tmp_path}{os.pathsep}{processes.ROOT / 'src'}"
    command = [*job(tmp_path / "run", 2, "online"), "--keeper", "off"]
    environment = {"PYTHONPATH": path, "ASKED": str(asked), "WANDB_API_KEY": KEY}
    for _ in range(2):
        processes.run(command, cwd=tmp_path, env=environment, expect=-signal.SIGKILL)
    first, second = asked.read_text().split()
    assert first == second == processes.read(tmp_path / "run", "status.json")["wandb_id"]


SECRET_TASK = """
from dataclasses import dataclass
from evenkeel.training.task import secret
from evenkeel.tasks.classify import Classify

@dataclass
class Task(Classify):
    token: str = secret()

    def train_dataset(self):
        assert self.token == open("token").read(), "it is there for the task"
        return super().train_dataset()
"""


def test_a_secret_option_is_left_nowhere_and_may_change(tmp_path: Path) -> None:
    (tmp_path / "secretive.py").write_text(SECRET_TASK)
    run_dir, home = tmp_path / "run", tmp_path / "home"
    said = ""
    for steps, token in ((2, KEY), (4, KEY[::-1])):
        (tmp_path / "token").write_text(token)
        command = [*job(run_dir, steps, "offline"), "--task", "secretive.py:Task", "--token", token]
        done = processes.run(command, cwd=tmp_path, env={"HOME": str(home)})
        said += done.stdout + done.stderr
    assert processes.read(run_dir)["step"] == 4
    if has("report"):
        processes.evenkeel("report", run_dir)
        assert "dropout" in (run_dir / "report.html").read_text()
    for token in (KEY, KEY[::-1]):
        assert [*files_with(token, run_dir), *files_with(token, home)] == []
        assert token not in said
    assert "dropout" in (run_dir / "config.toml").read_text(), "the control: another option of the task"
    wandb = [path for path in run_dir.rglob("*.wandb") if b"batch_size" in path.read_bytes()]
    assert len(wandb) == 2, "the control: the others are sent"


def test_a_server_that_does_not_answer_costs_seconds_and_no_secret(tmp_path: Path, run_dir: Path) -> None:
    nobody = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}
    done = processes.run(job(run_dir, 2, "online"), cwd=tmp_path, env={**nobody, "HOME": str(tmp_path / "home")})
    assert processes.read(run_dir)["state"] == "finished"
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("evenkeel: WARNING: ")]
    assert warning.startswith("evenkeel: WARNING: Weights & Biases is off: CommError: ")
    assert processes.read(run_dir)["seconds"] < 60, "and wandb's own patience is 90"
    assert files_with(KEY, tmp_path) == []
    assert KEY not in done.stdout + done.stderr


def test_a_run_that_is_stopped_while_wandb_starts_may_start_with_other_options(tmp_path: Path) -> None:
    run_dir, home = tmp_path / "run", {"HOME": str(tmp_path)}
    started = processes.start([*job(run_dir, 3, "offline"), "--seed", "1"], cwd=tmp_path, env=home)
    processes.wait_until((run_dir / "logs" / "attempt-0001" / "rank-0.log").exists, "the start")
    done = processes.stop(started, signal.SIGINT, expect=STOPPED)
    assert "stopped by SIGINT" in done.stdout
    assert processes.read(run_dir, "status.json")["state"] == "stopped"
    processes.run([*job(run_dir, 3, "disabled"), "--seed", "2"], cwd=tmp_path)


def test_killed_and_resumed_each_tracker_has_each_step_once_and_the_names_of_metrics_jsonl(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [*job(run_dir, 40, "disabled"), "--tensorboard", "--csv", "--eval-every", "10", "--checkpoint-every", "7"]
    started = processes.start(command, cwd=tmp_path)
    wait_for_step(run_dir, 12, started)
    processes.kill_group(started)
    processes.finish(started)
    processes.run(command, cwd=tmp_path)
    records_ = [*processes.records(run_dir, "train"), *processes.records(run_dir, "eval")]
    assert len(records_) > 44, "the control: metrics.jsonl has what was done again twice"
    told = {(it["step"], name): value for it in records_ for name, value in it.items() if "/" in name}
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["train/loss"]] == [str(step) for step in range(1, 41)]
    shown = scalars(run_dir / "tensorboard")
    for name in ("train/loss", "test/accuracy"):
        expected = {step: value for (step, other), value in told.items() if other == name}
        assert {int(row["step"]): float(row[name]) for row in rows if row[name]} == expected
        assert dict(shown[name]) == pytest.approx(expected, rel=1e-6)
        assert len(shown[name]) == len(expected)


def test_the_sweep_of_the_documentation_makes_a_folder_and_an_offline_run_for_each_setting(tmp_path: Path) -> None:
    page = (processes.ROOT / "docs" / "tracking.md").read_text()
    sweep = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    settings = [dict(zip(sweep["parameters"], each, strict=True)) for each in ((0.002, 32), (0.01, 64))]
    for setting in settings:
        arguments = [f"--{name}={value}" for name, value in setting.items()]  # as wandb's agent writes them
        macros = {"${env}": ["env"], "${program}": [str(processes.ROOT / sweep["program"])], "${args}": arguments}
        words = [word for part in sweep["command"] for word in macros.get(part, [part])]
        words = [sys.executable, "-m", "torch.distributed.run", *words[2:]]
        processes.run(words, cwd=tmp_path, env={"WANDB_MODE": "offline", "HOME": str(tmp_path / "home")})
    folders = sorted(path.name for path in (tmp_path / "runs" / "sweep").iterdir())
    assert folders == ["classify-0.002-32", "classify-0.01-64"]
    for name in folders:
        (sent,) = (tmp_path / "runs" / "sweep" / name / "wandb").glob("offline-run-*/run-*.wandb")
        assert sweep["metric"]["name"].encode() in sent.read_bytes(), "the sweep's metric is in the summary"
    done = processes.run([sys.executable, processes.TRAIN, "--run-dir", "runs/{lr}-{oops}"], cwd=tmp_path, expect=2)
    assert done.stderr.startswith("evenkeel: --run-dir runs/{lr}-{oops}: there is no option oops; there are task, ")
