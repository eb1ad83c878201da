"""Ranks that are killed and jobs that are stopped: the last finished step is saved and no process is left."""

import os
import random
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support import small_runs as runs
from tests.support.processes import (
    TRAIN,
    finish,
    fork,
    fork_ranks,
    names_in,
    read,
    records,
    run,
    start,
    torchrun,
    wait_until,
    wait_until_gone,
)
from tests.support.small_runs import job, keepers_of, saved_step, starts, told_step, wait_for_start, wait_for_step

RARE = ["--checkpoint-every", 0, "--eval-every", 1000]
SLOW, LONG = pytest.mark.slow, pytest.mark.long
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


def launcher(ranks: int, *options: str) -> list[str]:
    return [sys.executable, "launch/single_node.py", "-g", str(ranks), *options, "--"]


@pytest.mark.parametrize(
    ("dies", "command", "more"),
    [
        pytest.param("trainer", torchrun(2, TRAIN), [], id="trainer"),
        pytest.param("trainer", torchrun(2, TRAIN), ["--num-workers", 2], id="with loader processes", marks=LONG),
        # whose store would be a thread of rank 0
        pytest.param("trainer", launcher(2, "--max-restarts", "0"), [], id="under a launcher", marks=SLOW),
        pytest.param("keeper", torchrun(2, TRAIN, restarts=3), [], id="keeper", marks=SLOW),
    ],
)
def test_any_rank_is_killed_and_no_step_is_lost_and_no_bit_changes(
    tmp_path: Path, undisturbed: str, dies: str, command: list[str], more: list[object]
) -> None:
    """Both in turn, at random steps, without a planned checkpoint. Where a trainer dies, torchrun may not restart."""
    run_dir, dice = tmp_path / "run", random.Random()
    process = start([*command, *job(run_dir, *RARE, "--pause", 0.15, *more)])
    before, keepers = list[int](), list[dict[int, int]]()
    for count, victim in ((2, 0), (3, 1), (4, 0)):
        wait_for_step(run_dir, told_step(run_dir) + dice.randrange(2, 6), process)
        keepers.append(keepers_of(process))
        before += [*keepers[-1].values(), *runs.workers_of(process).values()]
        os.kill(runs.pids_of(process, dies)[victim], signal.SIGKILL)
        wait_for_start(run_dir, count)
    done = runs.ended(process)
    wait_until_gone(before)  # a keeper takes its rank with it
    if dies == "trainer":
        assert keepers == [keepers[0]] * 3, "torchrun sees nothing"
        assert done.stderr.count("was killed by SIGKILL; all ranks restart in place, without torchrun") == 3
        ends = [it["last_end"] for it in records(run_dir, "start")[1:]]
        assert ends == [f"rank {victim} was killed by SIGKILL" for victim in (0, 1, 0)]
        assert "Traceback" not in done.stderr
    else:
        assert done.stderr.count("evenkeel: the keeper of rank 1 was killed; torchrun decides") == 1
        assert "a restart or the same command continues there" in done.stdout
    assert runs.no_step_is_done_twice(run_dir)
    assert all(step > 0 for step in starts(run_dir)[1:])
    assert runs.restarts_of(run_dir) == ((0, 3) if dies == "trainer" else (3, 0))
    assert read(run_dir)["samples_seen"] == runs.PLAN.epochs * runs.SAMPLES
    assert runs.weights_of(run_dir) == undisturbed


