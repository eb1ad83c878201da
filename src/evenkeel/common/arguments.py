"""Command lines and environment variables: names, numbers, errors, and a stdout without a reader."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar

from .errors import REFUSED, Refusal

T = TypeVar("T")

LARGEST_WORLD = "EVENKEEL_LARGEST_WORLD"
"""The environment variable with the maximum number of ranks of an elastic job."""

GPUS_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide all GPUs on purpose."""

PLAIN = {
    r"^Error parsing (\S+): invalid literal for int.*?['\"](.*)['\"]": r"\1 \2: must be INT",
    r"^Error parsing (\S+): could not convert string to float.*?['\"](.*)['\"]": r"\1 \2: must be FLOAT",
    r"^Error parsing (\S+): no type matching (\S+) .*? from \[['\"](.*?)['\"]\].*": r"\1 \3: must be \2",
    r"^Error parsing (\S+): .* \[['\"](.*)['\"]\] into tuple type \S+\[(.*)\]": r"\1 \2: the types must be \3",
    r"^invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\).*": r"\2 \1: must be \3",
    r"^Missing value for argument '(\S+)'\. Expected (\d+) values\.": r"\1: a value is missing, it takes \2",
    r"^Unrecognized options: (?!-)": "no option takes the value ",
}
"""What tyro says about a value, and what we say."""

KINDS = {"INT": "a whole number", "FLOAT": "a number"}


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def is_typed(name: str, words: Sequence[str]) -> bool:
    """Whether an option, such as run-dir, is among the words of a command line."""
    return any(word.partition("=")[0].replace("_", "-") == f"--{name}" for word in words)


def number_in(variable: str, least: int, most: int) -> int:
    """The whole number in an environment variable that is set; refused if it is not one, or out of bounds."""
    text = os.environ[variable]
    number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
    if number is None or not least <= number <= most:
        raise Refusal(f"{variable}={text[:40]}: must be a whole number from {least} to {most}; correct or unset it")
    return number


def lose_stdout() -> None:
    """Discard further output to stdout, because its reader has closed it, as in `--help | head`."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def some_options(words: Sequence[str], *options: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The values of some options, each given by its names, and the other words.

    Raises:
        Refusal: one of them has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in options:
        parser.add_argument(*names)
    try:
        return parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise Refusal(str(error)) from None


def refuse_empty(words: Sequence[str], *classes: Any) -> None:
    """Refuse an empty word, usually from an unset shell variable, unless the option is empty by default, and a switch
    with a value.

    `classes` are dataclasses with the options; other options on the command line are not checked.
    """
    defaults = {option.name.rstrip("_"): option.default for cls in classes for option in fields(cls)}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and isinstance(defaults.get(name.lstrip("-").replace("-", "_")), bool):
            raise Refusal(f"{word}: {name} takes no value; type only that, or leave it out")
        if word and (value or not equals):
            continue
        before = words[number - 1] if number else ""
        option = name or (before if before.startswith("-") else "")
        in_a_list = not option and any(earlier.startswith("-") for earlier in words[:number])
        if in_a_list or (option and defaults.get(option.lstrip("-").replace("-", "_"), "") == ""):
            continue
        raise Refusal(f"{option or 'an argument'} is empty (an unset shell variable?): give a value or leave it out")


def refuse_unknown_command(word: str, known: Collection[str]) -> None:
    """Refuse a command that does not exist, and suggest one of similar spelling.

    >>> refuse_unknown_command("statsu", ["status", "plan"])
    Traceback (most recent call last):
    evenkeel.common.errors.Refusal: unknown command statsu; did you mean status? (--help lists all commands)
    """
    if word not in known and not word.startswith("-"):
        near = difflib.get_close_matches(word, known, n=1)
        there = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise Refusal(f"unknown command {word}; {there} (--help lists all commands)")


def one_line_errors(
    call: Callable[[], T], hint: str = "--help lists all options", synonyms: Mapping[str, str] = MappingProxyType({})
) -> T:
    """Run a tyro command line and turn its framed error message into a :class:`Refusal` of one line.

    tyro suggests options of similar spelling. `synonyms`, other names -> what to type, are exact, or a second choice.
    """
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return call()
    except BrokenPipeError:  # while it printed its help
        lose_stdout()
        raise SystemExit(0) from None
    except SystemExit as exit_:
        if exit_.code != REFUSED:
            raise
    plain = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]", "", captured.getvalue())  # no colours, no frame
    title, *lines = [line.strip() for line in plain.splitlines()] or [""]
    sections = re.split(r"^[─-]{3,}$", "\n".join(lines), flags=re.MULTILINE)  # dashes where there is no UTF-8
    message = next((" ".join(section.split()) for section in sections if section.strip()), title)
    # the options; the help of each is indented further
    needed = re.findall(r"^ {5,6}(\S.*?) *$", plain.partition("For full helptext")[0], re.MULTILINE)
    if message.startswith("Missing from") and needed:
        message = f"{' and '.join(needed)} must be given"
    _, _, suggested = "\n".join(sections).partition("Perhaps you meant:")
    # the last sentence names --help, which may begin a line
    names = re.findall(r"^--(?!help\b)[\w-]+", suggested, re.MULTILINE)
    typed = re.match(r"Unrecognized options: (--[\w-]+)", message)
    if typed and (not names or typed[1] in synonyms):
        near = difflib.get_close_matches(typed[1].replace("_", "-"), synonyms, n=1, cutoff=0.8)
        names = [synonyms[name] for name in near]
    for theirs, ours in PLAIN.items():
        message = re.sub(theirs, ours, message).replace("', '", " ")
    if message.startswith("Unrecognized options: "):
        message = re.sub(", [^-][^,]*", "", message)  # the values of these options
    value, must, kinds = message.rpartition(": must be ")
    if must:
        *others, last = [KINDS.get(kind, kind) for kind in re.findall(r"[^|{}',\s]+", kinds) if kind != "None"]
        message = value + must + (f"{', '.join(others)} or {last}" if others else last)
    message += f"; did you mean {' or '.join(names)}?" if names else ""
    raise Refusal(f"{message} ({hint})")
