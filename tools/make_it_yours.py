#!/usr/bin/env python3
"""Make this template yours: give the package your name, and take out the rooms that you do not need.

    tools/make_it_yours.py mytrainer
    tools/make_it_yours.py mytrainer --without slurm docker

It works on its own checkout and commits nothing. Earlier runs continue: what they wrote does not depend on the name.
`EVENKEEL_...` variables keep their names, because shells' start-up files and jobs in a queue may set them.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
NAME = "evenkeel"

ROOMS = {
    "plan": "src/evenkeel/cli/plan.py",
    "checkpoint": "src/evenkeel/cli/checkpoint.py tests/cli/test_checkpoint.py tests/*/test_checkpoint_command.py",
    "compare": "src/evenkeel/cli/compare.py tests/cli/test_compare.py tests/processes/test_compare.py",
    "status": "src/evenkeel/cli/status.py src/evenkeel/cli/follow.py tests/cli/test_status.py "
    "tests/processes/test_follow.py",
    "data": "src/evenkeel/cli/data.py tests/cli/test_data.py",
    "predict": "src/evenkeel/cli/predict.py tests/cli/test_predict.py tests/processes/test_predict.py",
    "profile": "src/evenkeel/cli/profile.py tests/cli/test_profile.py tests/processes/test_profile.py",
    "scaling": "src/evenkeel/cli/scaling tests/cli/test_scaling.py tests/processes/test_scaling.py docs/scaling.*",
    "report": "src/evenkeel/cli/report src/evenkeel/assets/report.css tests/cli/report tests/support/reports.py "
    "docs/report.md",
    "chaos": "src/evenkeel/cli/chaos tests/cli/chaos tests/support/chaos.py docs/chaos.md",
    "doctor": "src/evenkeel/cli/doctor tests/cli/doctor tests/*/test_doctor.py docs/doctor.md",
    "slurm": "src/evenkeel/launch/slurm slurm tests/launch/slurm tests/cluster docs/slurm.md",
    "docker": "src/evenkeel/launch/docker docker .dockerignore tests/launch/docker tests/docker docs/docker.md",
    "segment": "src/evenkeel/tasks/segment.py tests/tasks/test_segment.py tests/promises/test_two_networks.py",
    "regress": "src/evenkeel/tasks/regress.py",
    "lm": "src/evenkeel/tasks/lm.py src/evenkeel/tasks/text.py src/evenkeel/tasks/transformer.py "
    "src/evenkeel/cli/sample.py src/evenkeel/assets/persuasion.* tests/*/test_lm.py docs/text.md",
    "examples": "examples tests/processes/test_examples.py tests/processes/test_adapters.py docs/nanogpt.md",
    "benchmarks": "benchmarks tests/processes/test_benchmarks.py",
}
"""What can be taken out: these files and folders are deleted, and so are all tests that import any of them."""

TARGETS = {"docker": "test-docker", "benchmarks": "bench-smoke"}  # of the Makefile


def refuse(line: str) -> NoReturn:
    """End with a line on stderr and exit code 2."""
    print(f"make_it_yours: {line}", file=sys.stderr)
    sys.exit(2)


def git(*arguments: str) -> str:
    """What git says here."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S607


def texts() -> dict[str, str]:
    """All tracked text files and their contents, but not the runs that an earlier version has left for tests."""
    listed = git("grep", "-lIe", "", "--", ".", ":!tests/fixtures").splitlines()
    return {name: (ROOT / name).read_text() for name in listed}


def check(name: str, without: list[str]) -> None:
    """Refuse what cannot be done, before anything is changed."""
    if not name.isidentifier() or keyword.iskeyword(name):
        refuse(f"{name}: is no name of a package; use letters, digits and _, as in mytrainer")
    sys.path.insert(0, str(ROOT))
    if name != NAME and importlib.util.find_spec(name):
        refuse(f"{name}: there is a module of this name already; choose another")
    for room in without:
        if room not in ROOMS:
            refuse(f"--without {room}: unknown; choose from {', '.join(ROOMS)}")
        if not (ROOT / ROOMS[room].split()[0]).exists():
            refuse(f"--without {room}: has been taken out already")
    try:
        changed = git("status", "--porcelain").splitlines()
    except (OSError, subprocess.CalledProcessError):
        refuse(f"{ROOT} is not a git checkout, so nothing could be undone; run: git init && git add . && git commit")
    if changed:
        refuse(f"git status names {len(changed)} changed or new files; commit them, so that this can be undone")


