#!/usr/bin/env python3
"""Make this template yours: a small project of 600 lines, or a fork of it all.

    tools/make_it_yours.py mytrainer --thin --with slurm    a project beside this checkout, which has it as a dependency
    tools/make_it_yours.py mytrainer                        this checkout, with your name for the package
    tools/make_it_yours.py mytrainer --without slurm docker the same without the components that you do not need

--thin is `evenkeel new` (docs/thin.md), from a wheel of this checkout unless --from names another source. The other two
change this checkout itself and commit nothing. Everything is computed before anything is written, and a failure or
Ctrl-C leaves the checkout as it was. Earlier runs continue: their files do not depend on the name. `EVENKEEL_...`
variables keep their names, because shells' start-up files and jobs in a queue may set them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
NAME = "evenkeel"

K8S = "src/evenkeel/launch/k8s src/evenkeel/cli/new/templates/k8s-* k8s tests/launch/k8s tests/k8s docs/kubernetes.md"

COMPONENTS = {
    "plan": "src/evenkeel/cli/plan.py",
    "checkpoint": "src/evenkeel/cli/checkpoint.py src/evenkeel/cli/export.py tests/cli/test_checkpoint.py "
    "tests/cli/test_export.py tests/*/test_checkpoint_command.py",
    "compare": "src/evenkeel/cli/compare.py src/evenkeel/cli/compare_metrics.py tests/cli/test_compare.py "
    "tests/cli/test_compare_metrics.py tests/processes/test_compare.py",
    "status": "src/evenkeel/cli/status.py src/evenkeel/cli/follow.py tests/cli/test_status.py "
    "tests/processes/test_follow.py",
    "new": "src/evenkeel/cli/new tests/cli/test_new.py tests/processes/test_new.py docs/thin.md",
    "data": "src/evenkeel/cli/data.py tests/cli/test_data.py",
    "predict": "src/evenkeel/cli/predict.py tests/cli/test_predict.py tests/processes/test_predict.py",
    "profile": "src/evenkeel/cli/profile.py tests/cli/test_profile.py tests/processes/test_profile.py",
    "scaling": "src/evenkeel/cli/scaling tests/*/test_scaling.py docs/scaling.*",
    "time_travel": "src/evenkeel/time_travel tests/time_travel tests/*/test_replay*.py "
    "tests/*/test_bisect.py tests/*/test_audit.py docs/time-travel.md",
    "mirror": "src/evenkeel/mirror tests/mirror tests/support/s3.py tests/processes/test_mirror.py docs/mirror.md",
    "sweep": "src/evenkeel/cli/sweep.py tests/*/test_sweep.py docs/sweep.md",
    "trackers": "src/evenkeel/run/own_trackers.py tests/run/test_own_trackers.py tests/promises/test_own_trackers.py "
    "tests/support/note_tracker.py tests/support/mlflow_stand_in.py",
    "report": "src/evenkeel/cli/report tests/cli/report tests/support/reports.py docs/report.*",
    "chaos": "src/evenkeel/cli/chaos tests/cli/chaos tests/support/chaos.py docs/chaos.md benchmarks/kill.py",
    "check": "src/evenkeel/cli/check src/evenkeel/testing.py tests/cli/check tests/*/test_check.py "
    "tests/support/bad_tasks.py docs/check.md",
    "doctor": "src/evenkeel/cli/doctor tests/cli/doctor tests/*/test_doctor.py docs/doctor.md",
    "slurm": "src/evenkeel/launch/slurm src/evenkeel/cli/new/templates/slurm-* "
    "slurm tests/launch/slurm tests/cluster docs/slurm.md",
    "docker": "src/evenkeel/launch/docker src/evenkeel/cli/new/templates/docker-* "
    f"docker .dockerignore tests/launch/docker tests/docker docs/docker.md {K8S}",  # pods run the image
    "k8s": K8S,
    "segment": "src/evenkeel/tasks/segment.py tests/tasks/test_segment.py tests/promises/test_two_networks.py",
    "regress": "src/evenkeel/tasks/regress.py",
    "lm": "src/evenkeel/tasks/lm.py src/evenkeel/tasks/text.py "  # not transformer.py: the tests of --shard divide it
    "src/evenkeel/cli/sample.py src/evenkeel/assets/persuasion.* tests/*/test_lm.py docs/text.md",
    "examples": "examples tests/processes/test_examples.py docs/nanogpt.md",
    "benchmarks": "benchmarks tests/processes/test_benchmarks.py",
}
"""Optional components: these files and folders are deleted, and so are files in USERS that import them."""

USERS = ("tests/", "benchmarks/", "examples/")
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSTALLED = [str(folder) for folder in ROOT.glob(".venv/lib/*/site-packages")]
Texts = Mapping[str, str]  # the contents of text files, by their paths below the root


def refuse(line: str, code: int = 2) -> NoReturn:
    """End with a line on stderr."""
    print(f"make_it_yours: {line}", file=sys.stderr)
    sys.exit(code)


def git(*arguments: str) -> str:
    """The output of git here; raises OSError if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)  # noqa: S607
    if done.returncode:
        raise OSError(f"git {arguments[0]}: {' '.join(done.stderr.split())}")
    return done.stdout


