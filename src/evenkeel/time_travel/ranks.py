"""`replay --ranks N`: torchrun starts N processes that replay together; the first writes what they have found."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from ..common.errors import REFUSED, Ended, Refusal
from ..common.files import read_json, write_json
from ..common.network import Link
from ..distributed.exits import exit_code
from ..launch.topology import Topology, torchrun
from ..run.records import read_config
from .replay import Replay, function_of, prepared, replay_in


def replay_on(
    ranks: int,
    run_dir: Path,
    first: int,
    last: int,
    script: Path,
    words: list[str],
    python: str = "",
    save_samples: Path | None = None,
) -> Replay:
    """As `replay`, on so many processes of this machine. `python`: FILE:FUNCTION, which each of them calls.

    Raises:
        Refusal, Ended: as `replay`; with the line of a rank.
    """
    with prepared(run_dir, last, first - 1) as folder:
        if read_config(folder / "config.toml").get("shard") == "on":  # each rank looks at its own number of passes
            raise Refusal(
                f"--ranks {ranks}: one process replays a run with --shard on, with the same bits; leave it out"
            )
        write_json(folder / "asked.json", {
            "run_dir": str(run_dir), "first": first, "last": last, "script": str(script), "words": words,
            "python": python, "save_samples": str(save_samples or ""),
        })  # fmt: skip
        (folder / "__main__.py").write_text(f"from {__name__} import run\nrun()\n")
        topology = Topology(ranks, max_restarts=0)
        command = torchrun(topology, Link("127.0.0.1"), folder / "__main__.py", [str(folder)])
        done = subprocess.run(
            command.argv, env={**os.environ, **command.env}, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("evenkeel: ")]
            kind = Refusal if done.returncode == REFUSED else Ended
            raise kind(said[0].removeprefix("evenkeel: ") if said else f"--ranks {ranks}: {done.stderr[-2000:]}")
        return Replay(**read_json(folder / "found.json"))


def run() -> None:
    """One rank; ends the process."""
    sys.exit(exit_code(_replay))


def _replay() -> int:
    folder = Path(sys.argv[1])
    asked = read_json(folder / "asked.json")
    saved, visit = asked["save_samples"], function_of(asked["python"])
    found = replay_in(
        folder, Path(asked["run_dir"]), asked["first"], asked["last"], Path(asked["script"]), asked["words"], visit,
        Path(saved) if saved else None,
    )  # fmt: skip
    if os.environ["RANK"] == "0":
        write_json(folder / "found.json", {name: it for name, it in asdict(found).items() if name != "again"})
    return 0
