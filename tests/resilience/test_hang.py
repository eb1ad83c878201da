"""Ranks that neither die nor work: noticed, named, saved, started again."""

import contextlib
import json
import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from evenkeel.distributed.world import World
from evenkeel.resilience.beats import Beat, blamed, describe
from evenkeel.resilience.diagnosis import Diagnosis
from evenkeel.resilience.hang import Watch
from evenkeel.resilience.interruption import Resident
from tests.support import processes
from tests.support.processes import read, wait_until
from tests.training.test_staging import Training


def beat(step: int, phase: str) -> Beat:
    return Beat(1, step, phase, "host", 1, "node")


def test_the_culprit_comes_first() -> None:
    waiting = beat(811, "gradient reduction")
    ranks = {0: waiting, 1: waiting, 2: waiting, 3: beat(811, "data loading")}
    line = "rank 3 is in data loading of step 812; ranks 0-2 wait in gradient reduction of step 812"
    assert describe(ranks, []) == line
    assert describe(ranks, [3]) == (
        "rank 3 does not answer any more, last seen in data loading of step 812; "
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
        assert (len(found.outlook.frozen), found.is_within_reach()) == (not leaves, leaves)


def test_a_rank_that_deletes_old_snapshots_on_a_slow_disk_does_not_look_frozen(tmp_path: Path) -> None:
    store, calls, go = HashStore(), list[int](), threading.Event()

    def clean(step: int) -> None:
        calls.append(step)
        go.wait()

    def counts() -> int:
        return int(json.loads(watch.store.get("rank/0"))["count"]) if watch.store else 0

    with Watch(0, World(0, 0, 1, 1, torch.device("cpu"), launched=False), store, tmp_path, print, clean) as watch:
        watch.announce_saved(1)
        wait_until(lambda: calls == [1], "a checkpoint")
        before = counts()
        watch.announce_saved(2)
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