def tracked(*patterns: str) -> set[str]:
    """The files that git tracks, all or those of some patterns."""
    return set(git("ls-files", "-z", "--", *patterns).split("\0")) - {""}


def texts() -> dict[str, str]:
    """All tracked text files and their contents, except the runs of earlier versions in tests/fixtures."""
    found = {}
    for name in git("grep", "-lzIe", "", "--", ".", ":!tests/fixtures").split("\0"):
        with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):  # not ours
            found[name] = (ROOT / name).read_bytes().decode()
    return found


def ours(name: str) -> Any:
    """A module of the package that needs only the standard library; the package itself would need torch."""
    package = sys.modules.setdefault(NAME, types.ModuleType(NAME))
    package.__path__ = [str(ROOT / "src" / NAME)]
    return importlib.import_module(f"{NAME}.{name}")


def locked(lock: str) -> list[str]:
    """The packages that a requirements.lock names."""
    return re.findall(r"^([\w-]+)==", lock, re.MULTILINE)


def check_name(name: str, files: Texts) -> None:
    """Refuse an invalid name for the package."""
    taken = dict.fromkeys(locked(files.get("requirements.lock", "")), "a package that is needed here")
    taken |= {folder: f"{folder}/" for folder in folders(files)}
    taken |= {
        Path(file).stem: file for file in files if file.endswith(".py") and not file.startswith(("src/", "tests/"))
    }
    if reason := ours("common.package_name").why_not(name, taken, INSTALLED):
        refuse(f"{name}: {reason}")
    for file, text in files.items():
        if file.endswith(".py") and re.search(rf"\b{name}\b", text):
            for node in ast.walk(ast.parse(text, file)):
                if name in {getattr(node, field, None) for field in ("id", "arg", "name", "asname")}:
                    refuse(f"{name}: {file} has a variable of this name, which would hide the package; choose another")


def check_git() -> None:
    """Refuse if git could not undo everything."""
    try:
        changed = git("status", "--porcelain").splitlines()
    except OSError:
        refuse(f"{ROOT} is not a git checkout, so nothing could be undone; run: git init && git add . && git commit")
    if changed:
        refuse(f"git status names {len(changed)} changed or new files; commit them, so that this can be undone")


def module(name: str) -> str:
    """The dotted name of a Python file."""
    return name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def needed(name: str, text: str) -> set[str]:
    """Dotted names that a Python file imports whenever it is imported itself.

    Not those in a function, a `try` or a `with`, which are optional, and not those for type checkers only.
    """
    package = module(name).split(".")[: None if name.endswith("/__init__.py") else -1]
    found = set[str]()
    left: list[ast.stmt] = ast.parse(text, name).body
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            left += node.body + node.orelse
    return found


def folders(names: Iterable[str]) -> set[str]:
    """All folders that have any of these files."""
    return {str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}


def closure(gone: set[str], names: set[str], imports: Mapping[str, set[str]]) -> set[str]:
    """Some files and those to delete with them: their importers, a conftest.py's folder, a lone `__init__.py`."""
    users = {name for name in names if name.startswith(USERS)}
    more = gone
    while more:
        gone = gone | more
        modules = {module(name) for name in gone if name.endswith(".py")}
        kept = users - gone
        more = {name for name in kept if imports.get(name, set()) & modules}
        heads = tuple(name.removesuffix("conftest.py") for name in gone if name.endswith("/conftest.py"))
        more |= {name for name in kept if name.startswith(heads)}
        inits = {name for name in kept if name.endswith("/__init__.py")}
        filled = folders(kept - more - inits)
        more |= {name for name in inits if name.removesuffix("/__init__.py") not in filled}
    return gone


def goes(components: Mapping[str, str], files: Texts) -> set[str]:
    """All files to delete with some components; refuses if a remaining file imports one of them."""
    gone = set[str]()
    for component, patterns in components.items():
        if not (own := tracked(*patterns.split())):
            refuse(f"--without {component}: was removed already")
        gone |= own
    imports = {name: needed(name, text) for name, text in files.items() if name.endswith(".py")}
    gone = closure(gone, tracked(), imports)
    modules = {module(name) for name in gone if name.endswith(".py")}
    for name in sorted(imports.keys() - gone):
        if wanted := imports[name] & modules:
            refuse(f"{name} imports {min(wanted)}, which would be deleted; change it, or keep that component")
    return gone


