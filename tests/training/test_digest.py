"""Digests: every bit and every place counts, the way of adding up does not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenkeel.config import Config
from evenkeel.training.digest import bit_sum, digests, word_sum
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.staging import named_tensors
from evenkeel.training.state import State

sizes = st.integers(0, 70)
seeds = st.integers(0, 2**32)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


def digest(tensor: Tensor) -> str:
    return digests({"t": tensor})["t"]


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def by_the_book(octets: bytes) -> int:
    """The same sum in Python's unbounded integers."""
    total, mask = 0, 2**64 - 1
    for place in range(-(-len(octets) // 8)):
        word = int.from_bytes(octets[8 * place : 8 * place + 8], "little")
        x = (word + place * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        total += x ^ (x >> 31)
    return total & mask


@given(sizes, seeds, st.integers(1, 9))
def test_it_is_the_sum_of_mixed_words_however_it_is_cut(size: int, seed: int, chunk: int) -> None:
    octets = random_bytes(size, seed)
    expected = by_the_book(octets.numpy().tobytes())
    assert bit_sum(octets, chunk).item() % 2**64 == expected
    assert bit_sum(octets).item() % 2**64 == expected


@given(st.integers(1, 70), seeds, st.data())
def test_a_single_bit_anywhere_shows(size: int, seed: int, data: st.DataObject) -> None:
    octets = random_bytes(size, seed)
    before = digest(octets)
    octets[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(octets) != before


@given(st.integers(2, 40), seeds, st.data())
def test_two_elements_that_change_places_show_unlike_in_a_sum(size: int, seed: int, data: st.DataObject) -> None:
    values = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).float()
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = values.clone()
    swapped[one], swapped[other] = values[other], values[one]
    assert swapped.sum() == values.sum(), "the control"
    assert digest(swapped) != digest(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_that_of_the_values_whatever_their_place_in_memory(dtype: torch.dtype) -> None:
    values = torch.arange(15).to(dtype).view(3, 5)
    flat = torch.cat([torch.zeros(1, dtype=dtype), values.flatten()])  # as a parameter in a flat buffer: not aligned
    assert digest(flat[1:].view(3, 5)) == digest(values)
    assert digest(values.t().contiguous().t()) == digest(values)
    assert digest(values.t()) != digest(values)


def test_type_and_shape_count() -> None:
    zeros = torch.zeros(4)
    same_bits = [zeros, zeros.view(2, 2), zeros.view(torch.int32), torch.zeros(3), torch.zeros(2, dtype=torch.float64)]
    assert len({digest(tensor) for tensor in same_bits}) == len(same_bits)
    assert digest(torch.zeros(())) != digest(torch.zeros(0))


def test_many_random_tensors_have_different_digests() -> None:
    """Neighbouring values in neighbouring places, as in a step counter or a mask, where a weak mix would collide."""
    found = {digest(torch.tensor(row)) for row in np.ndindex(8, 8, 8, 8)}
    assert len(found) == 8**4


def test_a_state_is_named_by_its_parameters_and_holds_committed_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = State(model, [build_optimizer(model.parameters(), Config(optimizer="adamw"))])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.commit(clip_grad_norm(model.parameters(), 0.0), [group.committed for group in state.buffers.groups])
    found = digests(state.tensors())
    assert set(found) == {f"model.{name}" for name in model.state_dict()} | {
        f"optimizers.0.{name}.{kept}"
        for name, _ in model.named_parameters()
        for kept in ("step", "exp_avg", "exp_avg_sq")
    }
    model(torch.randn(4, 3))
    assert digests(state.tensors()) == found, "a forward pass moves the live statistics, not the committed ones"
    captured = state.capture()
    saved = digests(named_tensors(captured["model"]))
    assert {f"model.{name}": value for name, value in saved.items()}.items() <= found.items()
    with torch.no_grad():
        model[0].bias.add_(1)
    assert {name for name, value in digests(state.tensors()).items() if value != found[name]} == {"model.0.bias"}


def test_the_sum_of_words_of_a_tensor_that_begins_anywhere() -> None:
    whole = torch.arange(9, dtype=torch.float32)
    assert all(word_sum(whole[start:]) == word_sum(whole[start:].clone()) for start in range(9))
