"""How a run continues: the newest complete state of any node is loaded on all ranks."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..common.display import near
from ..common.errors import EndedForGood, Refusal
from ..common.files import folder_locked
from ..common.memory import is_out_of_memory
from ..common.phases import START_UP, activity
from ..config import Config
from ..distributed.world import World
from ..resilience.memory_checkpoint import rank_memory
from ..resilience.memory_offers import Offer, offer, open_first
from ..training.state import State
from .checkpoint import WRITER_TIMEOUT, Checkpoints
from .fingerprint import Differences, compare_bits
from .manifest import Manifest, Provenance, manifest_of
from .saver import Saver
from .sharded_saver import ShardedSaver
from .state_files import DAMAGED, entries
from .weights import misfit

log = logging.getLogger(__name__)


class Resumed(NamedTuple):
    """How a run continues."""

    unevaluated: bool
    """Whether the state was saved without an evaluation of it."""
    other_bits: Differences
    """In what this attempt's bits may differ from those before."""
    other_best: str
    """A line if another metric decides now which checkpoint is best; else ""."""


def resume(config: Config, world: World, checkpoints: Checkpoints, state: State, saver: Saver) -> Resumed:
    """Load the newest state of any node into this one, if there is any. Every rank calls it; the holder of the state
    reads, all receive.

    No shared file system is needed: after the loss of a node the newest state may be on any other. Ranks that start
    again in place usually find it in the memory of their own machine; with --shard, in their saver's slots.

    Args:
        config: the options.
        world: the ranks that go on; the process group exists.
        checkpoints: of the run on this node; their provenance is completed.
        state: is loaded.
        saver: writes this run's checkpoints.

    Raises:
        EndedForGood: it does not fit this model.
        Refusal: on all ranks: every checkpoint is damaged; there is none, and the file of --init-from is missing; or,
            with --strict-bits, as :func:`compare_bits`.
    """
    if state.sharding:
        from .sharded_resume import newest_rows  # imports FSDP2

        assert isinstance(saver, ShardedSaver)
        manifest, saved = newest_rows(world, state.sharding, saver, config.replicate > 0)
    else:
        manifest, saved = _newest(world, checkpoints)
    other_bits = _compare_bits(config, world, checkpoints.provenance, manifest)
    other_best = ""
    if manifest:
        _restore(state, saved, checkpoints.folder.parent)
        other_best = state.stopping.resume_from(manifest.best_by)
    else:
        _check_may_begin(config, world, checkpoints.folder, sharded=bool(state.sharding))
    checkpoints.provenance.best_by = state.stopping.best_by
    rank_memory.discard_previous()
    activity.enter(START_UP, "first step")
    return Resumed(bool(manifest and not manifest.metrics), other_bits, other_best)


def _check_may_begin(config: Config, world: World, folder: Path, sharded: bool) -> None:
    """A run without a checkpoint begins at step 0; refuse if it had one, or if its first weights are missing."""
    damaged = world.all_gather(next(map(str, entries(folder, f"{DAMAGED}*")), ""))
    if first := next(filter(None, damaged), ""):
        raise Refusal(
            f"{near(folder.parent)}: every checkpoint is damaged (set aside, such as {near(Path(first))}); copy a "
            f"whole one into {near(folder)}, or start over with --fresh"
        )
    if path := config.init_from:
        found = world.all_gather(path.exists())
        if not all(found[:1] if sharded else found):  # with --shard rank 0 reads it for all
            raise Refusal(f"--init-from {path}: no such file or folder, and the run has no checkpoint")


