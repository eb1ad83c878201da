"""Ranks that are killed start again in place: torchrun sees nothing, the bits are the same, and no process is left."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.processes import (
    ROOT,
    TRAIN,
    finish_all,
    fork,
    fork_ranks,
    read,
    records,
    run,
    running,
    start,
    torchrun,
    wait_until,
    wait_until_gone,
)
from tests.support.small_runs import (
    PLAN,
    SAMPLES,
    children,
    keepers_of,
    ranks_of,
    saved_step,
    starts,
    told_step,
    trainer_of,
    wait_for_step,
    weights_of,
    workers_of,
)
from tests.support.small_runs import kept_job as job

OF_A_TASK = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
"""For a task in a file of the test's own, which is derived from one of tests/support."""

RARE = ["--checkpoint-every", 0, "--eval-every", 1000]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Fingerprint of the weights of a run that nothing has happened to."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finish_all(fork_ranks(2, TRAIN, *job(run_dir, *RARE)))
    return weights_of(run_dir)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(lambda options: torchrun(2, TRAIN, *options), id="a plain torchrun"),
        pytest.param(
            lambda options: torchrun(2, TRAIN, *options, "--num-workers", 2),
            id="with loader processes",
            marks=pytest.mark.slow,
        ),
        # whose store would be a thread of rank 0
        pytest.param(
            lambda options: [sys.executable, "launch/single_node.py", "-g", "2", "--max-restarts", "0", "--", *options],
            id="a launcher",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_rank_is_killed_and_torchrun_which_may_not_restart_sees_nothing(
    tmp_path: Path, undisturbed: str, command: object
) -> None:
    assert callable(command)
    run_dir, dice = tmp_path / "run", random.Random()
    process = start(command(job(run_dir, *RARE, "--pause", 0.1)))
    wait_for_step(run_dir, 2, process)
    keepers = keepers_of(process)
    for count, victim in ((2, 0), (3, 1), (4, 0)):
        wait_for_step(run_dir, told_step(run_dir) + dice.randrange(1, 5), process)
        os.kill(workers_of(process)[victim], signal.SIGKILL)
        wait_until(lambda count=count: len(starts(run_dir)) >= count, "the next start")
    assert keepers_of(process) == keepers
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("was killed by SIGKILL; all ranks start again in place") == 3
    assert "Traceback" not in done.stderr
    steps = [record["step"] for record in records(run_dir, "train")]
    assert sorted(set(steps)) == sorted(steps), "no step is done twice"
    assert read(run_dir)["restarts"] == read(run_dir)["restarts_in_place"] == 3
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    assert weights_of(run_dir) == undisturbed
    wait_until_gone([*keepers.values()])


def test_the_control_without_keepers_the_same_kill_ends_the_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--pause", 0.1, "--keeper", "off")))
    wait_for_step(run_dir, 2, process)
    assert workers_of(process) == keepers_of(process)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    assert processes.finish(process).returncode == 1
    assert read(run_dir, "status.json")["state"] != "finished"


@pytest.mark.slow
def test_a_keeper_that_is_killed_takes_its_rank_with_it_and_torchrun_restarts_the_job(
    tmp_path: Path, undisturbed: str
) -> None:
    run_dir = tmp_path / "run"
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--pause", 0.1), restarts=1))
    wait_for_step(run_dir, 2, process)
    before = [*keepers_of(process).values(), *workers_of(process).values()]
    os.kill(keepers_of(process)[1], signal.SIGKILL)
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not any(map(running, before))
    assert (read(run_dir)["restarts"], read(run_dir)["restarts_in_place"]) == (1, 0)
    assert weights_of(run_dir) == undisturbed


@pytest.mark.slow
def test_an_exception_goes_to_torchrun_and_nothing_starts_again_in_place(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    begun = time.monotonic()
    done = run(torchrun(2, TRAIN, *job(run_dir, *RARE, "--fail-at", 5, "--failing-rank", 1)), expect=1)
    print(f"took {time.monotonic() - begun:.1f} s")
    assert "ZeroDivisionError: a bug in the user's loss" in done.stderr
    assert "start again in place" not in done.stderr
    assert len(starts(run_dir)) == 1


@pytest.mark.slow
def test_a_rank_that_dies_again_and_again_is_left_to_torchrun(tmp_path: Path) -> None:
    """In each start before its first step, so that it makes no progress."""
    task = tmp_path / "falling.py"
    task.write_text(
        "import ctypes, os\nfrom tests.support.recording_task import Recorded\n"
        "class Falling(Recorded):\n"
        "    def loss(self, model, batch):\n"
        "        if os.environ.get('RANK') == '1':\n"
        "            ctypes.string_at(0)  # a segmentation fault\n"
        "        return super().loss(model, batch)\n"
    )
    run_dir = tmp_path / "run"
    options = [*job(run_dir, "--keeper-restarts", 1), "--task", f"{task}:Falling"]
    done = run(torchrun(2, TRAIN, *options), env=OF_A_TASK, expect=1)
    assert done.stderr.count("rank 1 was killed by SIGSEGV; all ranks start again in place") == 1
    assert "rank 1 was killed by SIGSEGV again, without progress; torchrun decides" in done.stderr
    assert len(starts(run_dir)) == 2


@pytest.mark.slow  # test_endings has the same with a launcher
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_for_torchrun_stops_the_ranks_once_and_starts_none_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--pause", 0.1)))
    wait_for_step(run_dir, 3, process)
    pids = [*keepers_of(process).values(), *workers_of(process).values()]
    process.send_signal(number)
    done = processes.finish(process)
    wait_until_gone(pids)
    assert done.stdout.count("evenkeel: stopped by ") == 1
    assert "again in place" not in done.stderr
    assert saved_step(run_dir) >= told_step(run_dir)


@pytest.mark.slow
def test_a_signal_for_a_keeper_alone_reaches_its_rank(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = fork(TRAIN, *job(run_dir, *RARE, "--pause", 0.1))
    wait_for_step(run_dir, 3, process)
    os.kill(process.pid, signal.SIGTERM)
    done = processes.finish(process)
    assert done.returncode == 75
    assert "evenkeel: stopped by SIGTERM" in done.stdout


@pytest.mark.slow
def test_a_single_process_starts_again_too(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    fork(TRAIN, *job(run_dir, "--max-steps", 1)).wait()  # an older run in the way, which --fresh moves aside once
    process = start([sys.executable, str(TRAIN), *job(run_dir, "--checkpoint-every", 1, "--pause", 0.1, "--fresh")])
    wait_until(lambda: len(list(tmp_path.glob("run.old-*"))) == 1, "the old run aside")
    wait_for_step(run_dir, 3, process)
    os.kill(trainer_of(process), signal.SIGKILL)
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == "evenkeel: rank 0 was killed by SIGKILL; all ranks start again in place\n"
    first, second = starts(run_dir)
    assert (first, second > 0) == (0, True)
    assert len(list(tmp_path.glob("run.old-*"))) == 1


@pytest.mark.slow
def test_a_rank_that_dies_at_one_step_for_ever_comes_to_an_end(tmp_path: Path) -> None:
    """It does the steps since the last checkpoint each time, which is no progress; and ends as it was killed."""
    task = tmp_path / "killed.py"
    task.write_text(
        "import os, signal\nfrom tests.support.recording_task import Recorded\nclass Killed(Recorded):\n"
        "    def loss(self, model, batch):\n"
        "        Killed.calls += 1\n"
        "        if Killed.calls == 20:\n            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().loss(model, batch)\n"
    )
    run_dir = tmp_path / "run"
    options = [*job(run_dir, "--checkpoint-every", 0), "--task", f"{task}:Killed"]
    done = run([sys.executable, str(TRAIN), *options], env=OF_A_TASK, expect=-9)
    assert "rank 0 was killed by SIGKILL again, without progress; torchrun decides" in done.stderr
    assert len(starts(run_dir)) == 1 + 3, "the first, and --keeper-restarts without progress"


@pytest.mark.slow
def test_an_error_that_only_looks_like_the_loss_of_a_rank_is_shown(tmp_path: Path) -> None:
    task = tmp_path / "looks.py"
    task.write_text(
        "from tests.support.recording_task import Recorded\nclass Looks(Recorded):\n"
        "    def loss(self, model, batch):\n        raise RuntimeError('NCCL error of my own')\n"
    )
    options = [*job(tmp_path / "run"), "--task", f"{task}:Looks"]
    done = run(torchrun(2, TRAIN, *options), env=OF_A_TASK, expect=1)
    assert "\nRuntimeError: NCCL error of my own\n" in done.stderr
    assert "in place" not in done.stderr


@pytest.mark.slow
def test_ranks_whose_keepers_and_agent_are_all_killed_save_and_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start([sys.executable, "launch/single_node.py", "-g", "2", "--", *job(run_dir, *RARE, "--pause", 0.2)])
    wait_for_step(run_dir, 3, process)
    keepers = keepers_of(process)
    below = [pid for keeper in keepers.values() for pid in children(keeper)]
    assert len(below) == 3, "two ranks and the store"
    for pid in [process.pid, *keepers.values()]:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(below)
    process.communicate()
    assert saved_step(run_dir) >= told_step(run_dir)


@pytest.mark.slow
def test_a_keeper_replaces_itself_if_the_source_has_changed(tmp_path: Path) -> None:
    """Or the fork would compute by the old source, and the fingerprint would be that of the new."""
    task = tmp_path / "changing.py"
    text = (
        "from tests.support.recording_task import Recorded\nFACTOR = 1\nclass Changing(Recorded):\n"
        "    def metrics(self, model, batch):\n"
        "        return {'factor': super().metrics(model, batch)['loss'] * 0 + FACTOR}\n"
    )
    task.write_text(text)
    run_dir = tmp_path / "run"
    options = job(run_dir, "--checkpoint-every", 1, "--eval-every", 1, "--pause", 0.1, "--task", f"{task}:Changing")
    process = start(torchrun(2, TRAIN, *options), env=OF_A_TASK)
    wait_for_step(run_dir, 3, process)
    keepers = keepers_of(process)
    task.write_text(text.replace("FACTOR = 1", "FACTOR = 2"))
    os.kill(workers_of(process)[1], signal.SIGKILL)
    wait_until(lambda: len(starts(run_dir)) >= 2, "the next start")
    assert keepers_of(process) == keepers, "the same processes, so that torchrun sees nothing"
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    factors = [record["test/factor"] for record in records(run_dir, "eval")]
    assert factors[0] == 1
    assert factors[-1] == 2


@pytest.mark.slow
def test_a_task_that_starts_a_thread_when_it_is_imported_has_no_keeper(tmp_path: Path) -> None:
    task = tmp_path / "threaded.py"
    task.write_text(
        "import threading, time\nfrom tests.support.recording_task import Recorded\n"
        "threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\nclass Threaded(Recorded):\n    pass\n"
    )
    run_dir = tmp_path / "run"
    options = job(run_dir, *RARE, "--pause", 0.1, "--task", f"{task}:Threaded")
    process = start(torchrun(2, TRAIN, *options), env=OF_A_TASK)
    wait_for_step(run_dir, 2, process)
    assert not any(ranks_of(pid, "trainer") for pid in keepers_of(process).values())
    assert processes.finish(process).returncode == 0
    (log,) = run_dir.glob("logs/attempt-*/rank-0.log")
    assert "if it dies, torchrun must start it again: it has 2 threads" in log.read_text()
