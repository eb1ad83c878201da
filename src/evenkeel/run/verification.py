"""`--verify-every`: ranks check each other, to find a GPU that computes wrong.

A micro-batch has fixed samples and its own random numbers, so any rank computes the same bits for it from the same
weights. In each N-th step, before the commit:

1. each rank hands its first micro-batch on to the next rank, which computes it again; digests of the gradient, the loss
   and BatchNorm's statistics are compared, and so are digests of the committed state of all ranks;
2. where two differ, a third rank computes the micro-batch too, and the majority is right;
3. the step is thrown away, and all ranks compute it again, from the committed weights.

If a rank's state has drifted, and the step before was verified, the rank gets the state of the majority: the wrong one
has not reached the others by its gradients yet.

A rank that is wrong for the second time in an attempt ends the run: its fault is no accident. So does a state that
cannot be replaced. The run then goes back to the last step that was verified: with N = 1 none is lost; else nothing is
saved, and checkpoints of later steps are set aside.

The same rank must not compute its micro-batch again: a fault that is always there gives it the same wrong bits twice.
(Dixit et al., "Silent Data Corruptions at Scale", 2021, arXiv 2102.11245.)
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from ..common.errors import Ended, Refusal, Unfit
from ..common.naming import BIT_FLIPS, name_ranks
from ..common.phases import VERIFICATION, activity
from ..config import Config
from ..distributed.devices import describe, node_name
from ..resilience.memory_checkpoint import rank_memory
from ..training.digest import digests, on_host
from ..training.state import State
from ..training.task import Task
from ..training.whole_batch import has_batch_loss
from .attempt import Attempt
from .checkpointer import Checkpointer
from .manifest import step_of
from .state_files import WRONG, set_aside
from .verified_loss import Given, VerifiedLoss

log = logging.getLogger(__name__)

Digests = Mapping[str, int | str]


class Found(NamedTuple):
    """What each rank tells all others in a step that is verified."""

    own: str  # digest of what it has computed; of nothing, if it idles
    of_previous: str  # digest of what the rank before it should have computed
    state: str


class Who(NamedTuple):
    """A rank, for a person and for Slurm."""

    line: str  # rank, device, host, serial number
    node: str


def refuse_unverifiable(config: Config, task: Task) -> None:
    """Refuse --verify-every with a loss that a rank cannot compute for one micro-batch alone."""
    why = "it defines batch_loss()" if has_batch_loss(task) else ""
    why = "its loss calls collectives" if task.collectives else why
    if config.verify_every and why:
        raise Refusal(
            f"--verify-every {config.verify_every}: {type(task).__name__} cannot be verified: {why}, so no rank can "
            "compute another's micro-batch alone; leave the option out"
        )


class Verification:
    """Looks at the steps of a run, on every rank; asked by its `VerifiedLoss`.

    Args:
        attempt: this one.
        state: to be compared.
        checkpointer: whose checkpoints may be those of a wrong state.

    Attributes:
        repeats_step: the last step is not committed; it is to be computed again.
        steps: verified so far, over all attempts.
        alarms: what was found, in a line each.
        wrong_nodes: how often which node was wrong or hung, over all attempts; Slurm's jobs leave such nodes out.
    """

    def __init__(self, attempt: Attempt, state: State, checkpointer: Checkpointer) -> None:
        self._attempt, self._state, self._checkpointer, self.world = attempt, state, checkpointer, attempt.world
        self._every, self.repeats_step = attempt.config.verify_every, False
        known = attempt.status
        self.steps, self.alarms = known.get("verified", 0), list(known.get("alarms", []))
        self.wrong_nodes = Counter[str](known.get("wrong_nodes", {}))
        self._wrong: Counter[int] = Counter()  # alarms of each rank in this attempt
        self._agreed_step = -1  # the step before its commit, and its gradient, were compared without alarm
        self._fit = False  # whether results can be compared: checked once
        if self._every and self.world.world_size == 1:
            log.warning("--verify-every %d: there is one rank only, and it cannot check itself", self._every)

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._every or os.environ.get(BIT_FLIPS))

    def verifies(self, step: int) -> bool:
        """Whether this step, counted from 0, is compared."""
        return self._every > 0 and self.world.world_size > 1 and (step + 1) % self._every == 0

    def approves(self, model: VerifiedLoss, step: int) -> bool:
        """Compare, if it is time; False: the step is to be computed again.

        Raises:
            Ended: a rank has been wrong twice, a state has drifted and nobody can replace it, or the task does not give
                the same bits twice.
        """
        self.repeats_step = False
        if self._agreed_step < 0:  # an attempt may begin between two comparisons
            self._agreed_step = self._state.step // self._every * self._every if self._every else self._state.step
        if self.verifies(step):
            with activity.during(VERIFICATION):
                self._state.settle()
                self.repeats_step = not self._agree(model, step)
        return not self.repeats_step

    def _agree(self, model: VerifiedLoss, step: int) -> bool:
        ranks = range(self.world.world_size)
        own, given = on_host(model.mine), self._handed(model.kept, [(rank, self._after(rank)) for rank in ranks])
        of_previous, states = model.compute_again(given), digests(self._state.tensors())
        everyone = self.world.all_gather(Found(_one(own), _one(of_previous), _one(states)))
        if not self._fit:
            self._refuse_unfit(model)
        if len({found.state for found in everyone}) > 1:
            self._drifted(step, [found.state for found in everyone], states)
            return False
        if wrong := [rank for rank in ranks if everyone[rank].own != everyone[self._after(rank)].of_previous]:
            self._alarm(step, *self._judged(model, wrong, own, of_previous))
            return False
        self.steps, self._agreed_step = self.steps + 1, self._state.step + 1
        return True

    def _after(self, rank: int, places: int = 1) -> int:
        return (rank + places) % self.world.world_size

    def _refuse_unfit(self, model: VerifiedLoss) -> None:
        """End the run if a rank gets two results from the same numbers, or the devices are of several kinds."""
        unsteady = _first_different(*(model.compute_again(model.kept) for _ in range(2)))
        everyone = self.world.all_gather((unsteady, describe(self.world.device).kind))
        for rank, (tensor, kind) in enumerate(everyone):
            if tensor:
                raise Ended(
                    f"--verify-every {self._every}: rank {rank} has computed one micro-batch twice and got two results "
                    f"({tensor}): the task is not deterministic; make it so, or leave the option out"
                )
            if kind != everyone[0][1]:
                raise Ended(
                    f"--verify-every {self._every}: rank 0 has {everyone[0][1]}, rank {rank} {kind}, which may "
                    "differ in the last bits; use devices of one kind, or leave the option out"
                )
        self._fit = True

    def _judged(
        self, model: VerifiedLoss, wrong: Sequence[int], own: Digests, of_previous: Digests
    ) -> tuple[list[int], str, list[Who]]:
        """Let a third rank decide. Returns the suspects, the first tensor, and who each rank is."""
        pairs = [(rank, self._after(rank, 2)) for rank in wrong] if self.world.world_size > 2 else []
        third = model.compute_again(self._handed(model.kept, pairs))
        everyone = self.world.all_gather((own, of_previous, third, self._who()))
        suspects, tensor = set[int](), ""
        for rank in wrong:
            next_, judge = self._after(rank), self._after(rank, 2)
            first, second, decides = everyone[rank][0], everyone[next_][1], everyone[judge][2]
            tensor = tensor or _first_different(first, second)
            if pairs and decides in (first, second):
                suspects.add(rank if decides == second else next_)
            else:
                suspects |= {rank, next_, *([judge] if pairs else [])}
        return sorted(suspects), tensor, [it[3] for it in everyone]

    def _alarm(self, step: int, suspects: list[int], tensor: str, who: Sequence[Who]) -> None:
        """Report, and end the run if a suspect was one before."""
        found = f"{name_ranks(suspects)} computed a wrong gradient ({tensor}) in step {step + 1}"
        found = f"one of {found}, and no third rank can decide which" if len(suspects) > 1 else found
        line = self._report(step, found, suspects, who, sure=len(suspects) == 1)
        self._end_if_again(line, suspects, ())
        self._attempt.say(f"WRONG: {line}; the step is computed again")

    def _drifted(self, step: int, states: Sequence[str], mine: Digests) -> None:
        """Give the state that most ranks have to the others; end the run if that would not be right."""
        right, count = Counter(states).most_common(1)[0]
        decided = 2 * count > len(states)
        drifted = [rank for rank, state in enumerate(states) if not decided or state != right]
        everyone = self.world.all_gather((mine, self._who()))
        other = next(rank for rank, state in enumerate(states) if state != states[drifted[0]])
        tensor = _first_different(everyone[drifted[0]][0], everyone[other][0])
        found = f"the state of {name_ranks(drifted)} has drifted from the others' ({tensor}) before step {step + 1}"
        found = found if decided else f"{found}, and no majority can decide which is right"
        line = self._report(step, found, drifted, [it[1] for it in everyone], sure=decided)
        if not decided or self._state.step != self._agreed_step:  # the others have used its gradients since
            self._end(line, drifted)
        self._end_if_again(line, drifted, drifted)
        self._renew(drifted, source := states.index(right))
        self._attempt.say(f"WRONG: {line}; it has the state of rank {source} now; the step is computed again")

    def _renew(self, drifted: Collection[int], source: int) -> None:
        """Load the state of rank `source` on those that have drifted."""
        held = self.world.broadcast_tensors(self._state.capture() if self.world.rank == source else None, source)
        if self.world.rank in drifted:
            self._state.restore(held)
        if 0 in drifted and self._attempt.lead:  # what rank 0 has saved and recorded of this step is wrong
            if self._set_doubtful_aside():
                self._checkpointer.saver.start(self._state, {})
            if self._state.step:
                self._checkpointer.record_digests()

    def _end_if_again(self, line: str, suspects: Collection[int], unfit: Collection[int]) -> None:
        self._wrong.update(suspects)
        if any(self._wrong[rank] > 1 for rank in suspects):
            self._end(f"{line}; it was wrong before, so the run ends; replace that device, or leave it out", unfit)

    def _end(self, line: str, unfit: Collection[int]) -> NoReturn:
        """End the run. Steps since the last comparison may be wrong on all ranks: then nobody saves.

        Args:
            line: why.
            unfit: ranks whose state is wrong in any case.
        """
        everywhere = self._state.step != self._agreed_step
        unfit = range(self.world.world_size) if everywhere else unfit
        if self.world.local_rank == 0 and (everywhere or self.world.rank in unfit):
            self._set_doubtful_aside()
        self.world.all_gather(None)  # the others save afterwards
        raise (Unfit if self.world.rank in unfit else Ended)(line)

    def _set_doubtful_aside(self) -> bool:
        """Set aside checkpoints on this node that may be those of a wrong state; whether there were any."""
        self._checkpointer.take_result()
        # the commit that led to this step may be what was wrong: its result is compared in the next comparison only
        wrong = [path for path in self._checkpointer.saver.checkpoints.all() if step_of(path) >= self._agreed_step]
        for path in wrong:
            with contextlib.suppress(FileNotFoundError):  # nodes may share the folder
                set_aside(path, WRONG)
        for kind, label in [*rank_memory.labels.items()]:  # what the disk has refused: the keeper would write it
            if label["step"] >= self._agreed_step:
                rank_memory.discard(kind)
        return bool(wrong)

    def _report(self, step: int, found: str, suspects: Sequence[int], who: Sequence[Who], sure: bool) -> str:
        line = f"{found}: {'; '.join(who[rank].line for rank in suspects)}"
        self.alarms.append(line)
        self.wrong_nodes.update({who[rank].node for rank in suspects if sure})
        if self._attempt.lead:
            self._attempt.lead.tracker.event("wrong", step, reason=line)
        self.record()
        return line

    def record(self) -> None:
        """Record the counts in status.json."""
        if (lead := self._attempt.lead) and (self.steps or self.alarms):
            lead.directory.try_update(verified=self.steps, alarms=self.alarms, wrong_nodes=dict(self.wrong_nodes))

    def _who(self) -> Who:
        line = f"rank {self.world.rank}: {describe(self.world.device).line}{_serial(self.world.device)}"
        return Who(line, node_name())

    def _handed(self, kept: Given, pairs: Iterable[tuple[int, int]]) -> Given:
        """Send this rank's micro-batch to those that (from, to) pairs say; returns what this rank gets."""
        rank, sent, got = self.world.rank, list[Any](), cast(Given, None)
        for source, target in pairs:
            if source == rank:
                data = torch.frombuffer(bytearray(pickle.dumps(kept)), dtype=torch.uint8)
                sent += [(part, dist.isend(part, target)) for part in (torch.tensor([len(data)]), data)]
        for source, target in pairs:
            if target == rank:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, source)
                data = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(data, source)
                got = pickle.loads(data.numpy().tobytes())  # noqa: S301  # from a rank of this job
        for _, work in sent:
            work.wait()
        return got


def _one(several: Digests) -> str:
    """One digest of several."""
    return hashlib.sha256(repr(sorted(several.items())).encode()).hexdigest()


def _first_different(one: Digests, other: Digests) -> str:
    return next((name for name in {**one, **other} if one.get(name) != other.get(name)), "")


def _serial(device: torch.device) -> str:
    """A GPU's serial number and id, as far as they are known."""
    if device.type != "cuda":
        return ""
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    ask = ["nvidia-smi", "-i", gpu, "--query-gpu=serial", "--format=csv,noheader"]
    try:
        serial = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        serial = "unknown"
    return f", serial number {serial}, {gpu}"
