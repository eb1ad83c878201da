"""`evenkeel sample` with a task of one's own."""

from pathlib import Path

from tests.support.processes import TRAIN, evenkeel, run_forked
from tests.support.small_runs import options

TASK = """
import torch
from torch import nn
from evenkeel.tasks import Task


class Letters(Task):
    def train_dataset(self):
        return [torch.tensor([i % 3]) for i in range(30)]

    test_dataset = train_dataset

    def model(self):
        return nn.Embedding(3, 3)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[:, 0]), (batch[:, 0] + 1) % 3)


class Talking(Letters):
    def generate(self, model, prompt, tokens, temperature, top_k, seed):
        assert not model.training and not torch.is_grad_enabled()
        made = [ord(prompt[-1]) - ord("a")]
        for _ in range(tokens):
            made.append(int(model(torch.tensor(made[-1])).argmax()))
        return "".join(chr(ord("a") + it) for it in made[1:])
"""


def test_a_task_of_ones_own_continues_a_text(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(TASK)
    shape = ["--batch-size", 10, "--epochs", 20, "--lr", 0.3]
    for name in ("Talking", "Letters"):
        run_forked(TRAIN, *options(f"{tmp_path / 'letters.py'}:{name}", tmp_path / name, *shape))
    assert evenkeel("sample", tmp_path / "Talking", "ab", "--tokens", 4).stdout == "abcabc\n"
    # the control: the same model, whose task has no generate
    done = evenkeel("sample", tmp_path / "Letters", "ab", expect=2)
    assert "the task Letters generates no text: define generate(model" in done.stderr
