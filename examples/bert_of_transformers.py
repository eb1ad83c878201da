"""A network of Hugging Face's transformers, here a small BERT with random weights, which reads digits as 64 words.

    torchrun --standalone --nproc_per_node=2 train.py --task examples/bert_of_transformers.py:Bert --epochs 10 --lr 2e-3

`--lora 4` learns adapters of that rank and the last layer only (peft); the rest is frozen. In a job of your own the
network would come from `from_pretrained(...).train()`.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from evenkeel import Classification
from evenkeel.tasks import InMemory, digits


@dataclass
class Bert(Classification):
    lora: int = 0
    """Rank of LoRA's adapters (0: all weights learn)."""

    def train_dataset(self) -> InMemory:
        return words(train=True)

    def test_dataset(self) -> InMemory:
        return words(train=False)

    def model(self) -> nn.Module:
        shape = {"vocab_size": 17, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = BertConfig.from_dict({**shape, "intermediate_size": 128, "num_labels": 10, "pad_token_id": None})
        network: Any = BertForSequenceClassification(config)
        if self.lora:
            from peft import LoraConfig, TaskType, get_peft_model

            network = get_peft_model(network, LoraConfig(task_type=TaskType.SEQ_CLS, r=self.lora))
        return network

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        logits = model(input_ids=batch[0]).logits
        return {
            "loss": F.cross_entropy(logits, batch[1], reduction="none"),
            "accuracy": logits.argmax(1) == batch[1],
        }


def words(train: bool) -> InMemory:
    images, labels = digits(train).tensors
    return InMemory((images.flatten(1).int() + 8) // 16, labels)
