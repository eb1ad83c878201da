"""A thin project with a wheel of this checkout: its two commands, torchrun, its launchers, and the commands."""

import json
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from evenkeel.cli.new import project
from tests.support import needs
from tests.support.copies import needs_all_components
from tests.support.processes import ROOT, checked, finish, read, run, start
from tests.support.thin import OFFLINE, borrow, make, make_foreign_wheel, make_wheel

pytestmark = [needs.tools("git", "make"), needs_all_components, pytest.mark.timeout(1800)]

BARE: str = sys._base_executable
"""The Python of which the environment of these tests is made, and which lacks the package."""

PROJECTS = {"tide": ("classify", ["slurm", "docker", "k8s"]), "reef": ("lm", ["slurm"]), "fell": ("empty", [])}
"""Name of a project: its task, and its parts."""


@dataclass(frozen=True)
class Made:
    """A project that has been set up."""

    name: str
    folder: Path

    def __call__(self, words: str, expect: int = 0) -> str:
        """What a program of its .venv prints, or one of its own scripts by any Python."""
        program, *arguments = words.split()
        where = self.folder / program if "/" in program else self.folder / ".venv" / "bin" / program
        start_by = [BARE] if "/" in program else []
        return run([*start_by, str(where), *arguments], cwd=self.folder, limit=900, expect=expect).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=PROJECTS)
