"""A task's own collate function where samples are fetched: on what it is called, and with which random numbers."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from evenkeel.config import Config
from evenkeel.data.batch import dense
from evenkeel.data.blocks import Blocks, blocks_of
from evenkeel.data.data_digest import ONCE, alike, digest, digest_samples
from evenkeel.data.dataset import Collated, InMemory, Limited, limited
from evenkeel.data.loader import Seeded
from evenkeel.data.plan import MicroBatch
from evenkeel.data.sampler import Indices
from evenkeel.data.streams import Numbered, Streams

ROWS = torch.arange(12.0).reshape(6, 2)


class Itself(Dataset[Any]):
    """Fetches micro-batches itself: as a list of samples, or as a batch of its own."""

    def __init__(self, batch: Callable[[Sequence[int]], Any]) -> None:
        self.__getitems__ = batch

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[index]

    def order_blocks(self) -> Blocks:
        return Blocks([3, 3], window=1)


def own(samples: list[Any]) -> dict[str, Any]:
    return {"own": samples, "dice": float(torch.rand(()))}


def fetched(dataset: Any, numbers: Sequence[int] = (1, 4), epoch: int = 0, start: int = 0) -> Any:
    place = MicroBatch(0, 0, start, len(numbers))
    return Seeded(Collated(dataset, own), 7, "train").__getitems__(Indices(numbers, epoch, place))


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        InMemory(ROWS),
        TensorDataset(ROWS),
        Subset(InMemory(ROWS), range(6)),
        Limited(InMemory(ROWS), range(6)),
        limited(Subset(TensorDataset(ROWS), range(6)), 0),
        Itself(lambda numbers: [ROWS[number] for number in numbers]),
        Limited(Itself(lambda numbers: [ROWS[number] for number in numbers]), range(6)),
    ],
    ids=lambda it: type(it).__name__,
)
def test_it_is_given_a_list_of_samples_whatever_the_data_is(dataset: Any) -> None:
    samples = fetched(dataset)["own"]
    assert [torch.as_tensor(it[0] if isinstance(it, tuple) else it).tolist() for it in samples] == [[2, 3], [8, 9]]


def test_its_random_numbers_are_those_of_the_place_and_not_of_who_has_drawn_before() -> None:
    first = fetched(ROWS)["dice"]
    torch.rand(100)
    assert fetched(ROWS, (3,))["dice"] == first, "of the place, not of the samples"
    assert len({fetched(ROWS, epoch=epoch, start=start)["dice"] for epoch in (0, 1) for start in (0, 2)}) == 4
    test = Seeded(Collated(ROWS, own), 7, "test").__getitems__(Indices([1, 4], 0, MicroBatch(0, 0, 0, 2)))
    assert test["dice"] != first
    # the control: torch's own loader draws whatever comes next in its process
    batches = DataLoader(ROWS, batch_size=2, collate_fn=own)  # type: ignore[arg-type]
    assert [it["dice"] for it in batches] != [it["dice"] for it in batches]


def test_all_else_is_the_data_sets_own() -> None:
    dataset = Collated(Itself(list), own)
    assert (len(dataset), dataset[1].tolist()) == (6, [2, 3])
    blocks = blocks_of(dataset)
    assert blocks.lengths.tolist() == [3, 3]
    assert not hasattr(dataset, "first_samples")
    for copied in (copy.copy(dataset), pickle.loads(pickle.dumps(Collated(ROWS, own)))):
        assert copied.collate is own


def test_a_batch_that_the_data_set_makes_is_left_alone() -> None:
    class Whole(InMemory):
        def __getitems__(self, indices: list[int]) -> Any:
            return ("a batch of", len(indices))

    assert fetched(Itself(lambda numbers: ROWS[list(numbers)])).tolist() == [[2, 3], [8, 9]]
    assert fetched(Whole(ROWS)) == ("a batch of", 2), "somebody's own method, although the class has another"


def test_a_stream_is_collated_and_its_first_samples_are() -> None:
    stream = Numbered(Streams(lambda k, turn: map(float, range(10)), substreams=1), batch=2)
    assert fetched(stream, (0, 1))["own"] == [0.0, 1.0]
    digests, unsteady = digest_samples(Config(), {"training": Collated(stream, own)}, ONCE)
    assert digests["training"]
    assert digests["training"] != digest_samples(Config(), {"training": stream}, ONCE)[0]["training"]
    assert not unsteady


def test_digests_of_nested_and_sparse_tensors() -> None:
    parts = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
    made = [torch.nested.nested_tensor(parts, layout=layout) for layout in (torch.strided, torch.jagged)]
    made.append(torch.eye(3).to_sparse())
    for tensor in made:
        assert digest([tensor]) == digest([tensor.clone()])
        assert not alike(digest([tensor]), digest([tensor * -3]))
    assert [it.shape for it in dense(made[1])] == [(2, 3), (4, 3)]
    assert dense(made[2])[0].equal(torch.eye(3))
