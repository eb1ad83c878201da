"""Whole checkpoints in a real S3 server, damaged ones, and half ones; and which job may write there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenkeel.common.errors import Refusal
from evenkeel.mirror import lease
from evenkeel.mirror.copying import DONE, FINISHED, Copier
from evenkeel.mirror.lease import NAME, Lease
from evenkeel.mirror.store import Store
from evenkeel.resilience.heartbeat import VARIABLE, check
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import MANIFEST, Provenance, load, step_folders, step_of
from evenkeel.run.sharded_checkpoint import await_writers
from evenkeel.run.state_files import WRONG, delete, set_aside
from tests.run.test_sharded_checkpoint import save
from tests.support import s3
from tests.support.processes import Process, wait_until
from tests.support.s3 import port, store  # noqa: F401  (fixtures)


class Died(Exception):  # noqa: N818
    """The process that copies."""


def saved(folder: Path, step: int, accuracy: float = 0.0, **more: Any) -> Path:
    """A checkpoint whose metric is an accuracy."""
    state = {"step": step, "model": {"w": torch.full((1000,), float(step))}, "optimizers": []}
    checkpoints = Checkpoints(folder, 99, Provenance(("test/accuracy", "max")), **more)
    return checkpoints.save(state, {"accuracy": accuracy} if accuracy else {})


def copier(store: Store, run_dir: Path, keep: int = 2, first: bool = True, job: str = "") -> Copier:
    more = {"job": job or os.urandom(4).hex(), "harmless": [], "keep_best": 1, "grace": 5.0, "first": first}
    made = Copier(SimpleNamespace(url=store.url, run_dir=str(run_dir), keep=keep, **more), run_dir / "copies")
    made.lease.mine = first
    return made


def objects(store: Store) -> list[str]:
    return sorted(name.partition("/checkpoints/")[2] for name in store.fs.find(f"{store._root}/checkpoints"))


def state_of(store: Store, step: int) -> str:
    (name,) = [name for name in objects(store) if name.startswith(f"step-{step:08d}/state.pt")]
    return f"{store._root}/checkpoints/{name}"


def two(store: Store, tmp_path: Path) -> Path:
    """Two steps, there and in a folder; another, empty folder."""
    for step in (1, 2):
        store.put(saved(tmp_path / "here", step))
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_the_newest_comes_back_with_the_same_bytes(store: Store, tmp_path: Path) -> None:
    empty = two(store, tmp_path)
    assert store.fetch_newest(empty) == 2
    assert torch.equal(load(empty / "step-00000002")["model"]["w"], torch.full((1000,), 2.0))
    assert [path.name for path in empty.iterdir()] == ["step-00000002"]
    assert store.fetch_newest(empty, above=2) == 0


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def one_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [cut, one_bit])
def test_a_damaged_object_is_found_and_the_step_before_is_taken(
    damage: Any, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = two(store, tmp_path)
    name = state_of(store, 2)
    store.fs.pipe_file(name, damage(store.fs.cat_file(name)))
    assert store.fetch_newest(empty, set_aside=True) == 1
    assert "step 2 is damaged: " in capsys.readouterr().err
    assert [step_of(path) for path in step_folders(empty)] == [1]
    assert [*store.manifests()] == [1], "it would count among the newest"


@pytest.mark.parametrize(
    ("checked", "said"),
    [("when_supported", "has not arrived: FlexibleChecksumError"), ("when_required", "is damaged: sha256 is ")],
)
def test_what_the_network_has_damaged_is_fetched_again(
    checked: str, said: str, port: int, store: Store, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Whether S3's own client finds that, or nobody but the sha256."""
    empty, proxy = two(store, tmp_path), s3.Proxy(port)
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", checked)
    proxy.spoilt = torch.full((9,), 2.0).numpy().tobytes()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    assert Store(store.url, tmp_path / "c").fetch_newest(empty, set_aside=True) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f": step 2 {said}" in line
    assert line.endswith("; fetching it again")
    assert [*store.manifests()] == [1, 2]


