"""The public names: docs/api.md has them all, and documents and examples use no others."""

import ast
import importlib
import re
import sys
from importlib.util import find_spec

import pytest

from tests.support.processes import ROOT, run

pytest.importorskip("griffe", reason="griffelib, which tools/api.py needs, is for Python 3.11 and newer")

MODULES = ("evenkeel", "evenkeel.tasks", "evenkeel.testing")
PUBLIC = tuple(name for name in MODULES if find_spec(name))
IMPORT = re.compile(r"^ *(from evenkeel\S* import .*|import evenkeel\S*)$", re.MULTILINE)


def foreign(text: str) -> list[str]:
    """What a text imports of evenkeel without being public."""
    found = []
    for line in IMPORT.findall(text):
        (node,) = ast.parse(line.strip()).body
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom):
            exported = importlib.import_module(str(node.module)).__all__ if node.module in PUBLIC else ()
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in exported]
    return found


@pytest.mark.skipif(PUBLIC != MODULES, reason="this copy has left out a public module")
def test_the_page_is_made_from_the_docstrings() -> None:
    run([sys.executable, "tools/api.py", "--check"], cwd=ROOT)


def test_the_page_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    names = {name for module in PUBLIC for name in importlib.import_module(module).__all__}
    assert not {name for name in names if f"### {name}\n" not in text}


def test_documents_and_examples_use_public_names_only() -> None:
    files = [ROOT / "README.md", ROOT / "train.py", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    assert not {path.name: names for path in files if (names := foreign(path.read_text()))}


def test_the_control_a_private_name_is_found() -> None:
    text = "text\nfrom evenkeel.run.run import Run\nimport evenkeel.data\nfrom evenkeel import Task, State\n"
    assert foreign(text) == ["evenkeel.run.run.Run", "evenkeel.data", "evenkeel.State"]
