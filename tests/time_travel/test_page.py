"""What a replay has found, as a page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.time_travel.command import ReplayCommand
from evenkeel.time_travel.page import write_page
from evenkeel.time_travel.replay import Replay

EVIL = "<script>alert('x')</script>&\"a"
CULPRIT = {
    "operation": "aten.log", "module": EVIL, "line": EVIL, "value": "nan", "rows": [0], "given": True,
    "samples": [{"sample": 7, "source": EVIL}],
}  # fmt: skip
STEP: dict[str, Any] = {
    "step": 4, "loss": math.nan, "norm": math.inf, "note": EVIL, "nonfinite": CULPRIT,
    "samples": [{"sample": 7, "source": EVIL, "loss": math.nan}, {"sample": 31, "source": "", "loss": None}],
    "layers": [{"name": EVIL, "gradient": None, "update": 0.125, "weights": 2.5}],
    "activations": [{"module": EVIL, "largest": 1234.5}],
}  # fmt: skip


def test_it_shows_all_that_was_found_and_what_a_user_has_named_as_text(tmp_path: Path) -> None:
    found = Replay(started=3, steps=[STEP], agrees=False, agreement=EVIL, other=EVIL, ended=EVIL)
    write_page(tmp_path / "found.html", EVIL, found)
    text = (tmp_path / "found.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 10
    assert not [it for it in ("http:", "https:", "@import", " src=", "url(") if it in text]
    for shown in ("checkpoint of step 3", "Step 4", "aten.log", "0.125", "2.5", "1234.5", ">31<", "differs"):
        assert shown in text


@pytest.mark.parametrize(
    ("file", "line"), {"old.html": "exists", "no/new.html": "no folder", "run/new.html": "is in the run"}.items()
)
def test_a_file_that_cannot_be_new_is_refused_before_the_replay(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / "old.html").write_text("mine")
    with pytest.raises(Refusal, match=f"--html .*{file}.*{line}"):
        ReplayCommand(tmp_path / "run", "4", html=tmp_path / file)([])
    assert (tmp_path / "old.html").read_text() == "mine"