def test_a_manifest_that_is_cut_short_and_a_missing_object_count_as_no_checkpoint(store: Store, tmp_path: Path) -> None:
    empty = two(store, tmp_path)
    store.put(saved(tmp_path / "here", 3))
    manifest = f"{store._root}/checkpoints/step-00000003/{MANIFEST}"
    store.fs.pipe_file(manifest, cut(store.fs.cat_file(manifest)))
    store.fs.rm_file(state_of(store, 2))
    assert store.fetch_newest(empty) == 1


def test_a_cut_upload_leaves_the_one_before(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request in turn is the one at which the process dies; the control comes next."""
    empty, newest = two(store, tmp_path), saved(tmp_path / "here", 3)
    write = Store.write
    for last in range(2):
        left = [last]

        def dying(self: Store, name: str, content: Any, left: list[int] = left) -> None:
            if not left[0]:
                raise Died
            left[0] -= 1
            write(self, name, content)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "write", dying)
            with pytest.raises(Died):
                store.put(newest)
        assert [*store.manifests()] == [1, 2]
        assert store.fetch_newest(empty) == 2
        shutil.rmtree(empty / "step-00000002")
    store.put(newest)
    assert store.fetch_newest(empty) == 3


def test_the_control_a_plain_put_mixes_two_steps(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "usual").mkdir()
    for step, name in ((1, "model.pt"), (1, "optimizer.pt")):
        torch.save({"step": step}, folder / name)
    there = f"{store._root}/usual"
    store.fs.put(str(folder), there, recursive=True)
    for name in ("model.pt", "optimizer.pt"):
        torch.save({"step": 2}, folder / name)
    put = type(store.fs)._put_file
    done = list[str]()

    async def dying(self: Any, path: str, *more: Any, **options: Any) -> Any:
        if done:
            raise Died
        done.append(path)
        return await put(self, path, *more, **options)

    monkeypatch.setattr(type(store.fs), "_put_file", dying)
    with pytest.raises(Died):
        store.fs.put(str(folder), there, recursive=True, batch_size=1)
    monkeypatch.undo()
    (back := tmp_path / "back").mkdir()
    names = {name.split("/")[-1]: name for name in store.fs.find(there)}
    for name, place in names.items():
        store.fs.get_file(place, str(back / name))
    steps = {torch.load(back / name, weights_only=True)["step"] for name in names}
    assert steps == {1, 2}, "weights of one step and an optimizer of another, and nobody complains"


def test_there_stays_what_the_retention_says(store: Store, tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder, copies = run / "checkpoints", copier(store, run, keep=1)
    for step, accuracy in ((2, 0.1), (3, 0.9), (4, 0.2), (5, 0.3)):
        saved(folder, step, accuracy, keep_every=2)
        copies._pass(False)
    assert sorted(store.manifests()) == [2, 3, 4, 5], "2 and 4 are kept for ever, 3 is the best, 5 the newest"
    store.write("checkpoints/step-00000001/state.pt.leftover", b"of an upload that was killed")
    saved(folder, 7, 0.4, keep_every=2)
    copies._pass(False)
    assert {name.split("/")[0][-1] for name in objects(store)} == {"2", "3", "4", "7"}


def test_a_manifest_that_cannot_be_read_is_not_taken_for_a_missing_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not among the manifests is deleted, and an older step would be fetched."""
    empty, cat = two(store, tmp_path), store.fs.cat_file

    def throttled(path: str) -> Any:
        if "step-00000002/manifest" in path:
            raise OSError("SlowDown")
        return cat(path)

    with monkeypatch.context() as patch:
        patch.setattr(store.fs, "cat_file", throttled)
        with pytest.raises(OSError, match="SlowDown"):
            store.fetch_newest(empty)
    assert store.fetch_newest(empty) == 2


@pytest.mark.parametrize("moment", ["listed", "uploaded"])
def test_a_checkpoint_that_goes_while_it_is_uploaded_is_no_trouble(moment: str, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    first, second = saved(folder, 1), saved(folder, 2)
    copies = copier(store, tmp_path / "run")
    put, listed = store.put, copies.checkpoints.all()

    def gone(path: Path | None = None) -> Any:
        shutil.rmtree(first, ignore_errors=True)
        return put(path) if path else listed

    if moment == "listed":
        copies.checkpoints.all = gone
    copies.store.put = gone
    copies._pass(False)
    assert [*store.manifests()] == [step_of(second)]


def copying(run_dir: Path, port: int, grace: float = 60.0, url: str = "", **variables: str) -> Process:
    """The process of a copier that is not the first node's."""
    settings: Any = {"url": url or s3.new_url(), "run_dir": str(run_dir), "keep": 2, "keep_best": 1, "grace": grace}
    settings |= {"job": "", "harmless": [], "first": False, "again": False}
    command = [sys.executable, "-m", "evenkeel.mirror.copying", json.dumps(settings)]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=os.environ | s3.variables(port) | variables, text=True, **pipes)


def test_a_sharded_checkpoint_arrives_that_is_deleted_under_a_slow_upload(
    port: int, store: Store, tmp_path: Path
) -> None:
    """As --keep deletes it; and a start deletes what kills have left, but not what is being uploaded."""
    proxy, checkpoints = s3.Proxy(port), Checkpoints(tmp_path / "run" / "checkpoints", 9)
    path = save(checkpoints, 1)
    proxy.pause = 0.4
    with copying(tmp_path / "run", proxy.port, url=store.url) as process:
        wait_until(lambda: objects(store), "the first of three files")
        delete(path)
        await_writers(checkpoints)
        proxy.pause = 0.0
        said = process.communicate(DONE.decode(), 60)[1]
    assert [*store.manifests()] == [1], said
    assert not [*checkpoints.folder.glob("*step-*")]
    assert store.fetch_newest(checkpoints.folder) == 1


def test_an_upload_for_which_no_time_is_left_leaves_nothing_hidden(port: int, tmp_path: Path) -> None:
    proxy, run_dir = s3.Proxy(port), tmp_path / "run"
    path = saved(run_dir / "checkpoints", 1)
    proxy.limit = 1500  # less than state.pt
    with copying(run_dir, proxy.port, 1) as process:
        assert proxy.stopped.wait(60)
        held = [*path.parent.glob(".step-*/step-*/state.pt")]
        said = process.communicate(chr(signal.SIGTERM) + DONE.decode(), 60)[1]
    assert "has not step 1" in said
    assert held
    assert [*path.parent.glob("*step-*")] == [path]


def test_of_two_nodes_with_one_disk_one_fetches(port: int, store: Store, tmp_path: Path) -> None:
    two(store, tmp_path)
    proxy, folder = s3.Proxy(port), tmp_path / "run" / "checkpoints"
    proxy.pause = 0.2
    nodes = [copying(tmp_path / "run", proxy.port, url=store.url) for _ in range(2)]
    said = "".join(node.communicate(DONE.decode(), 60)[1] for node in nodes)
    assert [said.count(f": {what} step 2\n") for what in ("fetched", "another node has fetched")] == [1, 1], said
    assert {path.name for path in folder.iterdir()} == {".lock", "step-00000002"}
    store.fetch(2, folder)  # as if the lock had been no use
    assert load(folder / "step-00000002")["step"] == 2


def test_a_fetch_is_a_sign_of_life_as_long_as_files_grow(port: int, store: Store, tmp_path: Path) -> None:
    """Also on a node that waits while another fetches into the same folder."""
    two(store, tmp_path)
    (proxy := s3.Proxy(port)).held = b"/state.pt."
    beats = [tmp_path / f"beats-{node}" for node in range(2)]

    def alive() -> list[bool]:
        return [check(folder)[0] for folder in beats]

    def age() -> None:
        for folder in beats:
            folder.mkdir(exist_ok=True)
            os.utime(folder, (0.0, 0.0))

    age()
    assert alive() == [False, False]
    nodes = [copying(tmp_path / "run", proxy.port, url=store.url, **{VARIABLE: str(folder)}) for folder in beats]
    wait_until(lambda: all(alive()) and proxy.stopped.is_set(), "signs of life", 60)
    time.sleep(1)
    age()
    time.sleep(1)
    assert alive() == [False, False], "it hangs"
    proxy.held = b""
    for node in nodes:
        node.communicate(DONE.decode(), 60)


@pytest.mark.parametrize(("grace", "pause"), [(60, 0), pytest.param(20, 2, marks=pytest.mark.slow)])
def test_a_store_that_is_away_when_the_ranks_end_is_tried_again(
    grace: float, pause: float, port: int, tmp_path: Path
) -> None:
    """Once it is back, a slow upload may take longer than --grace."""
    proxy, run_dir = s3.Proxy(port), tmp_path / "run"
    saved(run_dir / "checkpoints", 1)
    proxy.away()
    with copying(run_dir, proxy.port, grace) as process:
        assert process.stdout.readline() == "ready\n"
        print(end=DONE.decode(), file=process.stdin, flush=True)
        assert "the job starts" in process.stderr.readline()
        assert "the job goes on" in process.stderr.readline()
        proxy.pause = pause
        proxy.back()
        assert "has step 1, the newest here" in process.stderr.read()


def test_what_no_attempt_can_mend_ends_with_the_ranks(port: int, tmp_path: Path) -> None:
    """As a damaged checkpoint: nothing waits for it, as for a store that is away."""
    run_dir = tmp_path / "run"
    (saved(run_dir / "checkpoints", 1) / MANIFEST).write_text("{")
    assert "has not step 1" in copying(run_dir, port).communicate(DONE.decode(), 30)[1]


def test_other_nodes_copy_what_they_have_written_and_do_not_delete(store: Store, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path / "run" / "checkpoints", step)
    copier(store, tmp_path / "run", keep=1)._pass(False)
    saved(tmp_path / "other" / "checkpoints", 4)
    other = copier(store, tmp_path / "other", keep=1, first=False)
    other._pass(False)
    assert sorted(store.manifests()) == [3, 4]
    manifest = tmp_path / "other" / "checkpoints" / "step-00000004" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"host": "', '"host": "another-'))
    other._done.clear()
    store.fs.rm(f"{store._root}/checkpoints/step-00000004", recursive=True)
    other._pass(False)
    assert sorted(store.manifests()) == [3], "the host that wrote it copies it"


def a_run(folder: Path, time: float = 9.0, state: str = "finished", step: int = 3) -> Path:
    """A run's own files, as on the node of rank 0, or copied from there when its attempt began."""
    folder.mkdir(parents=True, exist_ok=True)
    status = {"state": state, "step": step, "time": time, "world_sizes": [2]}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "config.toml").write_text('schedule = "constant"\n')
    return folder


