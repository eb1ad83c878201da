"""Every ending: what a killed, stopped, frozen or orphaned job leaves, and how it goes on."""

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import pytest

from evenkeel.common.processes import process_name, signal_name
from evenkeel.resilience.interruption import KEYBOARD, STOPPED
from evenkeel.resilience.keeper import EXIT_TIMEOUT
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance
from tests.support import needs, processes
from tests.support import small_runs as runs
from tests.support.needs import small_disk
from tests.support.processes import LIMIT, TRAIN, finish, fork, read, records, run, run_forked, start, stop, torchrun
from tests.support.small_runs import PLAN, SAMPLES, job, saved_step, told_step, trainer_of, wait_for_step, workers_of
from tests.support.terminal import Terminal


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_job_by_nohup_outlives_its_terminal_and_the_reader_of_its_output(tmp_path: Path, ranks: int) -> None:
    run_dir = tmp_path / "run"
    options = job(run_dir, "--hold", tmp_path / "hold", "--pause", 0.3)
    (tmp_path / "hold").touch()
    command = ["launch/single_node.py", "-g", ranks, "--"] if ranks else [TRAIN]
    process = start(["nohup", sys.executable, *command, *options])
    wait_for_step(run_dir, 2, process)
    process.stdout.close()
    for pid in (process.pid, *workers_of(process).values()):
        os.kill(pid, signal.SIGHUP)  # as a shell does to all processes of its jobs
    (tmp_path / "hold").unlink()
    assert process.wait(120) == 0
    assert (read(run_dir)["state"], read(run_dir)["restarts"]) == ("finished", 0)


