"""The state on disk: whole or absent, whatever happens while it is written."""

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from evenkeel.common.files import LOCK, write_json
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import MANIFEST, Provenance, load, read_manifest, step_of, verify
from evenkeel.run.state_files import STATE, Damaged
from tests.support.needs import small_disk
from tests.support.processes import names_in, wait_until
from tests.support.raised import line_of

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2, provenance=Provenance(("test/accuracy", "max")))


def state(step: int, size: int = 10) -> dict[str, Any]:
    """A state of which every element says the step, so that a mixture of two would show."""
    return {"step": step, "model": {"w": torch.full((size,), float(step))}, "optimizers": []}


def is_whole(found: dict[str, Any]) -> bool:
    return bool((found["model"]["w"] == found["step"]).all())


def steps(checkpoints: Checkpoints) -> list[int]:
    return [step_of(path) for path in checkpoints.all()]


def best_value(checkpoints: Checkpoints) -> float | None:
    best = checkpoints.best_path()
    by = checkpoints.provenance.best_by
    return read_manifest(best).metrics[by[0]] if best and by else None


def same(a: Any, b: Any) -> bool:
    """Equal in every bit, the types included."""
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def test_what_is_loaded_is_what_was_saved_bit_for_bit(checkpoints: Checkpoints) -> None:
    weird = {
        "nan": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "bf16": torch.randn(3, 5).bfloat16(),
        "ints": torch.arange(4, dtype=torch.int64).view(2, 2).t(),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor(True),
    }
    saved = {"step": 42, "model": weird, "optimizers": [{"state": {0: {"step": torch.tensor(7.0)}}, "lr": 1e-3}]}
    path = checkpoints.save(saved, {"accuracy": 0.5})
    assert path == checkpoints.folder / "step-00000042"
    assert same(load(path), saved)
    assert same(checkpoints.load_newest(), saved)


def test_an_empty_folder_and_none(checkpoints: Checkpoints) -> None:
    for _ in range(2):
        assert checkpoints.all() == []
        assert checkpoints.newest_step() == 0
        assert checkpoints.load_newest() is None
        assert best_value(checkpoints) is None
        checkpoints.folder.mkdir(exist_ok=True)


def test_the_manifest(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(state(3), {"accuracy": 0.5, "loss": 1.5})
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["step"], manifest["metrics"]) == (3, {"test/accuracy": 0.5, "test/loss": 1.5})
    assert manifest["files"][STATE]["bytes"] == (path / STATE).stat().st_size
    assert manifest["files"][STATE]["sha256"] == hashlib.sha256((path / STATE).read_bytes()).hexdigest()
    assert (manifest["kind"], manifest["host"]) == ("checkpoint", socket.gethostname())
    snapshot = checkpoints.save_if_new(state(4))
    assert read_manifest(snapshot).kind == "snapshot"


def test_a_planned_checkpoint_that_comes_late_replaces_a_snapshot_of_its_step(checkpoints: Checkpoints) -> None:
    """Which has no evaluation. One that is there already is not written again, nor is a snapshot of an older step."""
    evaluated: dict[str, Any] = {"metrics": {"accuracy": 0.9}, "kind": "checkpoint"}
    checkpoints.save_if_new(state(4))
    path = checkpoints.save_if_new(state(4), **evaluated)
    assert read_manifest(path).metrics == {"test/accuracy": 0.9}
    assert checkpoints.save_if_new(state(4), **evaluated) is None
    assert checkpoints.save_if_new(state(4)) is checkpoints.save_if_new(state(3)) is None
    assert read_manifest(path).kind == "checkpoint"
    assert checkpoints.save_if_new(state(3), metrics={"accuracy": 1.0}, kind="checkpoint") == checkpoints.best_path()


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("step", ["3", 3.5])
def test_a_manifest_whose_step_only_looks_like_the_folders_is_damaged(checkpoints: Checkpoints, step: object) -> None:
    path = checkpoints.save(state(3), {})
    assert read_manifest(path).step == 3, "the control"
    edit_manifest(path, lambda manifest: manifest.update(step=step))
    assert "is not this checkpoint's manifest" in line_of(Damaged, read_manifest, path)


