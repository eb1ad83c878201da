"""The committed state: all that a run is between two optimizer steps.

Model, optimizers and one integer, the step; where the options or the task ask for them, float16's loss scale, the
average of the weights, the memory of early stopping, the task's schedulers and what it remembers itself. Everything
else (sample order, random numbers, the learning rate of a task without schedulers) is a pure function of the options
and the step. There is no world size and no rank in it, so a state written by eight ranks is the state of a run on one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.deadlines import FOREVER
from ..common.phases import CHECKPOINT, COMMIT, activity
from .buffers import Buffers
from .early_stopping import Stopping
from .ema import Average
from .nonfinite import NonFinite, Verdict, decides_on_device, step_unless
from .optimization import Rates, load_optimizer, rate_names
from .precision import Scaler
from .schedulers import Schedulers, load_schedulers
from .seqlock import Seqlock, Torn
from .staging import Staging, map_tensors
from .task_state import TaskState, load_task_state


class State:
    """The live objects that a step changes, the same on every rank after each step.

    A step works on gradients and, where the model has them, on buffers (BatchNorm's statistics); parameters and
    optimizers change in :meth:`commit` alone. So between two commits, even in the middle of a step and from another
    thread, :meth:`capture` gives the state of the last finished step.

    Args:
        model: the bare model, not its DDP wrapper, so that saved names carry no `module.` prefix. On its device.
        optimizers: all that step together.
        skip_nonfinite: leave a step out whose gradient is not finite, and go on, instead of raising an error.
        origin: where the first weights are from, in a line, if they are from a file.
        scaler: the loss scaling of float16.
        ema: the decay of an average of the weights; 0: there is none.
        stopping: says when the run is over; None: never.
        placed: how the model is spread over several devices, in a line, if it is.
        schedulers: the task's, which set the learning rates instead of :meth:`set_rates`.
        own: what the task remembers, and does in a commit. The host then waits for each step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        skip_nonfinite: bool = False,
        origin: str = "",
        scaler: Scaler | None = None,
        ema: float = 0.0,
        stopping: Stopping | None = None,
        placed: str = "",
        schedulers: Schedulers | None = None,
        own: TaskState | None = None,
    ) -> None:
        self.own = own
        self.model, self.optimizers = model, optimizers
        self.skip_nonfinite, self.origin, self.placed = skip_nonfinite, origin, placed
        self.scaler, self.stopping, self.schedulers = scaler, stopping or Stopping(), schedulers
        self.step = 0
        """Optimizer steps done."""
        self.skipped = 0
        """Steps left out since this process began."""
        self.last_skipped = 0
        """The number of the last of them, counted from 1."""
        saved = model.state_dict(keep_vars=True).keys()  # leaves out constants, which models do not save
        self.parameters = list(model.parameters())
        """The model's, once and for all: to walk through a model takes as long as to compute a layer."""
        self.buffers = Buffers({name: buffer for name, buffer in model.named_buffers() if name in saved}, model)
        self.average = Average(model, ema, self.buffers) if ema else None
        # the scaler's is the first, where it is decided whether a step counts
        tensors = [*([scaler.scale] if scaler else []), *self.parameters, *self.buffers.committed.values()]
        self._devices = list(dict.fromkeys(tensor.device for tensor in tensors)) or [torch.device("cpu")]
        self._seqlock = Seqlock(*self._devices)
        self._verdict = Verdict(self._devices[0])
        self._rates: Rates | None = None
        self.rates: dict[str, Any] = {}
        """Each optimizer's learning rate in the last step, by `rate_names`."""
        self._rate_names = rate_names(optimizers, model)
        if schedulers:
            schedulers.taken = schedulers.taken.to(self._devices[0])

    def clear_gradients(self) -> None:
        """Forget the last step's gradients, also of parameters that no optimizer has: they would count in the norm."""
        for parameter in self.parameters:
            parameter.grad = None

    def set_rates(self, factors: float | Sequence[float]) -> None:
        """Set the learning rates of the next step, unless the task has schedulers, which have done so.

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
        """Take the step that the gradients say, if they are finite. Afterwards every rank holds the same state again.

        A GPU decides by itself, and the host learns of it while the next step is computed: it waits for the step
        before, never for the present one, so that the GPU does not run out of work.

        Args:
            buffers: new values of the buffers, flat, for each of :attr:`Buffers.groups`.
            norm: the gradient's norm, a scalar that is the same on every rank; not finite: nothing is changed.
            loss: the step's, which a scaler needs: an overflow at its scale is no failure, and only lowers the scale.

        Raises:
            NonFinite: this step, or on a GPU the one before, was not finite; `step` is back at the one before it.
        """
        self.settle()
        norm = norm.to(self._devices[0])
        bad = broken = ~norm.isfinite()
        overflow = None
        if self.scaler:
            assert loss is not None
            overflow = self.scaler.overflow(norm, loss)
            broken = bad & ~overflow
        on = {device: bad.to(device) for device in self._devices}
        # a CPU has the answer, and where the host must wait for a GPU's, it does so before it takes the lock, for a
        # rescue would wait as well
        on_device = bad.device.type != "cpu" and not self.own and all(map(decides_on_device, self.optimizers))
        known = bad if on_device else bool(bad)
        activity.enter(CHECKPOINT)  # which may be copying the state just now
        with self._seqlock.change(self.step + 1, undone=None if self.skip_nonfinite else broken):
            activity.enter(COMMIT)
            for name, optimizer in zip(self._rate_names, self.optimizers, strict=True):
                lr = optimizer.param_groups[0]["lr"]
                self.rates[name] = lr.clone() if isinstance(lr, Tensor) else lr
            for optimizer in self.optimizers:
                step_unless(known, optimizer)
            self.buffers.commit(buffers, on)
            if self.average:
                self.average.update(self.step + 1, bad)
            if self.scaler and overflow is not None:
                self.scaler.update(overflow, ~bad)
            if self.schedulers:
                self.schedulers.commit(bad)
            if self.own and not known:
                self.own.commit(self.model, self.step + 1)
            self.step += 1
        self._verdict.ask(broken)
        if self._verdict.known:
            self.settle()
        activity.step = self.step

    def is_over(self) -> bool:
        """Whether there are no more steps to do."""
        return self.stopping.over(self.step)

    @property
    def owes_evaluation(self) -> bool:
        """Whether a run that comes back at this step must evaluate before it goes on."""
        return self.stopping.owed(self.step) or bool(self.schedulers and self.schedulers.owes(self.step))

    @property
    def due_for_evaluation(self) -> bool:
        """Whether the step just taken is one to evaluate after; raises what :meth:`settle` does."""
        due = self.stopping.due(self.step)
        if due:
            self.settle()  # the evaluation waits for the device in any case
        return due

    def note(self, metrics: dict[str, float]) -> dict[str, float]:
        """Remember an evaluation of the present state; hands it on."""
        self.stopping.note(self.step, metrics)
        if self.schedulers:
            with self._seqlock.hold(FOREVER):
                self.schedulers.note(self.step, metrics)
        return metrics

    def check(self, metrics: dict[str, float]) -> None:
        """Warn, or end the run, if an evaluation lacks the metric that decides."""
        self.stopping.check(metrics)
        if self.schedulers:
            self.schedulers.check(metrics)

    def settle(self) -> None:
        """Wait until it is known whether the last step was finite.

        Raises:
            NonFinite: it was not.
        """
        broken = self._verdict.take()
        if self.schedulers and self.schedulers.pending:
            with self._seqlock.hold(FOREVER):
                self.schedulers.settle()
        if not broken:
            return
        if not self.skip_nonfinite:
            self.step = self._seqlock.asked = self.step - 1
            raise NonFinite(self.step + 1)
        self.skipped += 1
        self.last_skipped = self.step

    def capture(self, until: float = FOREVER, staging: Staging | None = None, final: bool = False) -> dict[str, Any]:
        """A copy of the committed state on the host, as nested dicts of tensors and plain data. Any thread may ask.

        Args:
            until: the moment to which to wait for a commit in progress, on the host and on its devices.
            staging: memory for the tensors, taken by the caller; None: new memory.
            final: the process is ending. No step is committed any more: it would not be in what is saved, and lost.

        Raises:
            Torn: the state is that of half a step, because a commit hangs or has failed.
        """
        return self.hold(until, staging, final)()

    def hold(
        self, until: float = FOREVER, staging: Staging | None = None, final: bool = False
    ) -> Callable[[], dict[str, Any]]:
        """Keep the state as it is until the function returned has captured it. Any thread may call that, once.

        So a copy is made beside the forward and backward passes of the next step, and only its commit waits. The
        arguments are those of :meth:`capture`, which is this and the call; the function raises Torn as well.
        """
        with ExitStack() as stack:
            stack.enter_context(self._seqlock.hold(until, final))
            if self.schedulers and self.schedulers.broken:
                raise Torn("a scheduler has failed in the midst of its step")
            asked, live = self._seqlock.asked, self._live()
            captured, copy = (staging or Staging(*self._devices)).place(live, ends=len(self._devices))
            held = stack.pop_all()

        def capture() -> dict[str, Any]:
            with held:
                self._seqlock.wait(until)
                copy()
            done, begun = ([number.item() for number in captured.pop(name)] for name in ("done", "begun"))
            step = min(done)
            if len({*done, *begun}) != 1:
                raise Torn(f"the optimizer step to {max(begun)} has not come to its end")
            on_host = "task" in live or any(tensor.device.type == "cpu" for tensor in named_tensors(live).values())
            if self._seqlock.lags(step, asked) and on_host:
                raise Torn(f"the device is at step {step}, but the task or an optimizer without fused=True is ahead")
            return {"step": step, **captured}

        return capture

    def pin(self, staging: Staging) -> None:
        """Prepare memory for fast copies from a GPU. After the first commit, when the optimizers have their state."""
        staging.pin(self._live())

    def _live(self) -> dict[str, Any]:
        """The committed state itself, in the order in which it must be copied."""
        model = self.model.state_dict()
        return {
            "done": self._seqlock.done,
            "model": {name: self.buffers.committed.get(name, value) for name, value in model.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            **self._options(),
            "begun": self._seqlock.begun,
        }

    def _options(self) -> dict[str, Any]:
        """The parts of the state that not every run has."""
        parts: dict[str, Any] = {"scaler": self.scaler.state_dict()} if self.scaler else {}
        if self.average:
            parts["ema"] = self.average.state_dict()
        if self.stopping.patience:
            parts["stopping"] = self.stopping.state_dict()
        if self.schedulers:
            parts["schedulers"] = self.schedulers.state_dict()
        if self.own and self.own.now is not None:
            parts["task"] = self.own.now
        return parts

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors of the committed state by name, to be read between two commits.

        Returns:
            "model.PARAMETER" and "model.BUFFER", and "optimizers.NUMBER.PARAMETER.NAME" of what an optimizer keeps;
            "ema.PARAMETER" and "scaler.NAME", where there are any.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        kept = {
            number: {names.get(id(p), str(i)): values for i, (p, values) in enumerate(optimizer.state.items())}
            for number, optimizer in enumerate(self.optimizers)
        }
        return named_tensors({"model": self._live()["model"], "optimizers": kept, **self._options()})

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Become what :meth:`capture` gave, whatever device that was on."""
        with self._seqlock.change(captured["step"]):
            self.model.load_state_dict(captured["model"])
            for optimizer, saved in zip(self.optimizers, captured["optimizers"], strict=True):
                load_optimizer(optimizer, saved, self.model)
            load_schedulers(self.schedulers, captured.get("schedulers"))
            load_task_state(self.own, captured.get("task"))
            self.buffers.accept()
            if self.average:
                self.average.load_state_dict(captured["ema"], captured["model"])
            if self.scaler:
                self.scaler.load_state_dict(captured["scaler"])
            if "stopping" in captured:
                self.stopping.load_state_dict(captured["stopping"])
            self.step = activity.step = captured["step"]


def named_tensors(tree: Any) -> dict[str, Tensor]:
    """All tensors in nested dicts and lists, by their dotted names."""
    found: dict[str, Tensor] = {}
    map_tensors(tree, lambda tensor, path: found.update({".".join(map(str, path)): tensor}))
    return found


def cpu_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict on the CPU, for a file that loads anywhere."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}


def sha256(weights: Mapping[str, Tensor]) -> str:
    """A fingerprint of a state dict: names, types, shapes and every bit of every tensor."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