TARGET = re.compile(r"^([a-z][\w-]*):.*\n((?:\t.*\n)+)\n?", re.MULTILINE)
FENCE = re.compile(r"^((?:(?!```|[#|]).+\n)*(?!```|[#|]).+:\n\n)?```(.*)\n((?:.*\n)*?)```\n\n?", re.MULTILINE)
"""A fenced block of Markdown with the paragraph above that leads to it, if that ends with a colon."""


class Gone:
    """The files and commands to remove, and patterns for them in text."""

    def __init__(self, components: Iterable[str], gone: set[str], files: Texts) -> None:
        self.components = set(components)
        self.paths = gone | (folders(gone) - folders(tracked() - gone))
        spelled = "|".join(re.escape(path) for path in sorted(self.paths) if "/" in path or path in gone)
        self.path = re.compile(rf"(?<![\w./-])(?:\./)?(?:{spelled or '(?!)'})/?(?![\w-]|[./]\w)")
        listed = re.findall(r'^    "(\w+)": "([\w.]+)\.\w+",$', files.get(f"src/{NAME}/__main__.py", ""), re.MULTILINE)
        calls = [f"{NAME} {name}" for name, place in listed if f"src/{NAME}/{place.replace('.', '/')}.py" in gone]
        self.targets = [name for name, recipe in TARGET.findall(files.get("Makefile", "")) if self.path.search(recipe)]
        calls += [f"make {target}" for target in self.targets]
        self.call = re.compile(rf"(?<![\w-])(?:{'|'.join(calls) or '(?!)'})(?![\w-])")

    def named(self, text: str) -> bool:
        """Whether a text names a removed path or command."""
        return bool(self.path.search(text) or self.call.search(text))


def makefile(text: str, gone: Gone, project: str) -> str:
    """The Makefile without targets whose recipes name something removed, and without extras that no longer exist."""
    text = TARGET.sub(lambda target: "" if target[1] in gone.targets else target[0], text)
    text = re.sub(r" --extra (\w+)", lambda it: it[0] if f"\n{it[1]} = [" in project else "", text)
    return re.sub(rf"(?<=.) (?:{'|'.join(gone.targets) or '(?!)'})(?= |$)", "", text, flags=re.MULTILINE)


def script(text: str, gone: Gone) -> str:
    """A shell script without lines that name something removed, and without each `if` whose first line does."""
    text = re.sub(r"^if (.*)\n(?:.*\n)*?fi\n", lambda it: "" if gone.named(it[1]) else it[0], text, flags=re.MULTILINE)
    return "".join(line for line in text.splitlines(keepends=True) if not gone.named(line))


def docstring(name: str, text: str, gone: Gone) -> str:
    """An `__init__.py` without the lines of its docstring about removed files."""
    here = name.removesuffix("__init__.py")
    names = [re.escape(path.removeprefix(here)) for path in gone.paths if path.startswith(here)]
    return re.sub(rf"^(?: +|- `)(?:{'|'.join(names) or '(?!)'})(?![\w.]).*\n", "", text, flags=re.MULTILINE)


def page(name: str, text: str, gone: Gone) -> str:
    """A Markdown page without links, list items, commands, promises and rows about something removed."""

    def fence(match: re.Match[str]) -> str:
        language, *about = match[2].split() or [""]
        commands = re.findall(r"(?:.*\\\n)*.*\n", match[3])
        left = [command for command in commands if not gone.named(command)]
        if gone.components & set(about):
            return ""
        if language not in ("", "bash") or left == commands:
            return match[0]
        empty = all(re.match(r" *(#.*)?\n", command) for command in left)
        return lead(match) if empty else match[0].replace(match[3], "".join(left))

    def lead(match: re.Match[str]) -> str:  # its last sentence leads to the block
        whole = re.match(r"(.*[.?!)])\s", match[1] or "", re.DOTALL)
        return f"{whole[1]}\n\n" if whole else ""

    def link(match: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(name).parent / match[3])
        return match[0] if target not in gone.paths else "" if match[1] else match[2]

    def item(match: re.Match[str]) -> str:
        return "" if os.path.normpath(PurePosixPath(name).parent / match[1]) in gone.paths else match[0]

    def row(match: re.Match[str]) -> str:
        return "" if any(gone.named(code) for code in re.findall("`[^`]* [^`]*`", match[0])) else match[0]

    text = re.sub(r"^- \[[^]]*\]\(([^):#]+)\).*\n", item, FENCE.sub(fence, text), flags=re.MULTILINE)
    text = re.sub(r"(!?)\[([^]]*)\]\(([^):#]+)(?:#[^)]*)?\)", link, text)
    text = re.sub(r"`pytest [^`]*`", lambda proof: re.sub(f" {gone.path.pattern}", "", proof[0]), text)
    text = re.sub(r"^\|.*`pytest( -k \w+)?`.*\n", "", text, flags=re.MULTILINE)  # a promise without a test
    return re.sub(r"^\|.*\n", row, text, flags=re.MULTILINE)


