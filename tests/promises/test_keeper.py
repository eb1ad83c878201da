"""Ranks that are killed start again in place: torchrun sees nothing, the bits are the same, and no process is left."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from evenkeel.common.processes import process_name
from tests.support import needs, processes
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, fork, read, records, run, start, torchrun, wait_until
from tests.support.small_runs import (
    OWN,
    children,
    ended,
    keepers_of,
    own_task,
    starts,
    wait_for_start,
    wait_for_step,
    workers_of,
)
from tests.support.small_runs import kept_job as job

RARE = ["--checkpoint-every", 0, "--eval-every", 1000]


def test_the_control_without_keepers_the_same_kill_ends_the_job(run_dir: Path) -> None:
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--pause", 0.1, "--keeper", "off")))
    wait_for_step(run_dir, 2, process)
    assert workers_of(process) == keepers_of(process)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    assert processes.finish(process).returncode == 1
    assert read(run_dir, "status.json")["state"] != "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    "raised", ["ZeroDivisionError: a bug in the user's loss", needs.long("RuntimeError: NCCL error of my own")]
)
def test_an_exception_goes_to_torchrun_and_nothing_starts_again_in_place(tmp_path: Path, raised: str) -> None:
    """Also one that only looks like the loss of a rank."""
    kind, _, text = raised.partition(": ")
    task = own_task(
        tmp_path,
        f"""
        def loss(self, model, batch):
            if self.calls == 4 and os.environ["RANK"] == "1":
                raise {kind}({text!r})
            return super().loss(model, batch)
        """,
    )
    done = run(torchrun(2, TRAIN, *job(tmp_path / "run", *RARE, "--task", task)), env=OWN, expect=1)
    assert f"{raised}\n" in done.stderr
    assert "restart in place" not in done.stderr
    assert len(starts(tmp_path / "run")) == 1
    # rank 0 has only lost the rank whose error it is
    assert kind != "ZeroDivisionError" or read(tmp_path / "run", "status.json")["reason"].startswith(raised)


@pytest.mark.parametrize("call", [needs.slow(1), 4])
def test_an_exception_of_a_rank_is_why_the_run_failed_also_on_one_that_torchrun_stops_first(
    tmp_path: Path, call: int
) -> None:
    """Rank 0 is busy, so that torchrun's SIGTERM comes before a collective fails."""
    body = f"""
    def loss(self, model, batch):
        if self.calls == {call}:
            if os.environ["RANK"] == "1":
                raise ConnectionError("no route to the data")
            time.sleep(20)
        return super().loss(model, batch)
    """
    task = own_task(tmp_path, body)
    done = run(torchrun(2, TRAIN, *job(tmp_path / "run", *RARE, "--task", task)), env=OWN, expect=1)
    status = read(tmp_path / "run", "status.json")
    assert (status["state"], status["fruitless"]) == ("failed", int(call == 1))
    assert status["reason"].startswith("ConnectionError: no route to the data")
    assert "stopped by" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("keeper", ["on", "off"])
