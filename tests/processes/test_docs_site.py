"""`make docs`: each page is in the site, with its pictures and searchable; a dead link or anchor is an error."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run

pytest.importorskip("material", reason="needs pip install -e '.[docs]'")
pytestmark = pytest.mark.promise


def build(project: Path, expect: int) -> str:
    """What the target `docs` of the Makefile says."""
    return run([sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"], cwd=project, expect=expect).stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the site is made of."""
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_it_builds_with_all_pages_pictures_and_a_search_index(project: Path) -> None:
    build(project, expect=0)
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
    ("page", "added", "said"),
    [
        ("tasks.md", "[dead](nowhere.md)", "contains a link 'nowhere.md'"),
        ("tasks.md", "[dead](recipes.md#no-such-section)", "does not contain an anchor '#no-such-section'"),
        ("tasks.md", "![dead](nowhere.png)", "contains a link 'nowhere.png'"),
        pytest.param("more.md", "# More", "more.md", id="a page that the index does not list"),
    ],
)
def test_the_control_a_dead_link_is_an_error(page: str, added: str, said: str, project: Path) -> None:
    with (project / "docs" / page).open("a") as file:
        file.write(f"\n{added}\n")
    assert said in build(project, expect=1)
