"""Ranks that neither die nor work: noticed, named, saved, started again."""

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from evenkeel.common import keeper_link
from evenkeel.common.processes import stat
from evenkeel.distributed.world import World
from evenkeel.resilience.beats import Beat, beat_now, blamed, describe, hung
from evenkeel.resilience.diagnosis import Diagnosis
from evenkeel.resilience.hang import Watch
from evenkeel.resilience.news import News
from evenkeel.resilience.resident import Resident
from evenkeel.run.tracking import start_logs
from tests.support import processes
from tests.support.processes import fork, read, wait_until
from tests.support.small_runs import OWN
from tests.training.test_staging import Training


def beat(step: int, phase: str) -> Beat:
    return Beat(1, step, phase, "host", 1, "node")


def test_a_rank_says_where_it_is_without_asking_a_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may hang, and is then the cause; the thread that beats must go on. The control: `traceback` asks it."""
    asked = []
    monkeypatch.setattr("linecache.checkcache", asked.append)
    found = beat_now(World(0, 0, 1, 1, torch.device("cpu"), launched=False)).place
    assert found.startswith(f" at {__file__}:")
    assert not asked
    traceback.extract_stack()
    assert asked


def test_the_culprit_comes_first() -> None:
    waiting = beat(811, "gradient reduction")
    ranks = {0: waiting, 1: waiting, 2: waiting, 3: replace(beat(811, "data loading"), place=" at task.py:9")}
    line = "rank 3 is in data loading of step 812 at task.py:9; ranks 0-2 wait in gradient reduction of step 812"
    assert describe(ranks, []) == line
    assert hung(ranks, []) == "rank 3 hung in data loading of step 812 at task.py:9"
    assert (hung(ranks, [3]), hung(ranks, [0, 3])) == ("rank 3 hung and was killed", "ranks 0, 3 hung and were killed")
    assert describe(ranks, [3]) == (
        "rank 3 does not answer any more, last seen in data loading of step 812 at task.py:9; "
        "ranks 0-2 wait in gradient reduction of step 812"
    )
    frozen = dict.fromkeys([0, 1, 2, 5, 7], waiting)
    assert describe(frozen, [5, 7]).startswith("ranks 5, 7 do not answer any more, last seen in gradient reduction")
    gpu = replace(beat(811, "data loading"), device="cuda:0 (GPU 2)")
    assert describe({0: waiting, 3: gpu}, [3]).startswith("rank 3 (cuda:0 (GPU 2) of host) does not answer any more")


def test_the_node_that_the_others_wait_for_is_blamed() -> None:
    waiting, loading = beat(811, "gradient reduction"), beat(811, "data loading")
    two = {rank: replace(waiting, node=f"node{rank // 2}") for rank in range(4)}  # two nodes of two ranks
    late = two | {3: replace(loading, node="node1")}
    assert blamed(late, []) == ["node1"]
    ahead = late | {0: replace(beat(812, "checkpoint"), node="node0")}
    assert blamed(ahead, []) == ["node1"], "not who waits elsewhere, of a later step"
    assert blamed(two, [0]) == ["node0"], "a frozen rank, wherever it was last seen"
    assert blamed(late, [0]) == ["node0"], "a frozen rank rather than one that is late"


def test_the_control_nobody_is_blamed_if_nothing_singles_out_a_node() -> None:
    waiting, loading = beat(811, "gradient reduction"), beat(811, "data loading")
    two = {rank: replace(waiting, node=f"node{rank}") for rank in range(2)}
    assert blamed(two, []) == [], "all wait in the reduction"
    assert blamed({rank: replace(loading, node=it.node) for rank, it in two.items()}, []) == [], "none does"
    assert blamed(two, [0, 1]) == [], "all are frozen"
    assert blamed({0: waiting, 1: loading}, [1]) == [], "there is one node only"


def test_what_explains_a_hang_is_not_waited_for_with_the_save(tmp_path: Path) -> None:
    """torch's own record of collectives may hang as they do: here its file does, before and after the save."""
    training = Training(tmp_path / "run", World(0, 0, 1, 1, torch.device("cpu"), launched=False))
    training.step()
    training.run._watched(None, Resident(1.0))
    for name in ("collectives.json", "stacks.txt"):
        os.mkfifo(training.run.attempt.logs / f"rank-0.{name}")  # whoever opens it waits for a reader
    threading.Thread(target=training.run.ending.hung, daemon=True).start()
    wait_until(lambda: read(training.run.path, "status.json")["state"] == "failed", "the end")
    assert training.saved(1)
    assert "no progress for 600 s" in read(training.run.path, "status.json")["reason"]


STUCK = """
import ctypes, sys, time, torch
from pathlib import Path
from evenkeel.distributed.world import World
from evenkeel.resilience.resident import Resident
from tests.resilience.test_hang import full_pipe
from tests.support.processes import wait_until
from tests.training.test_staging import Training

training = Training(Path(sys.argv[1]), World(0, 0, 1, 1, torch.device("cpu"), launched=False))
training.step()
watch = training.run._watched(None, Resident(1.0))
full_pipe(training.run.attempt.logs / "rank-0.stacks.txt")
if sys.argv[2:]:
    watch.timeout = 2.0
    watch.__enter__()
    wait_until(lambda: watch._stacks, "the first look")
    time.sleep(0.1)
    ctypes.PyDLL(None).sleep(5)  # with the interpreter locked, so that faulthandler's own thread writes
training.run.ending.hung()
"""


