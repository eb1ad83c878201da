"""For all tests that need a GPU: the riskiest first, a limit of time for each, and a table of what they have shown.

EVENKEEL_REHEARSE=1 runs on the CPU those that start jobs, so that they are not wrong themselves when a GPU comes.
"""

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenkeel.training.determinism import fix_arithmetic
from tests.support import processes
from tests.support.gpu import end_all

HERE = Path(__file__).parent
ORDER = "job jobs_of_two doctor state placement parts"
"""The files by risk; the others follow."""
REHEARSED = "EVENKEEL_REHEARSE" in os.environ
JOBS = {"test_job.py", "test_jobs_of_two.py", "test_doctor.py"}
"""The files whose tests only start processes, and may be rehearsed."""

PROCESS, TEST, ALL = 75.0, 90, float(os.environ.get("EVENKEEL_GPU_SECONDS", "480"))
"""Seconds after which a process is taken to hang, after which a test ends, and after which none begins: a machine may
be lent for ten minutes."""
BEGAN = "EVENKEEL_GPU_TESTS_BEGAN"
"""The environment variable for when the first test began, for what xdist starts in place of a process that has died."""

_reports: dict[str, list[pytest.TestReport]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder without a GPU, and sort it by risk."""
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    rank = {f"test_{name}.py": place for place, name in enumerate(ORDER.split())}
    by_risk = iter(sorted(mine, key=lambda item: rank.get(item.path.name, len(rank))))
    items[:] = [next(by_risk) if item.path.is_relative_to(HERE) else item for item in items]
    for item in mine:
        rehearsed = REHEARSED and item.path.name in JOBS
        # a hang in the driver can only be ended with its process, which pytest-xdist then starts again
        by_signal = item.path.name in JOBS or "PYTEST_XDIST_WORKER" not in os.environ
        method = "signal" if by_signal else "thread"
        item.add_marker(pytest.mark.skipif(not (torch.cuda.is_available() or rehearsed), reason="needs a CUDA device"))
        if not item.get_closest_marker("timeout") and not REHEARSED:
            item.add_marker(pytest.mark.timeout(TEST, method=method))


@pytest.fixture(scope="session", autouse=True)
def _as_train_py_computes() -> None:
    fix_arithmetic(exact=False)


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not REHEARSED:
        if time.time() - float(os.environ[BEGAN]) > ALL:
            pytest.skip(f"{ALL:.0f} s were over: run it by itself")
        monkeypatch.setattr(processes, "LIMIT", PROCESS)
    # processes are started in other folders as well
    paths = [processes.ROOT / "src", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(Path(path).absolute()) for path in paths))
    yield
    end_all()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Start the clock with the first test of this folder."""
    if nodeid.startswith("tests/gpu/"):
        os.environ.setdefault(BEGAN, str(time.time()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what the table needs, in the order in which it came."""
    if report.nodeid.startswith("tests/gpu/"):
        _reports.setdefault(report.nodeid, []).append(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _reports or not (torch.cuda.is_available() or REHEARSED):
        return
    lines = [machine(), "", "| check | result | s | found, or why |", "|---|---|---|---|"]
    for nodeid, reports in _reports.items():
        name = nodeid.removeprefix("tests/gpu/test_").replace(".py::test_", ": ").replace("_", " ").replace("|", "\\|")
        worst = next((it for it in reports if it.failed), next((it for it in reports if it.skipped), reports[-1]))
        result = "**failed**" if worst.failed else "skipped" if worst.skipped else "ok"
        seconds = sum(it.duration for it in reports)
        lines.append(f"| {name} | {result} | {seconds:.1f} | {reason(worst, reports)} |")
    terminalreporter.write_sep("=", "docs/gpu.md")
    terminalreporter.write_line("\n".join(lines))


def reason(worst: pytest.TestReport, reports: list[pytest.TestReport]) -> str:
    """Why a test has failed or was skipped; of one that has passed what it has measured."""
    if worst.skipped and isinstance(worst.longrepr, tuple):
        text = worst.longrepr[2].removeprefix("Skipped: ")
    elif worst.failed:
        crash = getattr(worst.longrepr, "reprcrash", None)
        first, *rest = (crash.message if crash else str(worst.longrepr)).strip().splitlines() or [""]
        text = f"{first[:120]} {''.join(rest[-1:])}"  # of a process: its exit code, and what it said last
    else:
        found = dict(pair for it in reports for pair in it.user_properties)
        text = "; ".join(f"{name} {value}" for name, value in found.items())
    return " ".join(text.split())[:240].replace("|", "\\|")


def machine() -> str:
    parts = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if not torch.cuda.is_available():
        return f"A rehearsal on the CPU; {', '.join(parts)}"
    try:
        known = torch.cuda.get_device_properties(0)
    except RuntimeError as error:  # it has died of a test
        return f"The GPU does not answer any more: {str(error).splitlines()[0]}; {', '.join(parts)}"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "?"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    parts = [*parts, f"CUDA {torch.version.cuda}", f"NCCL {nccl}", f"driver {driver}"]
    gib = known.total_memory / 2**30
    return f"{torch.cuda.device_count()} x {known.name}, {gib:.0f} GiB; {', '.join(parts)}; {time.strftime('%Y-%m-%d')}"
