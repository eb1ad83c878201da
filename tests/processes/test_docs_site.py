"""`make docs`: each page is in the site, with its pictures and searchable; a dead link or anchor is an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytest.importorskip("material", reason="needs pip install -e '.[docs]'")


def build(project: Path) -> subprocess.CompletedProcess[str]:
    """What the target `docs` of the Makefile runs."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the site is made of."""
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_it_builds_with_all_pages_pictures_and_a_search_index(project: Path) -> None:
    done = build(project)
    assert done.returncode == 0, done.stderr
    site = project / "build" / "site"
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {path.parent.name for path in site.glob("*/index.html")} == pages | {"readme"}
    for picture in [*(ROOT / "docs").glob("*.png"), *(ROOT / "docs").glob("*.svg")]:
        assert (site / picture.name).is_file()
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {it["location"].partition("/")[0] for it in found} >= pages | {"readme"}
    for page in site.glob("*/index.html"):
        text = page.read_text()
        assert not [raw for raw in ("```", "|---", "<p>|", "](", 'href="../src/') if raw in text], page.parent.name


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("[dead](nowhere.md)", "contains a link 'nowhere.md'"),
        ("[dead](recipes.md#no-such-section)", "does not contain an anchor '#no-such-section'"),
        ("![dead](nowhere.png)", "contains a link 'nowhere.png'"),
    ],
)
def test_the_control_a_dead_link_is_an_error(added: str, said: str, project: Path) -> None:
    page = project / "docs" / "tasks.md"
    page.write_text(f"{page.read_text()}\n{added}\n")
    done = build(project)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_page_that_the_index_does_not_list_is_an_error(project: Path) -> None:
    (project / "docs" / "more.md").write_text("# More\n")
    done = build(project)
    assert done.returncode == 1
    assert "more.md" in done.stderr
