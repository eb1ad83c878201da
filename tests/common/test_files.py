"""Locks, new folders, and lines that are whole. Atomic writes: tests/run/test_run_directory.py."""

import fcntl
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from threading import Event

import pytest

from evenkeel.common import files
from evenkeel.common.files import (
    FROZEN,
    LOCK,
    append_line,
    folder_locked,
    make_folder,
    make_unused,
    read_json,
    try_lock,
)

FORK = multiprocessing.get_context("fork")


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with path.open("ab") as mine, path.open("ab") as other:
        assert try_lock(mine)
        assert not try_lock(other)
        begun = time.monotonic()
        assert not try_lock(other, until=begun + 0.1)
        assert time.monotonic() - begun >= 0.1
        mine.close()
        assert try_lock(other)


def hold(folder: Path, locked: Event, seconds: float) -> None:
    with folder_locked(folder):
        locked.set()
        time.sleep(seconds)


@pytest.mark.parametrize("frozen", [False, True])
def test_who_waits_for_a_folder_waits_longer_if_its_holder_is_slow_and_not_frozen(tmp_path: Path, frozen: bool) -> None:
    holder = FORK.Process(target=hold, args=(tmp_path, begun := FORK.Event(), 60 if frozen else FROZEN + 1))
    holder.start()
    begun.wait()
    if frozen:
        os.kill(holder.pid or 0, signal.SIGSTOP)
    with folder_locked(tmp_path) as locked:
        assert not locked, "it does not wait at all"
    with folder_locked(tmp_path, time.monotonic() + 1) as locked:
        assert locked != frozen
    holder.kill()
    holder.join()


def test_who_waits_for_a_folder_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "SAY_AFTER", 0.5)
    monkeypatch.setattr(files, "SAY_AGAIN", 0.5)
    holder = FORK.Process(target=hold, args=(tmp_path, begun := FORK.Event(), 4))
    holder.start()
    begun.wait()
    with folder_locked(tmp_path, time.monotonic() + 60):
        pass
    holder.join()
    line = f"waiting for the lock of {tmp_path / LOCK}, which process {holder.pid} of this machine has"
    assert len(caplog.messages) > 1
    assert {*caplog.messages} == {line}


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_the_lock_of_a_folder_is_one_that_reaches_other_hosts(tmp_path: Path, kind: int) -> None:
    """NFS sends its server an exclusive lock of a file opened for writing, a shared one of one opened for reading."""
    with folder_locked(tmp_path, kind=kind):
        with (tmp_path / LOCK).open("r+b") as other:
            assert not try_lock(other)
        opened = [it.name for it in Path("/proc/self/fd").iterdir() if os.path.realpath(it) == str(tmp_path / LOCK)]
        (flags,) = {Path(f"/proc/self/fdinfo/{name}").read_text().split()[3] for name in opened}
    assert int(flags, 8) & os.O_ACCMODE == os.O_RDWR


def test_each_folder_that_is_made_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.path.realpath(f"/proc/self/fd/{file}")))
    make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [str(tmp_path / made) for made in ("", "a", "a/b")]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "a")


@pytest.mark.parametrize(("name", "code"), [("taken", 0), ("taken/below", 1)])
def test_a_link_to_nowhere_does_not_keep_the_search_for_a_free_name_going(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "taken").symlink_to("nowhere")
    child = FORK.Process(target=make_unused, args=[tmp_path / name])
    child.start()
    child.join(10)
    if child.is_alive():
        child.kill()
    assert child.exitcode == code
    assert (tmp_path / "taken-2").is_dir() == (code == 0), "else FileExistsError"


def test_a_line_is_in_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    append_line(tmp_path / "lines", b"one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, before[1]))  # as a disk that is full in the middle of the next
    try:
        with pytest.raises(OSError, match="No space left"):
            append_line(tmp_path / "lines", b"another\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "lines").read_bytes() == b"one\n"


def test_a_line_after_one_that_was_cut_is_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"one\nhal")
    append_line(tmp_path / "lines", b"two\n")
    assert (tmp_path / "lines").read_bytes() == b"one\nhal\ntwo\n"


def test_what_is_not_there_is_empty_and_what_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (
        tmp_path,
        tmp_path / "none",
        tmp_path / "file",
    ):  # the last is refused by rank 0
        assert read_json(folder / "status.json") == {}
    (tmp_path / "status.json").mkdir()
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path / "status.json")