def made(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """By the command that the wheel brings, in an environment that has nothing else of this checkout."""
    name, (task, parts) = request.param, PROJECTS[request.param]
    home = tmp_path_factory.mktemp(name)
    words = ["-m", "evenkeel", "new", name, "--task", task, *(["--with", *parts] if parts else [])]
    run([sys.executable, *words, "--from", str(wheel)], cwd=home)
    borrow(home / name, home / "site")
    for version in (wheel.name.split("-")[1], "9.9"):
        make_foreign_wheel(home / "index", version)
    make(home / name, "setup", PIP_FIND_LINKS=str(home / "index"))
    return Made(name, home / name)


def test_make_train(made: Made) -> None:
    make(made.folder, "train", "ARGS=--max-steps 3 --wandb disabled --schedule constant")
    kind = project.TASKS[PROJECTS[made.name][0]]
    summary = read(made.folder / "runs" / kind)
    assert (summary["state"], summary["step"], summary["world_sizes"]) == ("finished", 3, [2])
    where = made("python -c print(__import__('evenkeel').__file__)")
    assert where.startswith(str(made.folder / ".venv")), "the control: it is not this checkout's"


def test_the_control_by_its_name_pip_takes_the_package_of_an_index(made: Made) -> None:
    words = ["-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    env = {**OFFLINE, "PIP_FIND_LINKS": str(made.folder.parent / "index")}
    named = [*words, "--find-links", "wheels", "evenkeel"]
    found = json.loads(run([str(made.folder / ".venv/bin/python"), *named], cwd=made.folder, env=env).stdout)
    assert "/index/" in found["install"][0]["download_info"]["url"]


def test_make_test_and_make_lint(made: Made) -> None:
    assert "1 passed" in make(made.folder, "test")
    assert "Success: no issues found" in make(made.folder, "lint")
    task = made.folder / made.name / "task.py"
    text = task.read_text()
    mean = "        return F."
    assert mean in text
    try:  # the control: a sum in place of a mean depends on the cut
        task.write_text(text.replace(mean, "        return 3 * len(batch[0]) * F."))
        done = made("pytest -q", expect=1)
        assert "loss, any cut" in done  # in the table of what failed
        task.write_text(text.replace("-> nn.Module:", "-> int:"))
        assert "return type" in made("mypy", expect=1)
    finally:
        task.write_text(text)


def test_the_readmes_example_passes_make_lint_as_it_stands(made: Made) -> None:
    (example,) = re.findall(r"```python\n# my_job.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    task, job = made.folder / made.name / "task.py", made.folder / "my_job.py"
    text = task.read_text()
    try:
        task.write_text(example)
        job.write_text(example)
        assert "Success: no issues found" in make(made.folder, "lint")
        job.write_text(example.replace("samples=500", "sample=500"))
        assert 'Unexpected keyword argument "sample"' in made("mypy", expect=1), "the control: its bodies are checked"
    finally:
        task.write_text(text)
        job.unlink()


def test_torchrun_without_make_trains_its_task(made: Made) -> None:
    words = "torchrun --standalone --nproc_per_node=2 train.py --max-steps 2 --run-dir runs/plain --wandb disabled"
    made(words)
    assert read(made.folder / "runs" / "plain")["step"] == 2
    assert f'task = "{made.name}.task:' in (made.folder / "runs" / "plain" / "config.toml").read_text()


def test_its_launchers(made: Made) -> None:
    """Started by a Python without the package, which they leave for the project's; from another folder too."""
    said = made("launch/single_node.py -g 2 --dry-run -- --max-steps 2")
    assert f"{made.folder}/train.py --max-steps 2" in said
    assert f"{made.folder}/.venv/bin/python -m evenkeel.launch.agent" in said
    elsewhere = start([BARE, str(made.folder / "launch/single_node.py"), "--dry-run"], cwd=made.folder.parent)
    assert f"{made.folder}/train.py" in checked(finish(elsewhere), 0).stdout
    parts = PROJECTS[made.name][1]
    if "slurm" in parts:
        script = made("slurm/submit.py -n 2 -g 2 --time 30m --dry-run -- --max-steps 2")
        assert f"export EVENKEEL_ORIGIN={made.folder}\n" in script
        assert "/job.sh\n" in script
    if "docker" in parts:
        assert made("docker/run.py -g 2 --dry-run --image tide -- --max-steps 2").startswith("docker run ")
    if "k8s" in parts:
        text = made("k8s/submit.py -n 2 --image tide --dry-run -- --max-steps 2 --run-dir runs/pods")
        assert text.startswith("apiVersion: v1\nkind: Service\n")
    assert {path.name for path in made.folder.iterdir()} & {"slurm", "docker", "k8s"} == set(parts)


def test_the_commands(made: Made) -> None:
    made("torchrun --standalone --nproc_per_node=2 train.py --max-steps 2 --run-dir runs/seen --wandb disabled")
    assert "rank 1: " in made("evenkeel plan")
    assert "finished" in made("evenkeel status")
    assert ": ok, " in made("evenkeel checkpoint verify runs/seen")
    made("evenkeel report runs/seen")
    assert (made.folder / "runs" / "seen" / "report.html").exists()
    assert made("evenkeel update") == ""
    if PROJECTS[made.name][0] == "lm":
        greedy, drawn = (made(f"evenkeel sample runs/seen It --tokens 40 {more}") for more in ("--temperature 0", ""))
        assert greedy.startswith("It")
        assert drawn.startswith("It")
        assert greedy != drawn
        assert made("evenkeel sample runs/seen It --tokens 40 --top-k 1") == greedy


def test_a_newer_wheel_of_the_same_version_is_installed(made: Made) -> None:
    """As after `git pull` in the checkout: its version stays until the next release. By an environment's path."""
    (wheel,) = (made.folder / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    contents["evenkeel/__init__.py"] += b"\nNEWER = True\n"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, content in contents.items():
            file.writestr(name, content)
    (mine := made.folder.parent / "mine").symlink_to(made.folder / ".venv")
    created = (mine / "pyvenv.cfg").stat().st_mtime_ns
    (info,) = (mine / "lib").glob("python*/site-packages/evenkeel-*.dist-info")
    (info / "direct_url.json").write_text('{"url": "file:///its/checkout", "dir_info": {"editable": true}}')
    (mine / "bin" / "pip").unlink()  # as in an environment that uv has made
    done = make(made.folder, "setup", f"VENV={mine}", PIP_FIND_LINKS=str(made.folder.parent / "index"))
    version = info.name.split("-")[1].removesuffix(".dist")
    assert f"make setup: the wheel in wheels/ replaces in {mine}: evenkeel {version} /its/checkout\n" in done
    assert done.count("Uninstalling evenkeel") == 1
    made("python -c __import__('evenkeel').NEWER")
    assert (mine / "pyvenv.cfg").stat().st_mtime_ns == created, "an environment that is there is used as it is"