def test_a_loop_that_ends_too_early_on_one_rank_says_so(tmp_path: Path, keeper: str) -> None:
    steps = "    for step in run.steps():\n"
    loop = TRAIN.read_text().replace(
        steps, f"{steps}        if run.world.rank and step.number == 3:\n            break\n"
    )
    (own := tmp_path / "own.py").write_text(loop)
    done = run(torchrun(2, own, *job(tmp_path / "run", *RARE, "--keeper", keeper, "--max-steps", 9)), expect=1)
    assert done.stderr.startswith("evenkeel: the training loop ended at step 3 of 9")
    assert done.stderr.count("evenkeel: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "launcher", "until", "expect", "attempts"),
    [
        needs.long("ValueError", False, 9, -signal.SIGALRM, 2),
        ("ValueError", True, 9, 2, 2),
        needs.long("evenkeel.common.errors.EndedHere", True, 9, 2, 1),  # found by a check: certainly a mistake
        ("AttributeError", True, 9, 2, 1),  # in the code itself
        pytest.param("AttributeError", False, 9, -signal.SIGALRM, 1, marks=pytest.mark.long),
        ("ConnectionError", False, 9, 1, 3),  # the controls: perhaps of a network, and one that goes away
        needs.long("ValueError", True, 1, 0, 2),
    ],
)
def test_the_same_mistake_again_before_the_first_step_ends_the_job(
    tmp_path: Path, kind: str, launcher: bool, until: int, expect: int, attempts: int
) -> None:
    """And the corrected command goes on in the same folder, with other options, because nothing was trained."""
    body = f"""
    def loss(self, model, batch):
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "9")) < {until}:
            raise {kind}("a bug in sample " + os.environ["RANK"])
        return super().loss(model, batch)
    """
    options = job(tmp_path / "run", *RARE, "--task", own_task(tmp_path, body, "import evenkeel.common.errors"))
    ours = [sys.executable, "launch/single_node.py", "-g", "2", "--max-restarts", "2", "--"]
    done = run([*ours, *options] if launcher else torchrun(2, TRAIN, *options, restarts=2), env=OWN, expect=expect)
    assert len(records(tmp_path / "run", "start")) == attempts
    again = "; the same error as before: not tried again"
    assert done.stderr.count(again) == (expect not in (0, 1) and attempts == 2)
    if expect == 2:
        assert done.stderr.endswith(f"{again * (attempts == 2)}\n")
        corrected = run([sys.executable, TRAIN, *options, "--seed", 5], env=OWN)
        assert f"nothing was trained in {tmp_path / 'run'}; starting again" in corrected.stdout


@pytest.mark.slow
def test_under_a_launcher_the_error_of_a_rank_is_all_that_is_said(tmp_path: Path) -> None:
    """torch's own report and its log of ended ranks are for jobs none of whose ranks has said why."""
    body = """
    def loss(self, model, batch):
        if os.environ["RANK"] == "1":
            raise ValueError("a bug")
        return super().loss(model, batch)
    """
    options = job(tmp_path / "run", *RARE, "--task", own_task(tmp_path, body))
    ours = [sys.executable, "launch/single_node.py", "-g", "2", "--max-restarts", "0", "--"]
    done = run([*ours, *options], env=OWN, expect=1)
    *_, last = done.stderr.splitlines()
    assert last.startswith("evenkeel: the job has failed: ValueError: a bug (the batch is a list of ")
    assert not [it for it in ("Root Cause", "torch/distributed/elastic", "c10d") if it in done.stderr]


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_tried_once_more(run_dir: Path) -> None:
    """A flaky GPU may be the cause, but a second time it is the job."""
    done = run(torchrun(2, TRAIN, *job(run_dir, "--lr", 1e30), restarts=3), expect=-signal.SIGALRM)
    assert starts(run_dir) == [0, 1]
    assert "--on-nonfinite skip skips such steps; the same error as before: not tried again" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "name", "call", "expect", "restarts"),
    [(2, "SIGSEGV", 1, 1, 1), needs.long(0, "SIGKILL", 20, -signal.SIGKILL, 3)],
)
def test_a_rank_that_dies_again_and_again_is_left_to_torchrun(
    tmp_path: Path, ranks: int, name: str, call: int, expect: int, restarts: int
) -> None:
    """Before its first step, or after the same steps since the last checkpoint, which is no progress either."""
    task = own_task(
        tmp_path,
        f"""
        def loss(self, model, batch):
            if self.calls == {call - 1} and os.environ.get("RANK", "1") == "1":
                os.kill(os.getpid(), signal.{name})
            return super().loss(model, batch)
        """,
    )
    options = [TRAIN, *job(tmp_path / "run", *RARE, "--task", task, "--keeper-restarts", restarts)]
    done = run(torchrun(ranks, *options) if ranks else [sys.executable, *map(str, options)], env=OWN, expect=expect)
    said = f"rank {max(0, ranks - 1)} was killed by {name}"
    assert done.stderr.count(f"{said}; all ranks restart in place, without torchrun") == restarts
    assert f"{said} again, without progress; torchrun decides" in done.stderr
    assert len(starts(tmp_path / "run")) == 1 + restarts


