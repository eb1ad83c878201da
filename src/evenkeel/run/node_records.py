"""What the nodes have recorded of a run, which need share no disk: whether it goes on or starts over, and from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..common.display import near
from ..common.errors import Refusal
from ..distributed.world import World
from .earlier_run import has_trained, is_run, is_untrained, recorded_options
from .launch_token import is_restart, launch_token
from .records import read_facts
from .run_lock import in_use


class NodeRecords(NamedTuple):
    """The launch tokens of all ranks, and what the nodes have recorded of the run.

                                                     replaces_old_run  starts_over  statuses (status.json of nodes)
        a new run                                    no              no           none
        one that goes on                             no              no           of each node that has it
        --fresh, or untrained on all nodes           yes             yes          none
        the same, restarted by the same launch       yes             no           of each node where it has begun it

    So --fresh counts once for a launch (`is_restart`). Untrained: see `is_untrained`.
    """

    tokens: Sequence[str]
    replaces_old_run: bool
    starts_over: bool
    statuses: Sequence[dict[str, Any]]

    @property
    def newest(self) -> dict[str, Any]:
        """The newest status of any node, which says whether the run goes on or is over."""
        return max(self.statuses, key=_age, default={})

    @property
    def newest_with_cut(self) -> dict[str, Any]:
        """The newest that says how steps are cut; {}: none does."""
        return max((it for it in self.statuses if it.get("micro_batch")), key=_age, default={})


def gather_records(world: World, path: Path, fresh: bool, claimed: tuple[dict[str, Any], bool] | None) -> NodeRecords:
    """Gather from all nodes what they have recorded of the run in ``path``. All ranks call it.

    Args:
        fresh: --fresh was typed.
        claimed: on rank 0, the status of the folder that it has locked, and whether that run is untrained.

    Raises:
        Refusal: nodes have different runs there (:func:`_of_one_run`).
    """
    # of a rank that does not speak for its node: changes neither any() nor all()
    status, untrained, trained = dict[str, Any](), True, False
    if world.local_rank == 0:
        facts, untrained = claimed or (read_facts(path / "status.json")[0], is_untrained(path))
        status = recorded_options(path, untrained) | facts
        untrained |= not is_run(path)
        # on a shared disk this is rank 0's folder, which it has locked: no second record, whatever a stale cache shows
        trained = (claimed is not None or not in_use(path)) and has_trained(path, facts)
    known = world.all_gather((launch_token(), status, untrained, trained))
    tokens, statuses, untrained_at, trained_at = zip(*known, strict=True)
    begun_by_this_launch = [each for each in statuses if is_restart(each, tokens)]
    replaces_old_run = fresh or (any(statuses) and all(untrained_at))
    goes_on_from = begun_by_this_launch if replaces_old_run else _of_one_run(path, statuses, trained_at)
    return NodeRecords(tokens, replaces_old_run, replaces_old_run and not begun_by_this_launch, goes_on_from)


def _of_one_run(path: Path, statuses: Sequence[Mapping[str, Any]], trained: Sequence[bool]) -> list[dict[str, Any]]:
    """The statuses of the run that goes on, of the nodes that have one. If one has trained, those of another run are
    left out.

    Raises:
        Refusal: two nodes have different runs that have trained, as after a run on each alone. Without this one run's
            record would go on from the other's checkpoint.
    """
    ids = {rank: it["run_id"] for rank, it in enumerate(statuses) if it.get("run_id") and trained[rank]}
    first = min(ids, default=0)
    for rank, run_id in ids.items():
        if run_id != ids[first]:
            raise Refusal(
                f"--run-dir {near(path)}: rank {rank}'s node has another run there than rank {first}'s; move one of "
                "them away, name another folder, or start over with --fresh"
            )
    goes_on = ids.get(first)
    return [dict(it) for it in statuses if it and (not goes_on or it.get("run_id") in (goes_on, "", None))]


def _age(status: dict[str, Any]) -> tuple[int, float]:
    """Orders the statuses of nodes without a shared disk: by attempts, and of one attempt rank 0's, written last."""
    return len(status.get("world_sizes", [])), status.get("time", 0.0)
