"""The state of a sharded run: files of rows that any number of ranks can read, and slots in memory."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from evenkeel.common.files import try_lock, write_json
from evenkeel.config import Config
from evenkeel.distributed.world import World
from evenkeel.run.checkpoint import Checkpoints, label_of
from evenkeel.run.manifest import MANIFEST, Provenance, load, read_manifest, step_of, verify
from evenkeel.run.sharded_checkpoint import await_whole, await_writers, publish_if_whole, write_rows, write_slots
from evenkeel.run.sharded_resume import common_step
from evenkeel.run.sharded_saver import ShardedSaver
from evenkeel.run.state_files import Damaged, file_of, read_parts, rows_of
from evenkeel.training.slots import Slots
from evenkeel.training.staging import Staging, map_tensors
from evenkeel.training.state import State
from tests.run.test_checkpoint import same
from tests.support.processes import names_in, wait_until

FORK, CPU = multiprocessing.get_context("fork"), torch.device("cpu")
DIVIDED = {"model.uneven": 7, "model.few": 1, "model.bf16": 4, "optimizers.0.state.0.exp_avg": 7, "model.none": 0}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2, provenance=Provenance(("test/accuracy", "max")))


def whole(step: int) -> dict[str, Any]:
    """A state of which every tensor says the step."""
    draw = torch.Generator().manual_seed(step)
    model = {
        "uneven": torch.randn(7, 3, generator=draw),
        "few": torch.randn(1, 5, generator=draw),
        "bf16": torch.randn(4, generator=draw).bfloat16(),
        "none": torch.empty(0, 3),
        "buffer": torch.full((2,), float(step)),
    }
    moments = {"step": torch.tensor(float(step)), "exp_avg": torch.randn(7, 3, generator=draw)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 0.1 / step, "betas": (0.9, 0.99), "params": [0]}]}
    return {"step": step, "model": model, "optimizers": [optimizer]}


def part(state: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """A rank's rows, as torch.chunk divides them."""

    def rows(tensor: Tensor, path: tuple[object, ...]) -> Tensor:
        if ".".join(map(str, path)) not in DIVIDED:
            return tensor
        chunks = list(torch.chunk(tensor, ranks)) if len(tensor) else []
        return chunks[rank].clone() if rank < len(chunks) else tensor[:0].clone()

    return {**map_tensors(state, rows), "rows": {"rank": rank, "ranks": ranks, "of": DIVIDED}}


def save(checkpoints: Checkpoints, step: int, ranks: int = 3, only: range | None = None) -> Path:
    for rank in only if only is not None else range(ranks):
        write_rows(checkpoints, part(whole(step), rank, ranks), {"accuracy": 1 / step}, "checkpoint", "token")
    return checkpoints.folder / f"step-{step:08d}"


