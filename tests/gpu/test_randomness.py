"""Seeds that are functions of what they are for."""

from __future__ import annotations

import pytest
import torch

from evenkeel.data.randomness import seed_computation
from tests.data.test_randomness import SEEDS


@pytest.mark.parametrize("seed", SEEDS)
def test_the_stream_of_a_gpu_is_that_of_torchs_own_function(seed: int) -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(seed)
    expected = torch.rand(5, device=device).tolist()
    seed_computation(seed, [device])
    assert torch.rand(5, device=device).tolist() == expected
