"""Tasks that return what tasks should not, or what few do; and one for which memory is short."""

from __future__ import annotations

import collections
import os
import random
import re
import resource
import sys
import time
from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from recording_task import Recorded
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

from evenkeel.training.task import Task

MIB = 1 << 20
Pair = namedtuple("Pair", ["x", "y"])


class Usual(Task):
    """Nothing odd: 13 samples, which nothing divides."""

    best: ClassVar[Any] = ("loss", "min")

    def sample(self, index: int) -> Any:
        return torch.full((3,), index / 13), index % 2

    def train_dataset(self) -> Any:
        return [self.sample(index) for index in range(13)]

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = self.taken(batch)
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, y = self.taken(batch)
        return {"loss": F.cross_entropy(model(x), y, reduction="none")}


class OtherDataOnRank1(Usual):
    def train_dataset(self) -> Any:
        return super().train_dataset()[int(os.environ.get("RANK", "0")) :]


class Drawn(Usual):
    """Each method splits the whole at random, as is usual."""

    def whole(self) -> Any:
        x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, torch.arange(200))

    def split(self) -> Any:
        return random_split(self.whole(), [160, 40])

    def train_dataset(self) -> Any:
        return self.split()[0]

    def test_dataset(self) -> Any:
        return self.split()[1]

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1] % 2


class DrawnOnImport(Drawn):
    DICE = torch.Generator()
    DICE.seed()
    PARTS: ClassVar[Any] = random_split(range(200), [160, 40], DICE)  # type: ignore[arg-type]

    def split(self) -> Any:
        return [Subset(self.whole(), part.indices) for part in self.PARTS]


class Diced(TensorDataset):
    """Samples by dice that nobody seeds, and that hardly ever fall alike."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * 10 ** random.SystemRandom().uniform(-3, 3), y


class DrawnAtEachRead(Drawn):
    def whole(self) -> Any:
        return Diced(*super().whole().tensors)


class TrainingDrawnAtEachRead(Drawn):
    def train_dataset(self) -> Any:
        return Diced(*self.whole().tensors)


class Exits(Usual):
    """Its data set ends the process at a sample that no start looks at."""

    def train_dataset(self) -> Any:
        return Exiting()


class Exiting(Dataset[Any]):
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            sys.exit()
        return torch.ones(3), 0


class ExitsInLoss(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise SystemExit(0)


class Fills(Usual):
    """Its loss fills the training data, as one fills a replay buffer."""

    def train_dataset(self) -> Any:
        self.held = TensorDataset(torch.zeros(13, 3), torch.arange(13) % 2)
        return self.held

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.held.tensors[0].add_(1)
        return super().loss(model, batch)


class Sparse(Usual):
    def model(self) -> nn.Module:
        return nn.Embedding(13, 2, sparse=True)


class SparseLoss(Sparse):
    """Sparse in a function, which is not seen before the gradient."""

    def model(self) -> nn.Module:
        return nn.Embedding(13, 2)

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(F.embedding(batch[1], model.weight, sparse=True), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[1]).sum(1)}


class ItemLoss(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).item()

    metrics = Task.metrics


class NoFolder(Usual):
    def train_dataset(self) -> Any:
        return Path("no/such/folder/train.csv").read_text()


class TooLong(Usual):
    def train_dataset(self) -> Any:
        return OfLength(lambda: 100)


class NegativeLength(Usual):
    def test_dataset(self) -> Any:
        return OfLength(lambda: -1)


class OfLength:
    """13 samples that say to be others."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length()

    def __getitem__(self, index: int) -> Any:
        return ([torch.ones(3)] * 13)[index], 0


class Gathers(Usual):
    """Its loss compares with what all ranks have in this micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        mine = model(batch[0])
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine.detach())
        return torch.cdist(mine, torch.cat(everyone) + 1).mean()


class GathersAndSaysSo(Gathers):
    collectives = True


class ExitsInModel(Usual):
    def model(self) -> nn.Module:
        sys.exit("no such\nnetwork")


class CompiledByItself(Usual):
    """By torch.compile, whose wrapper stands in all names; as a whole, and a part of it."""

    def model(self) -> Any:
        part = torch.compile(nn.Linear(3, 4), backend="eager")
        return torch.compile(nn.Sequential(part, nn.Linear(4, 2)), backend="eager")


class OneUnused(Usual):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(3, 2)})

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model["used"](batch[0]), batch[1])

    def metrics(self, model: Any, batch: Any) -> Any:
        return {"loss": F.cross_entropy(model["used"](batch[0]), batch[1], reduction="none")}


class LeftOutLater(OneUnused):
    """Rank 1 does not use a part in the last of its two micro-batches of the second step."""

    calls = 0

    def loss(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        left_out = self.calls == 4 and os.environ.get("RANK") == "1"
        return super().loss(model, batch) + (0 if left_out else model["spare"](batch[0]).sum())


class OneUnusedAndSaidSo(OneUnused):
    unused_parameters = True


class Frozen(Usual):
    def model(self) -> nn.Module:
        return nn.Linear(3, 2).requires_grad_(False)


class NoModule(Usual):
    def model(self) -> Any:
        return torch.zeros(3)


class VectorLoss(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class DictLoss(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": super().loss(model, batch)}


class VectorPart(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), {"kl": batch[0]}


class TakenPart(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), {"lr": 1.0}


class OtherParts(Usual):
    """Its last micro-batch, of one sample, has a part more."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), {"a": 1.0, **({"b": 1.0} if len(batch[0]) == 1 else {})}


class PartsByRank(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch), {f"part_{os.environ.get('RANK', 0)}": 1.0}


