"""The start of an attempt: all ranks agree on data, options and cut, or all refuse before anything is written.

To make an `Attempt` needs no other rank: rank 0 locks the run's folder, and each node checks its own copy of the run.
`Attempt.begin` needs the process group. It

1. gathers what each node has recorded of the run;
2. refuses options that differ, then other data; decides the cut; then refuses other bits, with --strict-bits;
3. returns if the run is finished; else moves an old run aside (--fresh) and records the start in status.json;
4. opens each rank's log;
5. ends a run whose last attempts all died before they had finished a step;
6. starts the tracker on rank 0, which from then on leads (`Attempt.lead`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch

from ..common import keeper_link
from ..common.display import near
from ..common.errors import Ended, EndedForGood
from ..common.files import is_full
from ..config import Config, saved_options
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..distributed.causes import failure_behind, is_loss_of_a_rank, reason_of
from ..distributed.devices import describe, explain_uneven
from ..distributed.world import World
from ..resilience.interruption import REGROUPING
from ..training.cut import Cutter
from ..training.task import Task
from . import crash_loop, tracking
from .agreement import agree_on_cut, refuse_other_bits, refuse_other_options
from .checkpoint import Checkpoints
from .compiled_code import CompiledCode
from .data_check import DataCheck
from .fingerprint import MICRO_BATCH, fingerprint_of_run
from .identity import Identity, prepare_folder
from .manifest import Provenance
from .node_records import NodeRecords, gather_records
from .records import read_facts
from .run_directory import RunDirectory, RunState, claim, copy_run_records
from .start_checks import refuse_unmirrored, warnings_at_start
from .trackers import own_trackers, wandb_mode

log = logging.getLogger(__name__)

T = TypeVar("T")


class Lead(NamedTuple):
    """What only rank 0 has, once an attempt has begun."""

    directory: RunDirectory
    tracker: tracking.Tracker


class Attempt:
    """One start of a run. Every rank makes one; rank 0 claims the run directory.

    Args:
        config: the options.
        task: what is trained.
        plan: how steps are cut, as far as the options say.
        world: who takes part; the process group need not exist yet.
        sets: the training data and those of the evaluation, by name, whose samples are compared among ranks and with
            the run so far.
        cutter: returns the options with the cut, from those that any node has recorded.
        fixed: options that may not change, although they may in other runs.

    Attributes:
        config, plan: the options and how steps are cut, once :meth:`begin` has decided the cut.
        lead: the run's folder and its tracker, on rank 0 once the attempt has begun; None if the run is finished.
        data: compares the samples among ranks and with earlier attempts.
        checkpoints, provenance: the run's on this node, and what each of them says of the run.
        compiled: with --compile.
        logs: folder of logs; of this attempt's, once it has begun.
        hosts: the host name of each rank, once it has begun.

    Raises:
        Refusal: the run directory cannot be this run's.
    """

    def __init__(
        self, config: Config, task: Task, plan: Plan, world: World, sets: Mapping[str, SizedDataset], cutter: Cutter,
        fixed: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        assert config.run_dir is not None  # resolved
        self.path, self.config, self.plan, self.world, self.sets = config.run_dir, config, plan, world, dict(sets)
        refuse_unmirrored(config)
        self.options = saved_options(config, task.options())
        self.data = DataCheck(config, self.path, world, plan.samples, self.sets)
        self._own_trackers = own_trackers(config.tracker if world.rank == 0 else ())
        fingerprint = fingerprint_of_run(config, task, world)
        self.compiled = CompiledCode(self.path, fingerprint) if config.compile else None
        self.provenance = Provenance(fingerprint=fingerprint)
        run = Identity(self.options, task.harmless, self.data.samples, task.earlier, self.data.order, fixed)
        self._directory = claim(self.path, run, config.fresh, config.grace) if world.rank == 0 else None
        if world.local_rank == 0 and world.rank != 0:
            prepare_folder(self.path, run, config.fresh)
        self.checkpoints = Checkpoints(
            self.path / "checkpoints", config.keep, self.provenance, config.keep_best, config.keep_every,
            config.verify_every,
        )  # fmt: skip
        self.logs = self.path / "logs"
        self.lead: Lead | None = None
        self.hosts: list[str] = []
        self._notices: list[str] = []  # warnings to log when the attempt has begun; "" for none
        self.harmless, self._cutter = task.harmless, cutter
        try:
            self.data.read_digests({} if config.fresh else read_facts(self.path / "status.json")[0])
        except BaseException:
            self.close()  # a notebook goes on, and the next try needs the folder
            raise

    def close(self) -> None:
        """Unlock the run's folder, for a process that goes on after the run."""
        if self._directory:
            self._directory.release()

    @property
    def status(self) -> Mapping[str, Any]:
        """The facts in status.json, on rank 0; empty on others."""
        return self._directory.status if self._directory else {}

    def say(self, text: str) -> None:
        """Print a line on stdout, from rank 0."""
        if self._directory:
            tracking.say(text)

    def stopped(self, why: Callable[[], str]) -> None:
        """Record a stop signal during the start, before there is a state to save. Any thread may call it."""
        if (reason := why()) == REGROUPING:
            return
        cause = failure_behind(reason)
        end: RunState = "failed" if cause else "stopped"
        if (mine := self._directory) and mine.recorded:
            # after a restart in place the state may be in memory only, and "stopped" or "failed" without a checkpoint
            # is what `is_untrained` looks for: the next start would begin at step 0
            state: RunState = end if mine.attempts == 1 or mine.untrained else "running"
            with contextlib.suppress(OSError):
                mine.update(state, reason=cause or reason, **({} if cause else crash_loop.CLEARED))
        if not cause:  # the rank that failed has said it
            self.say(f"evenkeel: stopped by {reason} while starting; the same command goes on from here")

    @contextlib.contextmanager
    def failure_recorded(self) -> Iterator[None]:
        """A context that records an error once the start is recorded; `Ending` does so when there is a state."""
        try:
            yield
        except Exception as error:
            # the loss of another rank has another cause, such as a stop signal that this one has not handled yet
            if (mine := self._directory) and mine.recorded and not is_loss_of_a_rank(error):
                with contextlib.suppress(OSError):
                    mine.update("failed", reason=reason_of(error))
            raise

    def begin(self, find_micro_batch: Callable[[], tuple[int, str]]) -> bool:
        """Record the start of an attempt on all ranks; True: the run was finished already.

        Args:
            find_micro_batch: is called on all ranks if a new run has --micro-batch auto.

        Raises:
            Ended: too many attempts died before they finished a step, or a node cannot write.
            Refusal: on all ranks, before anything is written: a node has other data or options; or --strict-bits.
        """
        claimed = (mine.status, mine.untrained) if (mine := self._directory) else None
        nodes = gather_records(self.world, self.path, self.config.fresh, claimed)
        # once on each node, into its own cache; its other ranks wait in the next collective
        if self.compiled and self.world.local_rank == 0:
            self._notices.append(self.compiled.unpack(nodes.starts_over))
        # refuse before the run is written. Options first: data and cut depend on them, and bits on the cut
        refuse_other_options(self.world, self.config, self.options, self.harmless)
        self.data.compare(nodes.newest)
        agreed = agree_on_cut(self.world, self._cutter, self.plan, nodes.newest_with_cut, find_micro_batch)
        config, plan = self.config, self.plan = agreed.config, agreed.plan
        if (threads := nodes.newest_with_cut.get("threads", 0)) and not config.threads:
            torch.set_num_threads(threads)
        self.options |= {"micro_batch": config.micro_batch, "micro_batches": config.micro_batches}
        self.provenance.fingerprint |= {MICRO_BATCH: plan.cut, "threads": str(torch.get_num_threads())}
        if config.strict_bits and not self._finished(nodes.newest):
            refuse_other_bits(self.world, self.checkpoints, nodes.starts_over)
        # rank 0 writes first: it numbers the attempt, and with --fresh moves the old run away before ranks log
        status = self._record_start(nodes)
        self.provenance.run_id = status.get("run_id", "")
        if self._finished(status):
            early = " early" if status.get("stopped_early") else ""
            end = f"finished{early} at step {status.get('step', 0)}"
            self.say(f"evenkeel: {near(self.path)}: {end}; --fresh starts over")
            return True
        self._start_logging(status)
        # the logs are open, so the last end can be looked up there; W&B last, as only a start that goes on needs it
        self._check_crash_loop(status)
        self._start_tracking(agreed.line)
        for line in filter(None, self._notices):
            log.warning("%s", line)
        return False

    def record_order(self, epoch: int) -> None:
        """Compare the task's own order of an epoch among ranks, and record it; raises as `DataCheck.compare_order`."""
        if (digest := self.data.compare_order(epoch)) and self.lead:
            self.lead.directory.try_update(orders={str(epoch): digest})

    def _record_start(self, nodes: NodeRecords) -> dict[str, Any]:
        """Record on rank 0 that an attempt starts, unless the run is finished. Returns the status, on all ranks."""
        directory = self._directory
        written = self._try_to_write(lambda: self._write_start(directory, nodes)) if directory else None
        result: Any = self.world.broadcast(written)
        if isinstance(result, Ended):
            raise result
        return dict(result)

    def _write_start(self, directory: RunDirectory, nodes: NodeRecords) -> dict[str, Any]:
        """On rank 0: the part of :meth:`_record_start` that writes."""
        # rank 0's own folder may still have an older run than another node's
        if nodes.replaces_old_run and (line := directory.start_over(nodes.tokens)):
            self.say(f"evenkeel: {line}")
        # another node may have gone on without this one
        status = directory.status = nodes.newest or directory.status
        if self._finished(status):
            return status
        facts: dict[str, Any] = {
            "total_steps": self.plan.total_steps,
            "threads": torch.get_num_threads(),
            "micro_batch": self.plan.micro_batch,
            "micro_batches": self.plan.fixed_micro_batches,
            "samples": self.data.samples,
            "order": self.data.order,
            "digests": self.data.digests,
            "restarts_in_place": status.get("restarts_in_place", 0) + (keeper_link.restarts() > 0),
        }
        if wandb_mode(self.config.wandb)[0] != "disabled":
            # recorded before it is used, so that a start that is killed leaves no W&B run of its own
            facts["wandb_id"] = status.get("wandb_id") or uuid4().hex[:12]
        directory.begin(self.options, nodes.tokens, **facts)
        return directory.status

    def _start_logging(self, status: dict[str, Any]) -> None:
        """On every rank: start its log, and on a node without rank 0 copy the facts of the run. Raises Ended on all
        ranks if a node cannot write."""
        self.logs = self.path / "logs" / f"attempt-{len(status['world_sizes']):04d}"
        ready = self._try_to_write(lambda: self._write_log(status))
        mine = describe(self.world.device)
        log.info("process %d of this rank has %s", os.getpid(), mine.line)
        if reason := keeper_link.why_absent():
            log.info("no keeper, so torchrun restarts this rank if it dies: %s", reason)
        everywhere = self.world.all_gather((mine, ready))
        self.hosts = [device.host for device, _ in everywhere]
        for _, ended in everywhere:
            if ended:
                raise ended
        if self._directory:
            self._notices.append(explain_uneven([device.kind for device, _ in everywhere]))

    def _write_log(self, status: dict[str, Any]) -> None:
        copies = self.world.local_rank == 0 and not self._directory
        aside = copy_run_records(self.path, self.options, status, self.config.fresh) if copies else None
        tracking.start_logs(self.logs, self.world)
        if aside:
            log.info("--fresh: the run that was in %s is now in %s", self.path, aside)

    def _try_to_write(self, write: Callable[[], T]) -> T | Ended:
        """Write into the run directory; an error of this node's disk is returned, for all ranks, not raised."""
        try:
            return write()
        except Ended as ended:
            return ended
        except OSError as error:
            kind = EndedForGood if is_full(error) else Ended
            return kind(
                f"--run-dir {near(self.path)}: cannot be written on {socket.gethostname()}: {error.strerror or error}; "
                "free space or fix that, and run the same command again"
            )

    def _finished(self, status: dict[str, Any]) -> bool:
        over = status.get("stopped_early") or status.get("step", 0) >= self.plan.total_steps
        return status.get("state") == "finished" and bool(over)

    def _check_crash_loop(self, status: dict[str, Any]) -> None:
        if not (reason := crash_loop.reason_to_end(status)):
            return
        if self._directory:
            with contextlib.suppress(OSError):
                self._directory.update("failed", reason=reason)
        raise EndedForGood(f"{reason}; logs are in {self.path / 'logs'}; the same command tries again")

    def _start_tracking(self, cut_line: str) -> None:
        """Start the tracker on rank 0, and report how the cut was found, if a line says so."""
        if not (directory := self._directory):
            return
        config, plan, world = self.config, self.plan, self.world
        tracker = tracking.Tracker(config, plan, self.path, directory.attempts, world.world_size)
        tracker.start_wandb(directory.status.get("wandb_id"), self.options)
        for name, make in self._own_trackers.items():
            tracker.own_trackers[name] = partial(make, self.path.name, self.path, self.options)
        if damage := directory.trouble:
            self._notices.append(f"{self.path}/{damage}; the run goes on from its checkpoints")
        self._notices += [self.data.warning(), *warnings_at_start(config, plan, world, self.sets)]
        if cut_line:
            self.say(cut_line)
            tracker.event("micro_batch", 0, micro_batch=plan.micro_batch, how=cut_line)
        self.lead = Lead(directory, tracker)
