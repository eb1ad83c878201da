"""The README's lines for containers, typed in a checkout of a stranger's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.conftest import Built
from tests.support import processes
from tests.support.processes import ROOT, read
from tests.support.readme import blocks

pytestmark = pytest.mark.timeout(1200)


def test_the_lines_of_the_readme(built: Built, tmp_path: Path) -> None:
    """The image is built again, from the layers that it has in common with the one before.

    Those were built in the machine's network, which is a part of their names.
    """
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    (checkout / ".venv").symlink_to(Path(sys.prefix))
    (block,) = blocks("bash docker")
    lines = block.splitlines()
    assert len(lines) == 3
    for line in lines:
        typed = line.replace("docker build", "docker build --network host")
        done = processes.run(["bash", "-c", typed], checkout, built.engine.env, limit=600)
    assert "finished" in done.stdout
    assert read(checkout / "runs" / "in-a-container")["world_sizes"] == [2]