def test_node_0_applies_keep_to_what_the_node_of_rank_0_has_copied(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch orders nodes by their addresses' text, so that rank 0 is often not on node 0."""
    monkeypatch.setattr("evenkeel.mirror.copying.PRUNED", 0.0)
    node_0 = copier(store, a_run(tmp_path / "0", 1.0, "running", 0))
    node_1 = copier(store, a_run(tmp_path / "1", 8.0, "running", 8), first=False)
    for step in range(5, 9):
        saved(tmp_path / "1" / "checkpoints", step)
        node_1._pass(False)
        node_0._pass(False)
    assert sorted(store.manifests()) == [7, 8]
    a_run(tmp_path / "1")
    for node in (node_1, node_0):
        node._pass(True)
    assert json.loads(store.read("status.json") or b"")["state"] == "finished", "node 0 has an old copy"


def test_what_verify_every_has_set_aside_is_not_fetched_back(store: Store, tmp_path: Path) -> None:
    node = copier(store, tmp_path, keep=9)
    paths = [saved(tmp_path / "checkpoints", step) for step in (1, 2, 3)]
    node._pass(False)
    for path in paths[1:]:
        set_aside(path, WRONG)
    assert not node._is_behind()
    assert sorted(store.manifests()) == [1]
    saved(tmp_path / "checkpoints", 2)  # computed again
    node._pass(True)
    assert sorted(node._there()) == [1, 2]


def test_a_result_that_was_not_copied_is_copied_at_the_next_start(store: Store, tmp_path: Path) -> None:
    (a_run(tmp_path) / "model.pt").write_bytes(b"weights")
    saved(tmp_path / "checkpoints", 3)
    node = copier(store, tmp_path, first=False)
    assert node.begin() == 0
    node._pass(True)
    assert store.read("model.pt") == b"weights"


def test_a_url_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/lr[0.1]", tmp_path / "copies")
    store.put(saved(tmp_path / "here", 1))
    assert [*store.manifests()] == [1]


@pytest.mark.parametrize("end", [FINISHED, DONE])
def test_a_node_that_has_nothing_ends_with_the_one_that_copies_the_result(
    end: bytes, port: int, store: Store, tmp_path: Path
) -> None:
    """Kubernetes and srun kill the others soon after the first. The control: ranks that did not end well."""
    with copying(tmp_path / "empty", port, url=store.url) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.buffer.write(end)
        process.stdin.flush()
        if end == FINISHED:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3)
            saved(tmp_path / "run" / "checkpoints", 3)
            copier(store, a_run(tmp_path / "run"))._pass(True)
        assert process.wait(20) == 0