@pytest.mark.parametrize(
    ("number", "command", "ranks"),
    [
        (TERM, launcher(2), 2),
        *(pytest.param(number, launcher(1), 1, marks=SLOW) for number in (USR1, USR2)),
        pytest.param(INT, torchrun(2, TRAIN), 2, marks=SLOW),
        *(pytest.param(number, launcher(1), 1, marks=LONG) for number in (INT, HUP)),
        pytest.param(TERM, torchrun(2, TRAIN), 2, marks=LONG),
    ],
)
def test_a_signal_to_torchrun_or_a_launcher_saves_the_last_step_once_and_leaves_no_process(
    run_dir: Path, number: signal.Signals, command: list[str], ranks: int
) -> None:
    process = start([*command, *job(run_dir, *RARE, "--pause", 0.2, "--num-workers", 1)])
    wait_for_step(run_dir, 3, process)
    trainers = runs.workers_of(process).values()
    assert len(trainers) == ranks
    pids = [*keepers_of(process).values(), *trainers]
    process.send_signal(number)
    done = finish(process)
    wait_until_gone(pids)
    assert done.stdout.count("evenkeel: stopped by ") == 1
    assert "again in place" not in done.stderr
    status = read(run_dir, "status.json")
    assert status["state"] == "stopped"
    assert status["reason"] == number.name or command == torchrun(2, TRAIN), "torchrun sends SIGTERM for any"
    assert saved_step(run_dir) >= told_step(run_dir), "no finished step is lost"


@pytest.mark.slow
def test_a_slow_disk_gets_the_last_step_once_and_so_within_the_grace(tmp_path: Path) -> None:
    """If the other ranks begin to write too after half of --grace, no copy is whole in time."""
    run_dir, task = tmp_path / "run", runs.slow_disk(tmp_path, 9)
    words = job(run_dir, *RARE, "--pause", 0.2, "--grace", 12, "--task", task)
    assert runs.signal_ranks_at(3, run_dir, fork_ranks(3, TRAIN, *words), TERM) == [75] * 3
    assert saved_step(run_dir) >= told_step(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("second", "saves"), [(INT, False), (TERM, True)])
def test_a_second_ctrl_c_for_a_launcher_ends_a_slow_save(tmp_path: Path, second: signal.Signals, saves: bool) -> None:
    """For the ranks torchrun makes both signals a SIGTERM; and LSF sends the second of them."""
    run_dir, task = tmp_path / "run", runs.slow_disk(tmp_path, 8)
    process = start([*launcher(2), *job(run_dir, *RARE, "--pause", 0.2, "--task", task)], env=runs.OWN)
    wait_for_step(run_dir, 3, process)
    process.send_signal(INT)
    time.sleep(1.5)
    process.send_signal(second)
    done = finish(process)
    assert ("second stop signal: exiting without saving" in done.stderr) != saves, done.stderr
    assert (saved_step(run_dir) >= told_step(run_dir)) == saves


@pytest.mark.slow
def test_a_rank_that_starts_again_waits_for_one_that_still_saves(tmp_path: Path) -> None:
    """A restart in place is given up early, but not before --grace is over for the other ranks."""
    task = Path(runs.slow_disk(tmp_path, 6).removesuffix(":Own"))
    task.write_text(
        "from datetime import timedelta\nfrom evenkeel.distributed import world\n"
        f"world.RESTART_TIMEOUT = timedelta(seconds=2)\n{task.read_text()}"
    )
    words = ["--pause", 0.1, "--keeper-memory", "off", "--max-steps", 8, "--task", f"{task}:Own"]
    process = start(torchrun(2, TRAIN, *job(tmp_path / "run", *RARE, *words)), env=runs.OWN)
    wait_for_step(tmp_path / "run", 3, process)
    os.kill(runs.workers_of(process)[1], signal.SIGKILL)
    assert finish(process).returncode == 0
    assert len(starts(tmp_path / "run")) == 2


@pytest.mark.slow
def test_a_task_that_takes_signals_itself_takes_no_stop_signal_away(tmp_path: Path) -> None:
    """As an event loop does: Python writes a signal's number to one pipe only."""
    body = """
    def loss(self, model, batch):
        signal.set_wakeup_fd(-1)
        return super().loss(model, batch)
    """
    run_dir, task = tmp_path / "run", runs.own_task(tmp_path, body)
    process = start([sys.executable, str(TRAIN), *job(run_dir, *RARE, "--pause", 0.1, "--task", task)], env=runs.OWN)
    runs.stop_at(run_dir, 3, process, TERM, expect=75)
    assert saved_step(run_dir) >= 3


