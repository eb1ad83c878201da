"""The last collectives of each rank after a hang, from torch's flight recorder, and the verdict of `torchfrtrace`.

torch records the last TORCH_FR_BUFFER_SIZE collectives of a process, for each backend. A rank that hangs writes its
own twice: as JSON for people, and as the pickle that `torchfrtrace` reads, in a folder for each backend. The analysis
compares the ranks: which one has not joined a collective, or has joined with another size or type.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..common.naming import name_ranks

GENERAL, NCCL = "_dump_fr_trace", "_dump_nccl_trace"
DUMPS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo": (GENERAL, {}),
    "nccl": (NCCL, {}),
    "nccl2": (GENERAL, {"backend": "nccl2"}),
}
"""The dump function of each backend's recorder: "nccl" has a recorder of its own, or since torch 2.15 uses the general
one."""

PREFIX = "rank-"
"""Prefix of the file names for `torchfrtrace`; the rank follows."""

WAIT = 2.0
"""Seconds to wait for the files of other ranks. The state is saved by then, but nothing restarts before."""

COMPARED = 200
"""How many of each rank's last collectives are compared; all would take a second for every five ranks."""


def taken(*backends: str) -> dict[str, dict[str, Any]]:
    """This rank's last collectives for each of these backends (none: for all) that has recorded something."""
    traces = {name: _dump(*DUMPS[name]) for name in backends or DUMPS}
    return {name: trace for name, trace in traces.items() if trace.get("entries")}


def write(traces: dict[str, dict[str, Any]], folder: Path, rank: int) -> None:
    """Write ``BACKEND/rank-R`` for each backend."""
    for name, trace in traces.items():
        trace["pg_config"] = _groups() | {name: it for name, it in trace["pg_config"].items() if name}
        (folder / name).mkdir(parents=True, exist_ok=True)
        part = folder / f".{name}-{rank}"
        part.write_bytes(pickle.dumps(trace))
        part.replace(folder / name / f"{PREFIX}{rank}")


def _dump(how: str, which: dict[str, str]) -> dict[str, Any]:
    try:
        return dict(pickle.loads(getattr(torch._C._distributed_c10d, how)(**which)))  # noqa: S301  (of this process)
    except (AttributeError, TypeError, EOFError):  # a build without NCCL, a release before 2.15, nothing recorded
        return {}


def _groups() -> dict[str, dict[str, str]]:
    """The process groups by name. torch 2.15 records gloo's without a name, and `torchfrtrace` then fails."""
    groups, ranks = dist.distributed_c10d._world.pg_map, dist.get_process_group_ranks
    return {
        it.group_name: {"name": it.group_name, "desc": it.group_desc, "ranks": str(sorted(ranks(it)))} for it in groups
    }


def verdicts(folder: Path, world_size: int, ranks: Collection[int]) -> list[str]:
    """The verdict of `torchfrtrace`, a line for each backend, once these ranks have written or after :data:`WAIT`.

    Args:
        folder: that :func:`write` has written into, in this attempt of the job only: reading a pickle runs code.
        world_size: of the job.
        ranks: that can write.
    """
    until = time.monotonic() + WAIT

    def written() -> list[Path]:
        return [folder / name for name in DUMPS if (folder / name).is_dir()]

    while time.monotonic() < until and not all((it / f"{PREFIX}{rank}").exists() for it in written() for rank in ranks):
        time.sleep(0.02)
    return [line for it in written() if (line := _verdict(it, world_size))]


def _verdict(folder: Path, world_size: int) -> str:
    recorder_log = logging.getLogger("Flight Recorder")
    silence = logging.Filter("nobody")  # it logs each collective on stderr
    recorder_log.addFilter(silence)
    try:
        from torch.distributed.flight_recorder.components.builder import build_db
        from torch.distributed.flight_recorder.components.config_manager import JobConfig
        from torch.distributed.flight_recorder.components.loader import read_dir

        arguments = JobConfig().parse_args([str(folder), "--allow-incomplete-ranks", "--prefix", PREFIX])
        details, version = read_dir(arguments)
        for it in details.values():
            it["entries"] = it["entries"][-COMPARED:]
        traces = {it["rank"]: it["entries"] for it in details.values()}
        if absent := set(range(world_size)) - traces.keys():
            return f"{name_ranks([*absent])} left no record here; {_waiting(traces)}; {folder}"
        found = [
            it
            for it in build_db(details, arguments, version).collectives
            if it.missing_ranks or it.mismatch_collectives
        ]
        return f"{_blame(found[0])}; torchfrtrace {folder}" if found else ""
    finally:
        recorder_log.removeFilter(silence)


def _blame(collective: Any) -> str:
    what = f"{collective.collective_name} {collective.collective_seq_id} of group {collective.pg_desc}"
    if collective.missing_ranks:
        return f"{name_ranks([*collective.missing_ranks])} did not join {what}"
    other = next(iter(collective.mismatch_collectives.values()))  # of one rank; the others may be the wrong ones
    return f"the ranks differ in {what}: {str(other.type_of_mismatch).removeprefix('Error type: ')}"


def _waiting(traces: dict[int, list[dict[str, Any]]]) -> str:
    """What ranks wait for: the first unfinished collective of each."""
    pending: dict[str, list[int]] = {}
    for rank, entries in traces.items():
        first = next((it for it in entries if not it["retired"]), None)
        what = f"{first['profiling_name']} {first['collective_seq_id']}" if first else "nothing"
        pending.setdefault(what, []).append(rank)
    return ", ".join(f"{name_ranks(ranks)} in {what}" for what, ranks in pending.items())
