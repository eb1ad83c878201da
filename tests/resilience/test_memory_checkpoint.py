"""A state in memory that a keeper shares: whole or not there; and what keepers tell each other without a store."""

import contextlib
import errno
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from evenkeel.common import keeper_link, memory
from evenkeel.config import Config
from evenkeel.distributed.world import World
from evenkeel.resilience import memory_checkpoint, memory_offers, peers
from evenkeel.resilience.memory_checkpoint import TRIES, KeeperMemory, MemoryCheckpoint, rank_memory
from evenkeel.resilience.memory_offers import Offer, offer, open_first
from evenkeel.resilience.peers import Peers
from evenkeel.resilience.slot_files import SLOT_HEAD
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.saver import Saver
from evenkeel.training.state import State
from tests.support.processes import free_port, wait_until
from tests.support.small_runs import bytes_in_memory

MEGABYTE = 1 << 20
STATE = {"weights": torch.arange(MEGABYTE, dtype=torch.float32)}


SAVE_STATE = partial(torch.save, STATE)


def store(step: int, write: Callable[[IO[bytes]], object] = SAVE_STATE, kind: str = "snapshot") -> bool:
    return rank_memory.store(write, {"step": step, "kind": kind, "run_id": "here"})


def step_in(messages: dict[str, str]) -> int:
    """Of the snapshot that a rank has left; 0: it has left none."""
    return json.loads(messages.get("snapshot") or '{"step": 0}')["step"]


def by_a_rank(memory: KeeperMemory, act: Callable[[], object]) -> dict[str, str]:
    """What a fork tells its keeper: the last of each message."""
    heard, told = os.pipe()
    memory.prepare()
    if not (child := os.fork()):
        try:
            keeper_link.open_link(told, os.getppid(), 0)
            memory.hand_over()
            act()
        finally:
            os._exit(0)
    os.close(told)
    os.waitpid(child, 0)
    with os.fdopen(heard) as words:
        return dict(line.partition(" ")[::2] for line in words.read().splitlines())


def await_written(memory: KeeperMemory) -> None:
    wait_until(lambda: not memory.reap(), "all on the disk", limit=60)


def test_a_state_outlives_its_process_and_is_saved_by_a_child(tmp_path: Path) -> None:
    def save(it: memory_checkpoint.Stored) -> None:
        assert isinstance(it, MemoryCheckpoint)
        (tmp_path / "saved").write_bytes(Path(it.path).read_bytes())

    memory = KeeperMemory(save)
    memory.adopt(by_a_rank(memory, lambda: store(3)))
    await_written(memory)
    assert torch.load(tmp_path / "saved")["weights"].equal(STATE["weights"])

    def is_there() -> None:
        assert rank_memory.previous("elsewhere") is None, "the state of another run"
        left = rank_memory.previous("here")
        assert left.step == 3
        assert torch.load(left.path)["weights"].equal(STATE["weights"])
        store(4)

    assert step_in(by_a_rank(memory, is_there)) == 4


def test_a_checkpoint_and_a_later_rescue_are_both_written(tmp_path: Path) -> None:
    """The next rank begins with the later one; the checkpoint has an evaluation, and is not replaced by it."""

    def save(it: memory_checkpoint.Stored) -> None:
        assert isinstance(it, MemoryCheckpoint)
        (tmp_path / f"{it.step}-{it.label['kind']}").write_bytes(Path(it.path).read_bytes())

    def leave() -> None:
        store(3, kind="checkpoint")
        store(5)

    memory, before = KeeperMemory(save), bytes_in_memory(os.getpid())
    memory.adopt(by_a_rank(memory, leave))
    await_written(memory)
    assert {it.name for it in tmp_path.iterdir()} == {"3-checkpoint", "5-snapshot"}

    def is_there() -> None:
        store(rank_memory.previous("here").step)

    memory.adopt(messages := by_a_rank(memory, is_there))
    assert step_in(messages) == 5
    await_written(memory)
    memory.discard()
    assert bytes_in_memory(os.getpid()) == before, "no memory is left behind"


@pytest.mark.parametrize("limit", [MEGABYTE, resource.RLIM_INFINITY])
def test_a_state_that_has_no_room_is_not_held_at_all(limit: int) -> None:
    def act() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        if not store(1):
            assert rank_memory.labels == {}
            assert os.fstat(rank_memory.files["snapshot"]).st_size == 0
            store(2, lambda file: file.write(b"less"))  # the process goes on

    assert step_in(by_a_rank(KeeperMemory(print), act)) == (2 if limit == MEGABYTE else 1)


