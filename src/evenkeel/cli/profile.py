"""`python -m evenkeel profile`: merge the traces of a run's ranks onto one clock.

Each trace holds its rank's name, and by how much its clock is ahead of rank 0's (`run/profiling.py`). Does not import
torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..common.display import say
from ..common.errors import Refusal
from ..common.files import write_atomically
from ..common.naming import name_ranks
from ..config import MaybePath

FACTS = "evenkeel"
"""The key of our facts in a trace."""

PIDS = 100
"""Maximum number of rows of a rank in the merged trace: its process and its GPUs."""

Trace = dict[str, Any]
"""Chrome's Trace Event Format; `ts` and `dur` of its "traceEvents" are in microseconds."""


@dataclass(frozen=True)
class ProfileCommand:
    """Merge the ranks' traces of train.py --profile onto one clock.

    Example: python -m evenkeel profile runs/classify

    Open the result in https://ui.perfetto.dev or chrome://tracing. Each rank is a process there: "rank 3 (node b)".
    """

    run: tyro.conf.Positional[Path]
    """The run directory."""
    output: MaybePath = None
    """File to write. Default: profile/merged.json in the run directory."""

    def __call__(self) -> int:
        """Write the merged trace and print what it contains."""
        if self.output and self.output.exists():
            raise Refusal(f"--output {self.output}: exists already; name another file")
        traces, older = newest(read_traces(self.run / "profile"))
        output = self.output or self.run / "profile" / "merged.json"
        text = json.dumps(merged(traces)).encode()
        try:
            write_atomically(output, lambda file: file.write(text))
        except OSError as error:
            raise Refusal(f"--output {output}: {error.strerror}") from None
        first = traces[0][FACTS]
        say(f"{name_ranks([each[FACTS]['rank'] for each in traces])}, steps {first['steps']} -> {output}")
        for host, ahead in {each[FACTS]["host"]: each[FACTS]["clock_ahead_ns"] for each in traces}.items():
            if ahead:
                say(f"the clock of {host} is corrected by {-ahead / 1e6:+.3f} ms")
        if older:
            say(f"left out: {', '.join(older)}, from another window")
        if absent := sorted(set(range(first["world_size"])) - {each[FACTS]["rank"] for each in traces}):
            say(f"no trace of {name_ranks(absent)}; copy it here from the disk of their node")
        say("open it in https://ui.perfetto.dev or chrome://tracing")
        return 0


def read_traces(folder: Path) -> dict[str, Trace]:
    """The ranks' traces by file name, in the order of ranks.

    Raises:
        Refusal: there is none, or one was not written by train.py.
    """
    found = {int(name[1]): path for path in folder.glob("*") if (name := re.fullmatch(r"rank-(\d+)\.json", path.name))}
    if not found:
        raise Refusal(f"{folder}: no traces there; make some with train.py --profile 20:25")
    return {found[rank].name: _read(found[rank]) for rank in sorted(found)}


def _read(path: Path) -> Trace:
    try:
        trace: Trace = json.loads(path.read_bytes())
        facts = trace[FACTS]
        good = isinstance(trace["traceEvents"], list) and type(trace["baseTimeNanoseconds"]) is int
        numbers = all(type(facts[name]) is int for name in ("rank", "world_size", "clock_ahead_ns", "session"))
        if not (good and numbers and isinstance(facts["host"], str) and isinstance(facts["steps"], str)):
            raise ValueError("its facts were changed")
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Refusal(f"{path}: not a trace of train.py --profile: {str(error)[:80]}") from None
    return trace


def newest(traces: dict[str, Trace]) -> tuple[list[Trace], list[str]]:
    """The traces of the newest window, by rank 0's clock, and the names of the others."""
    last = max(trace[FACTS]["session"] for trace in traces.values())
    chosen = {name: trace for name, trace in traces.items() if trace[FACTS]["session"] == last}
    return list(chosen.values()), [name for name in traces if name not in chosen]


def merged(traces: list[Trace]) -> Trace:
    """One trace, whose time 0 is the first event of all, on rank 0's clock."""
    shifts = {}
    for trace in traces:
        facts, since = trace[FACTS], trace["baseTimeNanoseconds"] - traces[0]["baseTimeNanoseconds"]
        shifts[facts["rank"]] = (since - facts["clock_ahead_ns"]) / 1000
    events = [event for trace in traces for event in _of_rank(trace, shifts[trace[FACTS]["rank"]])]
    zero = min((event["ts"] for event in events if "ts" in event and event["ph"] != "M"), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = max(0.0, round(event["ts"] - zero, 3))
    return {"displayTimeUnit": "ms", "traceEvents": events, FACTS: [trace[FACTS] for trace in traces]}


def _of_rank(trace: Trace, shift: float) -> Iterable[dict[str, Any]]:
    """The events of a rank on the common clock, with pids and ids that no other rank has."""
    rank, host, events = trace[FACTS]["rank"], trace[FACTS]["host"], trace["traceEvents"]
    used = list(dict.fromkeys(e["pid"] for e in events if e.get("ph") != "M" and type(e.get("pid")) is int))
    labels = {e["pid"]: e["args"].get("labels", "") for e in events if e.get("name") == "process_labels"}
    used.sort(key=lambda pid: labels.get(pid) != "CPU")  # the process first, then its GPUs
    pids = {pid: rank * PIDS + row for row, pid in enumerate(used)}
    for pid, new in pids.items():
        name = f"rank {rank} (node {host})" + (f" {labels.get(pid, '')}" if new % PIDS else "")
        yield {"ph": "M", "name": "process_name", "pid": new, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": new, "tid": 0, "args": {"sort_index": new}}
    for event in events:
        pid = event.get("pid")
        if type(pid) is not int or pid not in pids or str(event.get("name")).startswith("process_"):
            continue
        flow = {"id": f"{rank}.{event['id']}"} if "id" in event else {}
        time = {"ts": event["ts"] + shift} if "ts" in event else {}
        yield event | {"pid": pids[pid]} | flow | time