@functools.cache
def imported(text: str) -> set[str]:
    """Names of packages that a Python file imports, or asks for."""
    found = re.compile(r'^ *(?:from|import) (\w+)|(?:importorskip|import_module|find_spec)\("(\w+)', re.MULTILINE)
    return {word for pair in found.findall(text) for word in pair}


def project(text: str, gone: Gone, unused: set[str]) -> str:
    """pyproject.toml without packages that nothing imports any more, and without removed folders."""
    for package in re.findall(r'"([\w-]+)(?:\[\w+\])?>=', text):
        if package.replace("-", "_") in unused:
            listed = rf'"{package}(?:\[\w+\])?>=[^"]*"'
            text = re.sub(rf"^ *{listed},.*\n|{listed}(, )?", "", text, flags=re.MULTILINE)
    text = text.replace(", ]", "]")
    for extra in re.findall(r"^(\w+) = \[(?: *#.*\n)?\]", text, re.MULTILINE):
        listed = rf"(?<=\[){extra},|,{extra}\b(?=.*\]\",$)"
        text = re.sub(rf"^{extra} = \[[^\]]*\].*\n|{listed}", "", text, flags=re.MULTILINE)
    for folder in map(re.escape, gone.paths):
        text = re.sub(rf', "{folder}"(?=.*\]$)|^"{folder}/\*\*" = .*\n', "", text, flags=re.MULTILINE)
    return text


def edited(files: Texts, gone: Gone) -> dict[str, str]:
    """The remaining text files, edited."""
    left = {name: text for name, text in files.items() if name not in gone.paths}
    before, after = ({name for it in some for name in imported(some[it]) if it[-3:] == ".py"} for some in (files, left))
    packages = project(files.get("pyproject.toml", ""), gone, before - after)
    for name, text in left.items():
        if name == "pyproject.toml":
            left[name] = packages
        elif name == "Makefile":
            left[name] = makefile(text, gone, packages)
        elif name.endswith(".md"):
            left[name] = page(name, text, gone)
        elif name.endswith("/__init__.py"):
            left[name] = docstring(name, text, gone)
        elif name == "tests/planted_faults.py":
            left[name] = re.sub(r' \|(?=")', "", re.sub(f" {gone.path.pattern}", "", text))
        elif re.match(r"#!.*\bbash\n", text):
            left[name] = script(text, gone)
    return left


def renamed(files: Texts, name: str) -> dict[str, str]:
    """The contents of all files, with the package's new name."""
    changed = {file: text.replace(NAME, name) for file, text in files.items()}
    if len(name) > len(NAME) and (project := changed.get("pyproject.toml")):  # accept lines that become too long
        changed["pyproject.toml"] = project.replace("\nignore = [\n", '\nignore = [\n  "E501",\n', 1)
    budgets = changed.get("tests/test_components.py")
    if len(name) > len(NAME) and budgets:  # `make format` breaks some lines
        more = re.compile(r'^(    "\w+": )(\d+),$', re.MULTILINE)
        changed["tests/test_components.py"] = more.sub(lambda it: f"{it[1]}{int(it[2]) + 100},", budgets)
    return changed


