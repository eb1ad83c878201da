"""One training over all its starts, as rank 0 keeps it: run directory, checkpoints, what is told.

Every rank has a `Run` and calls the same methods, so that `train.py` need not ask who it is; on other ranks they
take part in the collectives and do nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from . import compilation, tracking
from .activity import CHECKPOINT, START_UP, activity
from .background import Background
from .checked_optimizers import left_out
from .checkpoint import Checkpoints, Manifest, dump
from .compiled_code import CompiledCode
from .config import Config, flag, saved_options
from .config import differences as differences_of_options
from .cut import Cutter, passes
from .data_digest import OFTEN, ONCE, TWICE, Digests, difference
from .devices import describe as describe_device
from .devices import explain_uneven, replicas
from .digest import digests
from .errors import FAILED, Ended, Refusal
from .files import write_atomically, write_json
from .fingerprint import Differences, describe, differences, differences_among_ranks, fingerprint
from .hang import Watch
from .interruption import STOPPED
from .ledger import goodput, ledger
from .memory import OutOfMemory, explained
from .mistakes import is_out_of_memory
from .naming import TEST, named, shown
from .plan import Plan
from .precision import substitute
from .probe import Probe
from .records import read_facts, read_records, recorded_options
from .run_directory import (
    MAX_FRUITLESS,
    RunDirectory,
    RunState,
    adopt,
    check,
    claim,
    launch_token,
    refuse_other_data,
)
from .seqlock import Torn
from .staging import Staging
from .state import State, cpu_state_dict, sha256
from .sync_batchnorm import refuse_too_few_ranks
from .tasks import Task
from .world import World

log = logging.getLogger(__name__)

T = TypeVar("T")

MICRO_BATCH = "micro_batch"
"""The part of a fingerprint that says how batches are cut. It may change when a run is continued, with a warning."""

MANY_OVERFLOWS = 10
"""Steps in a row that float16's loss scaling may leave out without a warning: the first scale is a guess."""

LAST_LINE_SECONDS = 0.5
"""How long a stop waits for the line of metrics of the last step. It takes a millisecond, where it comes at all."""


