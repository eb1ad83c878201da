"""docs/coming-from.md: what it says to type and write exists, and what people type elsewhere is answered as it says."""

import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields

import pytest
import tyro
from torch.distributed.run import get_args_parser

from evenkeel.__main__ import COMMANDS, subcommands
from evenkeel.common.arguments import flag
from evenkeel.config import Config
from evenkeel.launch.launchers import MultiNode
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.command_line import BY_NAME, parse
from evenkeel.tasks.registry import BUILT_IN, built_in, load_task
from evenkeel.training.task import Task, option_name
from tests.support.processes import ROOT
from tests.support.raised import refusal_of

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
KUBERNETES = sorted((ROOT / "src" / "evenkeel" / "launch" / "k8s").glob("*.py"))
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
TOOLS, SUBJECTS = PAGE.split("\n## Subject by subject\n")

pytestmark = pytest.mark.skipif(
    len(built_in()) < len(BUILT_IN) or len(subcommands()) < len(COMMANDS) or not EXAMPLES,
    reason="the page is about all of Evenkeel, and this copy has left out a part",
)


def rows(text: str) -> list[tuple[str, str]]:
    """The rows of its tables: what people do there, and what they do here."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(there, here) for there, here in cells if there != "there"]


def spans(text: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def long_options(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", text)


def to_type() -> Iterator[str]:
    """What the page says to type or to write here: right-hand cells, blocks, and what it says subject by subject."""
    for _, here in rows(PAGE):
        yield from spans(here)
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    without_blocks = re.sub(r"^```.*?^```", "", SUBJECTS, flags=re.DOTALL | re.MULTILINE)
    yield from spans("\n".join(line for line in without_blocks.splitlines() if not line.startswith(("| ", "#"))))


def options_of(*classes: type) -> set[str]:
    return {flag(option_name(option.name)) for cls in classes for option in fields(cls)}


def of_evenkeel() -> set[str]:
    """The options of train.py with any task, of the examples, of the launchers, and torchrun's."""
    files = [*EXAMPLES, *KUBERNETES]
    of_files = [flag(name) for file in files for name in re.findall(r"^    (\w+): .+ = ", file.read_text(), re.M)]
    torchrun = {name for action in get_args_parser()._actions for name in action.option_strings}
    return options_of(Config, MultiNode, *map(load_task, built_in())) | {*of_files} | torchrun


def unknown(pieces: Iterator[str] | list[str]) -> list[str]:
    """Pieces with an option that does not exist, or with a command that `python -m evenkeel` does not take."""
    known, found = of_evenkeel(), []
    for piece in dict.fromkeys(pieces):
        options, command = piece, piece.startswith("python -m evenkeel ")
        if command:
            words, _, options = piece.removeprefix("python -m evenkeel ").partition(" -- ")
            # as main() does; its parsers know all values, too
            try:
                tyro.extras.subcommand_cli_from_dict(subcommands(), args=shlex.split(words), console_outputs=False)
            except SystemExit:
                found.append(piece)
        found += [f"{piece}: {name}" for name in long_options(options) if name not in known]
    return found


def test_what_it_says_to_type_exists() -> None:
    pieces = [*to_type()]
    assert len([piece for piece in pieces if "--" in piece]) >= 90
    assert len([piece for piece in pieces if piece.startswith("python -m evenkeel ")]) >= 5
    assert unknown(pieces) == []


def test_the_control_wrong_options_and_commands_are_found() -> None:
    wrong = ["python -m evenkeel predcit RUN", "python -m evenkeel predict RUN --sett a", "--ema 0.9 --warmup-epochs 5"]
    assert unknown([*wrong, "--ema 0.9"]) == [*wrong[:2], f"{wrong[2]}: --warmup-epochs"]


def test_what_it_says_to_write_exists() -> None:
    """Methods of a task, with the names of their parameters."""
    cells = [span for _, here in rows(TOOLS) for span in spans(here)]
    calls = [found.groups() for span in cells if (found := re.fullmatch(r"(\w+)\(([\w, ]*)\)", span))]
    assert len(calls) > 20
    for name, given in calls:
        if name != "gradient_checkpointing_enable":  # a method of transformers' networks
            parameters = [*inspect.signature(getattr(Task, name)).parameters]
            assert not given or given.split(", ") == parameters[1:], name


@pytest.mark.parametrize(("there", "here"), rows(TOOLS), ids=[there for there, _ in rows(TOOLS)])
def test_an_option_of_another_tool_is_answered_as_the_page_says(there: str, here: str) -> None:
    """It exists here too, or its refusal has something to say, and names what the page names."""
    ours = options_of(Config, Classify)
    typed = [word for span in spans(there) if span.startswith("-") for word in span.split() if word[:1] == "-"]
    for option in typed:
        if (name := option.replace("_", "-")) in ours:
            continue
        answer = refusal_of(parse, [option, "1"]).removesuffix(" (--help lists all options)")
        assert name in BY_NAME or "; did you mean --" in answer, answer
        if "here it is --" in answer or "; did you mean --" in answer:
            named = long_options(answer.partition("here it is" if name in BY_NAME else "did you mean")[2])
            assert {*named} & {*long_options(here)}, f"{answer}; the page says {here}"
