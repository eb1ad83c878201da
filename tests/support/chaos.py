"""Type `python -m evenkeel chaos` as a user would, and look at what it prints and leaves."""

import os
import re
import sys
from pathlib import Path

from tests.support import processes
from tests.support.processes import ROOT, TRAIN, Process, torchrun, wait_until

LINE = re.compile(r"^chaos \d\d:\d\d:\d\d  (kill|keeper|term|stop|truncate|fill|bitflip|agent|node) +(.*)$", re.M)


def chaos(options: str, *command: object) -> list[str]:
    """The command line; options without blanks in their values."""
    return [sys.executable, "-m", "evenkeel", "chaos", *options.split(), "--", *map(str, command)]


def two_ranks(*options: object) -> list[str]:
    """The job: train.py on two ranks that torchrun restarts three times."""
    return torchrun(2, TRAIN, *options, restarts=3)


def launcher(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "launch" / "single_node.py"), "-g", "2", *map(str, arguments)]


def faults_in(output: str) -> list[tuple[str, str]]:
    """(kind, whom) of each fault that was printed, those that hit nothing included."""
    return LINE.findall(output)


def reported(output: str, name: str) -> str:
    found = re.search(rf"^  {re.escape(name)} +(.*)$", output, re.MULTILINE)
    assert found, output[-3000:]
    return found[1]


def wait_for_fault(process: Process, kind: str) -> str:
    """Read what chaos prints until a fault of a kind; whom it hit."""
    for line in process.stdout:
        for found, whom in LINE.findall(line):
            if found == kind and not whom.startswith("missed"):
                return whom
    raise AssertionError(f"no {kind}: {processes.finish(process).stderr[-3000:]}")


def still_running(run_dir: Path) -> list[str]:
    """The command lines of all processes that name a run directory, wherever their parents are now."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run_dir).encode() in words:
            lines.append(b" ".join(words).decode())
    return lines


def wait_until_nothing_runs(run_dir: Path) -> None:
    wait_until(lambda: not still_running(run_dir), f"the end of all that names {run_dir}")


def free(folder: Path) -> int:
    """Bytes that a file system has left, for root."""
    facts = os.statvfs(folder)
    return facts.f_bfree * facts.f_bsize