def test_a_state_that_is_being_replaced_when_its_process_dies_is_not_whole() -> None:
    def act() -> None:
        store(1)
        store(2, lambda file: (file.write(b"half"), os._exit(0)))

    assert step_in(by_a_rank(KeeperMemory(print), act)) == 0


def test_a_process_without_a_keeper_holds_nothing() -> None:
    assert not store(1)
    assert rank_memory.previous("") is None
    assert offer(rank_memory.previous("")) is None


@pytest.mark.parametrize("kills", [1, TRIES])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_child_that_is_killed_is_followed_by_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kills: int, forgotten: bool
) -> None:
    """Also when the run has come further, so that only the child needs the memory. With TRIES kills: the control."""

    def save(it: memory_checkpoint.Stored) -> None:
        assert isinstance(it, MemoryCheckpoint)
        (tmp_path / str(os.getpid())).touch()
        if len([*tmp_path.iterdir()]) <= kills:
            time.sleep(600)
        (tmp_path / "saved").write_bytes(Path(it.path).read_bytes())

    memory, before = KeeperMemory(save), bytes_in_memory(os.getpid())
    memory.adopt(by_a_rank(memory, lambda: store(3)))
    for count in range(1, kills + 1):
        wait_until(lambda: memory.reap() == [3] and len([*tmp_path.iterdir()]) == count, "a child", limit=60)  # noqa: B023
        if forgotten:
            memory.discard()
        (writer,) = memory._writers
        os.kill(writer, signal.SIGKILL)
    await_written(memory)
    assert (tmp_path / "saved").exists() == (kills < TRIES)
    lost = f"evenkeel: NOT SAVED: {TRIES} processes that wrote step 3 were killed, the last of them by signal 9\n"
    assert capfd.readouterr().err == (lost if kills == TRIES else "")
    memory.discard()
    assert bytes_in_memory(os.getpid()) == before, "no memory is left behind"


