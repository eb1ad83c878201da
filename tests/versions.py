"""Install and run the versions that pyproject.toml promises: the oldest torch, one between, and the newest.

    make test-versions [ARGS="--only oldest between --all --target test --keep"]

For each: a virtual environment of its own (6 GB, deleted afterwards), `make train`, and `make test-fast`. One after the
other, a quarter of an hour each on two cores. A version whose Python is not on this machine is left out, with a line;
exit code 1 if anything has failed, if nothing could be run, or with --all if a version was left out.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
VENV = ".venv-versions"
LEAST = 0.98
"""Accuracy of `make train`; another torch may round otherwise."""


class Version(NamedTuple):
    """One combination that must work."""

    pythons: list[str]
    """The first of these that is here is taken."""
    torch: str = ""
    """Empty for what requirements.lock says."""
    torchvision: str = ""


VERSIONS = {
    "oldest": Version(["3.10"], "2.8", "0.23"),
    "between": Version(["3.12"], "2.9", "0.24"),  # the first with --shard
    "newest": Version(["3.15", "3.14", "3.13"]),  # the newest torch has wheels up to 3.15
}


def interpreter(python: str) -> str:
    """The path of an interpreter with `venv`: on PATH, or one that pyenv has installed; empty if there is none."""
    installed = map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}"))
    for found in (shutil.which(f"python{python}"), *sorted(installed, reverse=True)):
        # pyenv's entry on PATH may be one that only says how to choose a version
        if found and not subprocess.run([found, "-c", "import ensurepip, venv"], capture_output=True).returncode:
            return found
    return ""


def constraints(version: Version, file: Path) -> Path:
    """The lock; for another torch, without it and what it brings."""
    if not version.torch:
        return LOCK
    brought = re.compile(r"(torch|torchvision|triton|setuptools|(cuda|nvidia)-.*)==")
    others = [line for line in LOCK.read_text().splitlines() if not brought.match(line)]
    own = [f"torch=={version.torch}.*", f"torchvision=={version.torchvision}.*"]
    file.write_text("\n".join([*others, *own, ""]))
    return file


def make(target: str, log: Path, **variables: object) -> int:
    """Run a target of the Makefile and return its exit code. What it prints goes into a file."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    with log.open("w") as out:
        command = ["make", target, f"VENV={VENV}", *(f"{name}={value}" for name, value in variables.items())]
        return subprocess.run(command, cwd=ROOT, env=environ, stdout=out, stderr=subprocess.STDOUT).returncode


def run(version: Version, python: str, target: str, logs: Path) -> str:
    """Install a version, train, test; what came of it, in a line."""
    began = time.monotonic()

    def ended(what: str, log: str = "") -> str:
        if log:  # of what has failed: show how it ends
            print(*(logs / log).read_text(errors="replace").splitlines()[-40:], sep="\n")
        return f"{what}{' FAILED' * bool(log)}, {(time.monotonic() - began) / 60:.0f} min"

    shutil.rmtree(ROOT / VENV, ignore_errors=True)
    if make("setup", logs / "setup.log", PYTHON=python, CONSTRAINTS=constraints(version, logs / "constraints.txt")):
        return ended("setup", "setup.log")
    told = "import platform, torch; print('Python', platform.python_version(), 'torch', torch.__version__)"
    row = subprocess.check_output([f"{VENV}/bin/python", "-c", told], cwd=ROOT, text=True).strip()
    if make("train", logs / "train.log", ARGS=f"--run-dir {logs}/run --wandb disabled"):
        return ended(f"{row}: train", "train.log")
    accuracy = json.loads((logs / "run" / "summary.json").read_text())["metrics"]["test/accuracy"]
    row += f": trained to {accuracy:.4f}" + " FAILED" * (accuracy < LEAST)
    print(row, flush=True)
    code = make(target, logs / "test.log", ARGS="-q")
    *_, counts = ["nothing", *filter(str.strip, (logs / "test.log").read_text(errors="replace").splitlines())]
    return ended(f"{row}, {target}: {counts}", "test.log" if code else "")


def main() -> int:
    """Run the versions and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VERSIONS, default=list(VERSIONS), help="run these")
    parser.add_argument("--all", action="store_true", help="a version that cannot be run here is a failure")
    parser.add_argument("--target", default="test-fast", help="of the Makefile: test for the promises too")
    parser.add_argument("--keep", action="store_true", help=f"leave the last environment in {VENV}")
    options = parser.parse_args()
    rows, left_out = [], []
    for name in options.only:
        version = VERSIONS[name]
        python = next(filter(None, map(interpreter, version.pythons)), "")
        if not python:
            left_out.append(name)
            print(f"left out {name}: no python{' or python'.join(version.pythons)} with venv here", flush=True)
            continue
        print(f"{name}: {python}", flush=True)
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            rows.append(f"{name}: {run(version, python, options.target, Path(folder))}")
        if not options.keep:
            shutil.rmtree(ROOT / VENV, ignore_errors=True)
    print("\n".join(rows))
    return int(not rows or "FAILED" in "".join(rows) or (options.all and bool(left_out)))


if __name__ == "__main__":
    sys.exit(main())
