"""Check that all ranks, and all starts of a run, read the same samples in the same order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..common.display import near
from ..common.errors import Ended, Refusal
from ..common.phases import CHECKPOINT, activity
from ..config import Config
from ..data import data_digest
from ..data.changes import Changes
from ..data.data_digest import CLOSE, OFTEN, ONCE, TRAINING, TWICE, Digest, Digests, alike, difference
from ..data.dataset import SizedDataset
from ..data.order import Listed, order_name, order_of
from ..distributed.world import World
from .identity import refuse_other_data, refuse_other_order

log = logging.getLogger(__name__)


class RankData(NamedTuple):
    """The facts of one rank that ranks compare."""

    samples: dict[str, int]
    order: str
    changed_epoch: str  # the epoch whose order differs from what the run has used; "" if none does
    digests: Digests
    accepts_difference: bool  # the rank's --other-data


class DataCheck:
    """The data of this rank, compared with that of other ranks, of earlier starts, and with itself as the job goes on.

    Args:
        config: the options.
        path: the run directory, for messages.
        world: whose ranks are compared.
        samples: of the training data.
        sets: the training data and those of the evaluation, by name; without any nothing is read.
    """

    def __init__(
        self, config: Config, path: Path, world: World, samples: int, sets: Mapping[str, SizedDataset]
    ) -> None:
        self._config, self._path, self._world, self._sets = config, path, world, sets
        self.samples = {TRAINING: samples} | {name: len(dataset) for name, dataset in sets.items()}
        self.order = order_name(sets[TRAINING]) if TRAINING in sets else ""
        listed = order_of(sets[TRAINING]) if TRAINING in sets else None
        self._listed = listed if isinstance(listed, Listed) else None
        self.digests: Digests = {}
        self._unsteady: list[str] = []
        self._accepted_difference = ""
        self._changes: Changes | None = None

    def read_digests(self, known: Mapping[str, Any]) -> None:
        """Read a few samples of each set: once if the run ``known`` here has digests of all, else twice, to find
        samples that differ at each read."""
        self._read(ONCE if known.get("digests", {}).keys() >= self.samples.keys() else TWICE)

    def _read(self, times: int) -> None:
        if self._sets:
            self.digests, self._unsteady = data_digest.digest_samples(self._config, self._sets, times)

    def compare(self, before: Mapping[str, Any]) -> None:
        """Compare with the other ranks, and with the run's status ``before``. So far each node has read its own data.

        Raises:
            Refusal: on all ranks, if samples or their order differ.
        """
        mine = RankData(self.samples, self.order, self._changed_order(before), self.digests, self._config.other_data)
        everywhere = self._world.all_gather(mine)
        for rank, there in enumerate(everywhere):
            self._refuse_other(before, everywhere[0], rank, there)
        known = before.get("digests", {})
        if difference(known, [there.digests for there in everywhere]):
            self._read(OFTEN)  # samples that are random at each read are sometimes the same twice
            self._accepted_difference = difference(known, self._world.all_gather(self.digests))
            if self._accepted_difference and not any(there.accepts_difference for there in everywhere):
                raise Refusal(f"--run-dir {near(self._path)}: {self._accepted_difference}")
        self.digests = {**known, **self.digests}

    def _refuse_other(self, before: Mapping[str, Any], first: RankData, rank: int, there: RankData) -> None:
        """Refuse if a rank has other samples, or another order of them, than the run so far or than the first rank."""
        refuse_other_data(self._path, before.get("samples", {}), there.samples)
        refuse_other_order(self._path, before, there.order)
        if there.order != first.order:
            raise Refusal(
                f"the training data is read in {first.order or 'the usual order'} on rank 0 and in "
                f"{there.order or 'the usual order'} on rank {rank}; give all nodes the same index, and let "
                "sample_weights() and order() return the same on all ranks"
            )
        if there.changed_epoch:
            raise Refusal(
                f"--run-dir {near(self._path)}: order({there.changed_epoch}) is not what it was when the run was in "
                "that epoch, so that some samples would come twice; let it return the same at every start, name "
                "another folder, or start over with --fresh"
            )
        for part in first.samples | there.samples:
            if (expected := first.samples.get(part, 0)) != (number := there.samples.get(part, 0)):
                raise Refusal(
                    f"the {part} data has {expected} samples on rank 0 and {number} on rank {rank}; "
                    "give all nodes the same data"
                )

    def _changed_order(self, before: Mapping[str, Any]) -> str:
        """The epoch that the run was in, if the task lists another order for it now: a part of it has been trained on;
        else empty."""
        if not self._listed or before.get("order") != self.order:
            return ""
        known = {epoch: digest for epoch, digest in before.get("orders", {}).items() if epoch.isdecimal()}
        return next((epoch for epoch, digest in known.items() if self._listed.digest(int(epoch)) != digest), "")

    def compare_order(self, epoch: int) -> str:
        """Compare the order that the task lists for an epoch with other ranks'; its digest, empty if there is none.

        Raises:
            Ended: on all ranks: another rank has another order.
        """
        if not self._listed:
            return ""
        digests = self._world.all_gather(self._listed.digest(epoch))
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)
        if other:
            raise Ended(
                f"order({epoch}) is one order on rank 0 and another on rank {other}, so that some samples would come "
                "twice; make it of the epoch alone, or draw from torch's, NumPy's or Python's global generator"
            )
        return digests[0]

    def warning(self) -> str:
        """A warning about the data; empty if nothing is wrong."""
        if self._accepted_difference:
            return f"--other-data: {self._accepted_difference.partition(';')[0]}"
        if not self._unsteady:
            return ""
        return (
            f"the {' and '.join(self._unsteady)} data differs each time that it is read: it draws from a generator "
            "of its own, so a run cannot be repeated, nor its data be compared with that of other ranks and starts; "
            "draw from torch's, NumPy's or Python's global generator, which are seeded for each sample"
        )

    def watch(self) -> None:
        """Begin to watch for data that changes, which :meth:`refuse_changed` finds."""
        self._changes = Changes(self._config, self._sets, self.digests)

    def refreshed(self, epoch: int, dataset: SizedDataset, before: Digest | None) -> Digest | None:
        """Compare data that the task has made for an epoch, which is now the training data, with other ranks'.

        Args:
            epoch: for which it was made.
            dataset: the data.
            before: its digest when it was made for the first time, if that was before.

        Returns:
            Its digest, None if it cannot be compared.

        Raises:
            Ended: on all ranks: it differs; or `refresh` has changed the earlier data in place.
        """
        self.refuse_changed()
        with activity.during(CHECKPOINT):
            for times in (TWICE, OFTEN):  # samples that are random at each read are sometimes the same twice
                found = data_digest.digest_samples(self._config, {TRAINING: dataset}, times)[0]
                everywhere = self._world.all_gather(data_digest.of_tensors(dataset) or found.get(TRAINING))
                if not (problem := _refresh_difference(epoch, before, everywhere)):
                    break
        if problem and not any(self._world.all_gather(self._config.other_data)):
            raise Ended(problem)
        if problem and self._changes:
            log.warning("--other-data: %s", problem.partition(";")[0])
        if self._changes:
            others = {name: it for name, it in self.digests.items() if name != TRAINING}
            self._changes = Changes(self._config, {**self._sets, TRAINING: dataset}, {**others, **found})
        return None if problem else everywhere[0]

    def refuse_changed(self) -> None:
        """End the run on all ranks if data has changed since :meth:`watch`; with --other-data warn, once."""
        if not self._changes:
            return
        with activity.during(CHECKPOINT):
            everywhere = self._world.all_gather((self._changes(), self._config.other_data))
        if not (changed := next(filter(None, (line for line, _ in everywhere)), "")):
            return
        if not any(accepted for _, accepted in everywhere):
            raise Ended(
                f"{changed}: its result then depends on the ranks and on --num-workers, and a stop loses the change; "
                "let refresh(model, epoch) make the data (docs/tasks.md), or start another run for other data "
                "(--init-from), or, if you accept that, add --other-data"
            )
        self._changes = None
        log.warning("--other-data: %s", changed)


def _refresh_difference(epoch: int, before: Digest | None, everywhere: Sequence[Digest | None]) -> str:
    """Say in a line that a rank has made other data for an epoch than rank 0, or than `before`; else empty."""
    remedy = (
        "make it of the model, the epoch, the task's state_dict() and torch's, NumPy's or Python's global generator "
        "alone, or add --other-data"
    )
    for rank, digest in enumerate(everywhere):
        if digest and everywhere[0] and not alike(digest, everywhere[0]):
            return f"refresh() made other data for epoch {epoch} on rank {rank} than on rank 0; {remedy}"
        if digest and before and not alike(digest, before, CLOSE):
            return f"refresh() made other data for epoch {epoch} than when that epoch began; {remedy}"
    return ""
