"""A real S3 server on this machine, moto's, and a proxy before it whose connections a test can cut or slow down."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenkeel.mirror.store import Store
from tests.support.processes import free_port, wait_until

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("flask")
pytest.importorskip("flask_cors")

BUCKET = "runs"
SECRET = "a-secret-of-nobody"


class Proxy:
    """Passes connections on to a server; `away` refuses them, `limit` stops one after so many bytes of a body, 1 KiB
    takes `pause` seconds, the next answer that has the bytes `spoilt` gets other ones in their place, and a request
    that has the bytes `held` waits as long as they are there."""

    def __init__(self, server: int) -> None:
        self.server, self.port, self.limit, self.stopped = server, free_port(), 0, threading.Event()
        self.pause, self.spoilt, self.held = 0.0, b"", b""
        self._listener: socket.socket | None = None
        self._open = list[socket.socket]()
        self.back()

    def back(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def away(self) -> None:
        """Refuse connections, and cut those that are open."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for it in self._open:
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)
            it.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server))
                self._open += [client, server]
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while block := source.recv(1 << (10 if self.pause else 14)):
                seen += len(block) if up else 0
                if self.limit and seen > self.limit:
                    self.stopped.set()
                    threading.Event().wait()
                while up and self.held and self.held in block:
                    self.stopped.set()
                    time.sleep(0.05)
                time.sleep(self.pause if up else 0)
                if self.spoilt and not up and self.spoilt in block:
                    block, self.spoilt = block.replace(self.spoilt, bytes(len(self.spoilt))), b""
                target.sendall(block)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def served(log: Path, checks: bool = False) -> Iterator[int]:
    """The port of a server with an empty bucket; with `checks` it has none, and refuses all credentials."""
    port = free_port()
    more = {"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if checks else {}
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **more})
    try:
        wait_until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), "the server", more=log.read_text)
        if not checks:
            s3fs.S3FileSystem(**options(port), skip_instance_cache=True).mkdir(BUCKET)
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def options(port: int) -> dict[str, str]:
    return {"key": "nobody", "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}


def variables(port: int) -> dict[str, str]:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")
    return dict(zip(names, options(port).values(), strict=True)) | {"AWS_DEFAULT_REGION": "us-east-1"}


def new_url() -> str:
    """A place in the bucket that no other test uses."""
    return f"s3://{BUCKET}/{os.urandom(4).hex()}"


@pytest.fixture(scope="session")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with served(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture
def store(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in variables(port).items():
        monkeypatch.setenv(name, value)
    return Store(new_url(), tmp_path / "copies")
