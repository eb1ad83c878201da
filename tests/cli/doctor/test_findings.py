"""Findings of many ranks: merged, shown, and what becomes of checks that crash or hang."""

import json
import threading
from collections.abc import Iterator

import pytest

from evenkeel.cli.doctor.findings import Finding, Report, as_json, examine, judged, merge, show, worst

GOOD, BAD = judged("clock", "right"), judged("clock", "wrong", "right", "date", fail=True)


def reports(*findings: Finding | None) -> list[Report]:
    """Two nodes of two ranks."""
    return [Report(rank, "ab"[rank // 2], [finding] if finding else []) for rank, finding in enumerate(findings)]


@pytest.mark.parametrize(
    ("findings", "where"),
    [
        ((GOOD, GOOD, GOOD, GOOD), [""]),
        ((GOOD, GOOD, BAD, BAD), ["node a", "node b"]),
        ((GOOD, BAD, GOOD, GOOD), ["ranks 0, 2-3", "rank 1"]),
        ((GOOD, None, GOOD, None), [""]),  # one rank of each node speaks for it
    ],
)
def test_equal_findings_are_one(findings: tuple[Finding | None, ...], where: list[str]) -> None:
    assert [it.where for it in merge(reports(*findings))] == where


def test_versions_that_differ_are_a_warning_and_speeds_are_not() -> None:
    for same, level in ((True, "WARN"), (False, "OK")):  # as of versions, and of speeds
        made = [Finding("OK", "torch", value, same=same) for value in ("2.8", "2.8", "2.8", "2.9")]
        assert {it.finding.level for it in merge(reports(*made))} == {level}


def test_a_check_that_crashes_is_a_warning_and_one_that_hangs_a_failure() -> None:
    def crash() -> Iterator[Finding]:
        yield GOOD
        raise ZeroDivisionError("of one's own")

    def hang() -> list[Finding]:
        threading.Event().wait(20)
        return [GOOD]

    good, warning = examine("crash", crash, 20)
    assert good == GOOD
    assert (warning.level, warning.value) == ("WARN", "could not be checked: ZeroDivisionError: of one's own")
    (failure,) = examine("hang", hang, 0.1)
    assert (failure.level, failure.value, failure.expected) == ("FAIL", "not done within 0.1 s", "a second or two")
    assert [it.level for it in examine("versions", hang, 0.1)] == ["WARN"]
    assert examine("fine", lambda: [GOOD], 20) == [GOOD]


def test_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    merged = merge(reports(GOOD, GOOD, BAD, BAD))
    show(merged, "4 ranks", 1.0)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    bad = ["FAIL clock wrong (node b)", "expected right", "type date"]
    assert lines[1:] == ["OK clock right (node a)", *bad, "1 OK, 0 WARN, 1 FAIL in 1.0 s"]
    told = json.loads(as_json(merged, "4 ranks", 1.0))
    assert told["level"] == "FAIL"
    told_of = {"level": "FAIL", "name": "clock", "value": "wrong", "expected": "right", "remedy": "date"}
    assert told["findings"][1] == {**told_of, "ranks": [2, 3], "where": "node b"}
    counted = [worst(found) for found in ([], [GOOD], [GOOD, judged("x", "", warn=1)], [BAD, GOOD])]
    assert counted == ["OK", "OK", "WARN", "FAIL"], "the worst counts"
