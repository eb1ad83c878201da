"""The command `evenkeel`, as the package installs it."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint

import pytest

from evenkeel.__main__ import run
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


def test_without_any_command_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("evenkeel.__main__.COMMANDS", {"gone": "cli.gone.Gone"})
    monkeypatch.setattr(sys, "argv", ["evenkeel", "gone"])
    assert run() == 2
    assert capsys.readouterr().err == "evenkeel: there are no commands: all of them have been deleted from this copy\n"
