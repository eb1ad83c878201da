"""The network of `lm`: what each place may look at."""

import torch
from torch import Tensor

from evenkeel.tasks.transformer import Decoder, same_document

END = 9


def decoder(end: int | None = END) -> Decoder:
    torch.manual_seed(0)
    return Decoder(10, 16, 2, 2, 0.0, end)


def two_documents(first: list[int]) -> Tensor:
    return torch.tensor([[END, *first, END, 4, 5, 6]])


def test_the_mask_goes_back_to_the_token_that_ended_the_last_document() -> None:
    allowed = same_document(torch.tensor([[1, 2, END, 3]]), END)[0, 0].int().tolist()
    assert allowed == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_no_place_sees_a_later_one() -> None:
    for end in (END, None):
        own, other = (decoder(end)(torch.tensor([[END, 1, 2, last]]))[0, :3] for last in (3, 7))
        assert torch.equal(own, other)


def test_a_document_never_sees_another_one() -> None:
    """In no bit. The control: attention across the boundary, as nanoGPT has it, sees it."""
    texts = [two_documents(first) for first in ([1, 2, 3], [3, 3, 8])]
    own, other = (decoder()(text)[0, 4:] for text in texts)
    assert torch.equal(own, other)
    own, other = (decoder(end=None)(text)[0, 4:] for text in texts)
    assert not torch.equal(own, other)


def test_a_document_is_the_same_wherever_it_begins() -> None:
    """Only distances count in RoPE, so no position needs a reset."""
    alone = decoder()(torch.tensor([[END, 4, 5, 6]]))[0]
    torch.testing.assert_close(decoder()(two_documents([1, 2, 3]))[0, 4:], alone)
