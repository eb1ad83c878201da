"""The committed state: all that a run is between two optimizer steps.

Model, optimizers and one integer, the step. Everything else (sample order, random numbers, learning rate) is
a pure function of the options and the step. There is no world size and no rank in it, so a state written by
eight ranks is the state of a run on one.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .activity import COMMIT, activity
from .errors import Ended, Refusal
from .optimization import step_unless


class State:
    """The live objects that a step changes, the same on every rank after each step.

    A step works on gradients and, where the model has them, on buffers (BatchNorm's statistics); parameters and
    optimizers change in :meth:`commit` alone. So between two commits, even in the middle of a step and from another
    thread, :meth:`capture` gives the state of the last finished step.

    Args:
        model: the bare model, not its DDP wrapper, so that saved names carry no `module.` prefix. On its device.
        optimizers: all that step together.
        skip_nonfinite: leave a step out whose gradient is not finite, and go on, instead of raising an error.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], skip_nonfinite: bool = False) -> None:
        self.model, self.optimizers = model, optimizers
        self.skip_nonfinite = skip_nonfinite
        self.step = 0
        """Optimizer steps done."""
        self.skipped = 0
        """Steps left out since this process began."""
        self.last_skipped = 0
        """The number of the last of them, counted from 1."""
        saved = model.state_dict(keep_vars=True).keys()  # leaves out constants, which models do not save
        self.buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
        """The live buffers, which the forward passes of a step move about."""
        self.committed_buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        """Their values after the last finished step."""
        self._commit = threading.Lock()
        self._torn = False
        self._verdict = _Verdict(next(model.parameters()).device)

    def clear_gradients(self) -> None:
        """Forget the last step's gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def rewind_buffers(self) -> None:
        """Put the live buffers back to where the step began."""
        for name, buffer in self.buffers.items():
            buffer.copy_(self.committed_buffers[name])

    def commit(self, buffers: Mapping[str, Tensor], norm: Tensor) -> None:
        """Take the step that the gradients say, if they are finite. Afterwards every rank holds the same state again.

        A GPU decides by itself, and the host learns of it while the next step is computed: it waits for the step
        before, never for the present one, so that the GPU does not run out of work.

        Args:
            buffers: new values of the buffers, by name.
            norm: the gradient's norm, a scalar that is the same on every rank; not finite: nothing is changed.

        Raises:
            NonFinite: this step, or on a GPU the one before, was not finite; `step` is back at the one before it.
        """
        activity.enter(COMMIT)
        with self._commit:
            self._settle()
            bad = ~norm.isfinite()
            self._torn = True
            for optimizer in self.optimizers:
                step_unless(bad, optimizer)
            with torch.no_grad():
                for name, value in buffers.items():
                    self.committed_buffers[name].copy_(torch.where(bad, self.committed_buffers[name], value))
                    self.buffers[name].copy_(self.committed_buffers[name])
            self._torn = False
            self.step += 1
            self._verdict.ask(bad)
            if self._verdict.known:
                self._settle()
        activity.step = self.step

    def settle(self) -> None:
        """Wait until it is known whether the last step was finite.

        Raises:
            NonFinite: it was not.
        """
        with self._commit:
            self._settle()

    def _settle(self) -> None:
        if not self._verdict.bad():
            return
        self._verdict.forget()
        if not self.skip_nonfinite:
            self.step -= 1
            raise NonFinite(
                f"the loss or the gradient of step {self.step + 1} is not finite; lower --lr, set --clip-norm, or "
                "leave such steps out with --on-nonfinite skip"
            )
        self.skipped += 1
        self.last_skipped = self.step

    def capture(self, patience: float = -1) -> dict[str, Any]:
        """A copy of the committed state on the host, as nested dicts of tensors and plain data. Any thread may ask.

        Args:
            patience: seconds to wait for a commit in progress; negative: as long as it takes.

        Raises:
            Torn: the state is that of half a step, because a commit hangs or has failed.
        """
        if not self._commit.acquire(timeout=patience):
            raise Torn("an optimizer step is still at work")
        try:
            if self._torn:
                raise Torn("an optimizer step has failed half-way")
            model = self.model.state_dict()
            return {
                "step": self.step - (self._verdict.bad() and not self.skip_nonfinite),
                "model": _on_host({name: self.committed_buffers.get(name, value) for name, value in model.items()}),
                "optimizers": [_on_host(optimizer.state_dict()) for optimizer in self.optimizers],
            }
        finally:
            self._commit.release()

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Become what :meth:`capture` gave, whatever device that was on."""
        self.model.load_state_dict(captured["model"])
        for optimizer, saved in zip(self.optimizers, captured["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name, buffer in self.buffers.items():
            self.committed_buffers[name].copy_(buffer)
        self.step = activity.step = captured["step"]


class Torn(Exception):  # noqa: N818
    """There is no whole state to save."""


class NonFinite(Ended):
    """A step whose gradient is NaN or infinite. It has changed nothing."""


class _Verdict:
    """Whether the last step was left out, known without making the host wait for what is queued behind it."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._answer = torch.zeros((), dtype=torch.bool, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def ask(self, bad: Tensor) -> None:
        self._answer.copy_(bad, non_blocking=True)
        if self._arrived:
            self._arrived.record()

    @property
    def known(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def bad(self) -> bool:
        if self._arrived:
            self._arrived.synchronize()
        return bool(self._answer)

    def forget(self) -> None:
        self._answer.fill_(False)


def _on_host(tree: Any) -> Any:
    """A deep copy with its tensors on the CPU, sharing no memory with the live ones."""
    if isinstance(tree, Tensor):
        host = tree.detach()
        return host.clone() if host.device.type == "cpu" else host.cpu()
    if isinstance(tree, dict):
        return {key: _on_host(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_on_host(value) for value in tree)
    return tree


def load_weights(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file that holds a bare state dict.

    Raises:
        Refusal: the file is not one, or its weights do not fit the model.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    except (OSError, RuntimeError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        raise Refusal(f"--init-from {path}: {error}") from None


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