def full_pipe(path: Path) -> int:
    """Make a file that opens, but whoever writes waits, as on a disk that hangs, until what is returned is closed."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, bytes(1 << 12))
    return pipe


@pytest.mark.parametrize("more", [(), ("locked",)], ids=["on request", "by its own thread"])
def test_a_disk_that_hangs_under_the_stacks_does_not_stop_the_rank(tmp_path: Path, more: tuple[str, ...]) -> None:
    """faulthandler lets no other thread run while it writes, or while it waits for its own thread, which writes."""
    (script := tmp_path / "stuck.py").write_text(STUCK)
    process = fork(script, tmp_path / "run", *more, env=OWN, warm=True)
    try:
        wait_until(lambda: (tmp_path / "run" / "status.json").exists(), "the start")
        wait_until(lambda: read(tmp_path / "run", "status.json")["state"] == "failed", "the end", limit=30)
    finally:
        process.kill()
        process.communicate()


def test_a_disk_that_hangs_under_the_log_does_not_keep_a_hang_from_the_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(0, 0, 1, 1, torch.device("cpu"), launched=False)
    training = Training(tmp_path / "run", world)
    training.step()
    training.run._watched(None, Resident(1.0))
    disk, (keeper, link) = full_pipe(tmp_path / "rank-0.log"), os.pipe()
    start_logs(tmp_path, world)
    monkeypatch.setattr(keeper_link, "_keeper", keeper_link._Keeper(link, 0, 0))
    threading.Thread(target=training.run.ending.hung, daemon=True).start()
    try:
        wait_until(lambda: select.select([keeper], [], [], 0)[0], "the message", limit=20)
        assert os.read(keeper, 99) == b"hang \n"
        wait_until(lambda: read(training.run.path, "status.json")["state"] == "failed", "the end")
    finally:
        os.close(disk)
        start_logs(tmp_path / "other", world)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_has_finished_is_not_blamed_for_the_hang_of_another(tmp_path: Path, leaves: bool) -> None:
    """As when the disk stalls in rank 0's last save. The control: one that only stops to beat."""
    store = HashStore()
    first, second = (World(rank, 0, 2, 1, torch.device("cpu"), launched=False) for rank in range(2))
    with Watch(0, first, store, tmp_path, print) as watch:
        with contextlib.suppress(KeyError), Watch(0, second, store, tmp_path, print):
            wait_until(lambda: watch.store and watch.store.check(["rank/0", "rank/1"]), "beats")
            if not leaves:
                raise KeyError
        found = Diagnosis(watch)
        assert ("rank 1 does not answer any more" in found.explain()) == (not leaves)
        assert (len(found.findings.frozen), found.is_within_reach()) == (not leaves, leaves)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_store_that_does_not_answer_is_no_proof_that_rank_0_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr("evenkeel.resilience.diagnosis.STORE_TIMEOUT", 0.5)
    world = World(1, 1, 2, 2, torch.device("cpu"), launched=False)
    with Watch(0, world, HashStore(), tmp_path, print) as watch, subprocess.Popen(["sleep", "60"]) as rank_0:
        watch.first_beats = [replace(beat_now(world), pid=rank_0.pid), beat_now(world)]
        if stopped:
            rank_0.send_signal(signal.SIGSTOP)
            wait_until(lambda: getattr(stat(rank_0.pid), "state", "") == "T", "the stop")
        found = Diagnosis(watch)
        assert "rank 0 does not answer any more, or the network is down" in found.explain()
        found.kill_frozen()
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank_0.wait(0.5)
        assert rank_0.poll() == (-signal.SIGKILL if stopped else None)
        rank_0.kill()


def test_a_rank_that_deletes_old_snapshots_on_a_slow_disk_does_not_look_frozen(tmp_path: Path) -> None:
    store, calls, go = HashStore(), list[int](), threading.Event()

    def clean(step: int) -> None:
        calls.append(step)
        go.wait()

    def counts() -> int:
        return int(json.loads(watch.store.get("rank/0"))["count"]) if watch.store else 0

    world, news = World(0, 0, 1, 1, torch.device("cpu"), launched=False), News(0, clean)
    with Watch(0, world, store, tmp_path, print, news) as watch:
        news.announce(1)
        wait_until(lambda: calls == [1], "a checkpoint")
        before = counts()
        news.announce(2)
        wait_until(lambda: counts() > before + 1, "beats")
        assert calls == [1], "one at a time"
        go.set()
        wait_until(lambda: calls == [1, 2], "the next")


@pytest.mark.parametrize("own", [None, "7"])
def test_the_monitor_of_nccl_has_more_patience_than_the_watch(monkeypatch: pytest.MonkeyPatch, own: str | None) -> None:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MASTER_PORT", str(processes.free_port()))
    with World(0, 0, 1, 1, torch.device("cpu"), launched=True).connected(timedelta(seconds=1234)):
        assert os.environ[name] == (own or "1234")
