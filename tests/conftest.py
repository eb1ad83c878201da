"""For all tests."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.processes import STOP_SIGNALS

TOGETHER = ("tests/cluster/", "tests/docker/")
"""Folders whose tests share something of which a machine has one only: a cluster, images that are being built."""


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: one process runs all tests of a file, and all files of a folder in TOGETHER."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            inside = [folder for folder in TOGETHER if nodeid.startswith(folder)]
            return inside[0] if inside else super()._split_scope(nodeid)

    return ByFile(config, log)


# CI may have been started by nohup, and jobs heed that
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A test that runs `train.main` takes the stop signals; Ctrl-C must end the tests after it all the same."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked signals would be handed down to all processes"


KINDS = {"promises": "promise"} | dict.fromkeys(("processes", "nodes", "cluster", "docker", "gpu"), "slow")
"""The marker of the tests of a folder. Tests in any other folder run in the process of pytest alone, and fast."""


LONGEST = """nodes/test_train processes/test_optional_rooms processes/test_readme processes/test_compile
promises/test_faults processes/test_chaos nodes/test_nodes nodes/test_doctor processes/test_doctor
processes/test_stragglers"""
LONG = (*TOGETHER, *(f"tests/{name}.py" for name in LONGEST.split()))
"""What takes minutes begins first, or one process would be left with it in the end. Two of them are the folders whose
tests mostly wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, and put long files first."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG)))
    for item in items:
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        if kind := KINDS.get(folder):
            item.add_marker(kind)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "disk", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a disk: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