def in_a_fork(act: Callable[[], object], killed: bool) -> None:
    process = FORK.Process(target=act)
    process.start()
    process.join(60)
    assert process.exitcode == (-signal.SIGKILL if killed else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_rows_of_any_number_of_ranks_are_those_of_any_other(checkpoints: Checkpoints, ranks: int) -> None:
    path = save(checkpoints, 5, ranks)
    assert same(load(path), whole(5))
    for in_place in (False, True):
        parts = read_parts(path, 5, in_place)
        for others in (2, 3, 4, 5):
            for rank in range(others):
                assert same(rows_of(parts, rank, others), part(whole(5), rank, others))


def test_a_checkpoint_has_its_name_when_the_last_rank_has_written(checkpoints: Checkpoints) -> None:
    path = save(checkpoints, 5, only=range(2))
    assert not path.exists()
    assert save(checkpoints, 5, only=range(2, 3)).exists()
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", *(file_of(r, 3) for r in range(3))]
    manifest = verify(path)
    assert (manifest.kind, manifest.metrics, len(manifest.files)) == ("checkpoint", {"test/accuracy": 0.2}, 3)
    for step in (6, 7):
        save(checkpoints, step)
    assert [step_of(each) for each in checkpoints.all()] == [5, 6, 7], "the best and the newest two are stored"


def test_ranks_that_write_at_the_same_time_complete_each_step_once(checkpoints: Checkpoints) -> None:
    def write(rank: int) -> None:
        for step in range(1, 30):
            write_rows(checkpoints, part(whole(step), rank, 3), {}, "checkpoint", "token")

    processes = [FORK.Process(target=write, args=(rank,)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert [step_of(path) for path in checkpoints.all()] == [28, 29]
    assert all(same(load(path), whole(step_of(path))) for path in checkpoints.all())
    assert not list(checkpoints.folder.glob(".*.tmp"))


def test_a_rank_that_waits_for_the_same_rows_leaves_them_when_the_checkpoint_is_named(checkpoints: Checkpoints) -> None:
    """As replicas do when they are stopped (--shard N)."""
    save(checkpoints, 5, only=range(2))
    (folder,) = checkpoints.folder.glob(".step-*.tmp")
    with (folder / file_of(0, 3)).open() as file:
        assert try_lock(file)
        process = FORK.Process(target=save, args=(checkpoints, 5, 3, range(1)))
        process.start()
        opened = Path(f"/proc/{process.pid}/fd")
        wait_until(lambda: any(same_file(each, folder / file_of(0, 3)) for each in opened.iterdir()), "it waits")
        written = save(checkpoints, 5, only=range(2, 3)) / file_of(0, 3)
        before = written.stat().st_mtime_ns
        fcntl.flock(file, fcntl.LOCK_UN)  # the fork has it too
    process.join(60)
    assert process.exitcode == 0
    assert written.stat().st_mtime_ns == before, "written again, it would be damaged if a kill came"


def same_file(one: Path, other: Path) -> bool:
    return one.exists() and one.samefile(other)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("missing", [False, True], ids=["a bit", "missing"])
def test_a_bit_in_any_file_or_a_missing_one_is_named(checkpoints: Checkpoints, rank: int, missing: bool) -> None:
    save(checkpoints, 4)
    file = save(checkpoints, 5) / file_of(rank, 3)
    if missing:
        file.unlink()
    else:
        flip_a_bit(file)
    # each of two ranks verifies a part of the files, and one finds it
    found = [damage_of(file.parent, each) for each in range(2)]
    assert [str(file) in damage for damage in found] == [rank % 2 == 0, rank % 2 == 1]
    state = checkpoints.load_newest()
    assert same(state, whole(4))
    (aside,) = checkpoints.folder.glob("damaged-step-*")
    assert aside.name.startswith("damaged-step-00000005")


def damage_of(path: Path, rank: int) -> str:
    try:
        verify(path, rank=rank, ranks=2)
    except Damaged as damage:
        return str(damage)
    return ""


def flip_a_bit(file: Path) -> None:
    """In the values of a tensor, so that only a digest can find it."""
    content = bytearray(file.read_bytes())
    value = whole(5)["model"]["buffer"].numpy().tobytes()
    content[content.index(value) + len(value) - 1] ^= 1
    file.write_bytes(content)


def test_the_control_dcp_loads_a_flipped_bit_without_a_word(tmp_path: Path) -> None:
    state = {"model": whole(5)["model"]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    flip_a_bit(file)
    found = {"model": map_tensors(state["model"], lambda tensor, _path: torch.zeros_like(tensor))}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert not found["model"]["buffer"].equal(state["model"]["buffer"])


def test_a_kill_in_a_write_leaves_the_one_before(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, 4)
    save(checkpoints, 5, only=range(2))

    def killed() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda _file: os.kill(os.getpid(), signal.SIGKILL))
            save(checkpoints, 5, only=range(2, 3))

    in_a_fork(killed, killed=True)
    assert checkpoints.newest_step() == 4
    await_writers(checkpoints)
    assert names_in(checkpoints.folder) == ["step-00000004"]


def test_a_start_waits_for_a_rank_that_still_writes(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, 5, only=range(2))
    begun, fsync = checkpoints.folder / "begun", os.fsync

    def slow(file: int) -> None:
        begun.touch()
        time.sleep(1)
        fsync(file)

    def late() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            save(checkpoints, 5, only=range(2, 3))

    process = FORK.Process(target=late)
    process.start()
    wait_until(begun.exists, "the last rank writes")
    await_writers(checkpoints)
    assert checkpoints.newest_step() == 5
    process.join()


@pytest.mark.parametrize("complete", [await_writers, lambda it: await_whole(it, 5, 20)], ids=["a start", "rank 0"])
def test_what_a_rank_that_was_killed_could_not_complete_is_completed(
    complete: Callable[[Checkpoints], None], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            patch.setattr(Path, "replace", replaced_or_killed(Path.replace))
            save(checkpoints, 5)

    in_a_fork(killed, killed=True)
    assert checkpoints.newest_step() == 0
    complete(checkpoints)
    assert same(load(checkpoints.folder / "step-00000005"), whole(5))


@pytest.mark.parametrize("fails", range(1, 9))
def test_rows_outlive_a_look_into_a_folder_that_fails_for_a_moment(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """Those of a step that only lacks its name, and of one that another process writes."""
    in_a_fork(lambda: save_unnamed(checkpoints, monkeypatch), killed=True)
    (written := checkpoints.folder / ".step-00000006.other.tmp").mkdir()
    looks = count(1)

    def look(operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any) -> Any:
            if next(looks) == fails:
                raise PermissionError(errno.EACCES, "Permission denied")  # which `Path.glob` of Python 3.11 hides too
            return operation(*arguments)

        return act

    with (written / "state.pt").open("wb") as file:
        assert try_lock(file)
        with monkeypatch.context() as patch, contextlib.suppress(PermissionError):
            for name in ("listdir", "scandir"):
                patch.setattr(os, name, look(getattr(os, name)))
            await_writers(checkpoints)
        await_writers(checkpoints)
        assert same(load(checkpoints.folder / "step-00000005"), whole(5))
        assert (written / "state.pt").exists()


@pytest.mark.parametrize("again", [False, True], ids=["has looked", "moves away one that was there"])
def test_two_that_name_a_checkpoint_at_once_lose_none(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """As ranks do whose locks do not reach other hosts. At some point the second waits until the first has named it,
    and goes on before the first deletes what it has replaced."""
    final, replace, read = checkpoints.folder / "step-00000005", Path.replace, Path.read_text
    if again:
        save(checkpoints, 5)
    in_a_fork(lambda: save_unnamed(checkpoints, monkeypatch), killed=True)
    (folder,) = checkpoints.folder.glob(".step-*.tmp")
    (folder / MANIFEST).unlink()
    ready, named, moved = (threading.Event() for _ in range(3))

    def pause(here: bool) -> None:
        if here and threading.current_thread() is second:
            ready.set()
            named.wait(20)

    def paused_read(path: Path) -> str:  # of status.json, just before it renames
        pause(not again and (folder / MANIFEST).exists())
        return read(path)

    def paused_replace(path: Path, target: Path) -> Path:
        pause(again and path == final)
        found = replace(path, target)
        if path == folder:
            named.set()
            moved.wait(20)
        elif path == final and threading.current_thread() is second:
            moved.set()
            first.join(20)
        return found

    def name_it() -> None:
        with contextlib.suppress(FileNotFoundError):  # as its callers do
            publish_if_whole(checkpoints, folder)
        moved.set()

    first, second = (threading.Thread(target=name_it) for _ in range(2))
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    monkeypatch.setattr(Path, "read_text", paused_read)
    monkeypatch.setattr(Path, "replace", paused_replace)
    second.start()
    assert ready.wait(20)
    first.start()
    first.join()
    second.join()
    assert same(load(final), whole(5))
    assert names_in(checkpoints.folder) == [final.name]


def save_unnamed(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all rows, and be killed before the checkpoint has its name."""
    monkeypatch.setattr(Path, "replace", replaced_or_killed(Path.replace))
    save(checkpoints, 5)


def replaced_or_killed(replace: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    def act(path: Path, target: Path) -> Path:
        if path.is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(path, target)

    return act


def without_space(checkpoints: Checkpoints, rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(OSError, match="File too large"):
        save(checkpoints, 5, only=range(rank, rank + 1))


def test_a_rank_without_space_frees_what_it_has_and_rank_0_waits_no_longer(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, only=range(2))
    in_a_fork(lambda: without_space(checkpoints, 2), killed=False)
    (folder,) = checkpoints.folder.glob(".step-*.tmp")
    assert (folder / file_of(2, 3)).stat().st_size == 0
    begun = time.monotonic()
    with pytest.raises(OSError, match=f"a rank could not write its rows: .*{file_of(2, 3)}"):
        await_whole(checkpoints, 5, 20)
    assert time.monotonic() - begun < 10
    with (folder / file_of(2, 3)).open("r+b") as file:  # the control: one that is about to write
        assert try_lock(file)
        with pytest.raises(OSError, match="not all ranks have written"):
            await_whole(checkpoints, 5, 3)
        fcntl.flock(file, fcntl.LOCK_UN)
    assert same(load(save(checkpoints, 5, only=range(2, 3))), whole(5)), "a stop at this step tries again"


def test_what_other_ranks_have_left_of_it_is_deleted_later(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, only=range(2))
    in_a_fork(lambda: without_space(checkpoints, 2), killed=False)
    (folder,) = checkpoints.folder.glob(".step-*.tmp")
    save(checkpoints, 6)
    assert folder.exists(), "the control: a rank may be slow"
    for each in (*folder.iterdir(), folder):
        os.utime(each, (0, time.time() - 601))
    save(checkpoints, 7)
    assert names_in(checkpoints.folder) == ["step-00000006", "step-00000007"]


class Rank:
    """A rank's slots, and the state that it copies there."""

    def __init__(self, checkpoints: Checkpoints, rank: int = 0, slots: int = 2) -> None:
        self.descriptors = [os.memfd_create("slot") for _ in range(slots)]
        self.slots = Slots(self.descriptors, [torch.device("cpu")])
        self.checkpoints, self.rank = checkpoints, rank

    def store(self, step: int, killed: bool = False) -> None:
        def capture(staging: Staging) -> dict[str, Any]:
            state = part(whole(step), self.rank, 3)
            captured, copy = staging.prepare({"done": [torch.tensor(step)], **state, "begun": [torch.tensor(step)]})
            copy()
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            return {name: value for name, value in captured.items() if name not in ("done", "begun")}

        facts = label_of(self.checkpoints, step, {}, "snapshot") | {"token": "token"}
        self.slots.write(capture, facts)


def test_a_slot_has_what_was_stored_bit_for_bit(checkpoints: Checkpoints) -> None:
    rank = Rank(checkpoints, 2)
    for step in (1, 2, 3):
        in_a_fork(lambda step=step: rank.store(step), killed=False)
        assert rank.slots.steps() == sorted({max(step - 1, 1), step})
    for step in (2, 3):
        state, facts = rank.slots.read(step)
        assert same(state, part(whole(step), 2, 3))
        assert facts["step"] == step
    rank.slots.keep_only(2)
    rank.slots.keep_run(checkpoints.provenance.run_id)
    assert rank.slots.steps() == [2]
    rank.slots.keep_run("of another run")
    assert rank.slots.steps() == []


def test_a_step_that_two_threads_store_leaves_the_one_before(checkpoints: Checkpoints) -> None:
    """A rescue waits while the main thread copies the same step, and has it to store too."""
    rank = Rank(checkpoints)
    for step in (1, 2, 2):
        rank.store(step)
    assert rank.slots.steps() == [1, 2]


@pytest.mark.parametrize("slots", [2, pytest.param(1, id="the control: one slot")])
def test_a_kill_in_the_middle_of_the_copy_leaves_the_step_before(checkpoints: Checkpoints, slots: int) -> None:
    rank = Rank(checkpoints, slots=slots)
    for step in (6, 7):
        in_a_fork(lambda step=step: rank.store(step), killed=False)
    in_a_fork(lambda: rank.store(8, killed=True), killed=True)
    assert rank.slots.steps() == ([7] if slots == 2 else [])
    if slots == 2:
        assert same(rank.slots.read(7)[0], part(whole(7), 0, 3))
        in_a_fork(lambda: rank.store(8), killed=False)
        assert rank.slots.steps() == [7, 8]


def test_the_run_goes_on_at_the_smallest_of_the_newest_steps(checkpoints: Checkpoints) -> None:
    ranks = [Rank(checkpoints, number) for number in range(3)]
    for step in (1, 2, 3):
        for rank in ranks[: 3 if step < 3 else 1]:
            in_a_fork(lambda rank=rank, step=step: rank.store(step), killed=False)
    everywhere = [rank.slots.steps() for rank in ranks]
    step = common_step(everywhere)
    assert step == 2
    joined = rows_of([rank.slots.read(step)[0] for rank in ranks], 0, 1)
    assert same(joined, whole(2))
    # the control: the newest step is not there on two ranks
    assert max(map(max, everywhere)) == 3
    assert not all(3 in steps for steps in everywhere)
    assert common_step([[2, 3], [], [3]]) == 0, "a rank has none"
    assert common_step([[7], [9], [9]]) == 0, "another launch's"


@pytest.mark.parametrize(("hangs", "left"), [(True, [2, 3]), (False, [3, 4])], ids=["hangs", "the control"])
def test_a_rescue_from_a_gpu_that_hangs_leaves_the_two_last_finished_steps(
    checkpoints: Checkpoints, hangs: bool, left: list[int]
) -> None:
    """The host has queued step 4. A copy would be step 3 once more, in the place of 2, the newest of a dead rank."""
    model = nn.Linear(2, 1)
    state = State(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    described: Any = {"rows": {"rank": 1, "ranks": 2, "of": {}}}
    sharding: Any = SimpleNamespace(described=lambda committed: committed | described, rank=1)
    saver = ShardedSaver(checkpoints, World(1, 1, 2, 2, CPU, launched=False), Config(grace=4.0), print)
    saver.token, state.sharding = "token", sharding

    def commit() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.commit(torch.tensor(1.0))

    for _ in range(3):
        commit()
        saver.store_step(state)
    if hangs:
        state._seqlock._commit_events = {CPU: SimpleNamespace(query=lambda: False)}  # type: ignore[dict-item]
        state.step = state._seqlock.queued = 4
    else:
        commit()
    saver.rescue(state)
    assert saver.slots.steps() == left


def test_slots_on_the_disk_are_a_checkpoint_of_the_step_that_all_have(checkpoints: Checkpoints) -> None:
    ranks = [Rank(checkpoints, number) for number in range(3)]
    for step in (1, 2, 3):
        for rank in ranks[: 3 if step < 3 else 1]:
            rank.store(step)
    for rank in ranks:
        write_slots(rank.descriptors, time.monotonic() + 10)
    (path,) = checkpoints.all()
    assert same(load(path), whole(2))
    assert read_manifest(path).kind == "snapshot"
    await_writers(checkpoints)
    assert names_in(checkpoints.folder) == ["step-00000002"]
    checkpoints.provenance.run_id = "old"
    (late := Rank(checkpoints)).store(4)
    write_json(checkpoints.folder.parent / "status.json", {"run_id": "new"})  # by --fresh
    with pytest.raises(OSError, match="another run has begun there, so nothing is written"):
        write_slots(late.descriptors, time.monotonic() + 10)
    assert names_in(checkpoints.folder) == ["step-00000002"]
