"""How a sharded run continues: each rank takes its rows, from its keeper's memory or from files of any ranks.

From memory the run goes on at *the smallest of the newest steps* of all ranks: ranks differ by one step at most, and
each has its last two (`training.slots`). If a rank has none, because its node or its keeper is new, the others write
theirs, and all read the disk.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..common.errors import Ended, EndedForGood
from ..common.phases import START_UP, activity
from ..distributed.devices import node_name
from ..distributed.world import World
from ..training.staging import map_tensors
from .checkpoint import Checkpoints
from .manifest import Manifest, load, manifest_of, step_folders, step_of, verify
from .sharded_checkpoint import await_writers
from .sharded_saver import ShardedSaver
from .state_files import Damaged, read_parts, rows_of, set_aside

if TYPE_CHECKING:  # needs torch 2.9, and the files can be read without
    from ..training.sharding import Sharding

log = logging.getLogger(__name__)

Found = tuple[Manifest | None, dict[str, Any]]


def newest_rows(world: World, sharding: Sharding, saver: ShardedSaver, replicate: bool = False) -> Found:
    """This rank's rows of the newest step that all ranks can have, and its manifest; None if there is none.

    The saver gets the token of this launch, and whether it writes checkpoints. Every rank must call it.

    Raises:
        EndedForGood: on all ranks, if one does not see the folder of the others.
    """
    checkpoints, saver.writes = saver.checkpoints, world.rank < sharding.ranks
    _refuse_own_folder(world, checkpoints)
    saver.slots.keep_run(checkpoints.provenance.run_id)
    everywhere = world.all_gather(saver.slots.steps())
    step = common_step(everywhere)
    if not step:  # no step is in the slots of all ranks
        saver.write_slots()
        world.all_gather(None)
    if world.rank == 0:
        await_writers(checkpoints)
    on_disk = world.broadcast(checkpoints.newest_step() if world.rank == 0 else None)
    activity.enter(START_UP, "resuming")
    step *= step >= (on_disk or 0)
    _replicate(world, sharding, saver, step, replicate)
    saver.slots.keep_only(step)
    if step:
        saved, label = saver.slots.read(step)
        saver.token = label["token"]
        log.info("continuing from step %d, which was in memory; the ranks had %s", step, everywhere)
        return world.broadcast(manifest_of(label) if world.rank == 0 else None), saved
    saver.token = world.broadcast(uuid4().hex if world.rank == 0 else None) or ""
    return _from_disk(world, sharding, checkpoints)


def _replicate(world: World, sharding: Sharding, saver: ShardedSaver, step: int, asked: bool) -> None:
    """Start --replicate if asked for, and log what a lost node costs."""
    done = asked and saver.replicate(world, step)
    why = (
        "; --replicate 1 copies nothing, because one node has more than half of the ranks" if asked and not done else ""
    )
    done |= others_have_each_nodes_rows(world.all_gather(world.local_rank), sharding.ranks)
    cost = "none either" if done else "those since the last checkpoint"
    if world.rank == 0:
        log.info("--shard: killed ranks cost no step; a lost node costs %s%s", cost, why)


def others_have_each_nodes_rows(local_ranks: list[int], size: int) -> bool:
    """Whether ranks of other nodes have the rows of all ranks of any node, with replicas of so many ranks (--shard N).

    >>> others_have_each_nodes_rows([0, 1, 0, 1], 2), others_have_each_nodes_rows([0, 1, 0, 1], 4)
    (True, False)
    """
    nodes = list(accumulate(local_rank == 0 for local_rank in local_ranks))
    left = ({rank % size for rank, other in enumerate(nodes) if other != node} for node in set(nodes))
    return all(len(rows) == size for rows in left)


def common_step(everywhere: list[list[int]]) -> int:
    """The smallest of the newest steps, of the steps that each rank has; 0 if a rank does not have it."""
    step = min((max(steps, default=0) for steps in everywhere), default=0)
    return step if all(step in steps for steps in everywhere) else 0


def _from_disk(world: World, sharding: Sharding, checkpoints: Checkpoints) -> Found:
    """The newest checkpoint that is whole. Each rank verifies some of its files; one that is damaged is set aside.

    Raises:
        Ended: on all ranks, if one cannot read what another finds whole: its node may be what is broken.
    """
    while True:
        paths = world.broadcast(step_folders(checkpoints.folder)[-1:] if world.rank == 0 else [])
        if not paths:
            return None, {}
        path = paths[0]
        damage, saved = "", {}
        try:
            found = verify(path, rank=world.rank, ranks=world.world_size)
            saved = own_rows(path, sharding)
        except Damaged as error:
            damage = str(error)
        damages = world.all_gather(damage)
        if not any(damages):
            return found, saved
        rank = next(rank for rank, each in enumerate(damages) if each)
        judge = damages.index("") if "" in damages else rank
        if world.broadcast(_is_whole(path) if world.rank == judge else None, judge):
            node = world.all_gather(node_name())[rank]
            raise Ended(f"rank {rank} on {node} cannot read what rank {judge} can: {damages[rank]}")
        if world.rank == 0:
            set_aside(path, damage=damages[rank])


def _is_whole(path: Path) -> bool:
    """Whether this rank can read all files of a checkpoint, and finds them as they were written."""
    try:
        load(path, "shapes")
    except Damaged:
        return False
    return True


def own_rows(path: Path, sharding: Sharding) -> dict[str, Any]:
    """This rank's rows of a checkpoint, sharded or not. Of its files only these are read, and they may be deleted."""
    parts = read_parts(path, step_of(path), in_place=True)
    if "rows" not in parts[0]:
        parts = [sharding.described(parts[0], whole=True)]
    rows = rows_of(parts, sharding.rank, sharding.ranks)
    found: dict[str, Any] = map_tensors(rows, lambda tensor, _path: tensor.clone())
    return {**found, "rows": {"rank": sharding.rank, "ranks": sharding.ranks, "of": parts[0]["rows"]["of"]}}


def _refuse_own_folder(world: World, checkpoints: Checkpoints) -> None:
    """End the run on all ranks if their folders are not one."""
    name = world.broadcast(f".shared-{uuid4().hex}" if world.rank == 0 else None)
    mark = checkpoints.folder / str(name)
    if world.rank == 0:
        checkpoints.folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    world.all_gather(None)
    seen = world.all_gather(mark.exists())
    if world.rank == 0:
        mark.unlink(missing_ok=True)
    if not all(seen):
        blind = ", ".join(str(rank) for rank, it in enumerate(seen) if not it)
        raise EndedForGood(
            f"--shard needs a shared folder for checkpoints: rank {blind} does not see {checkpoints.folder} of "
            "rank 0; name a --run-dir on a disk that all nodes share"
        )
