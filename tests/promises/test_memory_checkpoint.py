"""The last step in memory: ranks that start again in place have it before the disk does, and without the disk."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evenkeel.common.processes import process_name
from evenkeel.resilience.interruption import KEYBOARD
from evenkeel.resilience.memory_checkpoint import TRIES
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance, step_of
from tests.support import needs, processes
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, Process, finish, fork, read, start, torchrun, wait_until, wait_until_gone
from tests.support.small_runs import ended, saved_step, starts, told_step, trainer_of, wait_for_start, wait_for_step
from tests.support.small_runs import kept_job as job

pytestmark = pytest.mark.slow

RARE = ["--checkpoint-every", 0, "--eval-every", 1000, "--pause", 0.1]
WAYS = pytest.mark.parametrize("memory", ["on", needs.slow("off")])
"""The second is the control."""


@WAYS
def test_a_disk_that_takes_nothing_loses_no_step(run_dir: Path, undisturbed: str, memory: str) -> None:
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--keeper-memory", memory)))
    wait_for_step(run_dir, 4, process)
    (run_dir / "checkpoints").symlink_to("/proc/sys/kernel")  # no folder can be made there
    os.kill(runs.workers_of(process)[1], signal.SIGKILL)
    wait_for_start(run_dir, 2)
    going_on = starts(run_dir)[1]
    wait_for_step(run_dir, told_step(run_dir) + 2, process)
    (run_dir / "checkpoints").unlink()
    done = ended(process)
    assert done.stderr.count("NOT SAVED: ") == 1
    if memory == "on":
        assert going_on >= 4
        assert runs.no_step_is_done_twice(run_dir)
    else:
        assert going_on == 0
    assert runs.weights_of(run_dir) == undisturbed


@contextmanager
def slow_checkpoint(run_dir: Path, *more: object, real: bool = False) -> Iterator[Process]:
    """A job that has come to step 4, while the disk has not taken the checkpoint of step 3 yet."""
    words = [TRAIN, *job(run_dir, *RARE, "--checkpoint-every", 3, *more)]
    process = start([sys.executable, *map(str, words)], env=runs.OWN) if real else fork(*words)
    wait_for_step(run_dir, 1, process)
    with runs.locked(run_dir):
        wait_for_step(run_dir, 4, process)
        yield process


@WAYS
def test_a_checkpoint_that_is_still_being_written_survives_the_death_of_all_ranks(run_dir: Path, memory: str) -> None:
    with slow_checkpoint(run_dir, "--keeper-memory", memory) as process:
        os.kill(trainer_of(process), signal.SIGKILL)
        wait_for_start(run_dir, 2)
        assert starts(run_dir)[1] == (3 if memory == "on" else 0)
        assert saved_step(run_dir) == 0
    wait_until(lambda: saved_step(run_dir) >= 3, "the checkpoint")
    ended(process)


def test_what_is_in_memory_comes_to_the_disk_and_then_goes(run_dir: Path) -> None:
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--num-workers", 1)))
    wait_for_step(run_dir, 2, process)
    with runs.locked(run_dir):
        os.kill(runs.workers_of(process)[1], signal.SIGKILL)
        survivor = runs.keepers_of(process)[0]
        wait_until(lambda: runs.bytes_in_memory(survivor) > 0, "a state in memory")
        wait_for_start(run_dir, 2)
        assert saved_step(run_dir) == 0
        assert runs.ranks_of(survivor, "writer")
    wait_until(lambda: saved_step(run_dir) == starts(run_dir)[1], "the same step on the disk")
    manifest = read(run_dir / "checkpoints" / f"step-{saved_step(run_dir):08d}", "manifest.json")
    assert manifest["kind"] == "snapshot"
    wait_until(lambda: not runs.ranks_of(survivor, "writer"), "the end of what has written it")
    wait_for_step(run_dir, starts(run_dir)[1] + 1, process)
    trainers = runs.workers_of(process).values()
    loaders = [child for trainer in trainers for child in runs.children(trainer)]
    assert len(loaders) == 2
    everybody = [*runs.keepers_of(process).values(), *trainers, *loaders]
    wait_until(lambda: not any(map(runs.bytes_in_memory, everybody)), "no more memory for it")
    assert finish(process).returncode == 0


@pytest.mark.parametrize("died", ["keeper", needs.long("trainer")])
def test_a_keeper_that_ends_has_its_ranks_last_step_written_first(run_dir: Path, undisturbed: str, died: str) -> None:
    """If torchrun restarts all, their memory is gone: when a keeper is killed, or a trainer after its last restart."""
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--keeper-restarts", 0), restarts=1))
    wait_for_step(run_dir, 3, process)
    os.kill(runs.pids_of(process, died)[1], signal.SIGKILL)
    ended(process)
    assert runs.no_step_is_done_twice(run_dir)
    assert runs.restarts_of(run_dir) == (1, 0)
    assert runs.weights_of(run_dir) == undisturbed


def test_a_keeper_that_cannot_fork_writes_the_last_step_itself(tmp_path: Path, run_dir: Path) -> None:
    """As where a machine or a container has no more processes."""
    full = tmp_path / "full"
    patch = f"""
