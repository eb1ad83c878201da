"""`replay --ranks N`: torchrun starts N processes that replay together; the first writes what they have found."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

from ..common.errors import REFUSED, Ended, Refusal
from ..common.network import Link
from ..distributed.exits import exit_code
from ..launch.topology import Topology, torchrun
from ..run.records import read_config
from .replay import Asked, Replay, function_of, prepared, replay_in


def replay_on(ranks: int, asked: Asked, python: str = "") -> Replay:
    """As `replay`, on so many processes of this machine. `python`: FILE:FUNCTION, which each of them calls.

    Raises:
        Refusal, Ended: as `replay`; with the line of a rank.
    """
    with prepared(asked) as (folder, reason):
        if (shard := read_config(folder / "config.toml").get("shard", "off")) != "off":  # passes depend on the ranks
            raise Refusal(
                f"--ranks {ranks}: one process replays a run with --shard {shard}, with the same bits; leave it out"
            )
        (folder / "asked").write_bytes(pickle.dumps((asked, python)))
        (folder / "__main__.py").write_text(f"from {__name__} import run\nrun()\n")
        topology = Topology(ranks, max_restarts=0)
        command = torchrun(topology, Link("127.0.0.1"), folder / "__main__.py", [str(folder)])
        done = subprocess.run(
            command.argv, env={**os.environ, **command.env}, capture_output=True, text=True, errors="replace"
        )
        if done.returncode:
            kind, why = Refusal if done.returncode == REFUSED else Ended, folder / "why"
            cause = why.read_text(encoding="utf-8") if why.exists() else ""
            raise kind(cause or f"--ranks {ranks}: {done.stderr[-2000:]}")
        found: Replay = pickle.loads((folder / "found").read_bytes())  # noqa: S301  # its ranks wrote it
        return found.noting(reason)


def run() -> None:
    """One rank; ends the process."""
    sys.exit(exit_code(_replay))


def _replay() -> int:
    folder = Path(sys.argv[1])
    asked, python = pickle.loads((folder / "asked").read_bytes())  # noqa: S301  # as above
    try:
        found = replay_in(folder, asked, function_of(python))
    except Exception as error:
        name = "" if isinstance(error, Ended | Refusal) else f"{type(error).__name__}: "
        with contextlib.suppress(FileExistsError), (folder / "why").open("xb") as file:  # the first one is the cause
            file.write(f"{name}{error}".encode(errors="backslashreplace"))
        raise
    if os.environ["RANK"] == "0":
        (folder / "found").write_bytes(pickle.dumps(found))
    return 0