class Run:
    """A run's folder and what is written into it.

    Args:
        config: the options.
        task: what is trained.
        plan: how it is cut.
        world: who takes part.
        test_samples: size of the test data. None: it is not looked at.
        cutter: how a step is cut, given what the run has recorded, on whichever node. None: as `config` says.
        look: `data_digest.look` at the data, so many times. None: it is not looked at.

    Raises:
        Refusal: on rank 0, if the run directory cannot be this run's.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        plan: Plan,
        world: World,
        test_samples: int | None = None,
        cutter: Cutter | None = None,
        look: Callable[[int], tuple[Digests, list[str]]] | None = None,
    ) -> None:
        assert config.run_dir is not None  # resolved
        self.path = config.run_dir
        self.config, self.plan, self.world = config, plan, world
        self._cutter = cutter or (lambda _recorded: config)
        self.options = saved_options(config, task.options())
        self.samples = {"training": plan.samples} | ({} if test_samples is None else {"test": test_samples})
        mine = (self.path, self.options, config.fresh, task.harmless, self.samples, task.earlier)
        self.directory: RunDirectory | None = claim(*mine) if world.rank == 0 else None
        if world.local_rank == 0 and world.rank != 0:
            check(*mine)
        kept = fingerprint(task, world.device)
        if (gpus := len(replicas(config.strategy, world.device))) > 1:
            kept["strategy"] = f"dp on {gpus} GPUs"
        if config.compile:
            kept |= compilation.facts(world.device)
        self.compiled = CompiledCode(self.path, kept) if config.compile else None
        self.checkpoints = Checkpoints(self.path / "checkpoints", config.keep, task.best, kept)
        self._look = look or (lambda _times: ({}, []))
        steady = {} if config.fresh else read_facts(self.path / "status.json")[0].get("digests", {})
        # whether samples are others each time can be found out once, but for those that were
        self.digests, self._unsteady = self._look(ONCE if steady.keys() >= self.samples.keys() else TWICE)
        self._other_data = ""
        self.tracker: tracking.Tracker | None = None
        self._harmless = task.harmless
        self._metrics = self.path / "metrics.jsonl"
        self._skipped_told = 0
        self._overflows_told = (0, 0)
        self._logged = 0
        self._compilations = -1
        self._writer: Background[float] = Background("checkpoint")
        self._staging = Staging(*world.devices)
        self._saving = 0
        self._watch: Watch | None = None
        self.started = time.monotonic()
        self.seconds_before = self.directory.status.get("seconds", 0.0) if self.directory else 0.0

    def begin(self, probe: Probe | None = None) -> bool:
        """Record, on every rank, that an attempt starts; True if there is nothing left to do.

        From here on `config` and `plan` say how steps are cut, where that was open.

        Args:
            probe: is called on all ranks if a run starts with auto.

        Raises:
            Ended: the last attempts have all died before they finished a step.
            Refusal: on all ranks, before anything is written: the data of a node is other data than the run's or rank
                0's; or with --strict-bits, as :meth:`resume`. Not before the process group exists, because another
                node may know more of the run.
        """
        first_here = self.world.local_rank == 0
        status = {**self._recorded(), **read_facts(self.path / "status.json")[0]} if first_here else {}
        known = self.world.gather((launch_token(), status))
        tokens = [token for token, _ in known]
        newest = max((status for _, status in known), key=_attempts)
        anew = self.config.fresh and not set(filter(None, tokens)) & set(newest.get("launch", []))
        note = self.compiled.unpack(begins=anew) if self.compiled and first_here else ""  # others wait below
        self._refuse_other_data({} if anew else newest)
        finished = self._finished(newest)
        said = self._settle_cut(known, probe)
        if self.config.strict_bits and (self.config.fresh or not finished):
            self._refuse_other_bits()
        opened: tuple[bool, dict[str, Any]] | Ended | None = None
        if self.directory:
            opened = self._written(lambda: self._open(tokens, newest))
        known_now: Any = self.world.broadcast(opened)
        if isinstance(known_now, Ended):
            raise known_now
        finished, status = known_now
        if finished:
            early = " early" * status.get("stopped_early", False)
            self._print(f"{self.path}: finished{early} at step {status.get('step', 0)}; --fresh starts over")
            return True
        self.logs = self.path / "logs" / f"attempt-{_attempts(status):04d}"
        ready = self._written(lambda: self._open_here(status))
        mine = describe_device(self.world.device)
        log.info("this rank has %s", mine)
        if note:
            log.warning("%s", note)
        everywhere = self.world.gather((mine, ready))
        for _, ended in everywhere:
            if ended:
                raise ended
        uneven = explain_uneven([device for device, _ in everywhere])
        if status["fruitless"] > MAX_FRUITLESS:
            self._end_crash_loop()
        if self.directory:
            self._start_tracking(self.directory)
            if self.directory.trouble:
                log.warning("%s/%s; the run goes on from its checkpoints", self.path, self.directory.trouble)
            for line in filter(None, (uneven, self._about_strategy(), self._about_data())):
                log.warning("%s", line)
            if self.tracker and said:
                self.tracker.say(said)
                self.tracker.event("micro_batch", 0, micro_batch=self.plan.micro_batch, how=said)
        return False

    def _open(self, tokens: list[str], newest: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """On rank 0: begin the attempt, unless the run is finished. Returns whether it is, and its status.

        Args:
            tokens: of all ranks.
            newest: the status that knows most of the run.
        """
        directory = self.directory
        assert directory
        if self.config.fresh:
            if aside := directory.start_over(tokens):
                self._print(f"--fresh: the run that was in {self.path} is now in {aside}")
        elif not directory.attempts:  # rank 0 is new here, but another node may know the run
            directory.status = newest
        status = directory.status
        if self._finished(status):
            return True, status
        facts: dict[str, Any] = {"total_steps": self.plan.total_steps, "threads": torch.get_num_threads()}
        facts |= {"micro_batch": self.plan.micro_batch, "micro_batches": self.plan.number}
        if tracking.wandb_mode(self.config.wandb)[0] != "disabled":
            # before it is used: a start that is killed in the midst of it must not leave a W&B run of its own
            facts["wandb_id"] = status.get("wandb_id") or uuid4().hex[:12]
        directory.begin(self.options, tokens, samples=self.samples, digests=self.digests, **facts)
        return False, directory.status

    def _open_here(self, status: dict[str, Any]) -> None:
        """On every rank: its log, and on a node without rank 0 what is to be known of the run."""
        aside = None
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

    def _recorded(self) -> dict[str, Any]:
        """What this node knows of the options that were left open when the run began."""
        recorded = recorded_options(self.path)
        if "threads" not in recorded and (newest := self.checkpoints.newest_manifest()):  # of an older version
            recorded |= {"threads": int(newest.fingerprint["threads"])} if "threads" in newest.fingerprint else {}
        return recorded

    def _settle_cut(self, known: list[tuple[str, dict[str, Any]]], probe: Probe | None) -> str:
        """Decide how steps are cut, and how many threads compute: as this run has recorded, or, if it is new, by the
        options.

        The same on all ranks, whichever node has the run's folder. Returns what there is to say of it.

        Args:
            known: token and status, of all ranks.
            probe: as for :meth:`begin`.
        """
        continued = [status for _, status in known if status.get("micro_batch")]
        if self.config.fresh:  # then only a restart of this launch finds its own run
            tokens = {token for token, _ in known if token}
            continued = [status for status in continued if tokens & set(status.get("launch", []))]
        recorded = max(continued, key=_attempts, default={})
        is_open = not (self.config.micro_batch or self.config.micro_batches)
        config, said = self._cutter(recorded), ""
        if config.micro_batch == "auto":
            found = recorded.get("micro_batch", 0)
            if not found:
                assert probe
                activity.enter(START_UP, "--micro-batch auto")
                found, said = probe()
            config = replace(config, micro_batch=int(found))
        if not config.threads and recorded.get("threads"):
            torch.set_num_threads(recorded["threads"])
        self.config, self.plan = config, self.plan.cut_as(config)
        self.options |= {"micro_batch": config.micro_batch, "micro_batches": config.micro_batches}
        if config.sync_batchnorm:
            refuse_too_few_ranks(self.plan, self.world.world_size)
        settled = {MICRO_BATCH: self.plan.cut, "threads": str(torch.get_num_threads())}
        self.checkpoints = replace(self.checkpoints, fingerprint=self.checkpoints.fingerprint | settled)
        return said or passes(self.plan, self.world) if is_open and not recorded and config.reduce == "tree" else said

    def _pack_compiled(self, step: int, asked: bool) -> None:
        """Keep compiled code with the run, if some is new or it is asked for."""
        new = compilation.progress.times != self._compilations
        if not (self.compiled and (new or asked)):
            return
        with activity.during(CHECKPOINT):
            self.compiled.pack()
        if new and self.tracker:
            self._compilations = compilation.progress.times
            self.tracker.event("compile", step, **compilation.progress.report())

    def _leave_compiled(self, step: int) -> None:
        """The run is over, and nothing is left on the nodes."""
        if self.directory:
            self._pack_compiled(step, asked=True)
        if self.compiled and self.world.local_rank == 0:
            self.compiled.clear()

    def _about_strategy(self) -> str:
        if self.config.strategy != "dp":
            return ""
        gpus = len(replicas("dp", self.world.device))
        what = (
            f"divides each micro-batch among {gpus} GPUs" if gpus > 1 else "has one device here, and nothing to divide"
        )
        return (
            f"--strategy dp {what}; ddp is the default because with dp one Python drives all GPUs, weights are sent "
            "out anew in each step, and BatchNorm's statistics are the first GPU's only"
        )

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

    def resume(self, state: State) -> None:
        """Continue from the newest whole state on any node, if there is one. Its holder reads, the others receive.

        No shared file system is needed: after the loss of a node the newest state may be on any of those left.

        Raises:
            Refusal: on all ranks, with --strict-bits, if what bits depend on is not what it was or not the same on all
                ranks. :meth:`begin` has seen to that, unless the newest checkpoint has turned out to be damaged.
        """
        other_bits: Differences = {}
        while True:
            steps = self.world.gather(self.checkpoints.newest_name() if self.world.local_rank == 0 else 0)
            newest = max(steps)
            if newest == 0:
                other_bits = self._compare_bits(None)
                break
            activity.enter(START_UP, "resuming")
            holder = steps.index(newest)
            saved = self.checkpoints.load_newest() if self.world.rank == holder else None
            # a damaged one has been set aside by now, and another node may hold the next best
            whole = saved and saved["step"] == newest
            found = self.world.broadcast(self.checkpoints.newest_manifest() if whole else None, holder)
            if found:
                other_bits = self._compare_bits(found)
                self._restore(state, self.world.broadcast_tensors(saved, holder))
                break
        activity.enter(START_UP, "first step")
        if self.tracker:
            if state.placed:
                log.info("%s", state.placed)
            if forgotten := left_out(state.model, state.optimizers):
                log.warning("%s", forgotten)
            if state.origin and newest == 0:
                # what has stayed random must not be overlooked
                log.log(logging.WARNING if self.config.init_partial else logging.INFO, "%s", state.origin)
            if state.step < (came := self.directory.status.get("step", 0) if self.directory else 0):
                log.warning("the run had come to step %d, but its newest checkpoint is of step %d", came, state.step)
            activity.redo_until = max((record["step"] for record in read_records(self._metrics, 1 << 20)), default=0)
            self.tracker.start(state.step)
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
                self.tracker.event("bits", state.step, differences=other_bits)

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

    def watched(self, store: Store | None, on_hang: Callable[[], None]) -> Watch:
        """A context in which every rank tells the others what it does.

        Args:
            store: this attempt's own.
            on_hang: is called from another thread when a rank is stuck; should call :meth:`hung`.
        """
        self._watch = Watch(self.config.hang_timeout, self.world, store, self.logs, on_hang, self._checkpoint_elsewhere)
        return self._watch

    def log_step(self, state: State, loss: Tensor, norm: Tensor) -> None:
        """A line of metrics for the last step. Reads from the device, so not for every step.

        Args:
            state: of which the step number counts.
            loss: the step's loss, summed over ranks.
            norm: the gradient's.
        """
        if not self.tracker:
            return
        if state.skipped > self._skipped_told:
            self._skipped_told = state.skipped
            log.warning("step %d was not finite and is left out, %d so far", state.last_skipped, state.skipped)
            self.tracker.event("nonfinite", state.last_skipped, skipped=state.skipped)
        more = {}
        if state.scaler:  # of the next step, and how many the run has left out for it
            more = {"scale": state.scaler.scale.item(), "overflows": int(state.scaler.overflows)}
            self._tell_overflows(state.step, int(more["overflows"]))
        lr = float(state.optimizers[0].param_groups[0]["lr"])
        self.tracker.train(state.step, loss.item(), norm.item(), lr, more)
        self._logged = state.step

    def _tell_overflows(self, step: int, overflows: int) -> None:
        """Some overflows are part of finding the scale; where there is nothing else, nothing is learned."""
        known, overflows_then = self._overflows_told
        all_of_them = overflows - overflows_then == step - known
        if all_of_them and step - known < MANY_OVERFLOWS:
            return
        self._overflows_told = (step, overflows)
        if all_of_them:
            log.warning(
                "the gradient has overflowed in all of the last %d steps, and they are left out: lower --lr or "
                "--loss-scale, or use --precision bf16",
                step - known,
            )

    def checkpoint(self, state: State, metrics: dict[str, float]) -> None:
        """After each step but the last: tell of an evaluation, and save if it is time or if it was the best so far.

        The state is copied and written in the background; the next commit waits for the copy, not for the writing.
        A checkpoint that cannot be written is reported, loudly, with the next step, and the training goes on: the old
        one stays.
        """
        if not (self.directory and self.tracker):
            return
        if not self._staging.pinned:  # here alone: page-locked memory for a state of each rank is more than a node has
            state.pin(self._staging)
        if self.directory.fruitless:
            self.directory.note(fruitless=0)  # this attempt has finished a step
        self._record_digests(self.tracker, state)
        metrics = named(TEST, metrics)
        every = self.config.checkpoint_every
        due = bool(every) and state.step % every == 0
        self._pack_compiled(state.step, due)
        if self._writer.done or (self._writer.busy and (due or metrics)):
            with activity.during(CHECKPOINT):
                self._take_result()
        if metrics:
            self.tracker.evaluation(state.step, metrics)
        if due or (metrics and self.checkpoints.improves(metrics)):
            begun = time.perf_counter()
            held = self._hold(state)
            self._saving = state.step
            self._writer.start(lambda: self._save(held, metrics, begun))

    def finish(self, state: State, metrics: dict[str, float]) -> None:
        """The last checkpoint, the model for the world outside, and the summary.

        Raises:
            Ended: they cannot be written.
            NonFinite: the last step was not finite.
        """
        state.settle()
        self._leave_compiled(state.step)
        if not (self.directory and self.tracker):
            return
        if self._writer.busy:
            self._take_result()
        metrics = named(TEST, metrics)
        self.tracker.evaluation(state.step, metrics)
        self._record_digests(self.tracker, state)
        activity.enter(CHECKPOINT)
        weights = cpu_state_dict(state.best_model)
        early = state.step < self.plan.total_steps
        why = f"stopped early at step {state.step}: {state.stopping.why()}" * early
        try:
            # no training to keep from waiting, so no copy of what is on the host
            self.checkpoints.save(state.capture(staging=Staging(*self.world.devices, still=True)), metrics)
            self._update("running", state.step)
            write_atomically(self.path / "model.pt", lambda file: dump(weights, file))
            summary = self._summary("finished", state.step, metrics) | {"weights_sha256": sha256(weights)}
            summary |= {"stopped_early": early} | ({"reason": why} if early else {})
            write_json(self.path / "summary.json", summary)
            # such a run has no more steps to do, whatever the plan says
            self._update("finished", state.step, total_steps=state.step, stopped_early=early, reason=why)
        except OSError as error:
            raise Ended(
                f"not finished: step {state.step} cannot be written: {error}; the last checkpoint is at step "
                f"{self.checkpoints.newest_step()}; make room and run the same command again"
            ) from error
        self.tracker.event("finish", state.step)
        productive = f"{summary['goodput']:.0%} of {sum(summary['ledger'].values()):.1f} s were productive"
        self._print(f"finished, {f'{why}, ' * early}{productive}: {shown(metrics)}  -> {self.path / 'model.pt'}")
        self.tracker.close()

    def stopped(self, state: State, reason: str) -> None:
        """A signal asked for a stop: save the last finished step. Any thread may call it, whatever the others do."""
        saved = self._rescue(state)
        if self._watch:
            self._watch.end()
        self._await_last_line(state.step)
        self._end("stopped", state.step, reason, STOPPED, fruitless=0)
        self._print(f"stopped by {reason}; {saved}; the same command continues")

    def failed(self, state: State, error: BaseException) -> None:
        """Something went wrong here or on another rank: save the last finished step.

        Args:
            state: the live state.
            error: what ended the training. The death of another rank shows as an error of a collective.

        Raises:
            OutOfMemory: if memory has run out: the same error, with all that there is to say.
        """
        if is_out_of_memory(error):
            story, config = error, self.config
            error = OutOfMemory(explained(story, self.world.device, config))
            saved = self._failed(state, error)
            raise OutOfMemory(explained(story, self.world.device, config, saved)) from story
        self._failed(state, error)

    def _failed(self, state: State, error: BaseException) -> str:
        if isinstance(error, Ended):
            log.info("failed at step %d: %s", state.step, error)  # the user is told in a line of its own
        else:
            log.error("failed at step %d", state.step, exc_info=error)
        return self._end_failed(state, error, self._rescue(state))

    def _end_failed(self, state: State, error: BaseException, saved: str) -> str:
        self._end("failed", state.step, _reason(error), FAILED)
        self._print(f"failed at step {state.step}; {saved}")
        return saved

    def hung(self, state: State) -> None:
        """A rank is stuck: save the last finished step, say which rank, and free torchrun of those that cannot end."""
        assert self._watch
        self._watch.look_around()  # meanwhile: nothing that explains the hang may keep the state from being saved
        saved = self._rescue(state)
        explained = self._watch.explain()
        log.info("failed at step %d: %s", state.step, explained)
        activity.write_off()
        self._end_failed(state, Ended(explained), saved)
        self._watch.kill_frozen()
        self._watch.write_collectives()

    def _refuse_other_data(self, before: dict[str, Any]) -> None:
        """Each node has looked at its own copy of the run so far, at its own command line and at its own data."""
        everywhere = self.world.gather((self.samples, self.options, self.digests, self.config.other_data))
        samples, options, _, _ = everywhere[0]
        for rank, (there, typed, _, _) in enumerate(everywhere):
            for name, first, here in differences_of_options(options, typed, self._harmless):
                raise Refusal(
                    f"{flag(name)} is {first} on rank 0 and {here} on rank {rank}; type it, and the same on all nodes"
                )
            refuse_other_data(self.path, before.get("samples", {}), there)
            for part, number in there.items():
                if number != samples[part]:
                    raise Refusal(
                        f"the {part} data has {samples[part]} samples on rank 0 and {number} on rank {rank}; "
                        "give all nodes the same data"
                    )
        known = before.get("digests", {})
        if difference(known, [there for _, _, there, _ in everywhere]):
            # now and then samples that are drawn anew at each read come out alike twice
            self.digests, self._unsteady = self._look(OFTEN)
            self._other_data = difference(known, self.world.gather(self.digests))
            if self._other_data and not any(accepted for *_, accepted in everywhere):
                raise Refusal(f"--run-dir {self.path}: {self._other_data}")
        self.digests = {**known, **self.digests}

    def _refuse_other_bits(self) -> None:
        manifests = self.world.gather(self.checkpoints.newest_manifest() if self.world.local_rank == 0 else None)
        known = [manifest for manifest in manifests if manifest and not self.config.fresh]
        self._compare_bits(max(known, key=lambda manifest: manifest.step, default=None))

    def _compare_bits(self, found: Manifest | None) -> Differences:
        """In what this attempt's bits might differ from those of a run that was never stopped; the same on all ranks.

        What checkpoints will say of it from now on is rank 0's.

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
                f"--strict-bits: from step {step} on the bits might be others: {describe(other_bits)}; continue with "
                "what it was before, or without --strict-bits"
            )
        if other_bits and void_from is None:
            void_from = step
        self.checkpoints = replace(self.checkpoints, fingerprint=present[0], bits_void_from=void_from)
        return other_bits

    def _record_digests(self, tracker: tracking.Tracker, state: State) -> None:
        every = self.config.digest_every
        if every and (state.step % every == 0 or state.is_over()):
            with activity.during(CHECKPOINT):
                tracker.event("digest", state.step, digests=digests(state.tensors()))

    def _finished(self, status: dict[str, Any]) -> bool:
        over = status.get("stopped_early") or status.get("step", 0) >= self.plan.total_steps
        return status.get("state") == "finished" and bool(over)

    def _end(self, name: RunState, step: int, reason: str, exit_code: int, **facts: Any) -> None:
        if not (self.directory and self.tracker) or self.directory.status.get("state") == "finished":
            return  # a signal in the very last moment changes nothing any more
        with contextlib.suppress(OSError):  # a disk too full even for this
            self._update(name, step or self.directory.status.get("step", 0), reason=reason, **facts)
        self.tracker.event({"stopped": "stop", "failed": "failure"}[name], step, reason=reason)
        self.tracker.close(exit_code=exit_code)

    def _rescue(self, state: State) -> str:
        """Save the committed state from this rank, unless another one here has done so; says what came of it."""
        if state.step == 0:
            return "there was no step to save"
        begun, grace = time.monotonic(), self.config.grace
        # moments, not lengths of time: whatever is waited for, the second half of the grace is left for the writing
        kept = self._staging.take(begun + grace / 4)
        try:
            # new memory if the writer does not come back with the other
            staging = self._staging if kept else Staging(*self.world.devices)
            captured = state.capture(begun + grace / 2, staging, final=True)
            # the lowest one that lives should write; not before the capture, because small steps go on meanwhile
            time.sleep(min(0.05 * self.world.local_rank, grace / 8))
            path = self.checkpoints.rescue(captured, begun + grace / 2)
        except (OSError, Torn, RuntimeError) as error:  # the last from a GPU that has failed
            log.error("NOT SAVED: %s; the last checkpoint is at step %d", error, self.checkpoints.newest_step())
            return f"not saved ({error})"
        finally:
            if kept:
                self._staging.give_back()
        seconds = time.monotonic() - begun
        if path:
            log.info("saved %s in %.2f s", path, seconds)
        return f"step {captured['step']} is saved" + (f", in {seconds:.2f} s" if path else "")

    def _await_last_line(self, step: int) -> None:
        """The signal may have come between the commit of the last step and its line of metrics, which soon follows."""
        deadline = time.monotonic() + LAST_LINE_SECONDS
        due = self.tracker is not None and step % self.config.log_every == 0
        while due and self._logged < step and time.monotonic() < deadline:
            time.sleep(0.005)

    def _take_result(self) -> None:
        """What came of the last checkpoint in the background; waits for it if need be."""
        assert self.tracker
        step = self._saving
        try:
            seconds = self._writer.result()
            self.tracker.event("checkpoint", step, seconds=round(seconds, 4))
            if self._watch:
                self._watch.announce_saved(step)
        except OSError as error:
            last = self.checkpoints.newest_step()
            self.tracker.event("checkpoint_failed", step, reason=str(error))
            log.error("NO CHECKPOINT at step %d: %s; training goes on, the last one is at step %d", step, error, last)

    def _hold(self, state: State) -> Callable[[], dict[str, Any]]:
        """The state, to be captured by :meth:`_save` in memory which that gives back."""
        with activity.during(CHECKPOINT):
            self._staging.take()
        try:
            return state.hold(staging=self._staging)
        except BaseException:
            self._staging.give_back()
            raise

    def _save(self, held: Callable[[], dict[str, Any]], metrics: dict[str, float], begun: float) -> float:
        try:
            captured = held()
            self.checkpoints.save(captured, metrics)
            self._update("running", captured["step"])  # here, because a disk that is busy with the above takes its time
        finally:
            self._staging.give_back()
        return time.perf_counter() - begun

    def _end_crash_loop(self) -> NoReturn:
        reason = f"{MAX_FRUITLESS} attempts in a row have died before they finished a step"
        if self.directory:
            last = self.directory.status.get("last_failure")
            reason += f"; the last: {last}" if last else ", without a word: killed from outside, perhaps for memory"
            with contextlib.suppress(OSError):
                self.directory.update("failed", reason=reason)
        raise Ended(f"{reason}; logs are in {self.path / 'logs'}; the same command tries again")

    def _start_tracking(self, directory: RunDirectory) -> None:
        config, plan, world = self.config, self.plan, self.world
        if world.world_size > plan.max_world_size:
            log.warning(
                "%d of %d ranks have nothing to do: the batch of %d is cut into %d micro-batches of %d; "
                "a smaller --micro-batch feeds more ranks",
                world.world_size - plan.max_world_size, world.world_size,
                config.batch_size, plan.max_world_size, config.micro_batch,
            )  # fmt: skip
        if note := substitute(config.precision, world.device):
            log.warning("%s", note)
        self.tracker = tracking.Tracker(config, plan, self.path, directory.attempts, world.world_size)
        self.tracker.start_wandb(directory.status.get("wandb_id"), self.options)

    def _update(self, name: RunState, step: int, **facts: Any) -> None:
        assert self.directory
        facts = {"total_steps": self.plan.total_steps} | facts
        self.directory.update(name, step=step, seconds=round(self._seconds(), 3), **facts)

    def _seconds(self) -> float:
        """Wall-clock seconds at work, over all attempts that lived to tell."""
        return self.seconds_before + time.monotonic() - self.started

    def _summary(self, name: RunState, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        assert self.directory
        now = {"kind": "summary", "time": time.time(), "spent": activity.spent()}
        seconds = ledger([*read_records(self._metrics), now])
        return {
            "state": name,
            "step": step,
            "epoch": step / self.plan.steps_per_epoch,
            "samples_seen": self.plan.samples_seen(step),
            "metrics": metrics,
            "restarts": self.directory.attempts - 1,
            "world_sizes": self.directory.status["world_sizes"],
            "bits_void_from": self.checkpoints.bits_void_from,
            "seconds": round(self._seconds(), 3),
            "goodput": goodput(seconds),
            "ledger": seconds,
        }

    def _checkpoint_elsewhere(self, step: int) -> None:
        """On a node without rank 0, snapshots of former attempts are of no use any more."""
        if not self.directory:
            self.checkpoints.clear_snapshots(before=step)
            if self.compiled:
                self.compiled.pack()

    def _print(self, text: str) -> None:
        if self.directory:
            with contextlib.suppress(OSError):  # a pipe that is gone
                print(f"evenkeel: {text}", flush=True)


def _reason(error: BaseException) -> str:
    """What went wrong, in a line."""
    name = "" if isinstance(error, Ended) else f"{type(error).__name__}: "
    first, *more = f"{name}{error}".strip().split("\n")
    # of an error in a loader process torch tells where it was caught first, and what it was last
    return more[-1] if more and " in DataLoader worker process " in first else first


def _attempts(status: dict[str, Any]) -> int:
    return len(status.get("world_sizes", []))
