"""For all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
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


KINDS = {"promises": "promise", "processes": "long"} | dict.fromkeys(
    ("bare", "nodes", "cluster", "docker", "k8s", "gpu"), "slow"
)
"""The marker of the tests of a folder. Tests in any other folder run in the process of pytest alone, and fast."""


FEATURES = """checkpoint_activations collate fit hsdp keep_every meta_device own_trackers parts patterns refresh
schedulers sharded_auto show task_state verify_every whole_batch"""
"""Files of tests/promises about features that a run may have. They are slow: CI runs them, `make test` does not."""


LONGEST = """k8s/test_job processes/test_readme nodes/test_train processes/test_optional_components
processes/test_compile promises/test_sharded_state promises/test_memory_checkpoint promises/test_verify_every
promises/test_faults processes/test_chaos nodes/test_doctor processes/test_doctor processes/test_stragglers"""
LONG = (*TOGETHER, *(f"tests/{name}.py" for name in LONGEST.split()))
"""What takes minutes begins first, or one process would be left with it in the end. Two of them are the folders whose
tests mostly wait."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Thousands of tests and all that they import are no garbage: to look through them, while they are imported and in
    each `gc.collect()` of a test, takes up to half a second of CPU time."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_sessionfinish() -> None:
    """Or libraries print at the end what they have leaked."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, a long one as slow too, and put long files first."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG)))
    for item in items:
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        if kind := KINDS.get(folder):  # of tests/processes CI runs those that show a promise
            item.add_marker("slow" if kind == "long" and item.get_closest_marker("promise") else kind)
        of_feature = folder == "promises" and item.path.stem.removeprefix("test_") in FEATURES.split()
        if of_feature or item.get_closest_marker("long"):
            item.add_marker("slow")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a run, which is not there yet."""
    return tmp_path / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    from tests.support import needs

    with needs.small_disk(tmp_path / "disk", "8m") as folder:
        yield folder


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """As below, for whole files."""
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Where all tools should be there, a test that is skipped for want of one fails."""
    return _no_skip((yield))


def _no_skip(report: Any) -> Any:
    from tests.support import needs  # torch is not for the process that only hands tests out

    if report.skipped and os.environ.get(needs.NO_SKIPS) and not hasattr(report, "wasxfail"):
        _, _, reason = report.longrepr
        if not needs.CI_LACKS.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{reason} ({needs.NO_SKIPS} is set, so nothing may be missing)"
    return report