@pytest.mark.parametrize("plain", [True, False], ids=["torchrun", "launcher"])
def test_ctrl_c_on_a_terminal_explains_the_traceback_that_torchrun_ends_with(tmp_path: Path, plain: bool) -> None:
    options = job(tmp_path / "run", "--pause", 0.2)
    launcher = [sys.executable, "launch/single_node.py", "-g", "2", "--", *options]
    with Terminal(torchrun(2, TRAIN, *options) if plain else launcher, columns=200) as terminal:
        terminal.read_until(r"step 2/")
        terminal.press_ctrl_c()
        assert terminal.end() == (1 if plain else STOPPED)
    ours, _, after = terminal.text.partition("; the same command continues there")
    assert re.search(r"evenkeel: stopped by SIGINT; step \d+ is saved", ours)
    assert "Traceback" not in ours
    if plain:
        assert after.startswith(" (torchrun may print a traceback; that is not an error)\nTraceback (most recent")
    else:
        assert "raceback" not in after
        assert "death signal" not in terminal.text  # torchrun's own line


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ([TRAIN], signal.SIGINT, KEYBOARD),
        ([TRAIN], signal.SIGHUP, 128 + signal.SIGHUP),
        (["launch/single_node.py", "-g", "1", "--"], signal.SIGINT, KEYBOARD),
        (["-m", "evenkeel.launch.agent", "--standalone", TRAIN], signal.SIGINT, STOPPED),
    ],
    ids=["rank", "rank, hangup", "launcher", "agent"],
)
def test_a_stop_during_the_imports_is_a_line(tmp_path: Path, command: list[object], number: int, code: int) -> None:
    process = start([sys.executable, *command, *job(tmp_path / "run")])
    maps = Path(f"/proc/{process.pid}/maps")
    processes.wait_until(lambda: "libtorch" in maps.read_text(), "the import of torch")
    process.send_signal(number)
    done = processes.checked(finish(process), code)
    line = f"stopped by {signal_name(number)} while starting; the same command goes on from here"
    assert (done.stdout, done.stderr) == ("", f"evenkeel: {line}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_signal_is_heard_whatever_threads_the_libraries_have_started(tmp_path: Path, ranks: int) -> None:
    """OpenBLAS starts threads on import, before anybody could block a signal in them."""
    run_dir, several = tmp_path / "run", {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    process = start(program(ranks, *job(run_dir, "--checkpoint-every", 0, "--pause", 0.2)), env=several)
    wait_for_step(run_dir, 3, process)
    if ranks:
        os.kill(workers_of(process)[1], signal.SIGTERM)
        # rank 0 fails when rank 1 is gone, and may be seen first; then this stands among the other failures
        assert re.search(rf"exitcode *: {STOPPED}\b", finish(process).stderr)
    else:
        assert len(list(Path(f"/proc/{trainer_of(process)}/task").iterdir())) > 3
        stop(process, expect=STOPPED)
    assert saved_step(run_dir) >= told_step(run_dir)


def program(ranks: int, *options: str) -> list[str]:
    """A job on so many ranks; 0: in one process without torchrun."""
    return torchrun(ranks, TRAIN, *options) if ranks else [sys.executable, str(TRAIN), *options]


@needs.root("make a pid namespace")
@needs.tools("unshare")
def test_a_job_that_is_process_1_of_a_container_stops_well_before_docker_kills_it(run_dir: Path) -> None:
    """`docker stop`: SIGTERM to torchrun as the first process of a pid namespace, and SIGKILL after 10 seconds."""
    options = job(run_dir, "--checkpoint-every", 0, "--pause", 0.2, "--num-workers", 1)
    inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = start([*inside, *torchrun(1, TRAIN, *options)])
    wait_for_step(run_dir, 3, process)
    (first,) = runs.children(process.pid)
    begun = time.monotonic()
    os.kill(first, signal.SIGTERM)
    finish(process)
    assert time.monotonic() - begun < 10
    assert read(run_dir, "status.json")["state"] == "stopped"
    assert saved_step(run_dir) >= told_step(run_dir)


def test_a_snapshot_on_a_full_disk_costs_itself_and_not_the_checkpoint_before(tmp_path: Path) -> None:
    with small_disk(tmp_path, "3m") as folder:
        run_dir = folder / "run"
        process = fork(TRAIN, *job(run_dir, "--pause", 0.1, "--checkpoint-every", 4))
        wait_for_step(run_dir, 5, process)
        with (folder / "filler").open("wb", buffering=0) as filler:
            fill(filler)
            process.send_signal(signal.SIGTERM)
            while process.poll() is None:
                fill(filler)  # a checkpoint that did not fit has given back what it had
                time.sleep(0.001)
        done = processes.checked(finish(process), STOPPED)
        assert "NOT SAVED: [Errno 28] No space left on device; the last checkpoint is at step" in done.stderr
        newest = Checkpoints(run_dir / "checkpoints", 2, Provenance(("test/loss", "min"))).newest_step()
        assert newest % 4 == 0
        (folder / "filler").unlink()
        run_forked(TRAIN, *job(run_dir, "--pause", 0.1, "--checkpoint-every", 4))
        assert records(run_dir, "start")[-1]["step"] == newest
        assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES


def fill(file: IO[bytes]) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_stop_needs_no_other_rank(run_dir: Path) -> None:
    """Rank 1 is frozen, so rank 0 sits in a collective that will not end; SIGTERM still saves and ends it."""
    process = start(torchrun(2, TRAIN, *job(run_dir, "--checkpoint-every", 0, "--pause", 0.5)))
    wait_for_step(run_dir, 3, process)
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGSTOP)
    time.sleep(1)
    os.kill(workers[0], signal.SIGTERM)
    # after --grace it would end without a snapshot, after 30 s torchrun kills
    processes.wait_until_gone([workers[0]], 25)
    os.kill(workers[1], signal.SIGKILL)
    finish(process)
    assert read(run_dir, "status.json")["state"] == "stopped"
    assert saved_step(run_dir) >= told_step(run_dir)


def opened(pid: int, path: str) -> bool:
    """Whether a process has a file open."""
    with os.scandir(f"/proc/{pid}/fd") as entries:
        return any(os.path.realpath(entry.path) == path for entry in entries)


def test_a_stop_waits_for_nobody_beyond_its_grace(run_dir: Path) -> None:
    process = fork(TRAIN, *job(run_dir, "--pause", 0.1, "--checkpoint-every", 0, "--grace", 6))
    wait_for_step(run_dir, 2, process)
    with runs.locked(run_dir):
        begun = time.monotonic()
        assert stop(process, expect=STOPPED).stderr == ""
    assert time.monotonic() - begun < 6
    assert saved_step(run_dir) >= told_step(run_dir)


def test_a_signal_limits_the_rescue_after_an_error(tmp_path: Path, run_dir: Path) -> None:
    task = runs.own_task(
        tmp_path,
        """
        def loss(self, model, batch):
            self.losses = getattr(self, "losses", 0) + 1
            if self.losses == 12:
                os.fsync = lambda file: time.sleep(600)
                raise ValueError("a bug, and then a disk that hangs")
            return super().loss(model, batch)
        """,
    )
    process = fork(TRAIN, *job(run_dir, "--task", task, "--checkpoint-every", 0, "--grace", 3), env=runs.OWN)
    processes.wait_beside(process, lambda: [*run_dir.glob("checkpoints")], "a save that hangs")
    assert "not finished within --grace 3 s after an error" in stop(process, expect=STOPPED).stderr


def test_a_signal_is_heard_where_no_thread_can_start() -> None:
    program = """if True:
        import os, resource, signal, time
        from evenkeel.resilience.interruption import Interruption
        Interruption(5.0).on_stop(lambda why: print("saved after", why(), flush=True))
        os.getuid() or os.setuid(65534)  # root may start as many as it likes
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    """
    assert processes.run([sys.executable, "-c", program], expect=STOPPED).stdout == "saved after SIGTERM\n"


@pytest.mark.parametrize(("end", "ranks"), [("finish", 1), ("stop", 1), ("failure", 0), ("second Ctrl-C", 0)])
def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, end: str, ranks: int) -> None:
    """Neither the folders of sockets that loader processes have, nor torchrun's."""
    run_dir, temporary = tmp_path / "run", Path(tempfile.mkdtemp(dir="/tmp"))  # short: sockets have names in it
    more = ["--fail-at", 30] if end == "failure" else []
    options = job(run_dir, "--checkpoint-every", 0, "--pause", 0.1, "--num-workers", 2, *more)
    process = start(program(ranks, *options), env={"TMPDIR": str(temporary)})
    wait_for_step(run_dir, 2, process)
    trainer = workers_of(process)[0] if ranks else trainer_of(process)
    loaders = runs.children(trainer)
    assert len(loaders) >= 2
    assert list(temporary.glob("pymp-*")), "there is something to be left"
    with runs.locked(run_dir) if end == "second Ctrl-C" else contextlib.nullcontext():
        if end == "stop":
            process.send_signal(signal.SIGTERM)
        if end == "second Ctrl-C":
            process.send_signal(signal.SIGINT)
            time.sleep(1.2)
            process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
    processes.wait_until_gone(loaders)
    finish(process)
    # torch's compiler makes this one when it is imported, one for each user and not for each run
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert not [name for pid in loaders for name in Path("/dev/shm").glob(f"torch_{pid}_*")]
    shutil.rmtree(temporary)