def as_it_was_before_kinds(manifest: dict[str, Any]) -> None:
    for name in ("kind", "host", "best_by"):
        del manifest[name]


def test_an_older_manifest_still_counts(checkpoints: Checkpoints) -> None:
    path = checkpoints.save(state(3), {"accuracy": 0.5})
    edit_manifest(path, as_it_was_before_kinds)
    manifest = read_manifest(path)
    assert (manifest.kind, manifest.host, manifest.best_by) == ("checkpoint", "", None)
    assert same(checkpoints.load_newest(), state(3))
    assert best_value(checkpoints) == 0.5


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(checkpoints: Checkpoints) -> None:
    """Its step would be taken for the newest by its name, and for an old one by what is in it."""
    checkpoints.save(state(1), {})
    shutil.copytree(checkpoints.folder / "step-00000001", checkpoints.folder / "step-00000009")
    assert checkpoints.load_newest(step=9) is None
    assert same(checkpoints.load_newest(), state(1))
    assert steps(checkpoints) == [1]
    assert len(list(checkpoints.folder.glob("damaged-step-00000009-*"))) == 1


def snapshots(folder: Path, *numbers: int) -> Checkpoints:
    """A folder with snapshots of this host at some steps."""
    checkpoints = Checkpoints(folder, keep=99, provenance=Provenance(("test/accuracy", "max")))
    for step in numbers:
        assert checkpoints.save_if_new(state(step))
    return checkpoints


def test_what_another_process_still_writes_is_left_alone(checkpoints: Checkpoints) -> None:
    left = checkpoints.folder / ".step-00000007.abc.tmp"
    left.mkdir(parents=True)
    with checkpoints.writer_locked(0.0):  # flock counts descriptors, not processes
        checkpoints.load_newest()
        assert left.exists()
    checkpoints.load_newest()
    assert not left.exists(), "the control: its writer was killed"


def test_a_writer_that_is_frozen_between_two_renames_keeps_no_start_waiting(checkpoints: Checkpoints) -> None:
    final = checkpoints.save(state(3), {})
    with checkpoints.writer_locked(0.0):
        final.rename(checkpoints.folder / f".{final.name}.old")
        found = checkpoints.load_newest()
    assert found["step"] == 3


def test_what_killed_writers_have_left_goes_with_the_next_checkpoint(checkpoints: Checkpoints) -> None:
    """Ranks that start again from memory read nothing of the folder."""
    checkpoints.save(state(3), {})
    (checkpoints.folder / "step-00000003").rename(checkpoints.folder / ".step-00000003.old")
    (left := checkpoints.folder / ".step-00000007.abc.tmp").mkdir()
    with checkpoints.writer_locked(0.0):
        checkpoints.save_if_new(state(5), time.monotonic())
        assert len(list(checkpoints.folder.glob(".step*"))) == 2, "another process may write still"
    checkpoints.save(state(8), {})
    assert left.exists(), "it may write without the lock, if the holder was frozen"
    os.utime(left, (0, 0))
    checkpoints.save(state(9), {})
    assert [path.name for path in checkpoints.folder.glob(".step*")] == []


def test_older_snapshots_of_this_host_are_cleared(tmp_path: Path) -> None:
    checkpoints = snapshots(tmp_path, 1, 2, 3, 4)
    checkpoints.clear_snapshots(before=3)
    assert steps(checkpoints) == [3, 4]
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]
    checkpoints.clear_snapshots(before=3)
    Checkpoints(tmp_path / "none", keep=1, provenance=Provenance(("test/accuracy", "max"))).clear_snapshots(before=3)
    assert not (tmp_path / "none").exists()


def test_planned_checkpoints_and_those_of_other_hosts_are_not_cleared(tmp_path: Path) -> None:
    """A shared file system: all hosts, rank 0's too, write into one folder."""
    checkpoints = snapshots(tmp_path, 1, 2, 3, 4, 5, 6)
    checkpoints.save(state(6), {"accuracy": 0.5})  # in the place of a snapshot
    checkpoints.save(state(7), {})
    by_step = {step_of(path): path for path in checkpoints.all()}
    edit_manifest(by_step[1], lambda manifest: manifest.update(host="another"))
    edit_manifest(by_step[2], as_it_was_before_kinds)
    edit_manifest(by_step[3], lambda manifest: manifest.update(kind="pirate"))
    truncate(by_step[4] / MANIFEST)
    checkpoints.clear_snapshots(before=100)
    assert steps(checkpoints) == [1, 2, 3, 4, 6, 7], "5 alone is sure to be this host's own snapshot"
    assert best_value(checkpoints) == 0.5


