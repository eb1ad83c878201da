"""`evenkeel new` and `evenkeel update`: what is written, what is refused, and what a newer version changes."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch

from evenkeel import __version__
from evenkeel.cli.new import project
from evenkeel.cli.new import source as source_module
from evenkeel.cli.new.project import PARTS, RECORD, TASKS, Answers, render, write
from evenkeel.cli.new.source import own_source, source_of
from tests.support import needs
from tests.support.processes import ROOT, Done, contents_of, run
from tests.support.raised import refusal_of
from tests.support.thin import OFFLINE
from tests.support.typed import typed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = tuple(part for part in PARTS if (ROOT / part).is_dir())
CHOICES = [*product(TASKS, ((), HERE))]
WHEEL = "evenkeel-0.1.0-py3-none-any.whl"


def answers(task: str = "classify", parts: tuple[str, ...] = HERE, source: str = "evenkeel==0.1.0") -> Answers:
    found = source_of(source, Path())
    return Answers("tide", task, parts, found.requirement, found.kind)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, and the working folder."""
    write(answers(), "0.1.0", tmp_path / "tide")
    monkeypatch.chdir(tmp_path / "tide")
    return tmp_path / "tide"


def make(*words: str, **variables: str) -> Done:
    """In the working folder, and not as a part of the `make test` that runs this."""
    return run(["make", *words], cwd=Path(), env=variables, expect=None)