@pytest.mark.slow
def test_a_job_that_waits_for_the_folder_does_not_get_it_while_ranks_start_again(tmp_path: Path, run_dir: Path) -> None:
    """Nobody has it locked then: rank 0 is dead."""
    (slow := tmp_path / "slow").touch()
    options = job(run_dir, *RARE, "--pause", 1, "--hold", slow)
    process = start(torchrun(2, TRAIN, *options))
    wait_for_step(run_dir, 2, process)
    other = start([sys.executable, TRAIN, *options])
    assert any("waiting up to" in line for line in other.stderr)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    wait_for_start(run_dir, 2)
    slow.unlink()
    assert "NOT SAVED" not in ended(process).stderr
    assert len(starts(run_dir)) == 2
    assert "finished at step" in processes.finish(other).stdout


@pytest.mark.slow
def test_a_signal_for_a_keeper_alone_reaches_its_rank(run_dir: Path) -> None:
    process = fork(TRAIN, *job(run_dir, *RARE, "--pause", 0.1))
    wait_for_step(run_dir, 3, process)
    os.kill(process.pid, signal.SIGTERM)
    done = processes.finish(process)
    assert done.returncode == 75
    assert "evenkeel: stopped by SIGTERM" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("signals", "within"), [((signal.SIGINT, signal.SIGINT), 8), ((signal.SIGTERM,), 14)])
def test_a_rank_that_cannot_leave_is_killed(run_dir: Path, signals: tuple[signal.Signals, ...], within: float) -> None:
    """It is stopped here, and so can no more obey a signal than one whose interpreter waits for C code."""
    process = start([sys.executable, str(TRAIN), *job(run_dir, "--pause", 0.1, "--grace", 1)])
    wait_for_step(run_dir, 3, process)
    os.kill(trainer := runs.trainer_of(process), signal.SIGSTOP)
    for number in signals:
        os.kill(process.pid, number)
        time.sleep(1.2)
    done = processes.finish(process, within)
    assert (done.returncode, process_name(trainer)) == (-signal.SIGKILL, "")
    assert done.stderr == f"evenkeel: rank 0 was killed before it had left after {signals[0].name}\n"


@pytest.mark.long
def test_the_death_of_the_jobs_store_costs_a_line(run_dir: Path) -> None:
    launch = [sys.executable, str(processes.ROOT / "launch" / "single_node.py"), "-g", "2", "--"]
    process = start([*launch, *map(str, job(run_dir, "--pause", 0.1, "--max-steps", 120))])
    wait_for_step(run_dir, 3, process)
    (store,) = [pid for pid in children(keepers_of(process)[0]) if process_name(pid) == "store"]
    os.kill(store, signal.SIGKILL)
    said = ended(process).stderr
    assert "evenkeel: the process with the job's store was killed; the job goes on, but restarts by" in said
    assert "frame #" not in said, "no stacks of C++, although each rank wants to beat"
    assert len(starts(run_dir)) == 1


@pytest.mark.long
def test_a_single_process_starts_again_too(tmp_path: Path, run_dir: Path) -> None:
    fork(TRAIN, *job(run_dir, "--max-steps", 1)).wait()  # an older run in the way, which --fresh moves aside once
    process = start([sys.executable, str(TRAIN), *job(run_dir, "--checkpoint-every", 1, "--pause", 0.1, "--fresh")])
    wait_until(lambda: len(list(tmp_path.glob("run.old-*"))) == 1, "the old run aside")
    wait_for_step(run_dir, 3, process)
    os.kill(runs.trainer_of(process), signal.SIGKILL)
    done = ended(process)
    assert done.stderr == "evenkeel: rank 0 was killed by SIGKILL; all ranks restart in place, without torchrun\n"
    first, second = starts(run_dir)
    assert (first, second > 0) == (0, True)
    assert len(list(tmp_path.glob("run.old-*"))) == 1


