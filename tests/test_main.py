"""The command `evenkeel`, as the package installs it."""

import os
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from evenkeel.__main__ import run, subcommands
from tests.support import needs
from tests.support.processes import ROOT
from tests.support.typed import typed


@pytest.mark.parametrize(
    ("called_as", "shown"), [("bin/evenkeel", "evenkeel"), ("evenkeel/__main__.py", "python -m evenkeel")]
)
def test_the_installed_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], called_as: str, shown: str
) -> None:
    pytest.importorskip("evenkeel.cli.plan")
    (value,) = re.findall(r'^evenkeel = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    command = EntryPoint("evenkeel", value, "console_scripts").load()
    monkeypatch.setattr(sys, "argv", [called_as, "plan", "--help"])
    with pytest.raises(SystemExit, match="0"):
        command()
    assert capsys.readouterr().out.startswith(f"usage: {shown} plan ")
    monkeypatch.setattr(sys, "argv", [called_as, "plan", "-w", "0"])
    assert command() == 2
    assert capsys.readouterr().err == "evenkeel: --world-size 0: must be at least 1\n"


@pytest.mark.parametrize(
    ("component", "words", "said"),
    [
        ("status", "statsu", "unknown command statsu; did you mean status? (--help lists all commands)"),
        ("status", "stats --watch", "unknown command stats; did you mean status? (--help lists all commands)"),
        ("status", "xyz", "unknown command xyz; there are "),
        ("status", "", "which command? "),
        ("new", "new", "NAME must be given (--help lists all options)"),
        ("checkpoint", "checkpoint lst runs/x", "unknown command lst; did you mean list? (--help lists all commands)"),
        ("status", "--version", "Unrecognized options: --version (--help lists all options)"),
        ("plan", "plan --lr 4", "Unrecognized options: --lr (--help lists all options; those of train.py come"),
        ("status", "status --jsn", "Unrecognized options: --jsn; did you mean --json? (--help lists all options)"),
    ],
)
def test_a_command_that_does_not_exist(component: str, words: str, said: str) -> None:
    pytest.importorskip(f"evenkeel.cli.{component}")
    code, out, err = typed(words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"evenkeel: {said}")


@pytest.mark.skipif(not subcommands(), reason="this copy has left out all commands")
def test_the_help_has_a_line_a_command() -> None:
    code, text, _ = typed("--help")
    assert code == 0
    assert all(re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE) for name in subcommands())
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(lines) == len(subcommands()), "options and examples are in the help of the command"
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_an_action_says_it_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("evenkeel.cli.checkpoint")
    monkeypatch.setattr(sys, "argv", ["evenkeel", "checkpoint", "export", "--help"])
    with pytest.raises(SystemExit, match="0"):
        run()
    assert capsys.readouterr().out.count("Write the model of the newest") == 1


def test_without_any_command_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.__main__.COMMANDS", {"gone": "cli.gone.Gone"})
    assert typed("gone")[::2] == (2, "evenkeel: there are no commands: all have been deleted from this copy\n")


@needs.root("act as another user")
def test_a_folder_that_may_not_be_read_is_a_line(tmp_path: Path) -> None:
    pytest.importorskip("evenkeel.cli.compare")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True, mode=0)
    os.seteuid(65534)
    try:
        code, _, err = typed("compare", tmp_path / "run", tmp_path / "run")
    finally:
        os.seteuid(0)
    assert (code, err.count("\n")) == (2, 1)
    assert err.endswith(": Permission denied\n")
