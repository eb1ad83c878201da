"""Each hint appears when it should and not otherwise."""

from dataclasses import replace
from typing import Any

import pytest

from evenkeel.run.hints import MOST, Figures, hints

QUIET = Figures(600.0, {"productive": 0.9, "data": 0.05, "evaluation": 0.04, "checkpoint": 0.01}, memory=0.7)


def test_a_run_without_a_flaw_gets_none() -> None:
    assert hints(QUIET) == {}
    assert hints(replace(QUIET, memory=None)) == {}
    slow = replace(QUIET, parts={"evaluation": 0.5, "checkpoint": 0.5}, eval_every=0, checkpoint_every=0)
    assert hints(slow) == {}, "there is no option to change"


def test_at_most_two_at_a_time() -> None:
    worst = replace(QUIET, parts={"data": 0.25, "evaluation": 0.35, "checkpoint": 0.2}, memory=0.99)
    assert list(hints(worst)) == ["memory", "data"]
    assert MOST == 2


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("data", {"parts": {"data": 0.38}}, {"parts": {"data": 0.19}}, "data wait 38 %: try --num-workers 4"),
    (
        "data",
        {"parts": {"data": 0.38}, "num_workers": 6, "cores": 8},
        {"parts": {"data": 0.1}, "num_workers": 6},
        "data wait 38 %: try --num-workers 8",
    ),
    (
        "data",
        {"parts": {"data": 0.38}, "num_workers": 8, "cores": 8},
        {"parts": {"data": 0.1}, "num_workers": 8},
        "data wait 38 %: make samples cheaper to read, docs/data.md",
    ),
    (
        "evaluation",
        {"parts": {"evaluation": 0.45}, "eval_every": 100},
        {"parts": {"evaluation": 0.29}},
        "evaluation takes 45 % of the time: try --eval-every 400",
    ),
    (
        "checkpoint",
        {"parts": {"checkpoint": 0.12}, "checkpoint_every": 50},
        {"parts": {"checkpoint": 0.09}},
        "checkpoints take 12 % of the time: try --checkpoint-every 200",
    ),
    ("memory", {"memory": 0.97}, {"memory": 0.94}, "GPU memory is 97 % full: a smaller --micro-batch leaves room"),
    (
        "micro_batch",
        {"memory": 0.2, "micro_batches": 8},
        {"memory": 0.2, "micro_batches": 1},
        "GPU memory is 20 % full, and a rank computes 8 micro-batches a step: a larger --micro-batch is faster",
    ),
]


@pytest.mark.parametrize(("subject", "bad", "good", "text"), CASES)
def test_a_hint_and_its_control(subject: str, bad: dict[str, Any], good: dict[str, Any], text: str) -> None:
    found = hints(replace(QUIET, **bad))
    assert list(found) == [subject]
    assert found[subject].startswith(text)
    assert hints(replace(QUIET, **good)) == {}
    assert hints(replace(QUIET, **bad, seconds=10.0)) == {}, "the first steps say little"