@pytest.mark.parametrize("url", ["memory://run", "runs/classify", "nothing://run", "ftp://me:my-secret@host/run"])
def test_urls_that_cannot_be_meant(url: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"^--mirror") as refused:
        Store(url, tmp_path)
    assert "my-secret" not in str(refused.value)


def test_wrong_credentials_are_refused_without_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3.served(tmp_path / "log", checks=True) as port:
        for name, value in s3.variables(port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Refusal, match="PermissionError") as refused:
            copier(Store(s3.new_url(), tmp_path / "c"), tmp_path / "run").begin()
    assert s3.SECRET not in str(refused.value)


def test_a_missing_bucket_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="FileNotFoundError"):
        copier(Store("s3://no-such-bucket/run", tmp_path / "c"), tmp_path / "run").begin()


def test_away_at_the_start_an_empty_folder_waits_and_another_goes_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.free_port()}")
    nowhere = Store(store.url, tmp_path / "c")
    assert copier(nowhere, tmp_path / "empty").begin() == 75
    saved(tmp_path / "run" / "checkpoints", 1)
    assert copier(nowhere, tmp_path / "run").begin() == 0
    lines = capsys.readouterr().err.splitlines()
    assert [" is empty; start again: " in lines[0], " copying is tried again" in lines[1]] == [True, True]


