"""The task `lm`: an exact loss and perplexity, and texts that it continues."""

from math import exp
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenkeel.common.errors import Refusal
from evenkeel.tasks.lm import Lm
from evenkeel.tasks.text import PAD

SMALL = Lm(seq_len=32, width=16, layers=1, heads=2)


def model(task: Lm = SMALL) -> nn.Module:
    torch.manual_seed(0)
    return task.model().eval()


def batch(data: object, indices: list[int]) -> Tensor:
    return torch.stack([data[i] for i in indices])  # type: ignore[index]


def test_every_token_is_predicted_once_in_one_of_the_parts() -> None:
    parts = (SMALL.train_dataset(), SMALL.validation_dataset(), SMALL.test_dataset())
    windows = [part[i] for part in parts for i in range(len(part))]
    predicted = torch.cat([window[1:] for window in windows])
    assert predicted[predicted != PAD].tolist() == parts[0].tokens[1:].tolist()
    assert all((parts[0][i] != PAD).all() for i in range(len(parts[0]))), "training windows are whole"
    assert [len(part) for part in parts] == [13130, 730, 730]


def test_the_loss_is_the_mean_over_the_tokens_of_the_global_batch() -> None:
    """Micro-batches count by their samples, which have as many tokens each."""
    net, data = model(), SMALL.train_dataset()
    whole = batch(data, [*range(7)])
    expected = F.cross_entropy(net(whole[:, :-1]).flatten(0, 1), whole[:, 1:].flatten())
    parts = sum(len(part) / 7 * SMALL.loss(net, part) for part in whole.split(3))
    torch.testing.assert_close(parts, expected)


@torch.no_grad()
def test_perplexity_is_that_of_all_tokens() -> None:
    """The control: the mean of parts' perplexities is another number."""
    net, data = model(), SMALL.validation_dataset()
    whole = batch(data, [726, 727, 728, 729])
    assert (whole[-1] == PAD).any()
    rows = SMALL.metrics(net, whole)
    found = SMALL.summarize({name: values.double().mean(0) for name, values in rows.items()})
    logits, follows = net(whole[:, :-1].clamp(min=0)), whole[:, 1:]
    expected = F.cross_entropy(logits[follows != PAD].double(), follows[follows != PAD])
    assert found["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert found["perplexity"] == pytest.approx(exp(expected), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(float(expected) / 0.6931471805599453, rel=1e-6)
    means = [exp(nats / tokens) for nats, tokens in zip(rows["nats"], rows["tokens"], strict=True)]
    assert sum(means) / 4 != pytest.approx(exp(expected), rel=1e-6)
    assert SMALL.tokens(whole) == 4 * 32


def test_a_text_is_continued_the_same_by_the_same_seed() -> None:
    net = model()

    def more(seed: int = 0, temperature: float = 1.0, top_k: int = 0, prompt: str = "Anne") -> str:
        return SMALL.generate(net, prompt, 40, temperature, top_k, seed)

    assert more() == more() != more(seed=1)
    assert more(temperature=0) == more(top_k=1) == more(temperature=0, seed=1)
    assert more(prompt="x" * 100)[0], "only the end of a long text is read"


def test_a_document_that_ends_ends_the_text() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, tokens: Tensor) -> Tensor:
            return F.one_hot(torch.full_like(tokens, 65 if tokens.shape[1] < 6 else 256), 257) * 100.0

    assert SMALL.generate(Ends(), "An", 40, 1.0, 0, 0) == "AAA"
    assert SMALL.generate(Ends(), "An", 2, 1.0, 0, 0) == "AA"


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"^--width 20: must be a multiple of 8, twice --heads 4$"):
        Lm(width=20)
    (tmp_path / "short.txt").write_bytes(b"too short")
    with pytest.raises(Refusal, match=r"short.txt: its 10 tokens are too few for --seq-len 128 and --held-out 0.1"):
        Lm(text=tmp_path / "short.txt", data_dir=tmp_path).train_dataset()
