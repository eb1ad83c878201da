"""A finding; a check that may crash or hang; the findings of many ranks as one list, as text and as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from rich.console import Console

from ...common.display import styled
from ...common.naming import name_ranks

Level = Literal["OK", "WARN", "FAIL"]
STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of a check on one rank."""

    level: Level
    name: str
    value: str
    expected: str = ""
    remedy: str = ""
    """The line to type."""
    same: bool = False
    """Whether all ranks should have this value."""


def judged(
    name: str,
    value: str,
    expected: str = "",
    remedy: str = "",
    *,
    warn: object = False,
    fail: object = False,
    same: bool = False,
) -> Finding:
    """A finding that is OK, and has no remedy, unless `warn` or `fail` is true."""
    level: Level = "FAIL" if fail else "WARN" if warn else "OK"
    return Finding(level, name, value, *(("", "") if level == "OK" else (expected, remedy)), same)


def examine(name: str, check: Callable[[], Iterable[Finding]], seconds: float, crash: Level = "WARN") -> list[Finding]:
    """Run a check; a crash is a finding of level `crash`, a hang a FAIL (of imports, which may be slow, a WARN)."""
    found: list[Finding] = []

    def work() -> None:
        try:
            found.extend(check())
        except BaseException as error:  # also a SystemExit, as from `leave` in a library
            text = " ".join(f"{type(error).__name__}: {error}".split())
            found.append(Finding(crash, name, f"could not be checked: {text[:400]}", "a check without errors", ISSUE))

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive():
        return found
    level: Level = "WARN" if name == "versions" else "FAIL"
    return [Finding(level, name, f"not done within {seconds:g} s", "a second or two", f"{COMMAND} --timeout 60")]


COMMAND = "python -m evenkeel doctor"
ISSUE = f"{COMMAND} --json    # and report it with this output"


@dataclass
class Report:
    """All findings of one rank."""

    rank: int
    host: str
    findings: list[Finding]


@dataclass(frozen=True)
class Merged:
    """A finding that some ranks share."""

    finding: Finding
    ranks: list[int]
    where: str
    """Which nodes or ranks; empty: all that were checked."""


def merge(reports: Sequence[Report]) -> list[Merged]:
    """Merge equal findings of several ranks, in their original order."""
    groups: dict[Finding, list[Report]] = {}
    for report in reports:
        for finding in dict.fromkeys(report.findings):
            groups.setdefault(finding, []).append(report)
    names = list(dict.fromkeys(finding.name for finding in groups))
    merged = []
    for finding in sorted(groups, key=lambda it: names.index(it.name)):
        asked = [report for report in reports if any(it.name == finding.name for it in report.findings)]
        having, values = groups[finding], {it.value for it in groups if it.name == finding.name}
        if finding.same and len(values) > 1 and finding.level == "OK":
            finding = replace(finding, level="WARN", expected="the same on all ranks", remedy="make setup")
        merged.append(Merged(finding, [it.rank for it in having], _where(having, asked)))
    return merged


def _where(having: Sequence[Report], asked: Sequence[Report]) -> str:
    if len(having) == len(asked):
        return ""
    hosts = list(dict.fromkeys(it.host for it in having))
    if len(having) == sum(it.host in hosts for it in asked):
        return f"node{'s' * (len(hosts) > 1)} {', '.join(hosts)}"
    return name_ranks([it.rank for it in having])


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level among findings."""
    levels = {it.level for it in findings}
    return "FAIL" if "FAIL" in levels else "WARN" if "WARN" in levels else "OK"


def show(merged: Sequence[Merged], title: str, seconds: float) -> None:
    """Print the findings: a line each, and below a problem the expected value and the command to type."""
    width = max((len(it.finding.name) for it in merged), default=0)
    lines = [styled(f"doctor: {title}")]
    for it in merged:
        value = it.finding.value + (f"  ({it.where})" if it.where else "")
        level, name = it.finding.level, it.finding.name
        lines.append(styled(f"{level:<6}", STYLES[level]) + styled(f"{name:<{width}}  {value}"))
        below = {"expected": it.finding.expected, "type": it.finding.remedy}
        lines += [styled(f"      {word:<{width}}  {text}") for word, text in below.items() if text]
    counts = [f"{sum(it.finding.level == level for it in merged)} {level}" for level in STYLES]
    lines.append(styled(f"{', '.join(counts)} in {seconds:.1f} s"))
    Console(highlight=False, soft_wrap=True).print(*lines, sep="\n")  # commands to type stay on one line


def as_json(merged: Sequence[Merged], title: str, seconds: float) -> str:
    """The findings for programs."""
    rows = [{**asdict(it.finding), "ranks": it.ranks, "where": it.where} for it in merged]
    for row in rows:
        del row["same"]
    level = worst(it.finding for it in merged)
    return json.dumps({"level": level, "about": title, "seconds": round(seconds, 2), "findings": rows}, indent=2)
