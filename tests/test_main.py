"""The command `evenkeel`, as the package installs it."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint

import pytest

from evenkeel.__main__ import run, subcommands
from tests.support.processes import ROOT


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
    ("component", "typed", "said"),
    [
        ("status", "statsu", "unknown command statsu; did you mean status? (--help lists all commands)"),
        ("status", "stats --watch", "unknown command stats; did you mean status? (--help lists all commands)"),
        ("status", "xyz", "unknown command xyz; there are "),
        ("status", "", "which command? "),
        ("new", "new", "NAME must be given (--help lists all options)"),
        ("checkpoint", "checkpoint lst runs/x", "unknown command lst; did you mean list? (--help lists all commands)"),
        ("status", "--version", "Unrecognized options: --version (--help lists all options)"),
        ("plan", "plan --lr 4", "Unrecognized options: --lr, 4 (--help lists all options; those of train.py come"),
        ("status", "status --jsn", "Unrecognized options: --jsn; did you mean --json? (--help lists all options)"),
    ],
)
def test_a_command_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], component: str, typed: str, said: str
) -> None:
    pytest.importorskip(f"evenkeel.cli.{component}")
    monkeypatch.setattr(sys, "argv", ["evenkeel", *typed.split()])
    assert run() == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"evenkeel: {said}")
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_the_help_has_a_line_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not subcommands():
        pytest.skip("this copy has left out all commands")
    monkeypatch.setattr(sys, "argv", ["evenkeel", "--help"])
    assert run() == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE) for name in subcommands())
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(lines) == len(subcommands()), "options and examples are in the help of the command"
    assert max(map(len, text.splitlines())) <= 80


def test_the_help_of_an_action_says_once_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("evenkeel.cli.checkpoint")
    monkeypatch.setattr(sys, "argv", ["evenkeel", "checkpoint", "export", "--help"])
    with pytest.raises(SystemExit, match="0"):
        run()
    assert capsys.readouterr().out.count("Write the model of the newest") == 1


def test_without_any_command_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("evenkeel.__main__.COMMANDS", {"gone": "cli.gone.Gone"})
    monkeypatch.setattr(sys, "argv", ["evenkeel", "gone"])
    assert run() == 2
    assert capsys.readouterr().err == "evenkeel: there are no commands: all have been deleted from this copy\n"
