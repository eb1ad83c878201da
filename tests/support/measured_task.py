"""The task with a validation set, measured by torchmetrics as well."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score

from evenkeel.tasks import SumMetrics
from tests.support.validated_task import Validated, samples


def of_scores() -> dict[str, Metric]:
    return {
        "f1": MulticlassF1Score(3, average="macro"),
        "auroc": MulticlassAUROC(3, thresholds=20),
        "confusion": MulticlassConfusionMatrix(3),
    }


@dataclass
class Measured(Validated):
    """With a third set of two micro-batches, of which a third rank has none."""

    own = SumMetrics(**of_scores())
    error = SumMetrics(mse=MeanSquaredError())

    def test_dataset(self) -> Any:
        return super().test_dataset() | {"tiny": samples(5, 3)}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        scores = model(batch[0])
        squares = self.error.of(scores, nn.functional.one_hot(batch[1], 3).float())
        return super().metrics(model, batch) | self.own.of(scores.softmax(1), batch[1]) | squares

    def summarize(self, means: dict[str, Tensor], samples: int = 0) -> dict[str, float]:
        found = self.error.computed(self.own.computed(means, samples), samples)
        cells = found.pop("confusion").flatten()
        return super().summarize(found | {f"cell_{i}": cell for i, cell in enumerate(cells)})
