"""train.py from outside: what it leaves, how it ends, and its loader processes."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from evenkeel.common.files import write_json
from evenkeel.resilience.interruption import STOPPED
from evenkeel.run.state_files import STATE
from evenkeel.training.state_dicts import sha256
from tests.run.test_checkpoint import seal
from tests.support import needs, processes
from tests.support import small_runs as runs
from tests.support.small_runs import PLAN, TASK, children, failed, job, model_of, trainer_of, wait_for_step, weights_of


def test_a_finished_run_says_so_and_changes_nothing_and_fresh_moves_it_aside(tmp_path: Path, run_dir: Path) -> None:
    command = [processes.TRAIN, *job(run_dir, "--max-steps", 3)]
    processes.run_forked(*command)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    again = processes.run_forked(*command, "--shares", "auto")  # recorded only by an attempt that goes on
    assert "finished at step 3; --fresh starts over" in again.stdout
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    processes.run_forked(*command, "--fresh")
    (aside,) = tmp_path.glob("run.old-*")
    assert (aside / "model.pt").read_bytes() == before[run_dir / "model.pt"]
    assert weights_of(run_dir) == weights_of(aside), "the same command gives the same weights"


def test_a_run_stays_in_its_folder_whatever_folder_the_task_goes_to(tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir()
    task = runs.own_task(
        tmp_path,
        f"""
        import sys
        sys.argv = ["of its own"]

        def train_dataset(self):
            os.chdir({str(there)!r})
            return super().train_dataset()

        def metrics(self, model, batch):
            os.chdir("/")
            return super().metrics(model, batch)
        """,
    )
    for words in ("step 3/3 ", "runs/own: finished at step 3; --fresh starts over"):
        command = [processes.TRAIN, *job(Path("runs/own"), "--max-steps", 3, "--checkpoint-every", 1, "--task", task)]
        assert words in runs.ended(processes.fork(*command, cwd=tmp_path, env=runs.OWN)).stdout
    assert {"metrics.jsonl", "model.pt", "checkpoints"} <= {path.name for path in (tmp_path / "runs/own").iterdir()}
    assert not [*there.iterdir()]


def unfit_state(run_dir: Path) -> Path:
    """A run of two steps whose checkpoint has another shape than the model; returns the checkpoint."""
    processes.run_forked(processes.TRAIN, *job(run_dir, "--max-steps", 2, "--schedule", "constant"))
    (newest,) = (run_dir / "checkpoints").glob("step-*")
    found = torch.load(newest / STATE, weights_only=True)
    found["model"]["old.bias"] = found["model"].pop("0.bias")
    torch.save(found, newest / STATE)
    seal(newest)
    return newest


def test_a_state_that_does_not_fit_the_model_ends_in_a_line(run_dir: Path) -> None:
    newest = unfit_state(run_dir)
    ranks = failed(2, job(run_dir, "--max-steps", 4, "--schedule", "constant"))
    line = runs.the_line("".join(rank.stderr for rank in ranks))
    assert line.startswith(f"{run_dir}: its state of step 2 does not fit this model and its optimizers (")
    assert "(only in the model: 0.bias; only in the run: old.bias); restore" in line
    assert newest.exists(), "it is no damage"
    status = processes.read(run_dir, "status.json")
    assert (status["state"], status["step"]) == ("failed", 2)
    assert line.startswith(" ".join(status["reason"].split()))
    assert [r["reason"] for r in processes.records(run_dir, "failure")] == [status["reason"]]
    assert "failed at step 2; no step has finished in this attempt; nothing to save" in ranks[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["on", needs.long("off")])
def test_a_state_that_does_not_fit_is_not_tried_again(run_dir: Path, keeper: str) -> None:
    unfit_state(run_dir)
    command = job(run_dir, "--max-steps", 4, "--schedule", "constant", "--keeper", keeper)
    launch = processes.torchrun(2, processes.TRAIN, *command, restarts=3)
    done = processes.run(launch, expect=-signal.SIGALRM)
    assert done.stderr.count("does not fit this model") == 1
    assert "does not fit this model" in processes.read(run_dir, "status.json")["reason"]
    assert len(processes.records(run_dir, "start")) == 1, "that before"


@pytest.mark.parametrize("keeper", ["on", "off"])
def test_what_a_run_leaves(run_dir: Path, keeper: str) -> None:
    """A rank of another job has started it: that one's store lives on, and its last end is not this one's."""
    store = processes.start(["sleep", 600])
    of_another = {"EVENKEEL_LAST_END": "rank 0 was killed by SIGKILL", "EVENKEEL_KEPT_STORE": str(store.pid)}
    command = processes.torchrun(2, processes.TRAIN, *job(run_dir, "--checkpoint-every", 4, "--keeper", keeper))
    processes.run(command, env=of_another | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert store.poll() is None
    processes.kill_group(store)
    assert "last_end" not in processes.records(run_dir, "start")[0]
    summary = processes.read(run_dir)
    weights = model_of(run_dir)
    assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}, "bare names, no module."
    assert all(tensor.device.type == "cpu" for tensor in weights.values())
    assert summary["weights_sha256"] == sha256(weights)
    assert summary["state"] == processes.read(run_dir, "status.json")["state"] == "finished"
    assert {"step", "epoch", "samples_seen", "metrics", "restarts", "world_sizes", "seconds"} <= set(summary)
    assert [r["step"] for r in processes.records(run_dir, "train")] == list(range(1, PLAN.total_steps + 1))
    assert [r["step"] for r in processes.records(run_dir, "eval")] == [9, 18, 27]
    left = [processes.names_in(run_dir / name) for name in ("checkpoints", "logs/attempt-0001")]
    assert left == [["step-00000024", "step-00000027"], ["rank-0.log", "rank-1.log"]]


def with_loaders(run_dir: Path) -> tuple[processes.Process, list[int]]:
    """A run at work, and its loader processes."""
    process = processes.start([sys.executable, processes.TRAIN, *job(run_dir, "--pause", 0.1, "--num-workers", 2)])
    wait_for_step(run_dir, 1, process)
    found = children(trainer_of(process))
    loaders = [child for child in found if TASK in Path(f"/proc/{child}/cmdline").read_text()]
    assert len(loaders) == 4, "two for training, two for evaluating"
    return process, loaders


def test_loader_processes_mind_only_their_parent(tmp_path: Path) -> None:
    """Slurm signals every process of a step: the loaders must not die before the training process has saved."""
    process, loaders = with_loaders(run_dir := tmp_path / "run")
    for loader in loaders:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(loader, number)
    wait_for_step(run_dir, runs.told_step(run_dir) + 4, process)
    for pid in [*loaders, process.pid]:
        os.kill(pid, signal.SIGUSR2)
    processes.checked(processes.finish(process), 75)
    assert processes.read(run_dir, "status.json")["reason"] == "SIGUSR2"


def test_loader_processes_never_outlive_a_killed_parent(tmp_path: Path) -> None:
    process, loaders = with_loaders(tmp_path / "run")
    os.kill(trainer_of(process), signal.SIGKILL)
    # by themselves they would look for their parent every 5 s
    processes.wait_until_gone(loaders, 4)
    processes.kill_group(process)
    process.communicate()


def test_a_bug_in_the_loss_ends_the_run_at_once_and_keeps_the_last_step(run_dir: Path) -> None:
    """With loader processes alive, which must not keep the failed process from ending."""
    done = processes.run_forked(
        processes.TRAIN, *job(run_dir, "--fail-at", 10, "--num-workers", 2, "--checkpoint-every", 0), expect=1
    )
    assert f"evenkeel: rank 0 failed: {runs.BUG}\n" in done.stderr
    status = processes.read(run_dir, "status.json")
    assert (status["state"], status["reason"]) == ("failed", runs.BUG)
    assert runs.saved_step(run_dir) == status["step"]


def test_with_fresh_a_new_node_takes_over_what_the_other_one_knows_of_the_same_job(tmp_path: Path) -> None:
    def nodes(*disks: str) -> list[processes.Process]:
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "EVENKEEL_LAUNCH": "the-same-job"}
        both = zip(processes.rank_variables(2), disks, strict=True)
        return [processes.fork(processes.TRAIN, *job(tmp_path / disk, "--fresh"), env=it | alone) for it, disk in both]

    def stop_after(step: int, *disks: str) -> None:
        started = nodes(*disks)
        wait_for_step(tmp_path / disks[0], step, started[0])
        for process in started:
            process.send_signal(signal.SIGTERM)
        processes.finish_all(started, STOPPED)

    def attempts(disk: str) -> int:
        status = processes.read(tmp_path / disk, "status.json")
        assert set(status["world_sizes"]) == {2}
        return len(status["world_sizes"])

    stop_after(3, "first", "second")
    (tmp_path / "third").mkdir()  # with another run, of more attempts
    write_json(tmp_path / "third" / "status.json", {"world_sizes": [1] * 5, "state": "stopped", "step": 9})
    stop_after(5, "third", "second")
    assert attempts("third") == 2
    assert processes.records(tmp_path / "third", "start")[0]["step"] >= 3
    # the first is back as rank 0, with an older status than the others have
    processes.finish_all(nodes("first", "second"))
    assert attempts("first") == attempts("second") == 3
    # nor does the second, with its copy of rank 0's status at the start, know that the run has finished
    end, _ = processes.finish_all(nodes("second", "first"))
    assert f"second: finished at step {PLAN.total_steps}; --fresh starts over" in end.stdout
    assert attempts("second") == 3, "nothing is written"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bug_in_the_data_set_is_reported_at_its_line(tmp_path: Path, run_dir: Path, workers: int) -> None:
    body = """
    def train_dataset(self):
        return Broken(super().train_dataset())
    """
    broken = """
class Broken:
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        if index == 77:
            raise ValueError("bad file 77.png\\nat byte 0")
        return self.data[index]
"""
    task = runs.own_task(tmp_path, body, broken)
    words = [processes.TRAIN, *job(run_dir, "--num-workers", workers, "--task", task)]
    done = processes.run([sys.executable, *words], env=runs.OWN, expect=1)
    line = 1 + (tmp_path / "own.py").read_text().partition("raise ValueError(")[0].count("\n")
    shown = done.stderr.splitlines()
    place = f"{tmp_path / 'own.py'}:{line}"
    assert shown[-1] == f"evenkeel: rank 0 failed: ValueError: bad file 77.png (sample 77) at {place}"
    (begin,) = [number for number, text in enumerate(shown) if text.startswith("Traceback")]
    assert "your files only" in shown[begin]
    assert "\nValueError: bad file 77.png" in "\n".join(shown[begin:-1])
    assert not [text for text in shown[begin:] if "/src/evenkeel/" in text]