@pytest.mark.slow
def test_a_child_of_the_task_that_outlives_rank_0_does_not_keep_the_folder(tmp_path: Path, run_dir: Path) -> None:
    body = """
    def loss(self, model, batch):
        file = os.path.join(os.path.dirname(__file__), "child")
        if not os.path.exists(file):
            child = os.fork()  # as multiprocessing does for a Manager or a Process
            if not child:
                os.closerange(0, 3)
                time.sleep(60)
                os._exit(0)
            with open(file, "w") as told:
                told.write(str(child))
        return super().loss(model, batch)
    """
    options = job(run_dir, *RARE, "--pause", 0.1, "--max-steps", 9, "--task", own_task(tmp_path, body))
    process = start([sys.executable, TRAIN, *options], env=OWN)
    wait_for_step(run_dir, 2, process)
    os.kill(runs.trainer_of(process), signal.SIGKILL)
    child = int((tmp_path / "child").read_text())
    try:
        assert ended(process).stderr.count("\n") == 1  # that rank 0 was killed
        assert processes.running(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["FACTOR = 2", "def half(:", None], ids=["changed", "half a change", "deleted"])
def test_a_restart_in_place_goes_on_with_the_code_that_the_run_began_with(tmp_path: Path, edit: str | None) -> None:
    """Whoever edits a task while it trains means the next run. The control: the same command typed again has it."""
    body = """
    def metrics(self, model, batch):
        return {"factor": super().metrics(model, batch)["loss"] * 0 + FACTOR}
    """
    run_dir, task = tmp_path / "run", own_task(tmp_path, body, before="FACTOR = 1")
    options = job(run_dir, "--checkpoint-every", 1, "--eval-every", 1, "--pause", 0.1, "--task", task)
    process = start(torchrun(2, TRAIN, *options), env=OWN)
    wait_for_step(run_dir, 3, process)
    if edit:
        own_task(tmp_path, body, before=edit)
    else:
        (tmp_path / "own.py").unlink()
    os.kill(workers_of(process)[1], signal.SIGKILL)
    wait_for_start(run_dir, 2)
    if edit == "FACTOR = 2":
        process.send_signal(signal.SIGINT)
    said = processes.finish(process).stderr
    assert "WARNING: own.py has changed on the disk; the run goes on with the code that it began with" in said
    assert "has the new code" not in said
    assert not records(run_dir, "bits")
    assert starts(run_dir)[1] >= 3
    assert {record["test/factor"] for record in records(run_dir, "eval")} == {1}
    if edit == "FACTOR = 2":
        said = run(torchrun(2, TRAIN, *options), env=OWN).stderr
        assert "WARNING: own.py has changed; from step" in said
        assert records(run_dir, "eval")[-1]["test/factor"] == 2


@pytest.mark.slow
def test_a_task_that_starts_a_thread_when_it_is_imported_has_no_keeper(tmp_path: Path, run_dir: Path) -> None:
    thread = "threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()"
    options = job(run_dir, *RARE, "--pause", 0.1, "--task", own_task(tmp_path, before=thread))
    process = start(torchrun(2, TRAIN, *options), env=OWN)
    wait_for_step(run_dir, 2, process)
    assert not any(runs.ranks_of(pid, "trainer") for pid in keepers_of(process).values())
    ended(process)
    (log,) = run_dir.glob("logs/attempt-*/rank-0.log")
    assert "no keeper, so torchrun restarts this rank if it dies: it has 2 threads" in log.read_text()
