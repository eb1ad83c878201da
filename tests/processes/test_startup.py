"""Nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support import processes
from tests.support.terminal import Terminal

HEAVY = ("wandb", "submitit", "torchvision", "PIL", "rich", "tensorboard", "scipy", "sklearn", "matplotlib")
"""What takes time to import and the default job has no use for."""


REPORT = """
import atexit, json, os, runpy, sys
atexit.register(lambda: json.dump(sorted(sys.modules), open(os.environ["MODULES"], "w")))
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def imported(folder: Path, *options: str) -> set[str]:
    """The heavy ones that a job of one step has imported by its end."""
    job = ["train.py", "--width", "2", "--max-steps", "1", "--run-dir", folder / "run", "--wandb", "disabled", *options]
    processes.run([sys.executable, "-c", REPORT, *map(str, job)], env={"MODULES": str(folder / "modules.json")})
    return set(HEAVY) & set(json.loads((folder / "modules.json").read_text()))


def test_the_default_job_imports_nothing_heavy_and_the_control_what_a_task_needs_shows(tmp_path: Path) -> None:
    assert imported(tmp_path) == set()
    assert "torchvision" in imported(tmp_path, "--augment", "basic", "--fresh")


def test_the_display_is_imported_for_a_terminal(tmp_path: Path) -> None:
    """The other control: there the bar is, and the lines above it."""
    job = ["train.py", "--width", "2", "--max-steps", "1", "--run-dir", tmp_path / "run", "--wandb", "disabled"]
    env = {"MODULES": str(tmp_path / "modules.json")}
    with Terminal([sys.executable, "-c", REPORT, *map(str, job)], env=env) as terminal:
        assert terminal.end() == 0
        assert "step 0/1 ->" in terminal.text
        assert "step 1/1" in terminal.text
    assert "rich" in json.loads((tmp_path / "modules.json").read_text())