def _newest(world: World, checkpoints: Checkpoints) -> tuple[Manifest | None, dict[str, Any]]:
    """The newest complete state of any node, and its manifest; None if there is none. The same on all ranks."""
    first_of_node, run_id = world.local_rank == 0, checkpoints.provenance.run_id
    while True:  # until one is whole: a damaged one is set aside
        offers = world.all_gather(offer(rank_memory.previous(run_id)))
        if first_of_node and not any(offers):  # what keepers' children still write is offered too
            _await_writer(checkpoints.folder)
        on_disk = world.all_gather(checkpoints.newest_named_step() if first_of_node else 0)
        newest = max([*on_disk, *(it.step for it in offers if it)])
        if newest == 0:
            return None, {}
        activity.enter(START_UP, "resuming")
        in_memory = [it if it and it.step == newest else None for it in offers]
        if any(in_memory):
            manifest, saved = _from_memory(world, in_memory, run_id)
        else:
            manifest, saved = _from_disk(world, checkpoints, newest, on_disk.index(newest))  # the index is a rank
        if manifest:
            return manifest, saved


def _await_writer(folder: Path) -> None:
    """Wait for a process that an earlier attempt has left and that still writes."""
    if not folder.exists():
        return
    with folder_locked(folder, kind=fcntl.LOCK_SH) as free:
        if free:
            return
    log.warning("a process of an earlier attempt is still writing to %s; waiting for it", folder)
    with folder_locked(folder, time.monotonic() + WRITER_TIMEOUT, fcntl.LOCK_SH):
        pass


def _compare_bits(config: Config, world: World, provenance: Provenance, manifest: Manifest | None) -> Differences:
    """Compare the bits as :func:`compare_bits`, and set what later manifests say: rank 0's fingerprint, and from which
    step they may differ."""
    present = world.all_gather(provenance.fingerprint)
    found = compare_bits(present, manifest, config.strict_bits)
    step, void_from = (manifest.step, manifest.bits_void_from) if manifest else (0, None)
    if found and void_from is None:
        void_from = step
    provenance.fingerprint, provenance.bits_void_from = present[0], void_from
    return found


def _from_disk(
    world: World, checkpoints: Checkpoints, newest: int, holder: int
) -> tuple[Manifest | None, dict[str, Any]]:
    """The checkpoint of this step, which one rank reads; None if it is damaged. The same on all ranks."""
    # do not fall back to an older one here: another node may have a newer one
    saved = checkpoints.load_newest(step=newest) if world.rank == holder else None
    manifest = world.broadcast(checkpoints.newest_manifest(step=newest) if saved else None, holder)
    return manifest, world.broadcast_tensors(saved, holder) if manifest else {}


def _from_memory(world: World, offers: Sequence[Offer | None], run_id: str) -> tuple[Manifest | None, dict[str, Any]]:
    """The state that ranks have stored in memory, and its manifest. The same on all ranks."""
    holder = next(rank for rank, found in enumerate(offers) if found)
    mine = rank_memory.previous(run_id) if offers[world.rank] else None
    file = Path(mine.path).open("rb") if mine else open_first(filter(None, offers))  # noqa: SIM115
    everywhere = all(world.all_gather(file is not None))
    how = "read it" if everywhere else f"received it from rank {holder}"
    saved: dict[str, Any] = {}
    with file or contextlib.nullcontext():
        if file and (everywhere or world.rank == holder):
            saved = torch.load(f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True)
    if not everywhere:  # a machine has none
        saved = world.broadcast_tensors(saved, holder)
    label = world.broadcast(mine.label if mine and world.rank == holder else None, holder)
    assert label
    log.info("continuing from step %d, which was in memory: %s", saved["step"], how)
    return manifest_of(label), saved


def _restore(state: State, saved: dict[str, Any], run_dir: Path) -> None:
    try:
        state.restore(saved)
    except (RuntimeError, ValueError, LookupError) as error:
        if is_out_of_memory(error):
            raise
        what = misfit(error, state.model, saved["model"])
        raise EndedForGood(
            f"{run_dir}: its state of step {saved['step']} does not fit this model and its optimizers ({what}); "
            "restore the code that made it, name another --run-dir, or start over with --fresh"
        ) from error