fork = os.fork

def refuse():
    if os.path.exists({str(full)!r}):
        raise BlockingIOError(11, os.strerror(11))
    return fork()

os.fork = refuse
"""
    words = runs.kept_job(run_dir, *RARE, "--task", runs.own_task(tmp_path, before=patch))
    ranks = processes.fork_ranks(2, TRAIN, *words)
    wait_for_step(run_dir, 3, ranks[0])
    full.touch()
    os.kill(runs.trainer_of(ranks[1]), signal.SIGKILL)
    first, second = map(finish, ranks)
    assert saved_step(run_dir) == told_step(run_dir) >= 3
    for rank, done in enumerate((first, second)):
        line = f"evenkeel: rank {rank} cannot be forked: Resource temporarily unavailable; torchrun decides"
        assert (done.returncode, line in done.stderr) == (1, True), done.stderr


@needs.root("make a pid namespace")
@needs.tools("unshare")
def test_a_machine_that_has_no_such_memory_is_sent_the_state(tmp_path: Path, undisturbed: str) -> None:
    """Two agents, one of them with processes of its own numbering, as in a container."""
    run_dir, port = tmp_path / "run", processes.free_port()
    ranks = ["--nnodes=2", "--nproc_per_node=1", f"--master_port={port}", "--max-restarts=0"]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks]
    options = [str(TRAIN), *map(str, job(run_dir, *RARE))]
    process = start([*command, "--node_rank=0", *options])
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh"]
    other = start([*apart, *command, "--node_rank=1", *options])
    try:
        wait_for_step(run_dir, 3, process)
        (shell,) = runs.children(other.pid)
        (agent,) = runs.children(shell)
        (keeper,) = runs.ranks_of(agent).values()
        os.kill(runs.ranks_of(keeper, "trainer")[1], signal.SIGKILL)
        ended(process)
        ended(other)
    finally:
        processes.kill_group(other)
    assert read(run_dir)["restarts_in_place"] == 1
    (log,) = run_dir.glob("logs/attempt-0002/rank-1.log")
    assert "received it from rank 0" in log.read_text()
    assert runs.no_step_is_done_twice(run_dir)
    assert runs.weights_of(run_dir) == undisturbed


def test_ten_deaths_in_a_row_leave_one_state_in_memory_at_most(run_dir: Path) -> None:
    process = fork(TRAIN, *job(run_dir, *RARE, "--checkpoint-every", 1, "--pause", 0.02, "--epochs", 20))
    wait_for_step(run_dir, 1, process)
    for count in range(2, 12):
        victim = trainer_of(process)
        wait_for_step(run_dir, told_step(run_dir) + 1, process)
        os.kill(victim, signal.SIGKILL)
        wait_for_start(run_dir, count)
        time.sleep(0.05)
        assert len(runs.states_in_memory(process.pid)) <= 3, "those of the next trainer are empty"
    processes.stop(process, expect=75)


TWO_RUNS = """
from dataclasses import replace
import train
from evenkeel import Run, parse, start
from tests.support.recording_task import Recorded