def belongs(room: str) -> list[str]:
    """The files of a room and the tests that import them, in order of their names."""
    tests = {name: text for name, text in texts().items() if name.startswith("tests/") and name.endswith(".py")}
    gone = set(git("ls-files", "--", *ROOMS[room].split()).splitlines())
    more = gone
    while more:
        modules = [
            name.removeprefix("src/").removesuffix(".py").replace("/", ".") for name in gone if name[-3:] == ".py"
        ]
        imports = re.compile(rf"^(?:from|import) (?:{'|'.join(map(re.escape, modules))})\b", re.MULTILINE)
        fixtures = tuple(name.removesuffix("conftest.py") for name in gone if name.endswith("/conftest.py"))
        more = {
            name for name in tests if imports.search(tests[name]) or (fixtures and name.startswith(fixtures))
        } - gone
        gone |= more
    return sorted(gone)


def take_out(room: str) -> None:
    """Delete a room, and what Makefile, pyproject.toml and Markdown say of it."""
    gone = belongs(room)
    git("rm", "-q", *gone)
    for name, text in texts().items():
        new = text
        if name == "Makefile" and room in TARGETS:
            new = re.sub(rf"^{TARGETS[room]}:.*\n(\t.*\n)+\n|(?<=.) {TARGETS[room]}\b", "", text, flags=re.MULTILINE)
        elif name == "pyproject.toml":  # the folders that mypy reads
            new = re.sub(rf'^(files = .*), "{room}"', r"\1", text, flags=re.MULTILINE)
        elif name.endswith(".md"):
            for file in gone:
                new = new.replace(f" {file}", "") if file.startswith("tests/") else new
            if new != text:  # a promise without a proof
                new = re.sub(r"^\|.*`pytest( -k \w+)?`.*\n", "", new, flags=re.MULTILINE)
            for link, words, target in re.findall(r"(\[([^]]*)\]\(([^):#]+)\))", new):
                new = new if (ROOT / name).parent.joinpath(target).exists() else new.replace(link, words)
        if new != text:
            (ROOT / name).write_text(new)
    print(f"took out {room}: {len(gone)} files")


def rename(name: str) -> None:
    """Give the package another name."""
    changed = {file: text.replace(NAME, name) for file, text in texts().items() if NAME in text}
    if len(name) > len(NAME):  # the linter is to accept the lines that become too long
        changed["pyproject.toml"] = changed["pyproject.toml"].replace("\nignore = [\n", '\nignore = [\n  "E501",\n', 1)
    for file, text in changed.items():
        (ROOT / file).write_text(text)
    git("mv", f"src/{NAME}", f"src/{name}")
    for file in git("ls-files", f"*{NAME}*").splitlines():
        git("mv", file, file.replace(NAME, name))
    print(f"renamed {NAME} to {name} in {len(changed)} files")


def main() -> None:
    """Check, take out, rename, and say what comes next."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="what you will import, e.g. mytrainer")
    parser.add_argument("--without", metavar="ROOM", nargs="+", default=[], help=", ".join(ROOMS))
    options = parser.parse_args()
    check(options.name, options.without)
    for room in options.without:
        take_out(room)
    if options.name != NAME:
        rename(options.name)
    print("Nothing is committed; git diff HEAD shows all, git reset --hard undoes it. Next:")
    print(f"  delete src/{options.name}/moved.py, its import in __init__.py and its tests: you have no old names")
    print("  write your task (docs/tasks.md), and keep of README.md and docs/ what is true of your job")
    print("  make format lint test")


if __name__ == "__main__":
    main()