def test_a_signal_for_a_child_of_the_task_does_not_stop_the_run(tmp_path: Path) -> None:
    """A pool ends its processes by SIGTERM, and waits for them: it must end them, and only them."""
    body = """
    def loss(self, model, batch):
        ready, told = os.pipe()
        if not (child := os.fork()):
            os.write(told, b"1")  # only now a signal is the child's alone
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM, "it ended by itself"
        return super().loss(model, batch)
    """
    words = job(tmp_path / "run", *RARE, "--max-steps", 3, "--task", runs.own_task(tmp_path, body))
    assert finish(fork(TRAIN, *words, env=runs.OWN)).returncode == 0


def test_a_stop_that_ends_a_process_of_the_task_first_is_no_error(tmp_path: Path) -> None:
    """Slurm signals all processes of a job: the main thread may fail by another's end before this rank's signal."""
    body = """
    def loss(self, model, batch):
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGTERM)).start()
        raise EOFError("my helper has gone")
    """
    words = job(tmp_path / "run", *RARE, "--task", runs.own_task(tmp_path, body))
    assert finish(fork(TRAIN, *words, env=runs.OWN)).returncode == 75


@pytest.mark.slow
def test_a_new_job_waits_while_the_old_one_uses_its_grace(tmp_path: Path) -> None:
    run_dir, task = tmp_path / "run", runs.slow_disk(tmp_path, 13)
    words = job(run_dir, *RARE, "--pause", 0.2, "--task", task)
    (old,) = fork_ranks(1, TRAIN, *words)
    wait_for_step(run_dir, 3, old)
    old.send_signal(TERM)
    (new,) = fork_ranks(1, TRAIN, *words)
    assert finish(old).returncode == 75
    told = told_step(run_dir)
    done = runs.ended(new)
    assert re.search("waiting up to 3[45] s, in case it is ending", done.stderr)
    assert starts(run_dir) == [0, told]


@pytest.mark.slow
@pytest.mark.parametrize("keepers_too", [False, pytest.param(True, marks=LONG)])
def test_workers_whose_agent_is_killed_save_and_end(run_dir: Path, keepers_too: bool) -> None:
    """`kill -9` of torchrun itself, which would leave its workers running for ever; and of the keepers as well."""
    process = start([*(launcher(2) if keepers_too else torchrun(2, TRAIN)), *job(run_dir, *RARE, "--pause", 0.2)])
    wait_for_step(run_dir, 3, process)
    keepers = keepers_of(process).values()
    below = [pid for keeper in keepers for pid in runs.children(keeper)]
    assert len(below) == (3 if keepers_too else 2), "two ranks; and the store of a launcher's job"
    for pid in [process.pid, *(keepers if keepers_too else [])]:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone([*keepers, *below])
    process.communicate()
    assert saved_step(run_dir) >= told_step(run_dir)


@pytest.mark.long
def test_a_run_that_is_stopped_twice_while_it_starts_still_takes_other_options(tmp_path: Path) -> None:
    """The stop comes when it forks its loader process, which it does once the start is recorded."""
    stops = """
    import json, pathlib

    def stop():
        status = pathlib.Path(__file__).with_name("run") / "status.json"
        if "STOP" in os.environ and status.exists() and json.loads(status.read_text())["state"] == "running":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    os.register_at_fork(before=stop)
    """
    task, run_dir = runs.own_task(tmp_path, before=textwrap.dedent(stops)), tmp_path / "run"
    words = [sys.executable, TRAIN, *job(run_dir, "--task", task, "--num-workers", 1, "--max-steps", 2)]
    for _ in range(2):
        done = run(words, env=runs.OWN | {"STOP": "1"}, expect=75)
        assert "stopped by SIGTERM while starting" in done.stdout
        assert read(run_dir, "status.json")["state"] == "stopped"
    run([*words, "--seed", 5], env=runs.OWN)


