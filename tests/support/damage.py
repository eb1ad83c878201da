"""Random damage to files of other people: JSON of wrong types and numbers, bytes that have changed or are gone."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

NUMBERS = [0, -1, -0.5, 1e-300, -1e9, 1e15, 2**31, 2**63, -(2**63), 1e300, math.nan, math.inf, -math.inf, 10**400, True]
TEXTS = ["", "\ud800", "\x1b[2J", "\x00", "../a", "a" * 300]
OTHERS = [None, *TEXTS, [], {}, [[]], [{}], {"a": []}, ["n", "n"], {"": -1.0}]


def damaged(value: Any, dice: random.Random) -> Any:
    """A JSON value with one change somewhere in it, of a number as a rule to another one."""
    if not isinstance(value, (dict, list)) or not value:
        numeric = isinstance(value, (int, float)) and dice.random() < 0.7
        return dice.choice(NUMBERS if numeric else [*NUMBERS, *OTHERS])
    copied: Any = value.copy()
    place = dice.choice([*value]) if isinstance(value, dict) else dice.randrange(len(value))
    kind = dice.random()
    if kind < 0.1:
        copied.pop(place)
    elif kind < 0.2 and isinstance(value, dict):
        copied[dice.choice(["\x1b[2Jx", "\ud800", "loss", "", "name"])] = dice.choice([*NUMBERS, *OTHERS])
    elif kind < 0.2:
        copied.insert(place, value[place])
    else:
        copied[place] = damaged(value[place], dice)
    return copied


def scratched(content: bytes, dice: random.Random) -> bytes:
    """Bytes of which a few have changed, or a part is gone or there twice; most of it where files have headers."""
    found = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 8])):
        at = dice.randrange(len(found)) if dice.random() < 0.5 else dice.randrange(min(len(found), 600))
        width, kind = dice.choice([1, 2, 4, 8]), dice.random()
        if kind < 0.4:
            found[at] ^= 1 << dice.randrange(8)
        elif kind < 0.7:
            number = dice.choice([0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1)])
            found[at : at + width] = number.to_bytes(width, "little")
        elif kind < 0.8:
            del found[max(1, at) :]
        elif kind < 0.9:
            del found[at + 1 : at + 1 + 8 * width]
        else:
            found[at:at] = found[at : at + 64 * width]
    return bytes(found)


def leave_damaged(run_dir: Path, whole: Path, dice: random.Random) -> None:
    """The records and the status of a run, with a second attempt and each kind of record, some of them damaged."""
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(whole, run_dir, ignore=shutil.ignore_patterns("checkpoints", "*.pt"))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][:9]
    more: list[dict[str, Any]] = [
        {"kind": "failure", "step": 9, "reason": "x"},
        {"kind": "start", "step": 9, "attempt": 2, "world_size": 4},
        {"kind": "digest", "step": 10, "digests": {"w": "ab"}},
        {"kind": "bits", "step": 10, "differences": {"threads": ["1", "2"]}},
        {"kind": "eval", "step": 10, "test/loss": 1.0, "epoch": 0.5},
        {"kind": "checkpoint", "step": 10},
    ]
    spent = {"start_up": 2.0, "productive": 1.0}
    records += [record | {"time": records[-1]["time"] + n, "spent": spent} for n, record in enumerate(more)]
    for place in dice.sample(range(len(records)), 3):
        records[place] = damaged(records[place], dice)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    status = json.loads((run_dir / "status.json").read_text()) | {"hints": {"a": "b"}, "goodput": 0.5}
    status["state"] = dice.choice(["running", "stopped", "failed"])
    (run_dir / "status.json").write_text(json.dumps(damaged(status, dice)))
