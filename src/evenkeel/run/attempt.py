"""How an attempt of a run begins: all ranks agree on data, options and cut, or all refuse; then the newest state."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import torch

from ..common import display, kept
from ..common.errors import Ended, Refusal
from ..common.memory import is_out_of_memory
from ..common.naming import TEST, in_set
from ..common.phases import START_UP, activity
from ..config import Config, flag, saved_options
from ..config import differences as differences_of_options
from ..data.blocks import order_name
from ..data.data_digest import OFTEN, ONCE, TRAINING, TWICE, difference, look
from ..data.dataset import SizedDataset
from ..data.plan import Plan
from ..data.streams import Numbered
from ..distributed.data_parallel import replicas
from ..distributed.devices import describe as describe_device
from ..distributed.devices import explain_uneven
from ..distributed.sync_batchnorm import refuse_too_few_ranks
from ..distributed.world import World
from ..resilience import held
from ..training import compilation
from ..training.checks import left_out
from ..training.cut import Cutter
from ..training.early_stopping import Memory
from ..training.precision import substitute
from ..training.state import State
from ..training.task import Task
from . import tracking
from .checkpoint import Checkpoints, Manifest, manifest_of
from .compiled_code import CompiledCode
from .fingerprint import Differences, describe, differences, differences_among_ranks, fingerprint
from .records import read_facts, read_records, recorded_options
from .run_directory import (
    MAX_FRUITLESS,
    Identity,
    adopt,
    check,
    claim,
    launch_token,
    refuse_other_data,
    refuse_other_order,
)
from .trackers import wandb_mode

log = logging.getLogger(__name__)

T = TypeVar("T")
Known = list[tuple[str, dict[str, Any]]]
"""Launch token, and what a rank's node knows of the run (its status.json), of all ranks."""

MICRO_BATCH = "micro_batch"
"""The part of a fingerprint that says how steps are cut. It may change when a run is continued, with a warning."""


