"""A checkpoint of one run and the recorded digests of another: equal, or not in an optimizer's tensor only."""

from __future__ import annotations

import torch

from evenkeel.time_travel.bisect import _differ
from evenkeel.training.digest import digests
from evenkeel.training.staging import named_tensors
from evenkeel.training.state import State


def test_an_optimizers_tensor_that_differs_is_seen_between_a_checkpoint_and_recorded_digests() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = State(model, [optimizer])
    model(torch.randn(4, 3)).square().mean().backward()
    state.commit(torch.tensor(1.0))
    checkpoint, recorded = digests(named_tensors(state.capture())), digests(state.tensors())
    only = [name for name in recorded if name not in checkpoint]
    assert len(only) == 6, "the control: no name of the optimizer's is in both, so names alone would show nothing"
    assert not _differ(checkpoint, recorded)
    assert not _differ(recorded, checkpoint)
    optimizer.state[model.weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1
    later = digests(state.tensors())
    assert _differ(checkpoint, later)
    assert _differ(later, checkpoint)
    assert _differ(recorded, later)
