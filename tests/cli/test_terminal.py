"""What other people have named acts on nobody's terminal."""

import ast
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from evenkeel import __main__ as program
from evenkeel.common.display import UNSEEN, Lines, plain
from evenkeel.distributed.exits import exit_code
from tests.support.components import has
from tests.support.processes import ROOT
from tests.support.small_runs import OLD_RUNS

EVIL = "\x1b[2J\x1b]0;owned\x07\ud800\u202e\x9b1A\rx"


def change(path: Path, **facts: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run in a folder of a bad name that is not UTF-8 either, with a metric and a reason of bad names."""
    folder = Path(shutil.copytree(OLD_RUNS / "finished", tmp_path / os.fsdecode(b"mine\x1b[31m\xff")))
    metrics = folder / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines()
    more: list[dict[str, Any]] = [
        {"kind": "eval", f"test/{EVIL}": 0.5},
        {"kind": "bits", "differences": {EVIL: ["1", EVIL]}},
        {"kind": "stop", "reason": EVIL},
    ]
    lines += [json.dumps({"step": 60, "time": json.loads(last)["time"]} | record) for record in more]
    metrics.write_text("\n".join([*lines, last, ""]))
    change(folder / "status.json", state="stopped", reason=EVIL)
    change(folder / "checkpoints" / "step-00000060" / "manifest.json", metrics={EVIL: 0.5})
    return folder


COMMANDS = """status RUN | follow RUN | compare RUN OTHER | checkpoint list RUN | checkpoint inspect RUN
| data verify RUN"""


@pytest.mark.parametrize("command", [it.strip() for it in COMMANDS.split("|") if has(it.split()[0])])
def test_names_do_not_act_on_a_terminal(
    command: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(OLD_RUNS / "finished", run_dir.with_name("other"))
    words = [str({"RUN": run_dir, "OTHER": other}.get(word, word)) for word in command.split()]
    monkeypatch.setattr(sys, "argv", ["evenkeel", *words])
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    code = exit_code(program.main)
    out, err = capsys.readouterr()
    assert code == {"follow": 75, "data": 2}.get(words[0], 0), err
    assert not UNSEEN.search(out + err), out + err
    if "list" not in words:
        assert r"mine\x1b[31m\udcff" in (out + err).replace("\n", ""), out + err


def test_text_is_escaped_and_no_more_than_needed() -> None:
    assert plain(EVIL) == r"\x1b[2J\x1b]0;owned\x07\ud800\u202e\x9b1A\rx"
    for usual in ("é\tx\n", "日本 語", "👩\u200d💻", "\\x1b", "a\xa0b"):
        assert plain(usual) == usual
    assert Lines().format(logging.makeLogRecord({"msg": "%s", "args": (EVIL,)})) == plain(EVIL)


def test_commands_and_runs_have_no_other_way_to_a_terminal() -> None:
    """`print` and rich's `Text` are called in `common.display` alone, and rich gets no bare text of ours."""
    others = []
    for path in [*(ROOT / "src/evenkeel/cli").rglob("*.py"), *(ROOT / "src/evenkeel/run").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                texts = any(isinstance(it, (ast.JoinedStr, ast.BinOp)) for it in node.args)
                of_rich = texts and ast.unparse(node.func) == "console.print"
                if called in ("print", "Text") and (isinstance(node.func, ast.Name) or of_rich):
                    others.append(f"{path.name}:{node.lineno}: {called}")
    assert not others
