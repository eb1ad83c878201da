"""The README is executed: its task is trained, its commands are typed, and those of two pages of docs/ as well."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.copies import copy_files
from tests.support.processes import ROOT, Done, read
from tests.support.readme import README, blocks

pytestmark = pytest.mark.promise
DOCS = ROOT / "docs"
PAGES = (README, (DOCS / "data.md").read_text(), (DOCS / "what-happens.md").read_text())
"""Whose commands are typed, in this order."""


def commands() -> list[str]:
    found = [block for page in PAGES for block in blocks("bash", page)]
    return [line for block in found for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository as a stranger has it after set-up, with the README's task in place."""
    copy = tmp_path_factory.mktemp("readme") / "evenkeel"
    copy_files(copy)  # keeps times, so that make does not install again
    (copy / ".venv").symlink_to(Path(sys.prefix))
    (task,) = blocks("python")
    (copy / "my_job.py").write_text(task)
    return copy


def type_in(line: str, checkout: Path) -> Done:
    """Run a line as a shell would after `. .venv/bin/activate`."""
    path = f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}"
    env = {
        "PATH": path,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(checkout / "src"),
    }  # .venv has the original's source
    return processes.run(["bash", "-c", line], checkout, env)


def test_the_task_in_the_readme_is_at_most_forty_lines() -> None:
    (task,) = blocks("python")
    assert len(task.splitlines()) <= 40


def test_make_train_learns_the_digits(checkout: Path) -> None:
    assert commands()[0] == "make train"
    begun = time.monotonic()
    out = type_in("make train", checkout).stdout
    print(f"make train took {time.monotonic() - begun:.1f} s")
    summary = read(checkout / "runs" / "classify")
    assert summary["metrics"]["test/accuracy"] >= 0.98
    assert summary["state"] == "finished"
    assert len(summary["world_sizes"]) == 1
    assert "% of it training" not in out, "of a run without a restart"


@pytest.mark.parametrize("line", commands()[1:])
def test_command(line: str, checkout: Path) -> None:
    """In the order of the README: a later one may build on an earlier."""
    done = type_in(line, checkout)
    if "Spirals" in line and "--help" not in line and ("torchrun" in line or "launch/" in line):
        assert read(checkout / "runs" / "Spirals")["metrics"]["test/accuracy"] > 0.95
    if "--help" in line:
        assert "--hidden" in done.stdout
    if " chaos " in line:
        assert re.search(r"faults +2: kill 2$", done.stdout, re.MULTILINE), "as typed it sends kill -9 twice"


@pytest.mark.parametrize(("page", "least"), [("README.md", 5), ("docs/promises.md", 20)])
def test_every_proof_that_is_named_exists(page: str, least: int) -> None:
    proofs = re.findall(r"`pytest (tests/[\w/. ]+\.py)(?: -k (\w+))?`", (ROOT / page).read_text())
    assert len(proofs) >= least
    for paths, keyword in proofs:
        for file in paths.split():
            assert re.search(rf"^def test_\w*{keyword}", (ROOT / file).read_text(), re.MULTILINE), (file, keyword)
        in_ci = ("/processes/" not in file or "mark.promise" in (ROOT / file).read_text() for file in paths.split())
        assert any(in_ci), f"CI runs none of {paths}: mark a test of a promise"


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
