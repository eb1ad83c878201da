"""Downloads from a real server by several real processes: once, whole, or one line that says what to put where."""

import hashlib
import http.server
import io
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from tests.support import processes
from tests.support.processes import ROOT, TRAIN, checked, finish, finish_all, fork, kill_group, run_forked, wait_until
from tests.support.small_files import write_cifar, write_idx

WORKER = ROOT / "tests" / "support" / "download_worker.py"


class Server(http.server.ThreadingHTTPServer):
    """Serves files from memory, and counts who asks for what."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.files: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.halfway, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.fails = False


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path[1:]
        self.server.asked[name] += 1
        content = self.server.files.get(name)
        if content is None:
            self.send_error(404)
            return
        half = len(content) // 2
        if not self.server.fails:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:half])
        self.server.halfway.set()
        self.server.go_on.wait(120)
        if self.server.fails:
            self.send_error(503)
        else:
            self.wfile.write(content[half:])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """A server of small MNIST files, which the processes that a test starts are told of."""
    with Server() as server:
        archives = write_idx(tmp_path / "served", compressed=True)
        server.files = {name: (tmp_path / "served" / name).read_bytes() for name in archives}
        tell(monkeypatch, MNIST={"mirrors": [server.url], "resources": list(archives.items())})
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.go_on.set()
        server.shutdown()


def tell(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    monkeypatch.setenv("SMALL_FILES", json.dumps(settings))


def refusal(*arguments: object) -> str:
    """The last line of a process that refuses; those before it tell of the download."""
    return run_forked(*arguments, expect=2).stderr.splitlines()[-1]


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".evenkeel*") if path.suffix != ".lock")


def test_of_three_processes_one_downloads_and_all_have_the_same(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = finish_all([fork(WORKER, "mnist", data) for _ in range(3)])
    assert len({process.stdout for process in done}) == 1
    assert sum("mnist: downloading to" in process.stderr for process in done) == 1
    asked = dict(server.asked)
    assert set(asked) == set(server.files)
    alone = tmp_path / "alone"
    server.asked.clear()
    assert run_forked(WORKER, "mnist", alone).stdout == done[0].stdout
    assert dict(server.asked) == asked, "three together ask no more than one alone"
    server.asked.clear()
    run_forked(WORKER, "mnist", alone)
    assert not server.asked, "it is there"
    assert left_over(tmp_path) == []


def test_the_control_by_themselves_all_download_at_once_into_the_same_file(server: Server, tmp_path: Path) -> None:
    server.go_on.clear()
    started = [fork(WORKER, "stock", tmp_path / "data") for _ in range(3)]
    try:
        # each asks once for a redirect and once for the file, and none of them has it yet
        wait_until(lambda: server.asked.most_common(1)[:1] == [("train-images-idx3-ubyte.gz", 6)], "six requests")
    finally:
        for process in started:
            kill_group(process)


def test_what_a_killed_process_leaves_is_not_taken_for_whole(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data"
    server.go_on.clear()
    # after half of the redirect check's answer comes the download itself, of which torchvision reads all
    process = fork(WORKER, "mnist", data)
    wait_until(lambda: list(data.glob(".evenkeel-mnist/MNIST/raw/*.gz")), "a file that is half there")
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert left_over(data), "it had no time to clean up"
    assert not (data / "MNIST").exists()
    server.go_on.set()
    first = run_forked(WORKER, "mnist", data).stdout
    assert left_over(data) == []
    assert run_forked(WORKER, "mnist", tmp_path / "other").stdout == first


def test_those_that_waited_for_a_download_that_failed_do_not_try_again(server: Server, tmp_path: Path) -> None:
    server.fails = True
    server.go_on.clear()
    data = tmp_path / "data"
    workers: list[subprocess.Popen[str]] = []
    try:
        workers.append(fork(WORKER, "mnist", data))
        assert server.halfway.wait(120)
        workers.append(processes.start([sys.executable, WORKER, "mnist", data]))
        assert any("waiting for another process to download it" in line for line in workers[1].stderr)
        asked = server.asked.copy()
        server.go_on.set()
        done = [checked(finish(worker), 2) for worker in workers]
    finally:
        for worker in workers:
            kill_group(worker)
    refusals = [process.stderr.splitlines()[-1] for process in done]
    assert refusals[0] == refusals[1]
    assert "503" in refusals[0]
    assert server.asked == asked, "the second has not asked the server at all"
    assert left_over(data) == []
    server.fails = False
    run_forked(WORKER, "mnist", data)


def test_another_checksum_is_refused_and_archives_by_hand_are_unpacked(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data"
    name = "train-images-idx3-ubyte.gz"
    good, server.files[name] = server.files[name], server.files[name][:-1] + b"x"
    refused = refusal(WORKER, "mnist", data)
    assert refused.startswith("evenkeel: --dataset mnist: not found, and the download failed (")
    assert "corrupted" in refused
    assert f"into {data / 'MNIST' / 'raw'}, as they are or with .gz" in refused
    for file, content in {**server.files, name: good}.items():
        (data / file).write_bytes(content)
    server.asked.clear()
    run_forked(WORKER, "mnist", data)
    assert not server.asked
    assert (data / name).read_bytes() == good, "left where it was put"


def test_cifar_from_an_archive_and_no_changed_pickle_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "data"
    attributes = write_cifar(data, 10, packed=True)
    tell(monkeypatch, CIFAR10={**attributes, "url": "http://127.0.0.1:1/cifar-10-python.tar.gz"})
    whole = run_forked(WORKER, "cifar10", data).stdout
    batch = data / "cifar-10-batches-py" / "data_batch_2"
    batch.write_bytes(batch.read_bytes() + b"\n")
    assert run_forked(WORKER, "cifar10", data).stdout == whole, "unpacked again"
    batch.write_bytes(batch.read_bytes() + b"\n")
    (data / "cifar-10-python.tar.gz").unlink()
    refused = refusal(WORKER, "cifar10", data)
    assert refused.startswith("evenkeel: --dataset cifar10: not found, and the download failed (")
    assert f"put cifar-10-python.tar.gz into {data}, or its files into {data / 'cifar-10-batches-py'}" in refused


def test_without_a_network_one_line_says_which_files_go_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tell(monkeypatch, MNIST={"mirrors": ["http://127.0.0.1:1/"]})
    task = f"{ROOT / 'tests' / 'support' / 'small_task.py'}:Small"
    common = ["--task", task, "--dataset", "mnist", "--run-dir", tmp_path / "run", "--data-dir"]
    refused = refusal(TRAIN, *common, tmp_path / "data")
    assert refused.startswith("evenkeel: --dataset mnist: not found, and the download failed (")
    files = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte"
    assert f"put {files} into {tmp_path / 'data' / 'MNIST' / 'raw'}, as they are or with .gz" in refused
    assert not (tmp_path / "run").exists()
    read_only = refusal(TRAIN, *common, "/proc/data")
    assert "/proc/data" in read_only
    assert "No such file" in read_only


def test_weights_come_once_and_are_checked(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    cache = tmp_path / "home" / "hub" / "checkpoints"
    buffer = io.BytesIO()
    torch.save(torchvision.models.get_model("squeezenet1_1").state_dict(), buffer)
    name = f"squeezenet1_1-{hashlib.sha256(buffer.getvalue()).hexdigest()[:8]}.pth"
    server.files[name] = buffer.getvalue()[:-1] + b"x"
    tell(monkeypatch, weights={"squeezenet1_1": server.url + name})
    refused = refusal(WORKER, "squeezenet1_1")
    assert refused.startswith("evenkeel: --pretrained --model squeezenet1_1: not found, and the download failed (inv")
    assert f"put {name} into {cache}; TORCH_HOME sets another folder" in refused
    server.files[name] = buffer.getvalue()
    server.asked.clear()
    done = finish_all([fork(WORKER, "squeezenet1_1") for _ in range(2)])
    assert done[0].stdout == done[1].stdout
    assert server.asked == {name: 1}
    torch.save({"weights": print}, cache / name)  # as a pickle that names a function
    refused = refusal(WORKER, "squeezenet1_1")
    assert f"cannot read {cache / name} (Weights only load failed" in refused
