"""How a node's exit code follows from those of its ranks, and what failed first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenkeel.launch import agent

VERDICTS = {(75, 75): 75, (1, 2): 2, (75, 2): 2, (1, -9): 137, (75, -9): 137, (1, 1): 1, (-11, 1): 139, (3, 75): 3}
VERDICTS |= {(1, 75): 1, (1, -15): 1}  # torchrun stops the others after a failure


@pytest.mark.parametrize(("codes", "code"), VERDICTS.items())
def test_the_verdict_over_a_nodes_ranks(codes: tuple[int, ...], code: int) -> None:
    assert agent.verdict([*codes]) == code


def test_first_error_leaves_out_what_is_half_written(tmp_path: Path) -> None:
    for name, text in (("0", '{"mess'), ("1", json.dumps({"message": "plain words"}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "error.json").write_text(text)
    assert agent.first_error([tmp_path]) == "plain words"
    assert agent.first_error([tmp_path / "0"]) == ""