def test_a_run_that_finishes_deletes_what_a_killed_writer_has_left(tmp_path: Path) -> None:
    body = """
    def loss(self, model, batch):
        folder = os.path.join(os.path.dirname(__file__), "run", "checkpoints", ".step-00000001.0.tmp")
        os.makedirs(folder, exist_ok=True)
        return super().loss(model, batch)
    """
    runs.ended(fork(TRAIN, *job(tmp_path / "run", "--task", runs.own_task(tmp_path, body)), env=runs.OWN))
    assert not [name for name in names_in(tmp_path / "run" / "checkpoints") if name.startswith(".")]


@pytest.mark.parametrize("keeper", ["on", pytest.param("off", marks=SLOW)])
def test_rank_0_is_killed_before_it_has_saved_the_last_step_and_the_other_has_it(tmp_path: Path, keeper: str) -> None:
    body = """
    def after_evaluation(self, metrics, step):
        (folder := __import__("pathlib").Path(__file__).with_name("killed")).mkdir(exist_ok=True)
        if os.environ["RANK"] == "0" and not any(folder.iterdir()):
            (folder / "once").touch()
            time.sleep(2)  # the other rank has nothing more to compute
            os.kill(os.getpid(), signal.SIGKILL)
    """
    options = job(tmp_path / "run", *RARE, "--keeper", keeper, "--task", runs.own_task(tmp_path, body))
    run(torchrun(2, TRAIN, *options, restarts=int(keeper == "off")), env=runs.OWN)
    assert starts(tmp_path / "run") == [0, runs.PLAN.total_steps]
    assert runs.no_step_is_done_twice(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["on", pytest.param("off", marks=LONG)])
def test_ranks_whose_agent_is_killed_during_their_imports_end(tmp_path: Path, keeper: str) -> None:
    waits = (
        "import os, pathlib, time\n"
        "parent = os.getppid() if 'RANK' in os.environ else 0\n"
        "pathlib.Path(__file__).with_name(f'imports-{os.environ.get(\"RANK\")}').touch()\n"
        "while os.getppid() == parent:\n"
        "    time.sleep(0.02)\n"
    )
    imports = "from evenkeel import Run"
    (own := tmp_path / "own.py").write_text(TRAIN.read_text().replace(imports, waits + imports))
    options = job(tmp_path / "run", "--keeper", keeper, "--pause", 0.1)
    process = start([sys.executable, own, "-g", "2", *options])
    wait_until(lambda: (tmp_path / "imports-0").exists() and (tmp_path / "imports-1").exists(), "imports")
    ranks = keepers_of(process).values()
    process.kill()
    wait_until_gone([*ranks])
    process.communicate()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_an_attempt_after_the_death_of_a_keeper_says_so(run_dir: Path) -> None:
    process = start(torchrun(2, TRAIN, *job(run_dir, *RARE, "--keeper", "on", "--pause", 0.1), restarts=1))
    wait_for_step(run_dir, 2, process)
    os.kill(keepers_of(process)[1], signal.SIGKILL)
    done = runs.ended(process)
    assert re.search(r"^attempt 2, 2 ranks, .*, because the keeper of rank 1 was killed$", done.stdout, re.MULTILINE)


def test_the_control_a_stock_loop_loses_its_steps(tmp_path: Path) -> None:
    """The same SIGTERM to a loop that saves now and then, as the usual templates do: nothing is left."""
    script = tmp_path / "stock.py"
    script.write_text(
        "import sys, time, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "for step in range(1, 1000):\n"
        "    time.sleep(0.05)\n"
        "    print(step, flush=True)\n"
        "    if step % 100 == 0:\n"
        "        torch.save(model.state_dict(), sys.argv[1])\n"
    )
    process = start([sys.executable, str(script), str(tmp_path / "saved.pt")])
    while int(process.stdout.readline()) < 5:
        pass
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert not (tmp_path / "saved.pt").exists()