def test_no_batch_is_lost_where_temporary_files_have_long_paths(tmp_path: Path) -> None:
    """Loaders pass tensors on by sockets in there, and the path of a socket has at most 107 bytes."""
    (long := tmp_path / ("x" * 100)).mkdir()
    run(program(0, *job(tmp_path / "run", "--max-steps", 2, "--num-workers", 1)), env={"TMPDIR": str(long)}, limit=90)


@pytest.mark.parametrize(("apart", "code"), [(1.2, KEYBOARD), (0.005, STOPPED)], ids=["second", "delivered twice"])
def test_a_second_ctrl_c_exits_at_once_and_one_delivered_twice_saves(run_dir: Path, apart: float, code: int) -> None:
    """The first may wait for a checkpoint whose writer never finishes. `timeout` passes one on beside the terminal."""
    process = fork(TRAIN, *job(run_dir, "--pause", 0.1, "--checkpoint-every", 0))
    wait_for_step(run_dir, 2, process)
    with runs.locked(run_dir) if code == KEYBOARD else contextlib.nullcontext() as lock:
        process.send_signal(signal.SIGINT)
        if lock:
            processes.wait_until(lambda: opened(trainer_of(process), str(lock)), "its wait for the checkpoints")
        time.sleep(apart)
        stop(process, signal.SIGINT, code)  # and not after --grace, which has another code
    assert code == KEYBOARD or saved_step(run_dir) >= 2


