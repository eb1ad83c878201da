"""Hooks of mkdocs (mkdocs.yml): docs/index.md is the navigation, README.md is a page, links to the source are text.

On GitHub `[plan](../src/evenkeel/data/plan.py)` leads to the file. The site has no source, so only the text remains.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = "readme.md"
LINK = re.compile(r"^```.*?^```|(?<!!)\[([^]]*)\]\(([^)\s]+)\)", re.DOTALL | re.MULTILINE)
"""A link, or a fenced block, of whose info string mkdocs takes the language only."""


def navigation(index: str) -> list[dict[str, Any]]:
    """The sections of docs/index.md, each with the pages that its list links to: mkdocs' `nav`."""
    _, *sections = re.split(r"^## ", index, flags=re.MULTILINE)
    pages: list[dict[str, Any]] = [{"Start": "index.md"}, {"README": README}]
    for section in sections:
        listed = re.findall(r"^- \[([^]]*)\]\(([\w-]+\.md)\)", section, re.MULTILINE)
        pages.append({section.partition("\n")[0]: [{title: page} for title, page in listed]})
    return pages


def inside(markdown: str, folder: str = "docs/") -> str:
    """A page of a folder of the repository as a page of the site: a link to a file outside it becomes its text."""

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if text is None:
            return re.sub(r"\A(```\w*).*", r"\1", match[0])
        if target.startswith(("https://", "#")):
            return match[0]
        if target == "../README.md":
            return f"[{text}]({README})"
        if folder:
            return text if target.startswith("../") else match[0]
        return f"[{text}]({target.removeprefix('docs/')})" if target.startswith("docs/") else text

    return LINK.sub(link, markdown)


def on_config(config: Any) -> Any:
    """Read the navigation; mkdocs calls this first."""
    config["nav"] = navigation((Path(config["docs_dir"]) / "index.md").read_text())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add README.md, whose pictures are in docs/ as well."""
    from mkdocs.structure.files import File

    readme = inside((ROOT / "README.md").read_text(), folder="").replace("](docs/", "](")
    files.append(File.generated(config, README, content=readme))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page; mkdocs calls this before it checks them."""
    return markdown if page.file.src_path == README else inside(markdown)