def test_another_run_there_is_refused(store: Store, tmp_path: Path) -> None:
    config = 'task = "classify"\nlr = {}\nschedule = "cosine"\n'
    store.write("config.toml", config.format(0.1).encode())
    for lr, code in ((0.1, 0), (0.2, 2)):
        (run := tmp_path / f"run-{code}").mkdir()
        (run / "config.toml").write_text(config.format(lr))
        if code:
            with pytest.raises(Refusal, match=r"has another run: lr is 0.1 there, 0.2 here"):
                copier(store, run, job="same").begin()  # another job would first wait for the lease
        else:
            assert copier(store, run, job="same").begin() == 0


def test_a_second_job_is_refused_while_the_first_renews_and_may_come_after_its_death(store: Store) -> None:
    first, second = Lease(store, "a"), Lease(store, "b")
    first.acquire()
    over = threading.Event()

    def live() -> None:
        while not over.wait(lease.RENEWED):
            first.renew()

    (alive := threading.Thread(target=live)).start()
    with pytest.raises(Refusal, match=r"--mirror s3://\S+: a job on \S+ writes there; name another URL"):
        second.acquire()
    over.set()
    alive.join()
    second.acquire()
    assert second.mine
    with pytest.raises(Refusal):
        first.renew()
    assert not first.mine
    first.release()
    assert json.loads(store.read(NAME) or b"")["run"] == "b"


def test_a_restart_of_the_same_job_does_not_wait(store: Store) -> None:
    Lease(store, "a").acquire()
    began = time.monotonic()
    Lease(store, "a").acquire()
    assert time.monotonic() - began < lease.PATIENCE


def test_of_two_that_begin_at_once_one_gets_it(store: Store) -> None:
    both, refused = [Lease(store, "a"), Lease(store, "b")], list[Refusal]()

    def take(one: Lease) -> None:
        try:
            one.acquire()
        except Refusal as refusal:
            refused.append(refusal)

    threads = [threading.Thread(target=take, args=(one,)) for one in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(one.mine for one in both), len(refused)] == [1, 1]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": "a"}'])
def test_a_lease_that_was_cut_short_is_none(content: bytes, store: Store) -> None:
    store.write(NAME, content)
    Lease(store, "b").acquire()
