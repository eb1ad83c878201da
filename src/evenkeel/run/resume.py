"""How a run continues: the newest complete state of any node is loaded on all ranks."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from .manifest import Manifest, manifest_of
from .saver import Saver
from .sharded_saver import ShardedSaver
from .state_files import DAMAGED, entries
from .weights import misfit

log = logging.getLogger(__name__)


class Resume:
    """Loads the newest complete state of any node. Every rank makes one; the holder of the state reads, all receive.

    Args:
        config: the options.
        world: the ranks that go on; the process group exists.
        checkpoints: of the run on this node; it completes their provenance.

    Attributes:
        unevaluated: whether the state was saved without an evaluation of it.
        other_bits: in what this attempt's bits may differ from those before.
        other_best: a line if another metric decides now which checkpoint is best.
    """

    def __init__(self, config: Config, world: World, checkpoints: Checkpoints) -> None:
        assert config.run_dir is not None  # resolved
        self._config, self._world, self._checkpoints, self._path = config, world, checkpoints, config.run_dir
        self._provenance, self.unevaluated = checkpoints.provenance, False
        self.other_bits: Differences = {}
        self.other_best = ""

    def load(self, state: State, saver: Saver) -> None:
        """Load the newest state into this one, if there is any.

        No shared file system is needed: after the loss of a node the newest state may be on any other. Ranks that start
        again in place usually find it in the memory of their own machine; with --shard, in their saver's slots.

        Raises:
            EndedForGood: it does not fit this model.
            Refusal: on all ranks: every checkpoint is damaged; there is none, and the file of --init-from is missing;
                or, with --strict-bits, as :func:`compare_bits`.
        """
        if state.sharding:
            from .sharded_resume import newest_rows  # imports FSDP2

            assert isinstance(saver, ShardedSaver)
            manifest, saved = newest_rows(self._world, state.sharding, saver, self._config.replicate > 0)
        else:
            manifest, saved = self._newest()
        self._compare_bits(manifest)
        if manifest:
            self._restore(state, saved)
            self.unevaluated = not manifest.metrics
            self.other_best = state.stopping.resume_from(manifest.best_by)
        else:
            self._check_may_begin(sharded=bool(state.sharding))
        self._provenance.best_by = state.stopping.best_by
        rank_memory.discard_previous()
        activity.enter(START_UP, "first step")

    def _check_may_begin(self, sharded: bool) -> None:
        """A run without a checkpoint begins at step 0; refuse if it had one, or if its first weights are missing."""
        damaged = self._world.all_gather(next(map(str, entries(self._checkpoints.folder, f"{DAMAGED}*")), ""))
        if first := next(filter(None, damaged), ""):
            raise Refusal(
                f"{near(self._path)}: every checkpoint is damaged (set aside, such as {near(Path(first))}); copy a "
                f"whole one into {near(self._checkpoints.folder)}, or start over with --fresh"
            )
        if path := self._config.init_from:
            found = self._world.all_gather(path.exists())
            if not all(found[:1] if sharded else found):  # with --shard rank 0 reads it for all
                raise Refusal(f"--init-from {path}: no such file or folder, and the run has no checkpoint")

    def _newest(self) -> tuple[Manifest | None, dict[str, Any]]:
        """The newest complete state of any node, and its manifest; None if there is none. The same on all ranks."""
        first_of_node = self._world.local_rank == 0
        while True:  # until one is whole: a damaged one is set aside
            offers = self._world.all_gather(offer(rank_memory.previous(self._provenance.run_id)))
            if first_of_node and not any(offers):  # what children of keepers write is among the offers
                self._await_writer()
            on_disk = self._world.all_gather(self._checkpoints.newest_named_step() if first_of_node else 0)
            newest = max([*on_disk, *(offer.step for offer in offers if offer)])
            if newest == 0:
                return None, {}
            activity.enter(START_UP, "resuming")
            in_memory = [offer if offer and offer.step == newest else None for offer in offers]
            if any(in_memory):
                manifest, saved = self._from_memory(in_memory)
            else:
                manifest, saved = self._from_disk(newest, on_disk.index(newest))  # the index is a rank
            if manifest:
                return manifest, saved

    def _await_writer(self) -> None:
        """Wait for a process that an earlier attempt has left and that still writes."""
        if not (folder := self._checkpoints.folder).exists():
            return
        with folder_locked(folder, kind=fcntl.LOCK_SH) as free:
            if free:
                return
        log.warning("a process of an earlier attempt is still writing to %s; waiting for it", folder)
        with folder_locked(folder, time.monotonic() + WRITER_TIMEOUT, fcntl.LOCK_SH):
            pass

    def _compare_bits(self, manifest: Manifest | None) -> None:
        """Compare the bits as :func:`compare_bits`, and set what later manifests say: rank 0's fingerprint, and from
        which step they may differ."""
        present = self._world.all_gather(self._provenance.fingerprint)
        self.other_bits = compare_bits(present, manifest, self._config.strict_bits)
        step, void_from = (manifest.step, manifest.bits_void_from) if manifest else (0, None)
        if self.other_bits and void_from is None:
            void_from = step
        self._provenance.fingerprint, self._provenance.bits_void_from = present[0], void_from

    def _from_disk(self, newest: int, holder: int) -> tuple[Manifest | None, dict[str, Any]]:
        """The checkpoint of this step, which one rank reads; None if it is damaged. The same on all ranks."""
        # do not fall back to an older one here: another node may have a newer one
        saved = self._checkpoints.load_newest(step=newest) if self._world.rank == holder else None
        manifest = self._world.broadcast(self._checkpoints.newest_manifest(step=newest) if saved else None, holder)
        return manifest, self._world.broadcast_tensors(saved, holder) if manifest else {}

    def _from_memory(self, in_memory: Sequence[Offer | None]) -> tuple[Manifest | None, dict[str, Any]]:
        """The state that ranks have stored in memory, and its manifest. The same on all ranks."""
        world = self._world
        holder = next(rank for rank, offer in enumerate(in_memory) if offer)
        mine = rank_memory.previous(self._provenance.run_id) if in_memory[world.rank] else None
        file = Path(mine.path).open("rb") if mine else open_first(filter(None, in_memory))  # noqa: SIM115
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

    def _restore(self, state: State, saved: dict[str, Any]) -> None:
        try:
            state.restore(saved)
        except (RuntimeError, ValueError, LookupError) as error:
            if is_out_of_memory(error):
                raise
            what = misfit(error, state.model, saved["model"])
            raise EndedForGood(
                f"{self._path}: its state of step {saved['step']} does not fit this model and its optimizers ({what}); "
                "restore the code that made it, name another --run-dir, or start over with --fresh"
            ) from error
