"""Whether a replay agrees with its run, or a checkpoint with recorded digests."""

import pytest
import torch

from evenkeel.time_travel.agreement import Recorded, agreement
from evenkeel.time_travel.bisect import _differ
from evenkeel.training.digest import digests
from evenkeel.training.staging import named_tensors
from evenkeel.training.state import State

RUN = Recorded({2: {"a": "1", "b": "2"}, 4: {"a": "3", "b": "4"}}, {1: (0.5, 2.0), 2: (0.4, None)})
CASES = {
    "bits": (Recorded(RUN.digests, {}), True, "agrees in every bit (steps 2 to 4 compared)"),
    "a tensor": (Recorded({4: {"a": "3", "b": "5"}}), False, "differs: from step 4 on, 1 of 2 tensors, the first b"),
    "rounding": (Recorded({}, {1: (0.5000001, 2.0)}), True, "agrees to 2e-07 (step 1 compared)"),
    "a loss": (Recorded({}, {1: (0.6, 2.0)}), False, "differs: step 1 has the loss 0.6, the run logged 0.5"),
    "not finite in both": (Recorded({}, {2: (0.4, float("nan"))}), True, "agrees in every digit of the logged loss "),
    "finite in one": (Recorded({}, {2: (0.4, 1.0)}), False, "differs: step 2 has the norm of the gradient 1.0"),
    "nothing": (Recorded({3: {}}, {3: (1.0, 1.0)}), True, "not compared: "),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line(case: str) -> None:
    again, agrees, line = CASES[case]
    found = agreement(RUN, again, exact=False)
    assert found[0] == agrees
    assert found[1].startswith(line)


def test_other_bits_of_a_ring_are_rounding_and_of_a_tree_are_not() -> None:
    again = Recorded({2: {"a": "1", "b": "9"}}, {1: (0.5, 2.0)})
    line = "the digests differ from step 2 on, as of a ring on other ranks"
    assert agreement(RUN, again, exact=False)[1].endswith(line)
    assert agreement(RUN, again, exact=True) == (False, "differs: from step 2 on, 1 of 2 tensors, the first b")


def test_what_a_later_attempt_did_again_counts() -> None:
    records = [
        {"kind": "train", "step": 3, "loss": 1.0, "grad_norm": 2.0},
        {"kind": "digest", "step": 3, "digests": {"a": "0"}},
        {"kind": "start", "step": 2},
        {"kind": "train", "step": 3, "train/loss": 1.5, "grad_norm": 2.5},
    ]
    found = Recorded.of(records)
    assert found.logged == {3: (1.5, 2.5)}
    assert not found.digests


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