def test_sigint_and_then_sigterm_leave_a_slow_save_its_time(run_dir: Path) -> None:
    """LSF sends both, and a keeper kills what has not left five seconds after a second Ctrl-C."""
    process = fork(TRAIN, *runs.kept_job(run_dir, "--pause", 0.1, "--checkpoint-every", 0))
    wait_for_step(run_dir, 2, process)
    with runs.locked(run_dir):
        process.send_signal(signal.SIGINT)
        time.sleep(1.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(EXIT_TIMEOUT + 1)
    assert finish(process).returncode == STOPPED
    assert saved_step(run_dir) >= told_step(run_dir)


@pytest.mark.parametrize(("presses", "code"), [(1, STOPPED), (2, KEYBOARD)])
def test_a_ctrl_c_counts_once_although_its_keeper_waits_for_a_frozen_store(
    run_dir: Path, presses: int, code: int
) -> None:
    ranks = processes.fork_ranks(2, TRAIN, *runs.kept_job(run_dir, "--checkpoint-every", 0, "--pause", 0.1))
    wait_for_step(run_dir, 2, ranks[0])
    (store,) = (pid for pid in runs.children(ranks[0].pid) if process_name(pid) == "store")
    os.kill(store, signal.SIGSTOP)
    time.sleep(0.3)  # both keepers have asked it by then
    with runs.locked(run_dir):
        for _ in range(presses):
            ranks[1].send_signal(signal.SIGINT)
            time.sleep(1.3)
        os.kill(store, signal.SIGCONT)  # or they wait for ten seconds
        time.sleep(0.3)
    _, end = map(finish, ranks)
    assert (end.returncode, end.stderr.count("second stop signal")) == (code, presses - 1), end.stderr


def test_a_stop_after_the_death_of_another_rank_is_why_the_run_ends(run_dir: Path) -> None:
    """Rank 0 is still saving then, to start again."""
    words = runs.kept_job(run_dir, "--checkpoint-every", 0, "--pause", 0.1, "--keeper-memory", "off")
    ranks = processes.fork_ranks(2, TRAIN, *words)
    wait_for_step(run_dir, 2, ranks[0])
    with runs.locked(run_dir) as lock:
        os.kill(trainer_of(ranks[1]), signal.SIGKILL)
        processes.wait_until(lambda: opened(trainer_of(ranks[0]), str(lock)), "its rescue")
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    first, _ = map(finish, ranks)
    status = read(run_dir, "status.json")
    assert (status["state"], status["reason"], status["fruitless"]) == ("stopped", "SIGTERM", 0)
    assert "stopped by SIGTERM; step " in first.stdout
    assert first.returncode == STOPPED


def test_attempts_that_die_before_their_first_step_stop_after_three(run_dir: Path) -> None:
    task = runs.own_task(run_dir.parent, "def loss(self, *_):\n    raise ConnectionError('no route to the data')")
    done = run(torchrun(1, TRAIN, *job(run_dir, "--task", task), restarts=9), env=runs.OWN, expect=-signal.SIGALRM)
    status = read(run_dir, "status.json")
    assert status["state"] == "failed"
    assert "3 consecutive attempts died before they finished a step" in status["reason"]
    assert "ConnectionError: no route to the data" in status["reason"]
    assert len(records(run_dir, "start")) == 3
    assert done.stderr.count("3 consecutive attempts") == 1, "torchrun does not go on"

    again = run([sys.executable, TRAIN, *job(run_dir, "--task", task)], env=runs.OWN, expect=1)
    assert "3 consecutive attempts" not in again.stderr, "a command that is typed again is a new beginning"
    assert len(records(run_dir, "start")) == 4
