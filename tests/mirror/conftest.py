"""A server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.mirror.store import Store
from tests.support import s3


@pytest.fixture(scope="session")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with s3.served(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture
def store(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in s3.variables(port).items():
        monkeypatch.setenv(name, value)
    return Store(s3.new_url(), tmp_path / "copies")
