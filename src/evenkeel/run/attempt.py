"""The start of an attempt: all ranks agree on data, options and cut, or all refuse."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import torch

from ..common import display, keeper_link
from ..common.arguments import flag
from ..common.errors import Ended, Refusal
from ..common.naming import TEST, in_set
from ..common.phases import START_UP, activity
from ..config import Config, differences, saved_options
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..distributed.data_parallel import replicas
from ..distributed.devices import describe, explain_uneven
from ..distributed.sync_batchnorm import refuse_too_few_ranks
from ..distributed.world import World
from ..training import compilation
from ..training.cut import Cutter
from ..training.task import Task
from . import tracking
from .checkpoint import Checkpoints
from .compiled_code import CompiledCode
from .data_check import DataCheck
from .fingerprint import MICRO_BATCH, fingerprint
from .records import read_facts, recorded_options
from .resume import Resume
from .run_directory import MAX_FRUITLESS, Identity, RunDirectory, adopt, check, claim, launch_token
from .start_checks import refuse_unmirrored, warnings_at_start
from .trackers import own_trackers, wandb_mode

log = logging.getLogger(__name__)

T = TypeVar("T")
Known = list[tuple[str, dict[str, Any]]]
"""Launch token and the run's status.json on the rank's node, for all ranks."""


class Attempt:
    """One start of a run. Every rank makes one; rank 0 claims the run directory.

    Args:
        config: the options.
        task: what is trained.
        plan: how steps are cut, as far as the options say.
        world: who takes part; the process group need not exist yet.
        sets: the training data and those of the evaluation, by name, whose samples are compared among ranks and with
            the run so far. The first of the evaluation decides which checkpoint is the best.
        cutter: from the recorded options of the run, on any node, to the options with the cut. None: as in `config`.

    Attributes:
        config, plan: the options and how steps are cut, once :meth:`begin` has decided the cut.
        directory: the run's folder; None on other ranks than 0.
        tracker: logs to the console, files and W&B, on rank 0 once the attempt has begun.
        data: compares the samples among ranks and with earlier attempts.
        checkpoints: the run's on this node.
        compiled: with --compile.
        logs: folder of this attempt's logs, once it has begun.
        hosts: the host name of each rank, once it has begun.

    Raises:
        Refusal: the run directory cannot be this run's.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        plan: Plan,
        world: World,
        sets: Mapping[str, SizedDataset] = MappingProxyType({}),
        cutter: Cutter | None = None,
    ) -> None:
        assert config.run_dir is not None  # resolved
        self.path, self.config, self.plan, self.world, self.sets = config.run_dir, config, plan, world, dict(sets)
        refuse_unmirrored(config)
        self.options = saved_options(config, task.options())
        self.data = DataCheck(config, self.path, world, plan.samples, self.sets)
        self._own_trackers = own_trackers(config.tracker if world.rank == 0 else ())
        run = Identity(self.options, task.harmless, self.data.samples, task.earlier, self.data.order)
        self.directory = claim(self.path, run, config.fresh) if world.rank == 0 else None
        if world.local_rank == 0 and world.rank != 0:
            check(self.path, run, config.fresh)
        facts = fingerprint(task, world.device)
        if (gpus := len(replicas(config.strategy, world.device))) > 1:
            facts["strategy"] = f"dp on {gpus} GPUs"
        if config.shard != "off":
            facts["shard"] = "on"  # the norm and the optimizer's arithmetic are others
        if config.compile:
            facts |= compilation.facts(world.device)
        self.compiled = CompiledCode(self.path, facts) if config.compile else None
        decides = next((name for name in sets if name != TRAINING), "" if sets else TEST)
        best = (in_set(decides, task.best[0]), task.best[1]) if decides and task.best else None
        more = {"keep_best": config.keep_best, "keep_every": config.keep_every}
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.keep, best, facts, **more)
        self.tracker: tracking.Tracker | None = None
        self.hosts: list[str] = []
        self.harmless, self._cutter = task.harmless, cutter or (lambda _recorded: config)
        self.data.look({} if config.fresh else read_facts(self.path / "status.json")[0])

    def __enter__(self) -> None:
        """Keep the folder's lock to the end of the block."""

    def __exit__(self, *_: object) -> None:
        if self.directory:
            self.directory.release()

    def begin(self, find_micro_batch: Callable[[], tuple[int, str]] | None = None) -> bool:
        """Record the start of an attempt on every rank; True if the run is finished already.

        From here on `config` and `plan` say how steps are cut.

        Args:
            find_micro_batch: is called on all ranks if a new run has --micro-batch auto.

        Raises:
            Ended: too many attempts died before they finished a step, or a node cannot write.
            Refusal: on all ranks, before anything is written: a node has other data or options; or --strict-bits.
        """
        # 1. what each node knows of the run: the newest status says whether it begins, goes on or is over
        first_here = self.world.local_rank == 0
        status = {**recorded_options(self.path), **read_facts(self.path / "status.json")[0]} if first_here else {}
        known: Known = self.world.gather((launch_token(), status))
        tokens = [token for token, _ in known]
        newest = max((status for _, status in known), key=_attempts)
        # with --fresh, unless this launch has itself begun the run and is restarted
        anew = self.config.fresh and not set(filter(None, tokens)) & set(newest.get("launch", []))
        # 2. refuse before anything is written. Options first: data and cut depend on them, and bits on the cut
        note = self.compiled.unpack(begins=anew) if self.compiled and first_here else ""  # others wait below
        self._refuse_other_options()
        self.data.compare({} if anew else newest)
        said = self._decide_cut(known, find_micro_batch)
        if self.config.strict_bits and (self.config.fresh or not self._finished(newest)):
            self._refuse_other_bits()
        # 3. rank 0 writes first: it numbers the attempt, and with --fresh moves the old run away before ranks log
        status = self._record_start(tokens, newest)
        if self._finished(status):
            early = " early" * status.get("stopped_early", False)
            self.print(f"{self.path}: finished{early} at step {status.get('step', 0)}; --fresh starts over")
            return True
        uneven = self._start_logging(status)
        if note:  # not earlier: there was no log
            log.warning("%s", note)
        # 4. the logs are open, so the last end can be looked up there; W&B last, as only a start that goes on needs it
        if status["fruitless"] > MAX_FRUITLESS:
            self._end_crash_loop()
        if self.directory:
            self._start_tracking(uneven, said)
        return False

    def record_order(self, epoch: int) -> None:
        """Compare the task's own order of an epoch among ranks, and record it; raises as `DataCheck.compare_order`."""
        if (digest := self.data.compare_order(epoch)) and self.directory:
            self.directory.note(orders={str(epoch): digest})

    def _refuse_other_options(self) -> None:
        """So far each node has checked only its own copy of the run, and its own command line."""
        everywhere = self.world.gather(self.options)
        for rank, typed in enumerate(everywhere):
            for name, first, here in differences(everywhere[0], typed, self.harmless):
                raise Refusal(
                    f"{flag(name)} is {first} on rank 0 and {here} on rank {rank}; type the same on all nodes"
                )

    def _refuse_other_bits(self) -> None:
        """With --strict-bits: before anything is written, by the newest manifest of any node."""
        manifests = self.world.gather(self.checkpoints.newest_manifest() if self.world.local_rank == 0 else None)
        before = [manifest for manifest in manifests if manifest and not self.config.fresh]
        newest = max(before, key=lambda manifest: manifest.step, default=None)
        Resume(self.config, self.world, self.checkpoints).compare_bits(newest)

    def _record_start(self, tokens: list[str], newest: dict[str, Any]) -> dict[str, Any]:
        """Record on rank 0 that an attempt starts, unless the run is finished. Returns the status, on all ranks.

        Args:
            tokens: of all ranks.
            newest: the most recent status of the run.
        """
        written: dict[str, Any] | Ended | None = None
        if directory := self.directory:
            written = self._try_to_write(lambda: self._write_start(directory, tokens, newest))
        result: Any = self.world.broadcast(written)
        if isinstance(result, Ended):
            raise result
        return dict(result)

    def _write_start(self, directory: RunDirectory, tokens: list[str], newest: dict[str, Any]) -> dict[str, Any]:
        """On rank 0: the part of :meth:`_record_start` that writes."""
        if self.config.fresh:
            if aside := directory.start_over(tokens):
                self.print(f"--fresh: the run that was in {self.path} is now in {aside}")
        elif not directory.attempts:  # rank 0 is new here, but another node may know the run
            directory.status = newest
        status = directory.status
        if self._finished(status):
            return status
        facts: dict[str, Any] = {"total_steps": self.plan.total_steps, "threads": torch.get_num_threads()}
        facts |= {"micro_batch": self.plan.micro_batch, "micro_batches": self.plan.number}
        facts |= {"samples": self.data.samples, "order": self.data.order, "digests": self.data.digests}
        facts["restarts_in_place"] = status.get("restarts_in_place", 0) + (keeper_link.restarts() > 0)
        if wandb_mode(self.config.wandb)[0] != "disabled":
            # recorded before it is used, so that a start that is killed leaves no W&B run of its own
            facts["wandb_id"] = status.get("wandb_id") or uuid4().hex[:12]
        directory.begin(self.options, tokens, **facts)
        return directory.status

    def _start_logging(self, status: dict[str, Any]) -> str:
        """On every rank: start its log, and on a node without rank 0 copy the facts of the run. Returns a line if GPUs
        differ; raises Ended on all ranks if a node cannot write."""
        self.logs = self.path / "logs" / f"attempt-{_attempts(status):04d}"
        ready = self._try_to_write(lambda: self._write_log(status))
        mine = describe(self.world.device)
        log.info("this rank has %s", mine.line)
        if reason := keeper_link.why_absent():
            log.info("no keeper, so torchrun restarts this rank if it dies: %s", reason)
        everywhere = self.world.gather((mine, ready))
        self.hosts = [device.host for device, _ in everywhere]
        for _, ended in everywhere:
            if ended:
                raise ended
        return explain_uneven([device.kind for device, _ in everywhere])

    def _write_log(self, status: dict[str, Any]) -> None:
        aside: Path | None = None
        if self.world.local_rank == 0 and not self.directory:
            aside = adopt(self.path, self.options, status, self.config.fresh)
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
            return Ended(
                f"--run-dir {self.path}: cannot be written on {socket.gethostname()}: {error.strerror or error}; "
                "free space or fix that, and run the same command again"
            )

    def _decide_cut(self, known: Known, find_micro_batch: Callable[[], tuple[int, str]] | None) -> str:
        """Decide how steps are cut, and the number of threads: as recorded for this run; for a new one, by options.

        The same on all ranks, whichever node has the run's folder. Returns a line about the cut, or "".
        """
        continued = [status for _, status in known if status.get("micro_batch")]
        if self.config.fresh:  # then only a restart of this launch finds its own run
            tokens = {token for token, _ in known if token}
            continued = [status for status in continued if tokens & set(status.get("launch", []))]
        recorded = max(continued, key=_attempts, default={})
        config, said = self._cutter(recorded), ""
        if config.micro_batch == "auto":
            found = recorded.get("micro_batch", 0)
            if not found:
                assert find_micro_batch
                activity.enter(START_UP, "--micro-batch auto")
                found, said = find_micro_batch()
            config = replace(config, micro_batch=int(found))
        if not config.threads and recorded.get("threads"):
            torch.set_num_threads(recorded["threads"])
        self.config, self.plan = config, Plan.of(config, self.plan.length, self.plan.batches)
        self.options |= {"micro_batch": config.micro_batch, "micro_batches": config.micro_batches}
        if config.sync_batchnorm:
            refuse_too_few_ranks(self.plan, self.world.world_size)
        self.checkpoints.fingerprint |= {MICRO_BATCH: self.plan.cut, "threads": str(torch.get_num_threads())}
        return said

    def _finished(self, status: dict[str, Any]) -> bool:
        over = status.get("stopped_early") or status.get("step", 0) >= self.plan.total_steps
        return status.get("state") == "finished" and bool(over)

    def _end_crash_loop(self) -> NoReturn:
        reason = f"{MAX_FRUITLESS} consecutive attempts died before they finished a step"
        if self.directory:
            last = self.directory.status.get("last_failure")
            reason += (
                f"; the last: {last}" if last else ", without an error: killed from outside, perhaps out of memory"
            )
            with contextlib.suppress(OSError):
                self.directory.update("failed", reason=reason)
        raise Ended(f"{reason}; logs are in {self.path / 'logs'}; the same command tries again")

    def _start_tracking(self, uneven: str, said: str) -> None:
        """On rank 0: start the tracker, and log warnings before the first step.

        Args:
            uneven: that GPUs differ, if they do.
            said: a line about the cut, or "".
        """
        assert self.directory
        config, plan, world = self.config, self.plan, self.world
        self.tracker = tracking.Tracker(config, plan, self.path, self.directory.attempts, world.world_size)
        self.tracker.start_wandb(self.directory.status.get("wandb_id"), self.options)
        for name, make in self._own_trackers.items():
            self.tracker.own_trackers[name] = partial(make, self.path.name, self.path, self.options)
        if damage := self.directory.trouble:
            log.warning("%s/%s; the run goes on from its checkpoints", self.path, damage)
        for line in filter(None, (uneven, self.data.warning(), *warnings_at_start(config, plan, world, self.sets))):
            log.warning("%s", line)
        if said:
            self.tracker.say(said)
            self.tracker.event("micro_batch", 0, micro_batch=plan.micro_batch, how=said)

    def print(self, text: str) -> None:
        """A line on stdout, from rank 0."""
        if self.directory:
            with contextlib.suppress(OSError):  # a pipe that is gone
                display.say(f"evenkeel: {text}")


def _attempts(status: dict[str, Any]) -> int:
    return len(status.get("world_sizes", []))