@pytest.mark.parametrize("forks", [True, False])
def test_a_writer_that_fails_says_that_the_step_is_not_saved(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    """A child, or, where no process can be forked, the keeper."""

    def save(_it: object) -> None:
        raise RuntimeError("no archive")  # any error but an OSError, which the saver reports itself

    def no_more() -> int:
        raise BlockingIOError

    memory = KeeperMemory(save)
    messages = by_a_rank(memory, lambda: store(3))
    if not forks:
        monkeypatch.setattr(os, "fork", no_more)
    memory.adopt(messages)
    await_written(memory)
    *trace, line = capfd.readouterr().err.splitlines()
    assert trace[-1] == "RuntimeError: no archive"
    assert line == "evenkeel: NOT SAVED: the process that wrote step 3 failed, see the traceback"
    memory.discard()


def test_slots_stay_open_after_a_child_has_written_them() -> None:
    memory = KeeperMemory(print)
    memory.prepare()
    os.pwrite(memory._slots[0], SLOT_HEAD.pack(3, 0, 0, 0), 0)
    memory.save_slots()
    assert memory.reap() in ([3], [])
    await_written(memory)
    memory.adopt({})
    for slot in memory._slots:
        os.close(slot)


def test_a_path_that_is_another_file_here_is_no_offer(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    offer = Offer(3, str(tmp_path / "state"), memory_offers._identity(str(tmp_path / "state")))
    file = open_first([offer])
    assert file, "the control"
    file.close()
    boot, device, inode = offer.identity
    for other in (("another boot", device, inode), (boot, device + 1, inode), (boot, device, inode + 1)):
        assert open_first([offer._replace(identity=other)]) is None
    assert open_first([offer._replace(path="/proc/1/fd/999999")]) is None


def test_a_process_that_is_forked_keeps_no_memory() -> None:
    def act() -> None:
        store(1)
        mine = rank_memory.files["snapshot"]
        os.fstat(mine)
        if not (loader := os.fork()):
            with contextlib.suppress(OSError):
                os.fstat(mine)
                os._exit(1)
            os._exit(store(3))
        store(4 + os.waitpid(loader, 0)[1])

    assert step_in(by_a_rank(KeeperMemory(print), act)) == 4


@contextlib.contextmanager
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process of a job's store."""
    port = free_port()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    context = multiprocessing.get_context("fork")
    server = context.Process(target=serve, args=(port, ready := context.Event()))
    server.start()
    try:
        assert ready.wait(60)
        yield server.pid or 0
    finally:
        server.kill()
        server.join()


def serve(port: int, ready: Any) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    ready.set()
    signal.pause()
    del store


@pytest.mark.parametrize("looks", [True, False])
def test_a_store_that_has_ended_is_lost_without_a_stack_of_c_plus_plus(
    looks: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The control does not look, and torch prints one."""
    with served(monkeypatch) as server:
        mine = Peers(1, 2)
        mine.join("a")
        assert mine._store
        assert not mine.learn_of_death()
        if not looks:
            monkeypatch.setattr(Peers, "_is_cut_off", lambda _: False)
        os.kill(server, signal.SIGKILL)
    time.sleep(0.2)
    assert not mine.learn_of_death()
    assert mine._store is None
    assert ("TCPStore" in capfd.readouterr().err) == (not looks)


@pytest.mark.parametrize("rejoins", [True, False])
def test_a_keeper_that_lost_a_slow_store_is_not_waited_for(rejoins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control does not ask again: then the others wait for `FINISH_TIMEOUT` until this rank has finished."""
    with served(monkeypatch) as server:
        monkeypatch.setattr(peers, "REQUEST_TIMEOUT", 1.0)
        monkeypatch.setattr(peers, "FINISH_TIMEOUT", 0.0)
        other, slow = Peers(1, 3), Peers(2, 3)
        other.join("a")
        slow.join("a")
        os.kill(server, signal.SIGSTOP)
        wait_until(lambda: not slow.learn_of_death() and slow._store is None, "the loss: it may still answer at first")
        if not rejoins:
            monkeypatch.setattr(Peers, "_rejoin", lambda _: None)
        if rejoins:
            assert slow.await_all(lambda _seconds: False), "it ends where the store is still frozen"
        os.kill(server, signal.SIGCONT)
        assert slow.await_all(lambda _seconds: False)
        assert other._store
        assert other._store.add("done", 0) == rejoins


def give_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files to write to, which a keeper would give this process."""
    monkeypatch.setattr(rank_memory, "files", {kind: os.memfd_create(kind) for kind in ("checkpoint", "snapshot")})
    monkeypatch.setattr(rank_memory, "labels", {})


def after_a_step() -> State:
    model = nn.Linear(2, 2)
    state = State(model, [torch.optim.SGD(model.parameters())])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.commit(torch.tensor(1.0))
    return state


@pytest.mark.parametrize(("ranks", "where"), [(1, "stored in memory"), (10**15, "saved, in ")])
def test_a_rescue_for_which_the_node_has_no_memory_goes_to_the_disk(
    ranks: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of the node may store one at once, and the kernel would kill some of them."""
    give_memory(monkeypatch)
    world = World(0, 0, ranks, ranks, torch.device("cpu"), launched=False)
    saver = Saver(Checkpoints(tmp_path, 2), world, Config(grace=4.0), lambda _step: None)
    assert saver.rescue(after_a_step(), in_place=True).startswith(f"step 1 is {where}")


@pytest.mark.parametrize("name", ["", "memory"])
def test_a_control_group_has_less_left_than_the_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of cgroup v2 and v1; the kernel's files, in another folder."""
    _, limit, used, cached = memory.CONTROL_GROUPS[name]
    monkeypatch.setattr(memory, "CONTROL_GROUPS", {"": (str(tmp_path), limit, used, cached)})
    (tmp_path / used).write_text("600000\n")
    (tmp_path / "memory.stat").write_text(f"anon 400000\n{cached} 100000\n")
    (tmp_path / limit).write_text("1000000\n")
    assert memory.memory_left() == 500000
    (tmp_path / limit).write_text("max\n")
    assert memory.memory_left() > 500000


@pytest.mark.parametrize("disk", ["fails", "hangs"])
def test_a_rescue_needs_no_disk_where_memory_is_enough(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the disk whether the step is there, and a disk that fails or hangs cannot say."""
    state = after_a_step()
    (folder := tmp_path / "checkpoints").mkdir()
    alone = World(0, 0, 1, 1, torch.device("cpu"), launched=False)
    saver, stat = Saver(Checkpoints(folder, 2), alone, Config(grace=4.0), lambda _step: None), os.stat

    def fail(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(folder)):
            if disk == "fails":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            answers.wait(20)
        return stat(path, *arguments, **options)

    give_memory(monkeypatch)
    monkeypatch.setattr(os, "stat", fail)
    begun, answers = time.monotonic(), threading.Event()
    assert saver.rescue(state, in_place=True) == "step 1 is stored in memory"
    assert time.monotonic() - begun < 15
    answers.set()
    assert rank_memory.labels["snapshot"]["step"] == 1
