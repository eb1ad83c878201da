"""A thin project and its own environment: the packages of this one, and the package from a wheel of this checkout."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from tests.support.copies import copy_of_the_template
from tests.support.processes import environment, run

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""For pip: all that is needed is here. (0: do not isolate. pip reads this variable the other way round.)"""

COMMANDS = {"torchrun": "torch.distributed.run:main", "mypy": "mypy.__main__:console_entry", "pytest": "pytest:main"}


def make_wheel(folder: Path) -> Path:
    """A wheel of this checkout, as tools/make_it_yours.py makes one for a thin project."""
    copy_of_the_template(folder / "copy")
    run([sys.executable, "tools/make_it_yours.py", "first", "--thin"], cwd=folder / "copy", env=OFFLINE)
    (made,) = (folder / "first" / "wheels").glob("*.whl")
    return made


def make_foreign_wheel(folder: Path, version: str) -> Path:
    """A wheel of somebody else's package of the same name, as an index may have it."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"evenkeel-{version}-py3-none-any.whl", f"evenkeel-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("evenkeel/__init__.py", "raise SystemExit('this is another package')\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: evenkeel\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def borrow(project: Path, site: Path) -> None:
    """Make the project's .venv with links to all packages that are installed here but evenkeel, and with pip."""
    site.mkdir(exist_ok=True)
    for folder in map(Path, sys.path):
        if folder.name != "site-packages":
            continue
        for entry in folder.iterdir():
            ours = "evenkeel" in entry.name or entry.suffix == ".pth" or entry.name.startswith("pip")
            if not ours and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    venv.create(project / ".venv", with_pip=True, symlinks=True)
    (packages,) = (project / ".venv").glob("lib/python*/site-packages")
    # before those of its own: venv may bring an old setuptools
    (packages / "borrowed.pth").write_text(f"import sys; sys.path.insert(0, {str(site)!r})\n")
    scripts = project / ".venv" / "bin"
    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        text = f"#!{scripts / 'python'}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    (scripts / "ruff").symlink_to(Path(sys.executable).parent / "ruff")


def make(project: Path, *words: str, **variables: str) -> str:
    """What make prints in a project."""
    command = ["make", *words]
    env = {**environment(), **OFFLINE, "PYTHON": sys.executable, **variables}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