NAN = float("nan")
KEPT: dict[str, tuple[str, list[float | None], list[int], float | None]] = {
    "the newest two": ("max", [None, None, None, None], [3, 4], None),
    "and the largest": ("max", [0.5, 0.9, 0.6, None, 0.4, None], [2, 5, 6], 0.9),
    "and the smallest": ("min", [0.5, 0.1, 0.6, None, 0.4, None], [2, 5, 6], 0.1),
    "of equally good ones the first": ("max", [0.5, 0.5, None, None, None], [1, 4, 5], 0.5),
    "none that was overtaken": ("max", [0.1, 0.2, 0.3, 0.4, 0.5], [4, 5], 0.5),
    "no NaN, which would stay the best for ever": ("max", [NAN, 0.1, NAN, NAN, NAN], [2, 4, 5], 0.1),
    "no best of NaN alone": ("max", [NAN, NAN, NAN], [2, 3], None),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept(tmp_path: Path, case: str) -> None:
    direction, values, left, best = KEPT[case]
    checkpoints = Checkpoints(tmp_path, keep=2, provenance=Provenance(("test/score", direction)))  # type: ignore[arg-type]
    for step, value in enumerate(values, start=1):
        metrics = {} if value is None else {"score": value, "other": -1.0}
        before = best_value(checkpoints)
        better = (
            value is not None
            and value == value
            and (before is None or (value > before if direction == "max" else value < before))
        )
        assert checkpoints.improves(metrics) == better, "as good is not better"
        checkpoints.save(state(step), metrics)
        assert step in steps(checkpoints)
    assert steps(checkpoints) == left
    assert best_value(checkpoints) == best


@pytest.mark.parametrize(("keep_best", "left"), [(1, [4, 6, 7]), (2, [2, 4, 6, 7]), (3, [1, 2, 4, 6, 7])])
def test_so_many_best_ones_are_kept_besides_the_newest(tmp_path: Path, keep_best: int, left: list[int]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, provenance=Provenance(("test/score", "max")), keep_best=keep_best)
    for step, score in enumerate([3.0, 4.0, NAN, 5.0, 2.0, 1.0, 0.0], start=1):
        checkpoints.save(state(step), {"score": score})
    assert steps(checkpoints) == left
    worst = 6.0 - keep_best
    assert [checkpoints.improves({"score": score}) for score in (worst, worst + 0.5)] == [False, True]
    assert names_in(tmp_path) == [f"step-{step:08}" for step in left]


def test_each_nth_is_kept_for_ever_even_by_a_later_attempt_without_the_option(tmp_path: Path) -> None:
    """The control: with --keep-every 0 from the beginning only the newest stay."""
    for every, left in ((0, [11, 13]), (3, [3, 6, 9, 11, 13])):
        folder = tmp_path / str(every)
        first = Checkpoints(folder, keep=2, keep_every=every)
        for step in range(1, 8):
            first.save(state(step), {})
        first.save_if_new(state(9))  # a snapshot is a whole state too
        assert read_manifest(folder / "step-00000009").kept_for_ever == bool(every)
        later = Checkpoints(folder, keep=2)
        later.save(state(11), {})
        later.save(state(13), {})
        later.clear_snapshots(before=13)
        assert steps(later) == left


LATE = {
    "a snapshot": ("snapshot", None, {6: 0.5, 9: 0.4}, [6, 9], 0.5),
    "a snapshot, with room": ("snapshot", None, {6: 0.5}, [3, 6], 0.5),
    "evaluated, and not the best": ("checkpoint", 0.1, {6: 0.5, 9: 0.4}, [6, 9], 0.5),
    "evaluated, and the best": ("checkpoint", 0.9, {6: 0.5, 9: 0.4}, [3, 6, 9], 0.9),
    "evaluated again": ("checkpoint", 0.5, {3: 0.5, 6: 0.4, 9: 0.3}, [3, 6, 9], 0.5),
    "older than the best": ("checkpoint", 0.1, {1: 0.5, 6: 0.2, 9: 0.3}, [1, 6, 9], 0.5),
}


@pytest.mark.parametrize("case", LATE)
def test_an_old_step_that_comes_late_takes_nothing_from_newer_ones(checkpoints: Checkpoints, case: str) -> None:
    """From a process that writes it on a slow disk, as a keeper's child may, while the run goes on."""
    kind, metric, there, left, best = LATE[case]
    for step, accuracy in there.items():
        checkpoints.save(state(step), {"accuracy": accuracy})
    if kind == "snapshot":
        assert checkpoints.save_if_new(state(3)) is None, "it need not begin"
    checkpoints._write(state(3), {} if metric is None else {"accuracy": metric}, kind)  # it had begun before
    assert steps(checkpoints) == left
    assert best_value(checkpoints) == best
    newest = checkpoints.load_newest()
    assert newest["step"] == max(left)
    assert all(is_whole(load(path)) for path in checkpoints.all())


@pytest.mark.parametrize("moment", ["waits", "writes"])
@pytest.mark.parametrize("run_id", ["old", ""], ids=["", "control"])
def test_an_old_run_writes_nothing(tmp_path: Path, run_id: str, moment: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`--fresh` begins another run while it waits, or is frozen in the middle. The control: without the run's id."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, provenance=Provenance(run_id=run_id))
    checkpoints.folder.mkdir()
    with checkpoints.writer_locked(0.0) if moment == "waits" else contextlib.nullcontext():
        writer = FORK.Process(target=rescue_step_7, args=(checkpoints,))
        writer.start()
        if moment == "waits":
            wait_until(lambda: opened_by(writer.pid).count(str(checkpoints.folder / LOCK)) == 2, "its wait")
            checkpoints.folder.rename(tmp_path / "old")
            checkpoints.folder.mkdir()
        else:
            files = f".step-*/{STATE}"
            wait_until(lambda: any(map(size_of, checkpoints.folder.glob(files))), "the first bytes", every=0.0002)
            os.kill(writer.pid or 0, signal.SIGSTOP)
        write_json(tmp_path / "status.json", {"run_id": "new"})
    os.kill(writer.pid or 0, signal.SIGCONT)
    writer.join()
    assert names_in(checkpoints.folder) == ([] if run_id else ["step-00000007"])
    assert ("another run has begun there, so nothing is written: " in capfd.readouterr().err) == bool(run_id)


def rescue_step_7(checkpoints: Checkpoints) -> None:
    torch.set_num_threads(1)
    checkpoints.save_if_new(state(7, 4 * BIG), time.monotonic() + 60)


def opened_by(pid: int | None) -> list[str]:
    return [os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()]


def test_steps_are_numbers_and_other_folders_are_leftalone(checkpoints: Checkpoints) -> None:
    for step in (99_999_999, 100_000_000, 100_000_001):
        checkpoints.save(state(step), {})
    backup = checkpoints.folder / "step-00000001.bak"
    shutil.copytree(checkpoints.all()[0], backup)
    assert steps(checkpoints) == [100_000_000, 100_000_001]
    assert checkpoints.newest_step() == 100_000_001
    checkpoints.save(state(100_000_002), {})
    assert backup.is_dir()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "state cut": (STATE, truncate),
    "state empty": (STATE, lambda file: os.truncate(file, 0)),
    "state flipped": (STATE, flip_a_bit),
    "state longer": (STATE, lambda file: file.write_bytes(file.read_bytes() + b"\0")),
    "no state": (STATE, Path.unlink),
    "manifest cut": (MANIFEST, truncate),
    "manifest empty": (MANIFEST, lambda file: os.truncate(file, 0)),
    "manifest too deep": (MANIFEST, lambda file: file.write_text("[" * 200_000)),
    "manifest of nothing": (MANIFEST, lambda file: file.write_text("{}")),
    "no manifest": (MANIFEST, Path.unlink),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    _, newest = (checkpoints.save(state(step), {"accuracy": step / 10}) for step in (1, 2))
    damage(newest / name)
    with pytest.raises(Damaged, match=str(newest / name)):
        load(newest)
    found = checkpoints.load_newest()
    assert same(found, state(1))
    assert steps(checkpoints) == [1]
    (aside, _) = names_in(checkpoints.folder)
    assert aside.startswith("damaged-step-00000002-"), "set aside, not deleted"
    assert str(newest / name) in caplog.text
    assert aside in caplog.text

    checkpoints.save(state(2), {})  # the step comes again
    assert steps(checkpoints) == [1, 2]
    assert same(load(newest), state(2))


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_old_one_does_not_stand_in_the_way(
    checkpoints: Checkpoints, name: str, damage: Callable[[Path], None]
) -> None:
    old = checkpoints.save(state(1), {"accuracy": 0.5})
    damage(old / name)
    assert checkpoints.improves({"accuracy": 0.9})
    for step in (2, 3, 4):
        checkpoints.save(state(step), {"accuracy": 0.9})
    assert same(checkpoints.load_newest(), state(4))
    assert steps(checkpoints) == [2, 3, 4], "the first of equal ones is the best"


def test_a_best_one_that_cannot_be_read_for_a_moment_is_not_deleted(checkpoints: Checkpoints) -> None:
    """The control is above: a damaged one is deleted when it is old."""
    best = checkpoints.save(state(1), {"accuracy": 0.9})
    content = (best / MANIFEST).read_bytes()
    (best / MANIFEST).unlink()
    (best / MANIFEST).symlink_to("/proc/self/mem")  # reading it is an EIO
    for step in (2, 3, 4):
        checkpoints.save(state(step), {"accuracy": 0.5})
    (best / MANIFEST).unlink()
    (best / MANIFEST).write_bytes(content)
    assert steps(checkpoints) == [1, 2, 3, 4]
    assert checkpoints.best_path() == best
    checkpoints.save(state(5), {"accuracy": 0.5})
    assert steps(checkpoints) == [1, 4, 5]


def test_a_flipped_bit_anywhere_in_the_manifest(checkpoints: Checkpoints) -> None:
    """It is whole, or reported: never another exception, which would end the training."""
    manifest = checkpoints.save(state(1), {"accuracy": 0.5}) / MANIFEST
    content = manifest.read_bytes()
    for bit in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        checkpoints.improves({"accuracy": 0.1})
        with contextlib.suppress(Damaged):
            assert same(load(manifest.parent), state(1))


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("protocol", ["zip", "pickle"])
def test_a_checkpoint_cannot_run_code(checkpoints: Checkpoints, tmp_path: Path, protocol: str) -> None:
    """Even one whose manifest is right."""
    witness = tmp_path / "witness"
    evil = state(1) | {"evil": Malicious(witness)}
    path = checkpoints.save(state(1), {})
    with (path / STATE).open("wb") as file:
        torch.save(evil, file) if protocol == "zip" else pickle.dump(evil, file, protocol=2)
    content = (path / STATE).read_bytes()
    seal(path)
    assert "does not load: UnpicklingError: Weights only load failed" in line_of(Damaged, load, path)
    assert not witness.exists()
    torch.load(path / STATE, weights_only=False) if protocol == "zip" else pickle.loads(content)
    assert witness.exists(), "it would have run"


def seal(path: Path) -> None:
    """Have the manifest say what the file is now."""
    content = (path / STATE).read_bytes()
    sealed = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(path, lambda manifest: manifest["files"].update({STATE: sealed}))


UNFIT: dict[str, Callable[[int], Any]] = {
    "no archive": lambda step: b"precious",
    "refused by weights_only": lambda step: state(step) | {"model": Path("of another library's types")},
    "no model": lambda step: {"step": step, "optimizers": []},
    "no dict": lambda step: [state(step)],
    "of another step": lambda step: state(step + 7),
}


def unfit(file: Path, kind: str) -> None:
    """Make a state of a checkpoint one that no run can go on from, and have the manifest say that it is right."""
    content = UNFIT[kind](step_of(file.parent))
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    seal(file.parent)


@pytest.mark.parametrize("kind", UNFIT)
def test_a_sealed_one_that_is_no_state(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    checkpoints.save(state(1), {})
    newest = checkpoints.save(state(2), {})
    unfit(newest / STATE, kind)
    verify(newest)  # the control: its bytes are right
    with pytest.raises(Damaged, match=rf"^{newest / STATE}: (does not load|is )"):
        load(newest)
    assert same(checkpoints.load_newest(), state(1))
    assert steps(checkpoints) == [1]
    (aside,) = checkpoints.folder.glob("damaged-step-00000002-*")
    (line,) = caplog.messages
    assert line.endswith(f"; set aside as {aside.name}, trying the one before")


def test_memory_that_runs_out_is_no_damage(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(state(1), {})

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:120] err == 0. DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        checkpoints.load_newest()
    assert steps(checkpoints) == [1]


def test_a_folder_that_cannot_be_listed_is_not_empty(checkpoints: Checkpoints) -> None:
    """Else the run would begin at step 0. `Path.glob`, the control, finds nothing there since Python 3.12."""
    checkpoints.save(state(1), {})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # no further file can be opened
        for look in (checkpoints.newest_named_step, checkpoints.newest_step, checkpoints.load_newest):
            with pytest.raises(OSError, match="Too many open files"):
                look()
        if sys.version_info >= (3, 12):
            assert not [*checkpoints.folder.glob("step-*")]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert checkpoints.newest_named_step() == 1


def test_an_error_that_is_not_the_disks_is_not_taken_for_one(checkpoints: Checkpoints) -> None:
    checkpoints.save(state(1), {})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        checkpoints.save(state(2) | {"function": lambda: None}, {})
    assert names_in(checkpoints.folder) == ["step-00000001"]


def observe_every_operation(monkeypatch: pytest.MonkeyPatch, look: Callable[[str], None]) -> None:
    """Call ``look`` with its name after each operation of a save that changes the disk, or brings it there."""

    def observed(name: str | None, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = operation(*arguments, **options)
            if name is None:
                mode = os.fstat(arguments[0]).st_mode
                look("fsync folder" if stat.S_ISDIR(mode) else "fsync file")
            else:
                look(f"{name} {Path(arguments[0]).name}")
            return result

        return call

    monkeypatch.setattr(os, "fsync", observed(None, os.fsync))
    monkeypatch.setattr(Path, "replace", observed("rename", Path.replace))
    # a folder is deleted file by file, in any order
    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, observed(name, getattr(os, name)))


def test_the_order_of_operations(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is on the disk before it has its name, and its name before an old one goes."""
    checkpoints = Checkpoints(checkpoints.folder, keep=1, provenance=checkpoints.provenance)
    checkpoints.save(state(1), {})
    done: list[str] = []
    observe_every_operation(monkeypatch, done.append)
    checkpoints.save(state(2), {})
    (written,) = (name for name in done if re.fullmatch(r"rename \.step-00000002\..*\.tmp", name))
    named, forgotten = done.index(written), done.index("rename step-00000001")
    assert done[:named].count("fsync file") == 2
    assert done[named - 1] == "fsync folder"
    assert done[named + 1] == "fsync folder"
    assert named + 1 < forgotten < done.index(f"unlink {STATE}")


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step"])
def test_a_kill_between_any_two_operations_loses_no_finished_checkpoint(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: bool
) -> None:
    """The folder as each operation leaves it is copied, and a new start is made from every copy."""
    checkpoints = Checkpoints(checkpoints.folder, keep=1, provenance=checkpoints.provenance)
    checkpoints.save(state(1), {})
    copies: list[Path] = []

    def copy(_operation: str) -> None:
        copies.append(tmp_path / f"copy-{len(copies)}")
        with pytest.MonkeyPatch.context() as undone:
            for name, original in originals.items():
                undone.setattr(os, name, original)
            shutil.copytree(checkpoints.folder, copies[-1])

    originals = {name: getattr(os, name) for name in ("fsync", "unlink", "rmdir")}
    with monkeypatch.context() as patch:
        observe_every_operation(patch, copy)
        checkpoints.save(state(1 if again else 2), {})

    found: list[int] = []
    for folder in copies:
        start = Checkpoints(folder, keep=1, provenance=checkpoints.provenance)
        newest = start.load_newest()
        assert is_whole(newest)
        found.append(newest["step"])
        assert names_in(folder) == [path.name for path in start.all()], "tidied up"
    assert len(found) > 5
    assert found == sorted(found)
    assert set(found) == ({1} if again else {1, 2})


BIG = 8_000_000  # floats: long enough to write for a kill in the middle


def save_for_ever(folder: Path, size: int, done: Any) -> None:
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    checkpoints = Checkpoints(folder, keep=1, provenance=Provenance(("test/accuracy", "max")))
    step = checkpoints.newest_step()
    while True:
        step += 1
        checkpoints.save(state(step, size), {})
        done.value = step


def save_naively_for_ever(folder: Path, size: int, done: Any) -> None:
    """The control: one file, written over and over."""
    torch.set_num_threads(1)
    while True:
        done.value += 1
        torch.save(state(done.value, size), folder / "checkpoint.pt")


def kill_when(moment: Callable[[int], bool], target: Callable[..., None], folder: Path, size: int) -> int:
    """Start a process that saves, kill it at some moment, and say which save was its last whole one.

    Args:
        moment: whether it is time; gets the number of that save so far, 0 before the first.
        target: what the process does.
        folder: where.
        size: elements of the state.
    """
    done = FORK.Value("i", 0)
    process = FORK.Process(target=target, args=(folder, size, done))
    process.start()
    try:
        deadline = time.monotonic() + 240
        while not moment(done.value):
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.0002)
    finally:
        process.kill()
        process.join()
    return int(done.value)


def size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_kill_in_the_middle_damages_a_naive_checkpoint(tmp_path: Path) -> None:
    """What the tests below would see if they could not fail."""
    file = tmp_path / "checkpoint.pt"
    torch.save(state(1, BIG), file)
    whole = size_of(file)
    for _ in range(20):  # on a busy machine the kill may come after the write
        kill_when(lambda _: 0 < size_of(file) < whole, save_naively_for_ever, tmp_path, BIG)
        if size_of(file) < whole:
            break
    with pytest.raises((RuntimeError, EOFError, OSError, pickle.UnpicklingError)):
        torch.load(file, weights_only=True)


def test_a_kill_in_the_middle_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    """At the same moment as in the control, which is sure to be within a write; again and again."""
    checkpoints = Checkpoints(tmp_path, keep=1, provenance=Provenance(("test/accuracy", "max")))
    checkpoints.save(state(1, BIG), {})
    whole = size_of(checkpoints.all()[0] / STATE)

    def writing(_done: int) -> bool:
        return any(0 < size_of(path / STATE) < whole for path in tmp_path.glob(".step-*.tmp"))

    for _ in range(4):
        before = checkpoints.newest_step()
        done = kill_when(writing, save_for_ever, tmp_path, BIG)
        found = checkpoints.load_newest()
        assert is_whole(found)
        assert found["step"] >= max(before, done)
        assert [name for name in names_in(tmp_path) if name.startswith(".")] == []


def rescue_step_5(folder: Path) -> float:
    """Rescue a large state; returns the seconds that it has waited for the lock, and written."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    assert Checkpoints(folder, keep=2).save_if_new(state(5, BIG), begun + 0.2)
    return time.monotonic() - begun


@contextlib.contextmanager
def frozen_writer(folder: Path) -> Iterator[None]:
    """Another process that is stopped, with the lock, in the middle of writing step 5; at the end it goes on."""
    process = FORK.Process(target=rescue_step_5, args=(folder,))
    process.start()
    try:
        wait_until(lambda: any(map(size_of, folder.glob(f".step-*/{STATE}"))), "the first bytes")
        os.kill(process.pid, signal.SIGSTOP)
        assert not (folder / "step-00000005").exists(), "it has not come to its end"
        yield
        os.kill(process.pid, signal.SIGCONT)
        process.join(240)
        assert process.exitcode == 0, "it has saved the step as well"
    finally:
        process.kill()
        process.join()


def test_a_frozen_writer_of_the_same_step_neither_delays_nor_spoils_a_rescue(tmp_path: Path) -> None:
    with frozen_writer(tmp_path):
        seconds = rescue_step_5(tmp_path)
        assert seconds < 8, "it does not wait longer than it was told to"
        assert is_whole(load(tmp_path / "step-00000005"))
    assert names_in(tmp_path) == ["step-00000005"]
    assert is_whole(load(tmp_path / "step-00000005"))


def writers(folder: Path) -> int:
    """How many have written something."""
    return sum(size_of(file) > 0 for file in folder.glob(f".step-*/{STATE}"))


def test_a_start_leaves_alone_who_writes_without_the_lock(tmp_path: Path) -> None:
    """Its holder was frozen, and killed then."""
    holder, writer = (FORK.Process(target=rescue_step_5, args=(tmp_path,)) for _ in range(2))
    for number, process in ((1, holder), (2, writer)):
        process.start()
        wait_until(lambda n=number: writers(tmp_path) == n, "the first bytes")
        os.kill(process.pid or 0, signal.SIGSTOP)
    holder.kill()
    holder.join()
    assert Checkpoints(tmp_path, keep=2).load_newest() is None
    assert len(names_in(tmp_path)) == 1, "the control: what the holder has left is deleted"
    os.kill(writer.pid or 0, signal.SIGCONT)
    writer.join(240)
    assert writer.exitcode == 0
    assert is_whole(load(tmp_path / "step-00000005"))


def test_the_control_writers_that_share_a_name_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.common.files.uuid4", lambda: UUID(int=5))
    with frozen_writer(tmp_path), pytest.raises(FileExistsError):
        rescue_step_5(tmp_path)


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(checkpoints: Checkpoints) -> None:
    """As a loader process is, beside a checkpoint in the background."""
    with checkpoints.writer_locked(0):
        child = FORK.Process(target=time.sleep, args=(600,))
        child.start()
    try:
        begun = time.monotonic()
        checkpoints.save(state(1), {})
        assert time.monotonic() - begun < 5
    finally:
        child.kill()
        child.join()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as folder:
        yield folder


def test_a_checkpoint_stays_when_its_successor_fails(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    final, replace = checkpoints.save(state(3), {"accuracy": 0.5}), Path.replace

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp") and target == final:
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.save(state(3), {"accuracy": 0.5})
    assert checkpoints.all() == [final]


def test_a_folder_without_a_manifest_is_not_as_good_as_saved(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged disk has left it, and a start in another process gives it back the name that a writer has taken."""
    final, replace = checkpoints.folder / "step-00000003", Path.replace
    final.mkdir(parents=True)
    (final / "state.pt").touch()

    def replaced_and_back(self: Path, target: Path) -> Path:
        moved = replace(self, target)
        return replace(moved, self) if self == final else moved

    monkeypatch.setattr(Path, "replace", replaced_and_back)
    with pytest.raises(OSError, match="not empty"):
        checkpoints.save_if_new(state(3))


def test_a_full_disk_costs_the_new_checkpoint_and_not_the_old(disk: Path) -> None:
    checkpoints = Checkpoints(disk / "checkpoints", keep=2, provenance=Provenance(("test/accuracy", "max")))
    checkpoints.save(state(1, 100_000), {"accuracy": 0.5})
    free = shutil.disk_usage(disk).free
    for size in (200_000, 10_000_000):
        with pytest.raises(OSError, match="No space left on device") as caught:
            checkpoints.save(state(2, size), {})
        assert caught.value.errno == errno.ENOSPC
    assert shutil.disk_usage(disk).free == free, "what was written of it is gone"
    assert names_in(checkpoints.folder) == ["step-00000001"]
    assert same(checkpoints.load_newest(), state(1, 100_000))
    checkpoints.save(state(2, 100_000), {})
    assert steps(checkpoints) == [1, 2]


def test_a_snapshot_that_cannot_be_cleared_stays(disk: Path) -> None:
    checkpoints = snapshots(disk / "checkpoints", 1, 2)
    remount = ["mount", "-o", "remount,ro", str(disk)]
    # busy as long as the thread that has touched the lock has not closed it
    wait_until(lambda: subprocess.run(remount, capture_output=True, check=False).returncode == 0, "a read-only disk")
    with pytest.raises(OSError, match="Read-only file system"):
        (disk / "file").touch()
    checkpoints.clear_snapshots(before=2)
    assert steps(checkpoints) == [1, 2]
    assert same(load(checkpoints.all()[0]), state(1))
    assert same(checkpoints.load_newest(), state(2)), "nor can the lock be opened to write"