class Attempt:
    """One start of a run. Every rank makes one; rank 0 claims the run directory.

    Args:
        config: the options.
        task: what is trained.
        plan: how steps are cut, as far as the options say.
        world: who takes part; the process group need not exist yet.
        sets: the training data and those of the evaluation, by name, whose samples are compared among ranks and with
            the run so far. The first of the evaluation decides which checkpoint is the best.
        cutter: from what the run has recorded, on whichever node, to the options with the cut. None: as `config` says.

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
        self.started = time.monotonic()
        self.sets = dict(sets)
        self.path, self.config, self.plan, self.world = config.run_dir, config, plan, world
        self.options = saved_options(config, task.options())
        self.samples = {TRAINING: plan.samples} | {name: len(dataset) for name, dataset in sets.items()}
        self.order = order_name(sets[TRAINING]) if TRAINING in sets else ""
        run = Identity(self.options, task.harmless, self.samples, task.earlier, self.order)
        self.directory = claim(self.path, run, config.fresh) if world.rank == 0 else None
        if world.local_rank == 0 and world.rank != 0:
            check(self.path, run, config.fresh)
        kept = fingerprint(task, world.device)
        if (gpus := len(replicas(config.strategy, world.device))) > 1:
            kept["strategy"] = f"dp on {gpus} GPUs"
        if config.compile:
            kept |= compilation.facts(world.device)
        self.compiled = CompiledCode(self.path, kept) if config.compile else None
        decides = next((name for name in sets if name != TRAINING), TEST)
        best = task.best and (in_set(decides, task.best[0]), task.best[1])
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.keep, best, kept)
        self.unevaluated = False
        """Whether the state that is continued was saved without an evaluation of it."""
        self.tracker: tracking.Tracker | None = None
        self.hosts: list[str] = []
        """Of all ranks, once the attempt has begun."""
        self._harmless, self._cutter = task.harmless, cutter or (lambda _recorded: config)
        self._look: Callable[[int], Any] = lambda _times: ({}, [])
        if sets:
            self._look = partial(look, config, self.sets)
        steady = {} if config.fresh else read_facts(self.path / "status.json")[0].get("digests", {})
        # whether samples differ at each read is found out once
        self.digests, self._unsteady = self._look(ONCE if steady.keys() >= self.samples.keys() else TWICE)
        self._other_data = self._other_best = ""

    def begin(self, find_micro_batch: Callable[[], tuple[int, str]] | None = None) -> bool:
        """Record on every rank that an attempt starts; True if the run is finished already.

        From here on `config` and `plan` say how steps are cut.

        Args:
            find_micro_batch: is called on all ranks if a new run has --micro-batch auto.

        Raises:
            Ended: the last attempts have all died before they finished a step, or a node cannot write.
            Refusal: on all ranks, before anything is written: a node has other data or options; or --strict-bits.
        """
        first_here = self.world.local_rank == 0
        status = {**recorded_options(self.path), **read_facts(self.path / "status.json")[0]} if first_here else {}
        known: Known = self.world.gather((launch_token(), status))
        tokens = [token for token, _ in known]
        newest = max((status for _, status in known), key=_attempts)
        anew = self.config.fresh and not set(filter(None, tokens)) & set(newest.get("launch", []))
        note = self.compiled.unpack(begins=anew) if self.compiled and first_here else ""  # others wait below
        self._refuse_other_data({} if anew else newest)
        said = self._settle_cut(known, find_micro_batch)
        if self.config.strict_bits and (self.config.fresh or not self._finished(newest)):
            manifests = self.world.gather(self.checkpoints.newest_manifest() if first_here else None)
            before = [manifest for manifest in manifests if manifest and not self.config.fresh]
            self._compare_bits(max(before, key=lambda manifest: manifest.step, default=None))
        opened: dict[str, Any] | Ended | None = None
        if self.directory:
            opened = self._written(lambda: self._open(tokens, newest))
        told: Any = self.world.broadcast(opened)
        if isinstance(told, Ended):
            raise told
        status = told
        if self._finished(status):
            early = " early" * status.get("stopped_early", False)
            self.print(f"{self.path}: finished{early} at step {status.get('step', 0)}; --fresh starts over")
            return True
        self.logs = self.path / "logs" / f"attempt-{_attempts(status):04d}"
        ready = self._written(lambda: self._open_here(status))
        mine = describe_device(self.world.device)
        log.info("this rank has %s", mine.line)
        if reason := kept.why_not():
            log.info("if it dies, torchrun must start it again: %s", reason)
        if note:
            log.warning("%s", note)
        everywhere = self.world.gather((mine, ready))
        self.hosts = [device.host for device, _ in everywhere]
        for _, ended in everywhere:
            if ended:
                raise ended
        if status["fruitless"] > MAX_FRUITLESS:
            self._end_crash_loop()
        if self.directory:
            self._start_tracking(explain_uneven([device.kind for device, _ in everywhere]), said)
        return False

    def _open(self, tokens: list[str], newest: dict[str, Any]) -> dict[str, Any]:
        """On rank 0: begin the attempt, unless the run is finished. Returns its status.

        Args:
            tokens: of all ranks.
            newest: the status that knows most of the run.
        """
        directory = self.directory
        assert directory
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
        facts["restarts_in_place"] = status.get("restarts_in_place", 0) + (kept.restarts() > 0)
        if wandb_mode(self.config.wandb)[0] != "disabled":
            # recorded before it is used, so that a start that is killed leaves no W&B run of its own
            facts["wandb_id"] = status.get("wandb_id") or uuid4().hex[:12]
        directory.begin(self.options, tokens, samples=self.samples, order=self.order, digests=self.digests, **facts)
        return directory.status

    def _open_here(self, status: dict[str, Any]) -> None:
        """On every rank: its log, and on a node without rank 0 what is to be known of the run."""
        aside: Path | None = None
        if self.world.local_rank == 0 and not self.directory:
            aside = adopt(self.path, self.options, status, self.config.fresh)
        tracking.start_logs(self.logs, self.world)
        if aside:
            log.info("--fresh: the run that was in %s is now in %s", self.path, aside)

    def _written(self, write: Callable[[], T]) -> T | Ended:
        """What came of writing into the run directory; an error of this node's disk as a line for all ranks."""
        try:
            return write()
        except Ended as ended:
            return ended
        except OSError as error:
            return Ended(
                f"--run-dir {self.path}: cannot be written on {socket.gethostname()}: {error.strerror or error}; make "
                "room or mend that, and run the same command again"
            )

    def _settle_cut(self, known: Known, find_micro_batch: Callable[[], tuple[int, str]] | None) -> str:
        """Decide how steps are cut, and how many threads compute: as this run has recorded; if it is new, by options.

        The same on all ranks, whichever node has the run's folder. Returns what there is to say of it.
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
        self.config, self.plan = config, Plan.of(config, self.plan.samples)
        self.options |= {"micro_batch": config.micro_batch, "micro_batches": config.micro_batches}
        if config.sync_batchnorm:
            refuse_too_few_ranks(self.plan, self.world.world_size)
        self.checkpoints.fingerprint |= {MICRO_BATCH: self.plan.cut, "threads": str(torch.get_num_threads())}
        return said

    def _refuse_other_data(self, before: dict[str, Any]) -> None:
        """Each node has looked at its own copy of the run so far, at its own command line and at its own data."""
        everywhere = self.world.gather((self.samples, self.options, self.digests, self.order, self.config.other_data))
        samples, options, _, order, _ = everywhere[0]
        for rank, (there, typed, _, theirs, _) in enumerate(everywhere):
            for name, first, here in differences_of_options(options, typed, self._harmless):
                raise Refusal(
                    f"{flag(name)} is {first} on rank 0 and {here} on rank {rank}; type it, and the same on all nodes"
                )
            refuse_other_data(self.path, before.get("samples", {}), there)
            refuse_other_order(self.path, before, theirs)
            if theirs != order:
                raise Refusal(
                    f"the training data is read in {order or 'the usual order'} on rank 0 and in "
                    f"{theirs or 'the usual order'} on rank {rank}; give all nodes the same index"
                )
            for part, number in there.items():
                if number != samples[part]:
                    raise Refusal(
                        f"the {part} data has {samples[part]} samples on rank 0 and {number} on rank {rank}; "
                        "give all nodes the same data"
                    )
        known = before.get("digests", {})
        if difference(known, [there for _, _, there, *_ in everywhere]):
            # samples that are drawn anew at each read are sometimes the same twice
            self.digests, self._unsteady = self._look(OFTEN)
            self._other_data = difference(known, self.world.gather(self.digests))
            if self._other_data and not any(accepted for *_, accepted in everywhere):
                raise Refusal(f"--run-dir {self.path}: {self._other_data}")
        self.digests = {**known, **self.digests}

    def _compare_bits(self, found: Manifest | None) -> Differences:
        """In what this attempt's bits might differ from those of a run that was never stopped; the same on all ranks.

        Later checkpoints record what rank 0 has.

        Args:
            found: of the checkpoint that is continued.

        Raises:
            Refusal: with --strict-bits.
        """
        present = self.world.gather(self.checkpoints.fingerprint)
        step, void_from = (found.step, found.bits_void_from) if found else (0, None)
        other_bits: Differences = {}
        if found:
            # a checkpoint that is older than this part was made in the same pieces: no others were let in
            cut = {part: value for part, value in present[0].items() if part == MICRO_BATCH and found.fingerprint}
            other_bits = differences(cut | found.fingerprint, present[0])
        other_bits |= differences_among_ranks(present)
        if other_bits and self.config.strict_bits:
            raise Refusal(
                f"--strict-bits: from step {step} on the bits might differ: {describe(other_bits)}; continue with "
                "what it was before, or without --strict-bits"
            )
        if other_bits and void_from is None:
            void_from = step
        self.checkpoints.fingerprint, self.checkpoints.bits_void_from = present[0], void_from
        return other_bits

    def _finished(self, status: dict[str, Any]) -> bool:
        over = status.get("stopped_early") or status.get("step", 0) >= self.plan.total_steps
        return status.get("state") == "finished" and bool(over)

    def _end_crash_loop(self) -> NoReturn:
        reason = f"{MAX_FRUITLESS} attempts in a row have died before they finished a step"
        if self.directory:
            last = self.directory.status.get("last_failure")
            reason += f"; the last: {last}" if last else ", without a word: killed from outside, perhaps for memory"
            with contextlib.suppress(OSError):
                self.directory.update("failed", reason=reason)
        raise Ended(f"{reason}; logs are in {self.path / 'logs'}; the same command tries again")

    def _start_tracking(self, uneven: str, said: str) -> None:
        """On rank 0: the tracker, and what is worth a warning before the first step.

        Args:
            uneven: that GPUs differ, if they do.
            said: what there is to say of the cut.
        """
        assert self.directory
        config, plan, world = self.config, self.plan, self.world
        if world.world_size > plan.max_world_size:
            log.warning(
                "%d of %d ranks have nothing to do: the batch of %d is cut into %d micro-batches of %d; "
                "a smaller --micro-batch feeds more ranks",
                world.world_size - plan.max_world_size, world.world_size,
                config.batch_size, plan.max_world_size, config.micro_batch,
            )  # fmt: skip
        self.tracker = tracking.Tracker(config, plan, self.path, self.directory.attempts, world.world_size)
        self.tracker.start_wandb(self.directory.status.get("wandb_id"), self.options)
        if damage := self.directory.trouble:
            log.warning("%s/%s; the run goes on from its checkpoints", self.path, damage)
        note = substitute(config.precision, world.device)
        for line in filter(None, (note, uneven, self._about_data(), self._about_readers())):
            log.warning("%s", line)
        if said:
            self.tracker.say(said)
            self.tracker.event("micro_batch", 0, micro_batch=plan.micro_batch, how=said)

    def _about_data(self) -> str:
        if self._other_data:
            return f"--other-data: {self._other_data.partition(';')[0]}"
        if not self._unsteady:
            return ""
        return (
            f"the {' and '.join(self._unsteady)} data is another each time that it is read: it draws from a generator "
            "of its own, so a run cannot be repeated, nor its data be compared with that of other ranks and starts; "
            "draw from torch's, NumPy's or Python's global generator, which are seeded for each sample"
        )

    def _about_readers(self) -> str:
        stream, workers = self.sets.get(TRAINING), self.config.num_workers
        return stream.shared(self.plan, self.world.world_size, workers) if isinstance(stream, Numbered) else ""

    def resume(self, state: State) -> None:
        """Load the newest whole state of any node, if there is one. Its holder reads, the others receive.

        No shared file system is needed: after the loss of a node the newest state may be on any of those left. Where
        ranks start again in place, each finds it in the memory of its own machine, as a rule.

        Raises:
            Refusal: on all ranks, with --strict-bits, as :meth:`begin`, if the newest checkpoint was damaged.
        """
        other_bits: Differences = {}
        while True:
            on_disk = self.checkpoints.newest_name() if self.world.local_rank == 0 else 0
            everywhere = self.world.gather((held.offer(self.checkpoints.place), on_disk))
            newest = max(max(offer.step if offer else 0, on_disk) for offer, on_disk in everywhere)
            if newest == 0:
                other_bits = self._compare_bits(None)
                break
            activity.enter(START_UP, "resuming")
            in_memory = [offer if offer and offer.step == newest else None for offer, _ in everywhere]
            if any(in_memory):
                found, saved = self._receive(in_memory)
            else:
                found, saved = self._load(newest, [step for _, step in everywhere].index(newest))
            if found:
                other_bits = self._compare_bits(found)
                self._restore(state, saved)
                self.unevaluated = not found.metrics
                before, now = found.best_by, self.checkpoints.best_by
                if before and now and before != now:
                    state.stopping.memory = Memory()
                    self._other_best = f"{now[0]} decides which checkpoint is the best, where {before[0]} did"
                break
        held.forget_before()
        activity.enter(START_UP, "first step")
        if self.tracker:
            self._tell_of_resume(self.tracker, state, other_bits)

    def _load(self, newest: int, holder: int) -> tuple[Manifest | None, dict[str, Any]]:
        """The checkpoint of this step, which one rank reads; None if it is damaged. The same on all ranks."""
        saved = self.checkpoints.load_newest() if self.world.rank == holder else None
        # a damaged one has been set aside by now, and another node may hold the next best
        whole = saved and saved["step"] == newest
        found = self.world.broadcast(self.checkpoints.newest_manifest() if whole else None, holder)
        return found, self.world.broadcast_tensors(saved, holder) if found else {}

    def _receive(self, in_memory: Sequence[held.Offer | None]) -> tuple[Manifest | None, dict[str, Any]]:
        """What ranks have left in memory, and the manifest of its checkpoint. The same on all ranks."""
        holder = next(rank for rank, offer in enumerate(in_memory) if offer)
        before = held.before(self.checkpoints.place) if in_memory[self.world.rank] else None
        file = Path(before.path).open("rb") if before else held.opened(filter(None, in_memory))  # noqa: SIM115
        everywhere = all(self.world.gather(file is not None))
        how = "read it" if everywhere else f"received it from rank {holder}"
        saved: dict[str, Any] = {}
        with file or contextlib.nullcontext():
            if file and (everywhere or self.world.rank == holder):
                saved = torch.load(f"/proc/self/fd/{file.fileno()}", map_location="cpu", weights_only=True)
        if not everywhere:  # a machine has none
            saved = self.world.broadcast_tensors(saved, holder)
        facts = self.world.broadcast(before.facts if before and self.world.rank == holder else None, holder)
        assert facts
        log.info("going on from step %d, which was in memory: %s", saved["step"], how)
        return manifest_of(facts), saved

    def _restore(self, state: State, saved: dict[str, Any]) -> None:
        try:
            state.restore(saved)
        except (RuntimeError, ValueError, LookupError) as error:
            if is_out_of_memory(error):
                raise
            what = " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])
            raise Ended(
                f"{self.path}: its state of step {saved['step']} does not fit this model and its optimizers ({what}); "
                "bring back the code that it was made by, name another --run-dir, or start over with --fresh"
            ) from error

    def _tell_of_resume(self, tracker: tracking.Tracker, state: State, other_bits: Differences) -> None:
        if state.placed:
            log.info("%s", state.placed)
        if forgotten := left_out(state.model, state.optimizers):
            log.warning("%s", forgotten)
        if state.origin and state.step == 0:
            # what has stayed random must not be overlooked
            log.log(logging.WARNING if self.config.init_partial else logging.INFO, "%s", state.origin)
        if state.step < (came := self.directory.status.get("step", 0) if self.directory else 0):
            log.warning("the run had come to step %d, but its newest checkpoint is of step %d", came, state.step)
        if kept.is_kept() and self.config.keeper_memory == "on":
            size = sum(tensor.nbytes for tensor in state.tensors().values()) / 1e6
            more = "" if state.step else ", and what the optimizers keep"
            log.info("when a rank dies, each other leaves %.1f MB%s in memory (--keeper-memory)", size, more)
        if self._other_best:
            log.warning("%s, from step %d on: the best and --patience start anew", self._other_best, state.step)
        metrics = list(read_records(self.path / "metrics.jsonl", tail=1 << 20))
        activity.redo_until = max((record["step"] for record in metrics), default=0)
        tracker.start(state.step, any((it["kind"], it["step"]) == ("eval", state.step) for it in metrics))
        if MICRO_BATCH in other_bits:
            log.warning(
                "from step %d on micro-batches are of %s instead of %s: the global batches and their samples are "
                "the same; dropout, mixing, BatchNorm's groups and the last bits are not",
                state.step, *reversed(other_bits[MICRO_BATCH]),
            )  # fmt: skip
        if other_bits:
            # with the ring the number of ranks decides as well, and nobody has been promised anything
            loud = self.config.reduce == "tree" or "strategy" in other_bits
            level = logging.WARNING if loud else logging.INFO
            log.log(level, "from step %d on bit-for-bit equality is void: %s", state.step, describe(other_bits))
            tracker.event("bits", state.step, differences=other_bits)

    def print(self, text: str) -> None:
        """A line on stdout, from rank 0."""
        if self.directory:
            with contextlib.suppress(OSError):  # a pipe that is gone
                display.say(f"evenkeel: {text}")


def _attempts(status: dict[str, Any]) -> int:
    return len(status.get("world_sizes", []))
