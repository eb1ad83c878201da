"""What README.md shows."""

import re

from tests.support.processes import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str, page: str = README) -> list[str]:
    """The fenced blocks of exactly this info string."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