def main(arguments):
    config, task = parse(arguments, Recorded)
    for name in ("first", "second"):
        with Run.open(replace(config, run_dir=config.run_dir.with_name(name)), task) as run:
            if not run.finished:
                train.train(run)
    return 0

if __name__ == "__main__":
    start(main)
"""


@pytest.mark.long
def test_a_script_that_makes_two_runs_does_not_mistake_what_the_first_left_for_the_second(tmp_path: Path) -> None:
    script, first, second = tmp_path / "two_runs.py", tmp_path / "first", tmp_path / "second"
    script.write_text(TWO_RUNS)
    shape = ["--epochs", 1, "--batch-size", 12, "--micro-batch", 3, "--log-every", 1, "--pause", 0.1]
    options = ["--run-dir", tmp_path / "run", "--wandb", "disabled", "--checkpoint-every", 7, "--eval-every", 1000]
    process = start([sys.executable, *map(str, [script, *shape, *options])], env=runs.OWN)
    wait_for_step(first, 5, process)
    (first / "checkpoints").symlink_to("/proc/sys/kernel")  # so the seventh step is in memory only
    wait_for_step(first, 8, process)
    (first / "checkpoints").unlink()
    wait_for_step(second, 3, process)
    os.kill(trainer_of(process), signal.SIGKILL)
    assert finish(process).returncode == 0
    assert starts(second) == [0, 0]


def killed(process: Process) -> int:
    """Kill its trainer; the pid of the child that then writes."""
    os.kill(trainer_of(process), signal.SIGKILL)
    return int(wait_until(lambda: writer_of(process), "a child that writes"))


def writer_of(process: Process) -> int:
    """0: there is none."""
    return next((pid for pid in runs.children(process.pid) if process_name(pid) == "writer"), 0)


@pytest.mark.parametrize("looks", [True, False], ids=["", "control"])
@pytest.mark.long
def test_a_writer_that_was_frozen_leaves_a_run_alone_that_began_meanwhile(tmp_path: Path, looks: bool) -> None:
    """With --fresh. In the control it does not look whose folder it is, and the new run goes on from the old state."""
    blind = "" if looks else "from evenkeel.run import checkpoint\ncheckpoint.check_not_stale = lambda _: None"
    run_dir, task = tmp_path / "run", runs.own_task(tmp_path, before=blind)
    with slow_checkpoint(run_dir, "--task", task, "--keeper-restarts", 0, "--grace", 1, real=True) as process:
        os.kill(writer := killed(process), signal.SIGSTOP)
    process.wait(timeout=processes.LIMIT)

    def train(*more: object) -> None:
        words = job(run_dir, "--task", task, "--schedule", "constant", *more)
        processes.run([sys.executable, TRAIN, *words], env=runs.OWN)

    train("--fresh", "--max-steps", 1)
    os.kill(writer, signal.SIGCONT)
    told = finish(process).stderr
    train("--max-steps", 4)
    assert starts(run_dir) == [0, 1 if looks else 3]
    assert told.count("another run has begun there, so nothing is written: ") == looks
    assert "a process continues writing it" in told


@pytest.mark.parametrize("kills", [needs.long(1), TRIES])
def test_an_evaluated_step_is_on_the_disk_although_its_writer_is_killed(run_dir: Path, kills: int) -> None:
    """The ranks that start again have that step from memory, and do not evaluate it again. With TRIES: the control."""
    evaluated = ["--checkpoint-every", 0, "--eval-every", 3, "--keep", 1, "--task", f"{runs.ODD_TASKS}:WorseAndWorse"]
    with slow_checkpoint(run_dir, *evaluated) as process:
        os.kill(writer := killed(process), signal.SIGSTOP)  # a slower disk
        wait_for_step(run_dir, 5, process)  # so nobody but the writer needs that step any more
        for count in range(1, kills + 1):
            os.kill(writer, signal.SIGKILL)
            if count < TRIES:
                wait_until(lambda: writer_of(process) not in (0, writer), "the next")  # noqa: B023
                writer = writer_of(process)
    done = ended(process)
    assert starts(run_dir) == [0, 3]
    best = Checkpoints(run_dir / "checkpoints", 1, Provenance(("test/loss", "min"))).best_path()
    assert (step_of(best) == 3) == (kills < TRIES)
    assert done.stderr.count("NOT SAVED") == (kills == TRIES)


INT, TERM = signal.SIGINT, signal.SIGTERM
STOPS = {
    "one Ctrl-C": ([(0.0, INT)], False),
    "one that is delivered twice": ([(0.0, INT), (0.005, INT)], False),
    "two SIGTERMs, as from a scheduler": ([(0.0, TERM), (1.3, TERM)], False),
    "SIGINT and SIGTERM, as from LSF": ([(0.0, INT), (1.3, TERM)], False),
    "two": ([(0.0, INT), (1.3, INT)], True),
    "a Ctrl-C after SIGTERM": ([(0.0, TERM), (1.3, INT)], True),
}
"""What is sent, and whether that ends the wait: the first four are the control."""


@pytest.mark.parametrize(
    ("stops", "ends"),
    [pytest.param(*it, marks=[] if name in ("one Ctrl-C", "two") else pytest.mark.long) for name, it in STOPS.items()],
    ids=STOPS,
)
def test_a_second_ctrl_c_ends_the_wait(run_dir: Path, stops: list[tuple[float, signal.Signals]], ends: bool) -> None:
    with slow_checkpoint(run_dir, "--keeper-restarts", 0) as process:
        writer = killed(process)
        for pause, number in stops:
            time.sleep(pause)
            process.send_signal(number)
        if ends:
            assert process.wait(timeout=processes.LIMIT) == KEYBOARD
            wait_until_gone([writer])
        else:
            time.sleep(1.5)
            assert process.poll() is None, "it waits"
    done = finish(process)
    assert done.returncode == (KEYBOARD if ends else -signal.SIGKILL)
    assert done.stderr.count(f"{stops[0][1].name}: waiting ") == 1, done.stderr
    assert done.stderr.count("second stop signal: exiting, step 3 is NOT SAVED") == ends
    assert saved_step(run_dir) == (0 if ends else 3)


def test_a_second_ctrl_c_for_the_trainer_is_one_for_its_keeper(tmp_path: Path) -> None:
    with slow_checkpoint(tmp_path / "run") as process:
        process.send_signal(INT)
        time.sleep(1.3)
        process.send_signal(INT)
        assert process.wait(timeout=5) == KEYBOARD, "not the ten seconds for which a child waits for the lock"
    said = [f"evenkeel: second stop signal: exiting{what}\n" for what in (" without saving", ", step 3 is NOT SAVED")]
    assert finish(process).stderr == "".join(said)


def test_the_last_checkpoint_survives_the_death_of_the_rank_that_writes_it(tmp_path: Path) -> None:
    """All others have finished by then."""
    run_dir, task = tmp_path / "run", runs.slow_disk(tmp_path, 6)
    words = job(run_dir, "--checkpoint-every", 0, "--eval-every", 1000, "--task", task)
    process = start(torchrun(2, TRAIN, *words), env=runs.OWN)
    wait_until(lambda: [*run_dir.glob("checkpoints/.step-00000027.*.tmp/state.pt")], "the last checkpoint")
    time.sleep(0.5)  # in memory it is whole by now
    os.kill(runs.workers_of(process)[0], signal.SIGKILL)
    ended(process)
    assert starts(run_dir) == [0, 27]


def test_a_disk_that_hangs_under_a_checkpoint_keeps_no_later_step_out_of_memory(tmp_path: Path) -> None:
    """The only survivor of its node is the rank that writes it."""
    run_dir, task = tmp_path / "run", runs.slow_disk(tmp_path, 12)
    words = job(run_dir, *RARE, "--checkpoint-every", 20, "--grace", 8, "--task", task)
    process = start(torchrun(2, TRAIN, *words), env=runs.OWN)
    wait_for_step(run_dir, 22, process)
    os.kill(runs.workers_of(process)[1], signal.SIGKILL)
    wait_for_start(run_dir, 2)
    assert starts(run_dir)[1] >= 22
    assert saved_step(run_dir) == 0
    ended(process)
    assert runs.no_step_is_done_twice(run_dir)


def test_ranks_whose_copies_of_a_step_differ_evaluate_together(tmp_path: Path) -> None:
    """Rank 0 has died with the evaluation of step 4 done; rank 1 was slower. A metric that is NaN is not repeated from
    the record."""
    body = """
    best = ("loss", "min")

    def metrics(self, model, batch):
        loss = super().metrics(model, batch)["loss"]
        return {"loss": loss, "odd": loss * float("nan")}

    def loss(self, model, batch):
        type(self).trained = True
        return super().loss(model, batch)

    def summarize(self, means):
        if hasattr(self, "trained") and os.environ["RANK"] == "1" and not os.path.exists(self.folder + "/slow"):
            open(self.folder + "/slow", "w").close()
            time.sleep(600)
        return super().summarize(means)
    """
    run_dir = tmp_path / "run"
    before = "Recorded.folder = " + repr(str(tmp_path))
    words = job(run_dir, "--checkpoint-every", 0, "--eval-every", 4, "--patience", 3, "--pause", 0.1)
    process = start(torchrun(2, TRAIN, *words, "--task", runs.own_task(tmp_path, body, before)), env=runs.OWN)
    wait_for_step(run_dir, 2, process)
    with runs.locked(run_dir):
        wait_until(lambda: runs.bytes_in_memory(runs.keepers_of(process)[0]) > 0, "the evaluated step in memory")
        os.kill(runs.workers_of(process)[0], signal.SIGKILL)
        wait_for_start(run_dir, 2)
    ended(process)
    assert starts(run_dir) == [0, 4]


def test_a_start_waits_for_what_a_keeper_has_left_to_a_child(tmp_path: Path) -> None:
    run_dir, task = tmp_path / "run", runs.slow_disk(tmp_path, 25)
    words = job(run_dir, *RARE, "--checkpoint-every", 3, "--keeper-restarts", 0, "--grace", 1, "--task", task)
    process = start([sys.executable, str(TRAIN), *words], env=runs.OWN)
    wait_for_step(run_dir, 4, process)
    killed(process)
    process.wait(timeout=processes.LIMIT)
    assert saved_step(run_dir) == 0
    again = fork(TRAIN, *words, env=runs.OWN)
    assert "step 3 is NOT SAVED within --grace 1 s; a process continues writing it" in finish(process).stderr
    wait_for_start(run_dir, 2)
    assert "is still writing to" in processes.stop(again).stderr
    assert starts(run_dir) == [0, 3]


@pytest.mark.long
def test_what_a_keeper_leaves_to_a_child_after_its_grace_does_no_harm_later(run_dir: Path) -> None:
    """It writes step 3 when the next start has come further."""
    often = ["--checkpoint-every", 3, "--keep", 2, "--grace", 1]
    with slow_checkpoint(run_dir, *often, "--keeper-restarts", 0) as process:
        writer = killed(process)
        _, said = process.communicate(timeout=processes.LIMIT)
        os.kill(writer, signal.SIGSTOP)  # a slower disk
    assert process.returncode == -signal.SIGKILL
    assert "step 3 is NOT SAVED within --grace 1 s; a process continues writing it" in said
    again = fork(TRAIN, *job(run_dir, *RARE, *often))
    wait_for_step(run_dir, told_step(run_dir) + 1, again)
    os.kill(writer, signal.SIGCONT)
    wait_until_gone([writer])
    told = told_step(run_dir)
    ended(again)
    assert told < 27, "it was at work"
    assert starts(run_dir)[1] == 0
    assert processes.names_in(run_dir / "checkpoints") == ["step-00000024", "step-00000027"]
    done = runs.steps_of(run_dir)
    assert done[done.index(1, 1) :] == [*range(1, 28)]
    assert read(run_dir, "status.json")["state"] == "finished"