class LossWithoutGradient(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch).detach()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class Endless(Usual):
    def train_dataset(self) -> Any:
        return Stream()


class NoTestLength(Usual):
    def test_dataset(self) -> Any:
        return SimpleNamespace()


class FloatMetric(Usual):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": 0.5}


class NoMetrics(Usual):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return None


class TwoOfThree(Usual):
    """A row of three numbers for each sample, and nobody to make them numbers."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).repeat(1, 2)[:, :3]}


class RaggedMetric(Usual):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        n = len(batch[0])
        return {"loss": torch.zeros(n, n)}

    def summarize(self, means: Any) -> Any:
        return {"loss": means["loss"].sum()}


class NoSummary(Usual):
    def summarize(self, means: Any) -> Any:
        return None


class NumberedSummary(Usual):
    def summarize(self, means: Any) -> Any:
        return {1: 1.0}


class NumberedMetric(Usual):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {0: torch.zeros(len(batch[0]))}


class BrokenMetrics(Usual):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": next(iter([]))}


class Maximum(Usual):
    best: ClassVar[Any] = ("loss", "maximum")


class UsualBest(Usual):
    """Of a metric that there is not."""

    best: ClassVar[Any] = Task.best


class NoBest(Usual):
    best: ClassVar[Any] = None


class ComplexLoss(Usual):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + 1j)


class Lazy(Usual):
    def model(self) -> nn.Module:
        return nn.LazyLinear(2)


class Meta(Usual):
    def model(self) -> nn.Module:
        return nn.Linear(3, 2, device="meta")


class OtherModel(Usual):
    def optimizers(self, model: nn.Module, config: Any) -> Any:
        return [SGD(self.model().parameters(), lr=0.1)]


class NoOptimizers(Usual):
    def optimizers(self, model: nn.Module, config: Any) -> Any:
        return []


class TwiceTaken(Usual):
    def optimizers(self, model: Any, config: Any) -> Any:
        return [SGD(model.parameters(), lr=0.1), SGD([model.bias], lr=0.1)]


class Scheduled(Usual):
    """Steps a scheduler of its own; its bias is in no optimizer; it returns one and no list."""

    def optimizers(self, model: Any, config: Any) -> Any:
        self.optimizer = SGD([model.weight], lr=0.1)
        return self.optimizer

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.optimizer.param_groups[0]["lr"] *= 0.9
        return super().loss(model, batch)


class NoRates(Usual):
    def rates(self, config: Any, step: int, total_steps: int) -> Any:
        return None


class Exhausted:
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return next(iter(()))


class ExhaustedSamples(Usual):
    def train_dataset(self) -> Any:
        return Exhausted()


class NoneInside(Usual):
    def sample(self, index: int) -> Any:
        return torch.zeros(3), None


class Images(Usual):
    def sample(self, index: int) -> Any:
        return {"image": Image.new("L", (4, 4)), "label": 0}


class ManySizes(Usual):
    def sample(self, index: int) -> Any:
        return np.zeros((3, 4 + index % 2)), 0


@dataclass
class Sample:
    x: Tensor
    y: int


class DataClasses(Usual):
    def sample(self, index: int) -> Any:
        return Sample(*super().sample(index))


class MissingKey(Usual):
    def sample(self, index: int) -> Any:
        return {"x": 1.0} | ({} if index % 2 else {"y": 2})


class Bag(UserDict):  # type: ignore[type-arg]
    """A mapping that is no dict."""


class Everything(Usual):
    """What torch can collate, each in the others."""

    def sample(self, index: int) -> Any:
        x, y = super().sample(index)
        both = Pair({"x": x}, [y, (np.float32(y), f"text {index}")])
        return Bag(deep=collections.OrderedDict(both=both), name=f"sample {index}")

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        assert type(batch) is Bag
        assert type(batch["deep"]) is collections.OrderedDict
        both = batch["deep"]["both"]
        assert type(both) is Pair
        assert len(batch["name"]) == len(both.x["x"]) == len(both.y[1][1])
        return both.x["x"], both.y[0]


@dataclass
class Batch:
    x: Tensor
    y: Tensor


class Batches:
    """A data set that collates by itself, into a dataclass."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        raise AssertionError

    def __getitems__(self, indices: list[int]) -> Batch:
        return Batch(torch.rand(len(indices), 3), torch.zeros(len(indices), dtype=torch.long))


class OwnBatches(Usual):
    def train_dataset(self) -> Any:
        return Batches()

    test_dataset = train_dataset

    def taken(self, batch: Any) -> tuple[Tensor, Tensor]:
        return batch.x, batch.y


@dataclass
class WorseAndWorse(Recorded):
    """Its first evaluation is the best for ever."""

    best: ClassVar[Any] = ("loss", "min")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": torch.full((len(batch[1]),), time.time(), dtype=torch.float64)}


@dataclass
class Hungry(Recorded):
    """Each sample takes real memory in a pass, of which this process may have so much and no more."""

    greedy_at: int = -1
    """From this call of loss on, it takes twice as much."""

    bounded = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not self.bounded:  # not before: threads and libraries have taken theirs by now
            self.bounded = True
            here = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
            assert here
            limit = int(here[1]) * 1024 + int(os.environ.get("ROOM", 3000)) * MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        greed = 2 if 0 <= self.greedy_at <= self.calls + 1 else 1
        # 4 samples fit, and 8 do not; two take more than the 1 GiB of freed memory that the C library may keep
        room = torch.empty(len(batch[0]) * greed * 550 * MIB, dtype=torch.uint8)
        assert room.numel()
        return super().loss(model, batch)
