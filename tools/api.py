#!/usr/bin/env python3
"""Write docs/api.md, the names that a user's code may import, from their docstrings; --check fails if it is outdated.

Modules are read with griffe and not imported, so that the page is the same on every version of Python and torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
MODULES = ("evenkeel", "evenkeel.tasks", "evenkeel.testing")

NOT_MADE = ("Config", "DistributedLoss", "Run")
"""Classes whose objects other functions return."""

WITHOUT_ENTRY = ("TaskData",)
"""Base classes whose members are listed with those of the class that is public."""

FOR_THE_ENGINE = ("resume", "watched", "order_blocks", "exact", "largest_micro_batch")
"""Members that a user's code has no use for."""

HEAD = """# The public names

After this page you know which names you can import in your own code. They change only with a warning one minor release
before ([policy](../CONTRIBUTING.md#what-may-change)); everything else may change at any time.

`python tools/api.py` makes this page from the docstrings.
"""


def page() -> str:
    """The page, as Markdown."""
    package = griffe.load("evenkeel", search_paths=[ROOT / "src"], docstring_parser="google")
    parts, seen = [HEAD], set()
    for path in MODULES:
        module = package if path == "evenkeel" else package[path.partition(".")[2]]
        parts.append(f"## {path}\n")
        for name in sorted(module.exports or []):
            member = _target(module[str(name)])
            if member.path in seen:
                parts.append(f"`{name}`: the same as `evenkeel.{name}`.\n")
                continue
            seen.add(member.path)
            parts.extend(_entry(str(name), member))
    return "\n".join(parts)


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object:
    """What a name stands for; of a function in a module of the same name, the function."""
    if member.is_module:
        member = member[member.name]
    return member.final_target if isinstance(member, griffe.Alias) else member


def _entry(name: str, member: griffe.Object) -> Iterator[str]:
    """A name with its signature and docstring, and of a class its public methods and documented attributes."""
    yield f"### {name}\n"
    yield _signature(name, member)
    yield _text(member)
    if not isinstance(member, griffe.Class):
        return
    for part, it in _members(member).items():
        if part.startswith("_") or part in FOR_THE_ENGINE or not it.docstring:
            continue
        if isinstance(it, griffe.Function):
            yield _signature(part, it)
            yield _text(it)
        elif isinstance(it, griffe.Attribute):
            yield f"`{part}: {it.annotation}`\n\n{_text(it)}"


def _members(member: griffe.Class) -> dict[str, griffe.Object | griffe.Alias]:
    """Those of a class, and of bases that have no entry of their own."""
    parts = [it for it in member.resolved_bases if isinstance(it, griffe.Class) and it.name in WITHOUT_ENTRY]
    return {name: it for each in [*parts, member] for name, it in each.members.items()}


def _signature(name: str, member: griffe.Object) -> str:
    """The line by which it is called, in a block of code."""
    function = member.members.get("__init__") if isinstance(member, griffe.Class) else member
    if name in NOT_MADE or not isinstance(function, griffe.Function):
        return f"```python\nclass {name}\n```\n"
    parameters = [_parameter(it) for it in function.parameters if it.name not in ("self", "cls")]
    kind = "class" if isinstance(member, griffe.Class) else "def"
    returns = f" -> {function.returns}" if function.returns and kind == "def" else ""
    return f"```python\n{kind} {name}({', '.join(parameters)}){returns}\n```\n"


def _parameter(it: griffe.Parameter) -> str:
    stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    annotation = f": {it.annotation}" if it.annotation else ""
    default = f" = {it.default}" if it.default is not None and it.kind not in stars else ""
    return stars.get(it.kind or griffe.ParameterKind.positional_or_keyword, "") + str(it.name) + annotation + default


def _text(member: griffe.Object) -> str:
    """The docstring: prose as it is, and what is listed as a list. Examples stay in the source."""
    sections = member.docstring.parse("google") if member.docstring else []
    if member.name in NOT_MADE:
        sections = [it for it in sections if not isinstance(it, griffe.DocstringSectionParameters)]
    return "\n\n".join(filter(None, map(_section, sections))) + "\n"


def _section(section: griffe.DocstringSection) -> str:
    if isinstance(section, griffe.DocstringSectionText):
        text = re.sub(r"(\A|\n\n)[^\n]*(:\n\n)?>>>.*?(?=\n\n|\Z)", "", section.value, flags=re.DOTALL)
        return re.sub(r":\w+:`(.+?)`", r"`\1`", text.replace("``", "`")).strip()
    if isinstance(section, griffe.DocstringSectionReturns):
        return "\n".join(f"Returns: {it.description}" for it in section.value)
    if not isinstance(section.value, list) or isinstance(section, griffe.DocstringSectionExamples):
        return ""  # "Example:"
    raises = isinstance(section, griffe.DocstringSectionRaises)
    lines = [f"- `{it.annotation if raises else it.name}`: {' '.join(it.description.split())}" for it in section.value]
    return f"{section.kind.value.capitalize()}:\n\n" + "\n".join(lines)


def main() -> int:
    """Write the page, or with --check compare it. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is outdated")
    arguments = parser.parse_args()
    text = page()
    if not arguments.check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/api.md is outdated: python tools/api.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