def apply(files: Texts, gone: set[str], left: Texts, name: str) -> int:
    """Apply the changes to the checkout and stage them; returns how many files are new or changed.

    Everything is written to a temporary folder first, and then moved. If a move or git fails, or a signal comes,
    everything is moved back.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # for git as well; the loop below checks for them
    names = {file: file.replace(NAME, name) for file in tracked() - gone}  # with those that they will have
    fresh = {file: to for file, to in names.items() if file != to or files.get(file) != left.get(file)}
    with tempfile.TemporaryDirectory(prefix=".make_it_yours-", dir=ROOT) as folder:
        (Path(folder) / ".gitignore").write_text("*\n")
        before, after = Path(folder, "before"), Path(folder, "after")
        for file, to in fresh.items():
            (after / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, after / to, follow_symlinks=False)
            if file in left:
                (after / to).write_bytes(left[file].encode())
        moves = [(ROOT / file, before / file) for file in sorted(gone | fresh.keys())]
        moves += [(after / to, ROOT / to) for to in fresh.values()]
        done = []
        try:
            for here, there in moves:
                if signal.sigpending() & set(STOPS):
                    raise KeyboardInterrupt
                there.parent.mkdir(parents=True, exist_ok=True)
                done.append((here.rename(there), here))
            git("add", "--all", ".")
        except BaseException:
            for there, here in reversed(done):
                there.rename(here)
            tidy(folders(names.values()) - folders(names))
            raise
    tidy(folders([*gone, *names]) - folders(names.values()))
    return len(fresh)


def tidy(empty: Iterable[str]) -> None:
    """Delete folders without tracked files; leftovers of Python in one would make it a package."""
    for folder in sorted(empty, reverse=True):
        shutil.rmtree(ROOT / folder / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):
            (ROOT / folder).rmdir()


def make_it(name: str, without: list[str]) -> str:
    """Check, compute and write; returns what was done, and what to do next."""
    for component in without:
        if component not in COMPONENTS:
            refuse(f"--without {component}: unknown; choose from {', '.join(COMPONENTS)}")
    check_git()
    files, components = texts(), {component: COMPONENTS[component] for component in without}
    if name != NAME:
        check_name(name, files)
    gone = goes(components, files)
    left = edited(files, Gone(components, gone, files)) if gone else files
    count = apply(files, gone, renamed(left, name) if name != NAME else left, name)
    done = [f"removed {', '.join(components)}: {len(gone)} files"] * bool(gone)
    done += [f"renamed {NAME} to {name}"] * (name != NAME)
    done.append(f"{count} files are new or changed. Nothing is committed; git reset --hard undoes it. Next:")
    done.append("  write your task (docs/tasks.md), and shorten README.md and docs/ to what is true of your job")
    return "\n".join([*done, "  make format lint test"])


def make_thin(name: str, task: str, parts: list[str], source: str) -> str:
    """Write a small project, beside this checkout unless `name` is a path; returns what to do next."""
    try:
        thin, origin = ours("cli.new.project"), ours("cli.new.source")
    except ModuleNotFoundError:
        refuse("--thin: cli/new has been deleted from this copy")
    folder = Path(name).absolute() if os.sep in name else ROOT.parent / name
    name = folder.name
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    try:
        # this Python may have none of them, before `make setup`
        thin.check(name, folder, parts, INSTALLED, locked((ROOT / "requirements.lock").read_text()))
        with tempfile.TemporaryDirectory() as temporary:
            found = origin.source_of(source or str(ROOT), Path(temporary))
            answers = thin.Answers(name, task, tuple(sorted({*parts})), found.requirement, found.kind)
            written = thin.write(answers, version, folder, found.wheel)
    except ours("common.errors").Refusal as refusal:
        refuse(str(refusal))
    return str(thin.next_steps(folder, written))


def main() -> None:
    """Do it, or print one line why not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "name of your package, e.g. mytrainer; with --thin also a path to it, e.g. ./mytrainer"
    parser.add_argument("name", metavar="NAME", help=about)
    known = f"{', '.join(COMPONENTS)}; docker takes k8s with it"
    parser.add_argument("--without", metavar="COMPONENT", nargs="+", default=[], help=known)
    thin = parser.add_argument_group("with --thin")
    thin.add_argument("--thin", action="store_true", help="write a small project beside this checkout")
    thin.add_argument("--task", choices=["classify", "lm", "empty"], help="what its task does to begin with")
    thin.add_argument("--with", dest="parts", choices=["slurm", "docker", "k8s"], nargs="+", help="launchers to add")
    thin.add_argument("--from", dest="source", help="as for `evenkeel new` (docs/thin.md); default: this checkout")
    options = parser.parse_args()
    if options.thin and options.without:
        parser.error("--thin --without: a thin project has no components; choose its launchers by --with")
    if not options.thin and (options.task or options.parts or options.source):
        parser.error("--task, --with and --from are for --thin")
    try:
        if options.thin:
            done = make_thin(options.name, options.task or "classify", options.parts or [], options.source or "")
        else:
            done = make_it(options.name, options.without)
    except KeyboardInterrupt:
        refuse("stopped; nothing has been changed", 130)
    except (OSError, SyntaxError) as error:
        refuse(f"{error}; nothing has been changed")
    try:  # all is done by now, also if nobody reads this, as after `| head -0`
        print(done, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at the end


if __name__ == "__main__":
    main()
