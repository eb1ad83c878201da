"""torchmetrics' objects in an evaluation: what they say of the whole set, however it is cut."""

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MinMaxMetric,
    PearsonCorrCoef,
    R2Score,
)
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.text import WordErrorRate
from torchmetrics.wrappers import Running

from evenkeel.common.errors import EndedHere
from evenkeel.data.dataset import InMemory
from evenkeel.training import sum_metrics
from evenkeel.training.sum_metrics import SumMetrics
from tests.support.processes import ROOT
from tests.support.raised import refusal_of
from tests.support.readme import blocks
from tests.training.test_evaluation import Classify, evaluation

CLASSES, SAMPLES = 4, 61
CUTS = (1, 7, 16, 61)
SINGLE = "SumMetrics takes single metrics of torchmetrics, "


def of_classes() -> dict[str, Metric]:
    return {
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "normalized": MulticlassConfusionMatrix(CLASSES, normalize="true"),
        "auroc": MulticlassAUROC(CLASSES, thresholds=20),
    }


def of_numbers() -> dict[str, Metric]:
    return {
        "mse": MeanSquaredError(),
        "each": MeanSquaredError(num_outputs=CLASSES),
        "r2": R2Score(multioutput="raw_values"),
    }


@pytest.fixture
def test_set() -> InMemory:
    """Probabilities [samples, classes], whose largest is right more often than not, and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    right = nn.functional.one_hot(labels, CLASSES)
    return InMemory((right + torch.randn(SAMPLES, CLASSES, generator=generator)).softmax(1), labels)


class Measured(Classify):
    """Keeps what `summarize` has computed. The model passes scores on."""

    def __init__(self, classes: dict[str, Any], numbers: dict[str, Any]) -> None:
        self.classes, self.numbers = SumMetrics(**classes), SumMetrics(**numbers)
        self.found: dict[str, Tensor] = {}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        scores, labels = batch
        of_numbers = self.numbers.of(model(scores), nn.functional.one_hot(labels, CLASSES).float())
        return super().metrics(model, batch) | self.classes.of(scores, labels) | of_numbers

    def summarize(self, means: dict[str, Tensor], samples: int = 0) -> dict[str, float]:
        self.found = self.numbers.computed(self.classes.computed(means, samples), samples)
        return {"loss": float(self.found["loss"]), "samples": samples}


def whole(metric: Metric, *inputs: Tensor) -> Tensor:
    metric.update(*inputs)
    found: Tensor = metric.compute()
    return found


@pytest.mark.filterwarnings("error:The ``compute`` method")
@pytest.mark.parametrize("micro_batch", CUTS)
def test_they_say_what_torchmetrics_says_of_the_whole_set(test_set: InMemory, micro_batch: int) -> None:
    task = Measured(of_classes(), of_numbers())
    evaluate = evaluation(task, nn.Identity(), test_set, micro_batch)
    evaluate.rehearse()  # R2Score refuses a single sample
    assert evaluate()["samples"] == SAMPLES
    again = task.found
    evaluate()
    scores, labels = test_set.tensors
    for name, metric in of_classes().items():
        assert torch.equal(task.found[name], whole(metric, scores, labels)), f"{name}: counts, so the same bits"
    for name, metric in of_numbers().items():
        expected = whole(metric, scores, nn.functional.one_hot(labels, CLASSES).float())
        torch.testing.assert_close(task.found[name], expected)
    assert task.found.keys() == {"loss", *of_classes(), *of_numbers()}
    assert all(torch.equal(task.found[name], value) for name, value in again.items()), "nothing is left in them"


def test_control_the_mean_over_micro_batches_is_another_number_for_each_cut(test_set: InMemory) -> None:
    scores, labels = test_set.tensors
    naive = {
        float(
            sum(whole(MulticlassF1Score(CLASSES), s, t) for s, t in zip(scores.split(n), labels.split(n), strict=True))
        )
        / len(scores.split(n))
        for n in CUTS
    }
    assert len(naive) == len(CUTS)
    right = float(whole(MulticlassF1Score(CLASSES), scores, labels))
    assert sum(value == pytest.approx(right, abs=1e-3) for value in naive) == 1, "that of one micro-batch"


def test_a_collection_words_and_more_samples_than_float32_can_count(test_set: InMemory) -> None:
    collection = MetricCollection(
        {"f1": MulticlassF1Score(CLASSES), "auroc": MulticlassAUROC(CLASSES, thresholds=5)}, prefix="own_"
    )
    own = SumMetrics(**collection)
    means = {name: rows.mean(0) for name, rows in own.of(*test_set.tensors).items()}
    assert own.computed(means, SAMPLES) == collection.clone()(*test_set.tensors)

    errors = SumMetrics(wer=WordErrorRate())
    means = {name: rows.mean(0) for name, rows in errors.of(preds=["a b", "c"], target=["a b", "d"]).items()}
    assert errors.computed(means, 2) == {"wer": torch.tensor(1 / 3)}

    many = 2**40 + 1
    odd = SumMetrics(confusion=MulticlassConfusionMatrix(2))
    shares = torch.tensor([[1, 3], [5, many - 9]], dtype=torch.float64) / many
    assert odd.computed({"confusion.confmat": shares}, many)["confusion"].tolist() == [[1, 3], [5, many - 9]]


class Fractions(Metric):
    """Begins to count with an integer, and adds halves."""

    half: Tensor

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.add_state("half", start, "sum")

    def update(self, values: Tensor) -> None:
        self.half = self.half + 0.5 * len(values)

    def compute(self) -> Tensor:
        return self.half


def test_a_state_that_begins_with_another_number_than_zero_has_it_once() -> None:
    own = SumMetrics(own=Fractions(torch.tensor(100.0)))
    assert own.computed({"own.half": own.of(torch.ones(4))["own.half"].mean(0)}, 8) == {"own": torch.tensor(104.0)}
    with pytest.raises(EndedHere, match=r"^own: adds fractions to its integer state 'half': initialise that to 0.0$"):
        SumMetrics(own=Fractions(torch.tensor(0))).of(torch.ones(3))


def test_the_example() -> None:
    names = {"torch": torch, "MeanSquaredError": MeanSquaredError}
    results = doctest.testmod(sum_metrics, extraglobs=names)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (MulticlassAUROC(CLASSES), "the state 'preds' of a MulticlassAUROC is combined by cat, not by sum; choose"),
        (MulticlassF1Score(2, multidim_average="samplewise"), "the state 'tp' of a MulticlassF1Score is combined by"),
        (MaxMetric(), "the state 'max_value' of a MaxMetric is combined by max"),
        (PearsonCorrCoef(), "the state 'mean_x' of a PearsonCorrCoef is combined by none"),
        (MeanSquaredError() + MeanSquaredError(), f"{SINGLE}not a CompositionalMetric; name each of them"),
        (MinMaxMetric(MeanSquaredError()), f"{SINGLE}not a MinMaxMetric; name each of them"),
        (Running(MeanSquaredError()), f"{SINGLE}not a Running; name each of them"),
        (MetricCollection([MeanSquaredError()]), f"{SINGLE}not a MetricCollection; name each of them"),
        (0.5, f"{SINGLE}not a float; name each of them"),
    ],
)
def test_what_is_no_sum_is_refused_when_the_object_is_made(metric: Any, reason: str) -> None:
    SumMetrics(mean=MeanMetric())
    assert refusal_of(SumMetrics, mean=MeanMetric(), mine=metric).startswith(f"mine: {reason}")


def test_the_task_in_the_documents(test_set: InMemory) -> None:
    (block,) = [block for block in blocks("python", (ROOT / "docs" / "tasks.md").read_text()) if "SumMetrics(" in block]
    names: dict[str, Any] = {"MulticlassF1Score": MulticlassF1Score, "MulticlassAUROC": MulticlassAUROC}
    exec(block, names)
    task = type("Whole", (names["Mine"],), dict.fromkeys(("train_dataset", "test_dataset", "model")))
    logits, labels = nn.functional.pad(test_set.tensors[0].log(), (0, 10 - CLASSES), value=-99), test_set.tensors[1]
    found = evaluation(task(), nn.Identity(), InMemory(logits, labels))()
    assert found.keys() == {"f1", "auroc"}
    assert found["f1"] == float(whole(MulticlassF1Score(10, average="macro"), logits, labels))