@pytest.mark.parametrize(("task", "parts"), CHOICES)
def test_it_is_small(task: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    write(answers(task, parts), "0.1.0", tmp_path / "tide")
    files = [path for path in (tmp_path / "tide").rglob("*") if path.is_file()]
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert len(files) <= 15 + 1, "and the record for `evenkeel update`"
    assert sum(len(path.read_text().splitlines()) for path in files) <= 600
    assert max(lines.values()) <= 100, lines
    assert {path.name for path in (tmp_path / "tide").iterdir() if path.name in PARTS} == set(parts)


@pytest.mark.parametrize(("task", "parts"), CHOICES)
def test_its_texts_are_complete(task: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    for path, text in render(answers(task, parts)).items():
        assert text.endswith("\n")
        assert not any(f"@{word}@" in text for word in ("name", "class", "requirement", "wheel", "end")), path
        assert "@if " not in text, path
        if path.endswith(".py"):
            ast.parse(text, path)
    write(answers(task, parts), "0.1.0", tmp_path / "tide")
    for words in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        subprocess.run([sys.executable, "-m", "ruff", *words, "."], cwd=tmp_path / "tide", check=True)


def test_what_the_repository_has_too_is_the_same() -> None:
    texts = render(answers())
    same = [path for path in texts if (ROOT / path).exists() and (ROOT / path).read_text() == texts[path]]
    launchers = {"slurm": "slurm/submit.py", "docker": "docker/run.py", "k8s": "k8s/submit.py"}

    launched = [f"launch/{name}.py" for name in ("interpreter", "multi_node", "single_node")]
    assert sorted(same) == sorted(["train.py", *launched, *(launchers[part] for part in HERE)])


def test_first_thing_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    here = tmp_path / "tide"
    size = f"installs about 6 GB; without: {sys.executable} launch/single_node.py"
    then = f"  cd {here} && make train   # {size}\n  make test\n  make lock   # keeps the versions that were "
    then += "installed\nYour model goes into tide/task.py.\n"
    building = f"evenkeel: building a wheel of {ROOT}, which may take half a minute\n"
    assert typed("new tide --task empty") == (0, f"wrote 13 files to {here}. Next:\n{then}", building)
    (wheel,) = (here / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as file:  # by default of this checkout, and not of an index
        assert file.read("evenkeel/cli/new/source.py") == Path(source_module.__file__).read_bytes()
    table = tomllib.loads((here / "pyproject.toml").read_text())
    assert table["tool"]["evenkeel"]["task"] == "tide.task:MyTask"
    assert os.access(here / "launch" / "single_node.py", os.X_OK)
    assert [path.name for path in tmp_path.iterdir()] == ["tide"]


def test_the_next_command_can_be_pasted(tmp_path: Path) -> None:
    said = project.next_steps(tmp_path / "my work" / "tide", [])
    assert f"  cd '{tmp_path}/my work/tide' && make train   # installs" in said


@needs.tools("make")
@pytest.mark.parametrize("makefile", ["the project's", "the repository's"])
def test_an_old_python_makes_no_environment(makefile: str, folder: Path) -> None:
    if makefile != "the project's":
        shutil.copy(ROOT / "Makefile", folder)
    (folder / "requirements.lock").touch()
    old = folder / "python3.9"
    code = "import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])"
    old.write_text(f"#!/bin/sh\nshift\nexec {sys.executable} -c '{code}' \"$@\"\n")
    old.chmod(0o755)
    done = make("setup", f"PYTHON={old}")
    assert "needs Python 3.10 or newer; remove .venv, then: make setup PYTHON=python3.12" in done.stderr
    assert not (folder / ".venv").exists()


@needs.tools("make")
@pytest.mark.parametrize("makefile", [ROOT / "Makefile", ROOT / "src/evenkeel/cli/new/templates/Makefile.tmpl"])
def test_this_python_is_not_too_old_to_make_an_environment(makefile: Path) -> None:
    (line,) = [it for it in makefile.read_text().splitlines() if it.startswith("NEW := ")]
    subprocess.run([sys.executable, "-c", line.removeprefix("NEW := ")], check=True)


@needs.tools("make")
def test_make_runs_the_source_of_its_own_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a copied checkout has the source of the original."""
    (tmp_path / "src" / "evenkeel").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("src/evenkeel/__init__.py", "pyproject.toml", "requirements.lock", ".venv/.installed"):
        (tmp_path / name).touch()
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert make("own", PYTHONPATH=str(tmp_path / "src")).returncode == 0, "the control"
    done = make("own", PYTHONPATH=str(ROOT / "src"))
    assert done.returncode
    assert f".venv has evenkeel of {ROOT}/src/evenkeel/__init__.py, not of here: remove .venv, or" in done.stderr


@needs.tools("make")
def test_the_lock_has_no_path_of_this_machine(folder: Path, tmp_path: Path) -> None:
    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    stamp = folder / make("-n", "setup").stdout.split()[-1]
    venv.create(folder / ".venv", with_pip=True)
    pip = [folder / ".venv" / "bin" / "python", "-m", "pip", "install", "-q", "--no-index"]
    run([*pip, tmp_path / "tiny-1.0-py3-none-any.whl"], env={"PYTHONPATH": ""})
    stamp.touch()
    assert make("lock", PYTHONPATH="").returncode == 0
    assert (folder / "requirements.lock").read_text() == "tiny==1.0\n"


@needs.tools("make")
def test_make_installs_again_for_another_requirement_and_not_for_another_task(folder: Path) -> None:
    """The control: with pyproject.toml itself as a prerequisite, as is usual, another task would do as well."""

    def edit(file: str, old: str, new: str) -> None:
        text = (folder / file).read_text()
        assert text.count(old) == 1
        (folder / file).write_text(text.replace(old, new))

    assert make("-q", "setup").returncode == 1
    stamp = folder / make("-n", "setup").stdout.split()[-1]
    stamp.parent.mkdir()
    stamp.touch()
    edit("pyproject.toml", "tide.task:Digits", "tide.task:Mine")
    edit("pyproject.toml", "line-length = 120", "line-length = 100")
    future = stamp.stat().st_mtime + 9
    os.utime("pyproject.toml", (future, future))
    assert make("-q", "setup").returncode == 0

    edit("Makefile", "$(INSTALLED): $(LOCK)", "$(INSTALLED): pyproject.toml $(LOCK)")
    assert make("-q", "setup").returncode == 1
    edit("Makefile", "$(INSTALLED): pyproject.toml $(LOCK)", "$(INSTALLED): $(LOCK)")
    edit("pyproject.toml", 'dev = ["', 'dev = ["einops", "')
    assert make("-q", "setup").returncode == 1


REFUSED = {
    "new Tide": "Tide: cannot be a Python package's name; use small letters, digits and _, for example tide",
    "new ../tide2": "../tide2: is a path; give a name, for example tide2",
    "new match": "match: is a word of Python; choose another, such as mytrainer",
    "new json": "json: is a module of Python's standard library; choose another name",
    "new launch": "launch: is the name of launch in the project; choose another name",
    "new train": "train: is the name of train.py in the project; choose another name",
    "new torch": f"torch: is the name of the installed module {torch.__file__}; choose another name",
    "new full": "full: exists already, and nothing is overwritten; choose another name, or remove it",
    "new tide --from evenkeel": "--from evenkeel: give the path of a wheel or checkout, git+https://HOST/",
    "new tide --from evenkeel==1';": "--from evenkeel==1';: give the path of a wheel or checkout, git+https",
    "new tide --from git+https://host/evenkeel": "--from git+https://host/evenkeel: name the revision, as in git+https",
    "new tide --from git+ssh://git@host/evenkeel": "--from git+ssh://git@host/evenkeel: name the revision, as in git+",
    "new tide --from git+https://me:secret@host/x@v1": "--from: the address has a password, which would stand in files",
    "new tide --from git+https://ghp_token@host/x@v1": "--from: the address has a password, which would stand in files",
    f"new tide --from {WHEEL}": f"--from {WHEEL}: no such file",
    "new tide --from no.whl": "--from no.whl: is not a wheel",
    "new tide --from other-1.0-py3-none-any.whl": "--from other-1.0-py3-none-any.whl: is not a wheel of evenkeel; tho",
    "new tide --with nomad": "",
    "new": "",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_leaves_nothing(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "no.whl").touch()
    zipfile.ZipFile(tmp_path / "other-1.0-py3-none-any.whl", "w").close()
    monkeypatch.chdir(tmp_path)
    before = contents_of(tmp_path)
    code, _, line = typed(words)
    assert (code, line.count("\n")) == (2, 1)
    assert line.startswith(f"evenkeel: {REFUSED[words]}")
    assert "secret" not in line
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize(
    "source", ["evenkeel==0.2.0rc1", "git+https://host/me/evenkeel@v0.2.0", "git+ssh://git@host/evenkeel@0123abc"]
)
def test_where_the_package_comes_from(source: str) -> None:
    texts = render(answers(source=source))
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    (requirement,) = project["dependencies"]
    assert requirement == (source if source.startswith("evenkeel") else f"evenkeel @ {source}")
    assert not any("evenkeel" in it for it in project["optional-dependencies"]["dev"]), "by name, from an index"
    if "docker" in HERE:
        assert ("install -y --no-install-recommends git" in texts["docker/Dockerfile"]) == source.startswith("git")


def test_a_git_address_without_a_host_gets_one() -> None:
    """pip 23.2, which Python 3.11.7 brings, ends with a traceback at git+file:///."""
    found = source_of("git+file:///srv/evenkeel@v0.1.0", Path())
    assert found.requirement == "evenkeel @ git+file://localhost/srv/evenkeel@v0.1.0"


def test_a_wheel_is_copied(tmp_path: Path) -> None:
    zipfile.ZipFile(tmp_path / WHEEL, "w").close()
    source = source_of(str(tmp_path / WHEEL), tmp_path)
    made = Answers("tide", "lm", (), source.requirement, source.kind)
    written = write(made, "0.1.0", tmp_path / "tide", source.wheel)
    assert (tmp_path / "tide" / "wheels" / WHEEL).read_bytes() == (tmp_path / WHEEL).read_bytes()
    assert f"wheels/{WHEEL}" in written
    assert "$(PIP) install --progress-bar off wheels/evenkeel-*.whl " in (tmp_path / "tide" / "Makefile").read_text()


@needs.tools("make")
@pytest.mark.parametrize("listed", ["evenkeel 0.1.0 /a/checkout", "evenkeel-more 1.0 /elsewhere"])
def test_a_wheel_replaces_no_checkout(listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment that is named by VENV. The other one is the control."""
    zipfile.ZipFile(tmp_path / WHEEL, "w").close()
    source = source_of(str(tmp_path / WHEEL), tmp_path)
    write(Answers("tide", "lm", (), source.requirement, source.kind), "0.1.0", tmp_path / "tide", source.wheel)
    (python := tmp_path / "mine" / "bin" / "python").parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ncase $* in *--editable) echo '{listed}';; *install*) echo installs; exit 1;; esac\n")
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path / "tide")
    done = make("setup", f"VENV={tmp_path}/mine")
    refused = listed.startswith("evenkeel ")
    assert (f"evenkeel in {tmp_path}/mine is a checkout" in done.stderr) == refused, done.stderr
    assert (f". {tmp_path}/mine/bin/activate; launch/single_node.py; python -m pytest" in done.stderr) == refused
    assert ("\ninstalls\n" in done.stdout) != refused


PIP = """#!/bin/sh
case $* in *install*--editable*) cat <<'END'
Collecting torch==2.15 (from tide==0.1.0)
  Downloading torch-2.15.0.whl.metadata (29 kB)
Downloading numpy-2.4.whl (16.8 MB)
Downloading torch-2.15.0.whl (899.8 MB)
Installing collected packages: torch, numpy
Successfully installed numpy-2.4 torch-2.15
END
echo ERROR: it is full >&2; exit {code};; esac
"""


@needs.tools("make")
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("checkout", [True, False])
def test_make_shows_what_takes_long_and_errors_and_ends_as_pip_does(
    code: int, checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Answers("tide", "lm", (), "evenkeel==0.1.0", "index"), "0.1.0", tmp_path / "tide")
    if checkout:
        (tmp_path / "tide" / "Makefile").write_text((ROOT / "Makefile").read_text())
        (tmp_path / "tide" / "requirements.lock").touch()
    for name in ("python", "pip"):
        (file := tmp_path / "mine" / "bin" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PIP.format(code=code))
        file.chmod(0o755)
    monkeypatch.chdir(tmp_path / "tide")
    done = make("-s", "setup", f"VENV={tmp_path}/mine", f"PYTHON={tmp_path}/mine/bin/python")
    assert (done.returncode, "ERROR: it is full" in done.stderr) == (2 * (code > 0), True)
    long = ["  Downloading torch-2.15.0.whl (899.8 MB)", "  installing 2 packages: some minutes"]
    assert [line for line in done.stdout.splitlines() if not line.startswith("make setup: ")] == long


DIRECT = {
    '{"url": "https://host/me/evenkeel", "vcs_info": {"vcs": "git", "commit_id": "0123abc"}}': "git+https://host/me/ev"
    "enkeel@0123abc",
    '{"url": "file:///tmp", "dir_info": {}}': "/tmp",
    '{"url": "file:///gone/evenkeel-0.1.0-py3-none-any.whl", "archive_info": {}}': "",
    "": "",  # of an index
}
"""What pip records of an installation -> what `new` takes by default."""


@pytest.mark.parametrize("record", DIRECT)
def test_the_default_is_where_this_came_from(record: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "evenkeel-0.1.0.dist-info").mkdir()
    (tmp_path / "evenkeel-0.1.0.dist-info" / "METADATA").write_text("Name: evenkeel\nVersion: 0.1.0\n")
    (tmp_path / "evenkeel-0.1.0.dist-info" / "direct_url.json").write_text(record)
    monkeypatch.syspath_prepend(tmp_path)
    assert own_source() == str(ROOT), "the control: it runs from a checkout"
    monkeypatch.setattr(source_module, "__file__", str(tmp_path / "evenkeel" / "cli" / "new" / "source.py"))
    if DIRECT[record]:
        assert own_source() == DIRECT[record]
    else:
        assert "no record of a wheel, a checkout or git; name one: --from, the path of" in refusal_of(own_source)


def test_the_lines_of_its_readme_restart_ranks_and_do_not_refuse_each_other() -> None:
    lines = [line for line in render(answers())["README.md"].splitlines() if line.startswith(("torchrun ", "launch/"))]
    assert all("--max-restarts=3" in line for line in lines if line.startswith("torchrun "))
    assert len(lines) == len({re.findall("--run-dir (\\S+)", line)[0] for line in lines}) + 1, "two lines are one job"


def test_every_template_is_used() -> None:
    used = {project._template(path, task) for path in project.FILES for task in TASKS}
    assert {path for path in project.TEMPLATES.iterdir() if path.exists()} == {path for path in used if path.exists()}


def test_the_tests_of_a_project_do_not_repeat_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for testing in (project.TESTING, Path("/gone")):
        monkeypatch.setattr(project, "TESTING", testing)
        text = render(answers())["tests/test_task.py"]
        assert "tide" not in text
        assert "Digits" not in text


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    """Of the last file, when all others have been written."""
    assert "nothing has been written" in refusal_of(write, answers(), "0.1.0", tmp_path / "tide", tmp_path / "gone.whl")
    (tmp_path / "tide").mkdir()
    (tmp_path / "tide" / "mine").touch()
    assert "nothing has been written" in refusal_of(write, answers(), "0.1.0", tmp_path / "tide")
    assert [path.name for path in tmp_path.rglob("*")] == ["tide", "mine"]
    (tmp_path / "tide" / "mine").unlink()
    write(answers(), "0.1.0", tmp_path / "tide")  # the control: an empty folder will do
    assert (tmp_path / "tide" / "train.py").exists()


def as_an_older_version_wrote(folder: Path, path: str, old: str) -> None:
    """Change a file, and what is recorded of it."""
    record = json.loads((folder / RECORD).read_text())
    record["version"] = "0.0.9"
    if old:
        record["files"][path] = old
        (folder / path).write_text(old)
    else:
        del record["files"][path]
        (folder / path).unlink()
    (folder / RECORD).write_text(json.dumps(record))


def git_apply(folder: Path, diff: str) -> int:
    return subprocess.run(["git", "apply"], input=diff, text=True, cwd=folder, capture_output=True).returncode


def test_nothing_has_changed(folder: Path) -> None:
    with (folder / "tide" / "task.py").open("a") as file:
        file.write("# mine\n")
    assert typed("update") == (0, "", f"evenkeel: 0.1.0 to {__version__}: nothing has changed\n")


@needs.tools("git")
def test_a_newer_version_changes_a_file_and_adds_one(folder: Path) -> None:
    newer, tests = render(answers()), "tests/test_task.py"
    as_an_older_version_wrote(folder, "train.py", newer["train.py"].replace("clip_norm", "clip"))
    as_an_older_version_wrote(folder, tests, newer[tests].replace("the task", "a task", 1))
    as_an_older_version_wrote(folder, ".ci/run", "")
    with (folder / tests).open("a") as file:
        file.write("\n# mine\n")
    before = contents_of(folder)
    code, diff, err = typed("update")
    said = f"you have not changed: .ci/run, train.py; you have changed: {tests}"
    assert (code, err) == (0, f"evenkeel: 0.0.9 to {__version__}: {said}\n")
    assert contents_of(folder) == before, "nothing is overwritten"
    assert git_apply(folder, diff) == 0
    assert [(folder / path).read_text() for path in ("train.py", ".ci/run")] == [newer["train.py"], newer[".ci/run"]]
    assert os.access(folder / ".ci" / "run", os.X_OK)
    assert (folder / tests).read_text() == newer[tests] + "\n# mine\n"

    code, diff, err = typed("update")
    assert code == 0
    assert f"you have changed: {tests}" in err
    assert "train.py" not in diff, "it already is as it would be written"
    assert typed("update --done")[0] == 0
    assert typed("update")[::2] == (0, f"evenkeel: {__version__} to {__version__}: nothing has changed\n")


@needs.tools("git")
def test_a_project_in_a_subfolder_of_a_repository_takes_the_diff_too(folder: Path) -> None:
    """git takes names of a diff from the top of the repository, and passes over others without a word."""
    subprocess.run(["git", "init", "-q"], cwd=folder.parent, check=True)
    newer = render(answers())["train.py"]
    as_an_older_version_wrote(folder, "train.py", newer.replace("clip_norm", "clip"))
    assert git_apply(folder, typed("update")[1]) == 0
    assert (folder / "train.py").read_text() == newer


@needs.tools("git")
def test_the_control_where_the_user_has_changed_the_same_line_git_says_so(folder: Path) -> None:
    newer = render(answers())["train.py"]
    as_an_older_version_wrote(folder, "train.py", newer.replace("clip_norm", "clip"))
    mine = newer.replace("clip_norm", "mine")
    (folder / "train.py").write_text(mine)
    code, diff, _ = typed("update")
    assert code == 0
    assert git_apply(folder, diff) == 1
    assert (folder / "train.py").read_text() == mine

    (folder / "train.py").unlink()
    code, out, err = typed("update")
    assert (code, out) == (0, "")
    assert err.endswith("you have deleted, left out: train.py\n")


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"files": 3}', '{"name": "x"}'])
def test_a_damaged_record_is_refused(damage: str, folder: Path) -> None:
    (folder / RECORD).write_text(damage)
    assert typed("update") == (2, "", f"evenkeel: {RECORD}: is damaged; take it from an earlier commit\n")
    (folder / RECORD).unlink()
    said = f"evenkeel: no {RECORD} here: run this in the folder that `evenkeel new` wrote\n"
    assert typed("update") == (2, "", said)
