"""The committed state: the complete state of a run between two optimizer steps.

Model, optimizers and one integer, the step; if the options or the task need them, float16's loss scale, the
average of the weights, the memory of early stopping, the task's schedulers, its own state, and the weights from which
it made the epoch's data. Everything else (sample order, random numbers, the learning rate of a task without
schedulers) is a pure function of the options and the step. It has no world size and no rank, so one rank can continue a
state that eight ranks have written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.deadlines import FOREVER, left
from ..common.phases import CHECKPOINT, COMMIT, activity
from .buffers import Buffers
from .early_stopping import Stopping
from .ema import Average
from .nonfinite import NonFinite, Verdict, decide, step_unless
from .optimization import Rates, load_optimizer, rate_names
from .precision import Scaler
from .refresh import Refresh, load_refresh
from .schedulers import Schedulers, load_schedulers
from .seqlock import Seqlock, Torn
from .staging import Staging, named_tensors
from .state_dicts import load_weights, local_rows
from .task_state import TaskState, load_task_state

if TYPE_CHECKING:
    from .sharding import Sharding  # imports FSDP2, which takes a second


class State:
    """The live objects that a step changes, the same on every rank after each step.

    A step changes gradients and, if the model has them, buffers (BatchNorm's statistics); parameters and optimizers'
    moments change only in :meth:`commit`, learning rates also in :meth:`set_rates`. So between two commits,
    even in the middle of a step and from another thread, :meth:`capture` returns the state of the last finished step.

    Args:
        model: the bare model, not its DDP wrapper, so that saved names have no `module.` prefix.
        optimizers: all of them; they step together.
        skip_nonfinite: skip a step whose gradient is not finite, instead of raising an error.
        origin: the source of the initial weights, in a line, if they are from a file.
        scaler: the loss scaling of float16.
        ema: the decay of an average of the weights; 0: there is none.
        stopping: says when the run is over; None: never.
        placed: how the model is spread over several devices, in a line, if it is.
        schedulers: the task's, which set the learning rates instead of :meth:`set_rates`.
        task_state: the task's own state, which changes in a commit. The host then waits for each step.
        refresh: the weights from which the task has made the data of the present epoch.
        devices: of this rank; default: where the model is.
        sharded: it will be divided (:meth:`divide`), and the average gets memory only then.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        *,
        skip_nonfinite: bool = False,
        origin: str = "",
        scaler: Scaler | None = None,
        ema: float = 0.0,
        stopping: Stopping | None = None,
        placed: str = "",
        schedulers: Schedulers | None = None,
        task_state: TaskState | None = None,
        refresh: Refresh | None = None,
        devices: Sequence[torch.device] = (),
        sharded: bool = False,
    ) -> None:
        self.model, self.optimizers, self.task_state, self.refresh = model, optimizers, task_state, refresh
        self.sharding: Sharding | None = None
        """The division of its tensors among ranks, with --shard on."""
        self.skip_nonfinite, self.origin, self.placed = skip_nonfinite, origin, placed
        self.scaler, self.stopping, self.schedulers = scaler, stopping or Stopping(), schedulers
        self.step = 0
        """Optimizer steps done."""
        self.skipped = 0
        """Steps skipped since this process began."""
        self.last_skipped = 0
        """The number of the last skipped step, counted from 1."""
        self.parameters = list(model.parameters())
        """The model's parameters, listed once: listing them takes as long as computing a layer."""
        self.buffers = self._name_tensors(model)
        self.average = Average(model, ema, self.buffers, sharded) if ema else None
        # the first device decides whether a step is skipped
        tensors = [*([scaler.scale] if scaler else []), *self.parameters, *self.buffers.committed.values()]
        self._devices = list(dict.fromkeys(devices or [it.device for it in tensors])) or [torch.device("cpu")]
        self._seqlock = Seqlock(*self._devices)
        self._verdict = Verdict(self._devices[0])  # was the last step finite? A GPU answers later
        self._rates: Rates | None = None
        self.rates: dict[str, Any] = {}
        """Each optimizer's learning rate in the last step, by `rate_names`."""
        self._rate_names = rate_names(optimizers, model)
        if schedulers:
            schedulers.taken = schedulers.taken.to(self._devices[0])

    def _name_tensors(self, model: nn.Module) -> Buffers:
        """List the names of all tensors; returns the buffers. A tied tensor, or one of a layer used twice, has several
        names: checkpoints have all, optimizers and `Buffers` only its first."""
        self._saved_names = list(model.state_dict(keep_vars=True))  # without non-persistent buffers
        self._parameters_by_name = dict(model.named_parameters(remove_duplicate=False))
        # `divide` puts this rank's rows in place of the parameters
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        buffers = {name: it for name, it in model.named_buffers(remove_duplicate=False) if name in self._saved_names}
        first = {buffer: name for name, buffer in reversed(buffers.items())}
        self._first_buffer_names = {name: first[buffer] for name, buffer in buffers.items()}
        return Buffers({name: it for name, it in buffers.items() if first[it] == name}, model)

    def clear_gradients(self) -> None:
        """Clear the last step's gradients, also of parameters that no optimizer has: they would count in the norm."""
        for parameter in self.parameters:
            parameter.grad = None
        for rows in self.sharding.whole if self.sharding else ():  # an optimizer that ran out of memory leaves them
            rows.grad = None

    def set_rates(self, factors: float | Sequence[float]) -> None:
        """Set the learning rates of the next step, unless the task's schedulers have already done so.

        Args:
            factors: on each optimizer's peak rates: one for all, or one for each.
        """
        if self.schedulers:
            return
        if self._rates is None:
            self._rates = Rates(self.optimizers, begun=self.step > 0)
        self._rates.set(factors)

    @property
    def best_model(self) -> nn.Module:
        """The model to evaluate and to export: the averaged one, if there is one."""
        return self.average.model if self.average else self.model

    def commit(self, norm: Tensor, buffers: Sequence[Tensor] = (), loss: Tensor | None = None) -> None:
        """Take an optimizer step, if the gradients are finite. Afterwards every rank has the same state again.

        A GPU decides by itself, and the host learns of it while the next step is computed. So it waits for the previous
        step only, and the GPU does not run out of work; for this one if the host must decide (`decide`).

        Args:
            norm: the gradient's norm, a scalar that is the same on every rank; if not finite, nothing is changed.
            buffers: new values of the buffers, flat, for each of :attr:`Buffers.groups`; a model without any has none.
            loss: the step's loss, for a scaler: an overflow at its scale is not a failure, and only lowers the scale.

        Raises:
            NonFinite: this step, or on a GPU the previous one, was not finite; `step` is back at the one before it.
        """
        self.settle()
        # if the host must wait for a GPU, it does so here, before it takes the lock: a rescue would wait too
        norm, by_host = norm.to(self._devices[0]), self.task_state is not None
        nonfinite, overflow, failed, skip = decide(norm, loss, self.scaler, self.optimizers, by_host)
        skip_on = {device: nonfinite.to(device) for device in self._devices}
        activity.enter(CHECKPOINT)  # the lock waits if a checkpoint is being copied
        with self._seqlock.change(self.step + 1, undone=None if self.skip_nonfinite else failed):
            activity.enter(COMMIT)
            for name, optimizer in zip(self._rate_names, self.optimizers, strict=True):
                lr = optimizer.param_groups[0]["lr"]
                self.rates[name] = lr.clone() if isinstance(lr, Tensor) else lr
            for optimizer in self.optimizers:
                step_unless(skip, optimizer)
            self.buffers.commit(buffers, skip_on)
            if self.scaler and overflow is not None:
                self.scaler.update(overflow, ~nonfinite)
            if self.schedulers:
                self.schedulers.commit(nonfinite)
            if self.task_state and not skip:
                self.task_state.commit(self.model, self.step + 1)  # it may change the weights, which are averaged then
            if self.average:
                self.average.update(self.step + 1, nonfinite)
            self.step += 1
        self._verdict.ask(failed)
        # undo it now if that is known, as on a CPU; else a later `settle` does, and a rescue meanwhile sees by
        # `begun` and `done` which step is there
        if self._verdict.immediate or skip is True:
            self.settle()
        activity.step = self.step

    def is_over(self) -> bool:
        """Whether there are no more steps to do."""
        return self.stopping.over(self.step)

    def evaluation_is_due(self) -> bool:
        """Whether the step just taken is one to evaluate after."""
        return self.stopping.due(self.step)

    def record_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        """Record an evaluation of the current state; returns its metrics."""
        self.stopping.record_evaluation(self.step, metrics)
        if self.schedulers:
            with self._seqlock.hold(FOREVER):
                self.schedulers.record_evaluation(self.step, metrics)
        return metrics

    def settle(self) -> None:
        """Wait until it is known whether the last step was finite.

        Raises:
            NonFinite: it was not.
        """
        failed = self._verdict.pop()
        # not in `commit`: schedulers step only after a step that was taken, of which a GPU has told the host by now
        if self.schedulers and self.schedulers.pending:
            with self._seqlock.hold(FOREVER):
                self.schedulers.step_if_taken()
        if not failed:
            return
        if not self.skip_nonfinite:
            self.step = self._seqlock.queued = self.step - 1
            raise NonFinite(self.step + 1)
        self.skipped += 1
        self.last_skipped = self.step

    def capture(
        self, until: float = FOREVER, staging: Staging | None = None, final: bool = False, latest: bool = False
    ) -> dict[str, Any]:
        """A copy of the committed state on the host, as nested dicts of tensors and plain data. Any thread may call it.

        Args:
            until: the moment until which to wait for a commit in progress, on the host and on its devices.
            staging: memory for the tensors, reserved by the caller; None: new memory.
            final: the process is ending. No further step is committed: it would not be saved, and so be lost.
            latest: leave the memory as it is if the devices hang before the end of the step that the host has queued.

        Raises:
            Torn: the state is that of half a step, because a commit hangs or has failed; or as `latest` says.
        """
        return self.begin_capture(until, staging, final, latest)()

    def begin_capture(
        self, until: float = FOREVER, staging: Staging | None = None, final: bool = False, latest: bool = False
    ) -> Callable[[], dict[str, Any]]:
        """Do the first two steps of a copy (`seqlock`), and return the function that does the others, once, in any
        thread; until then no commit begins. The arguments are those of :meth:`capture`; both raise Torn.
        """
        with ExitStack() as stack:
            stack.enter_context(self._seqlock.hold(until, final))
            if self.schedulers and self.schedulers.broken:
                raise Torn("a scheduler has failed in the middle of its step")
            if latest and not self._seqlock.wait(until):
                raise Torn(f"the devices have not finished step {self.step}")
            queued, committed = self._seqlock.queued, self._committed()
            # the order of `committed` is the protocol: `done`, a number for each device, first, and `begun` last
            captured, copy = (staging or Staging(*self._devices)).prepare(committed, fences=len(self._devices))
            locked = stack.pop_all()

        def finish() -> dict[str, Any]:
            with locked:
                while True:  # a device that seemed to hang may still commit during the copy, which is torn then
                    # if the devices have finished, another copy would be no better; after the deadline none begins
                    last_try = self._seqlock.wait(until) or not left(until)
                    copy()
                    done, begun = ([number.item() for number in captured[name]] for name in ("done", "begun"))
                    consistent = len({*done, *begun}) == 1
                    if consistent or last_try:
                        break
            del captured["done"], captured["begun"]
            if not consistent:
                raise Torn(f"the optimizer step to {max(begun)} has not finished")
            self._check_one_step(committed, on_device=done[0], on_host=queued)
            return {"step": done[0], **captured}

        return finish

    def _check_one_step(self, committed: dict[str, Any], on_device: int, on_host: int) -> None:
        """Raise Torn if a part of a copy is on the host, and so of a step that a GPU has not done yet."""
        if on_device == on_host or all(it.type == "cpu" for it in self._devices):
            return
        if "task" in committed or any(it.device.type == "cpu" for it in named_tensors(committed).values()):
            raise Torn(f"the device is at step {on_device}, but the task or an optimizer without fused=True is ahead")

    def pin(self, staging: Staging) -> None:
        """Prepare memory for fast copies from a GPU. Call it after the first commit: then the optimizers have state."""
        staging.pin(self._committed())

    def _committed(self) -> dict[str, Any]:
        """The committed state itself, in the order of a copy (`seqlock`); of divided tensors this rank's rows."""
        # not state_dict(): functional_call in a loss may have other weights in the model now
        learned = dict(zip(self._parameters_by_name, local_rows(self._parameters_by_name.values()), strict=True))
        learned |= {name: self.buffers.committed[first] for name, first in self._first_buffer_names.items()}
        if not learned.keys() >= set(self._saved_names):  # get_extra_state() may add more
            learned = self.model.state_dict(keep_vars=True) | learned
        committed = {
            "done": self._seqlock.done,
            # detached after `local_rows`, because to detach a DTensor is slow
            "model": {name: learned[name].detach() for name in self._saved_names},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            **self._optional_parts(),
        }
        committed = self.sharding.described(committed) if self.sharding else committed
        return {**committed, "begun": self._seqlock.begun}  # last: it is copied after all others

    def _optional_parts(self) -> dict[str, Any]:
        """The parts of the state that not every run has."""
        parts: dict[str, Scaler | Average | Stopping | Schedulers | Refresh | None] = {
            "scaler": self.scaler,
            "ema": self.average,
            "stopping": self.stopping if self.stopping.patience else None,
            "schedulers": self.schedulers,
            "refresh": self.refresh,
        }
        present = {name: part.state_dict() for name, part in parts.items() if part}
        of_task = self.task_state.now if self.task_state else None
        return present if of_task is None else {**present, "task": of_task}

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors of the committed state by name, to be read between two commits.

        Returns:
            "model.PARAMETER" and "model.BUFFER", "optimizers.NUMBER.PARAMETER.NAME" for the state of optimizers, and
            "ema.PARAMETER" and "scaler.NAME", if there are any. Those that --shard divides are DTensors.
        """
        committed = self.sharding.divided(self._committed()) if self.sharding else self._committed()
        for number, optimizer in enumerate(self.optimizers):
            names = dict(enumerate(self.names.get(p, "") for group in optimizer.param_groups for p in group["params"]))
            of_one = committed["optimizers"][number]["state"]
            committed["optimizers"][number] = {names.get(i, i): it for i, it in of_one.items()}
        return named_tensors({part: it for part, it in committed.items() if part not in ("done", "begun")})

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Load the result of :meth:`capture`, whatever device it was on; of a divided state this rank's rows."""
        of = captured["rows"]["of"] if self.sharding else {}
        with self._seqlock.change(captured["step"]):
            load_weights(self.model, captured["model"], of)
            for optimizer, saved in zip(self.optimizers, captured["optimizers"], strict=True):
                load_optimizer(optimizer, saved, self.names)
            load_schedulers(self.schedulers, captured.get("schedulers"))
            load_task_state(self.task_state, captured.get("task"))
            load_refresh(self.refresh, captured.get("refresh"))
            self.buffers.accept()
            if self.average:
                self.average.load_state_dict(captured["ema"], captured["model"], of)
            if self.scaler:
                self.scaler.load_state_dict(captured["scaler"])
            if "stopping" in captured:
                self.stopping.load_state_dict(captured["stopping"])
            self.step = activity.step = captured["step"]

    def keep_weights(self, refresh: Refresh, epoch: int) -> None:
        """Keep the weights at an epoch's first step: the task makes the data of this epoch from them."""
        self.settle()
        with self._seqlock.hold(FOREVER):
            refresh.take(epoch, self._committed()["model"], self.task_state)

    def divide(self, sharding: Sharding) -> None:
        """Take the divided parameters of --shard, which have replaced the model's, before the first step."""
        self.sharding = sharding
        self.buffers.accept()  # rank 0 has sent them
        self.parameters[:] = self.model.parameters()
        self._parameters_by_name = dict(self.model.named_parameters(remove_duplicate=False))
        self.names = dict(zip(sharding.whole, self.names.values(), strict=True))
        if self.average:
            self.average.divide()
