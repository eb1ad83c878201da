"""The documentation: how long it is, that a reader finds each page, and that each page says what it is for."""

import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tools.docs_site import inside, navigation

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
INDEX = (DOCS / "index.md").read_text()
READERS = ["Use it", "Run it", "Change it"]


def listed() -> list[str]:
    """The pages in the navigation."""
    return [file for entry in navigation(INDEX)[2:] for pages in entry.values() for it in pages for file in it.values()]


def opening(page: str) -> str:
    """The paragraph below the title; empty if something else is there."""
    found = re.match(r"# .+\n\n((?:[^\n#|`>-].*\n)+)", page)
    return found[1] if found else ""


def loose_lists(page: str) -> list[str]:
    """First items of lists that follow a line of text: GitHub makes lists of them, mkdocs does not."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^(?![-\s|#]|\d+\. ).+\n((?:- |1\. ).*)", text, re.MULTILINE)


def test_it_is_short() -> None:
    """Words have a letter or a digit; a table's bars are none. Shorten something before you raise a limit.

    docs/api.md is not counted: it is made from the docstrings.
    """
    pages = [ROOT / "README.md", *(page for page in PAGES if page.name != "api.md")]
    words = {page.name: len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages}
    assert sum(words.values()) <= 28_000, sorted(words.items(), key=lambda it: -it[1])
    assert words["index.md"] <= 300
    assert words["README.md"] <= 1300, "it is to take ten minutes"


def test_each_page_is_listed_once_for_one_reader() -> None:
    assert [title for entry in navigation(INDEX)[2:] for title in entry] == READERS
    assert sorted(listed()) == [page.name for page in PAGES if page.name != "index.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_opens_with_what_one_can_do_after_it(page: Path) -> None:
    text = page.read_text()
    assert re.match(r"After this page\syou\s(can|know)\b", opening(text)), opening(text)
    assert not loose_lists(text)


def test_the_control_other_openings_and_lists_are_found() -> None:
    assert not opening("# Title\n\n## Heading\n\nAfter this page you can do it.\n")
    assert not opening("# Title\n\n| you can | do |\n|---|---|\n")
    assert opening("# Title\n\nAfter this page\nyou can.\n\nMore.\n") == "After this page\nyou can.\n"
    assert loose_lists("Some text:\n- an item\n- another\n") == ["- an item"]
    assert not loose_lists("Some text:\n\n- an item\n  goes on\n- another\n\n1. one\n2. two\n")


def test_links_to_what_the_site_has_not_become_text() -> None:
    page = "[a](tasks.md) ![b](b.png) [`c`](../src/c.py) [d](https://e.org) [f](../README.md) [g](#h)\n"
    assert inside(page) == "[a](tasks.md) ![b](b.png) `c` [d](https://e.org) [f](readme.md) [g](#h)\n"
    readme = "[a](docs/a.md#b) [c](train.py)\n```bash nodes\nx[0](c)\n```\n"
    assert inside(readme, "") == "[a](a.md#b) c\n```bash\nx[0](c)\n```\n"
