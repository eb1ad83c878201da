"""Tasks that return what tasks should not, or what few do; and one for which memory is short."""

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
from recording_task import Recorded
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from evenkeel.training.task import Task

MIB, RANK = 1 << 20, int(os.environ.get("RANK", "0"))
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

    def entropy(self, model: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
        x, y = self.taken(batch)
        return F.cross_entropy(model(x), y, reduction=reduction)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.entropy(model, batch)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.entropy(model, batch, "none")}


def odd(name: str, base: type[Usual] = Usual, **different: Any) -> type[Usual]:
    """The usual task with other methods or attributes."""
    return type(name, (base,), different)


# what loss() returns
ItemLoss = odd("ItemLoss", loss=lambda task, model, batch: task.entropy(model, batch).item(), metrics=Task.metrics)
DictLoss = odd("DictLoss", loss=lambda task, model, batch: {"loss": task.entropy(model, batch)})
# without torch's own error, which this flag avoids, its gradient would count twice
CallsBackward = odd(
    "CallsBackward",
    loss=lambda task, model, batch: (loss := task.entropy(model, batch)).backward(retain_graph=True) or loss,
)
KeepsGraph = odd(
    "KeepsGraph",
    loss=lambda task, model, batch: vars(task).update(last=task.entropy(model, batch) + task.last) or task.last,
    last=0.0,
)
ComplexLoss = odd("ComplexLoss", loss=lambda task, model, batch: task.entropy(model, batch) * (1 + 1j))
VectorPart = odd("VectorPart", loss=lambda task, model, batch: (task.entropy(model, batch), {"kl": batch[0]}))
OtherParts = odd(  # the last micro-batch, of one sample, has a part more
    "OtherParts",
    loss=lambda task, model, batch: (
        task.entropy(model, batch),
        {"a": 1.0} | ({"b": 1.0} if len(batch[0]) == 1 else {}),
    ),
)
PartsByRank = odd(
    "PartsByRank",
    loss=lambda task, model, batch: (task.entropy(model, batch), {f"part_{os.environ.get('RANK', 0)}": 1.0}),
)

# what metrics() and summarize() return, and which metric is the best
NoMetrics = odd("NoMetrics", metrics=lambda task, model, batch: None)
FloatMetric = odd("FloatMetric", metrics=lambda task, model, batch: {"accuracy": 0.5})
NumberedMetric = odd("NumberedMetric", metrics=lambda task, model, batch: {0: torch.zeros(len(batch[0]))})
TwoOfThree = odd(  # a row of three numbers for each sample, and nobody to make them numbers
    "TwoOfThree", metrics=lambda task, model, batch: {"loss": model(batch[0]).repeat(1, 2)[:, :3]}
)
NoBatchLoss = odd(
    "NoBatchLoss",
    loss=Task.loss,
    metrics=Task.metrics,
    embed=lambda task, model, batch: model(batch[0]),
    batch_loss=lambda task, embeddings: None,
)
OneEmbedding = odd("OneEmbedding", NoBatchLoss, embed=lambda task, model, batch: model(batch[0]).mean())
RaggedMetric = odd(
    "RaggedMetric",
    metrics=lambda task, model, batch: {"loss": torch.zeros(len(batch[0]), len(batch[0]))},
    summarize=lambda task, means: {"loss": means["loss"].sum()},
)
Sums = odd(
    "Sums",
    loss=lambda task, model, batch: task.entropy(model, batch, "sum"),
    metrics=lambda task, model, batch: {"loss": task.entropy(model, batch, "sum")},
)
NoSummary = odd("NoSummary", summarize=lambda task, means: None)
NumberedSummary = odd("NumberedSummary", summarize=lambda task, means: {1: 1.0})
Maximum = odd("Maximum", best=("loss", "maximum"))
UsualBest = odd("UsualBest", best=Task.best)  # then the loss counts
BesidesTheLoss = odd(  # and here
    "BesidesTheLoss",
    best=Task.best,
    metrics=lambda task, model, batch: dict.fromkeys(("loss", "error"), task.entropy(model, batch, "none")),
)
UnknownBest = odd("UnknownBest", best=("error", "min"))
NoBest = odd("NoBest", best=None)

# the network and who trains it
Evaluating = odd(  # a part of it in evaluation mode, as from_pretrained() returns it
    "Evaluating",
    model=lambda task: nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Dropout()).eval(), nn.Linear(4, 2).eval()),
)
Doubled = odd("Doubled", unchanged_train_dataset=Usual.train_dataset, train_dataset=lambda task: range(26))
Sparse = odd("Sparse", model=lambda task: nn.Embedding(13, 2, sparse=True))
Frozen = odd("Frozen", model=lambda task: nn.Linear(3, 2).requires_grad_(False))
NoModule = odd("NoModule", model=lambda task: torch.zeros(3))
OnGpu = odd("OnGpu", model=lambda task: nn.Linear(3, 2).cuda())
Lazy = odd("Lazy", model=lambda task: nn.LazyLinear(2))
Meta = odd("Meta", model=lambda task: nn.Linear(3, 2, device="meta"))
ExitsInLoss = odd("ExitsInLoss", loss=lambda task, model, batch: sys.exit(0))
ExitsInModel = odd("ExitsInModel", model=lambda task: sys.exit("no such\nnetwork"))
OtherModel = odd("OtherModel", optimizers=lambda task, model, config: [SGD(task.model().parameters(), lr=0.1)])
NoOptimizers = odd("NoOptimizers", optimizers=lambda task, model, config: [])
NoRates = odd("NoRates", rates=lambda task, config, step, total_steps: None)


class InAList(Usual):
    """Layers that the model does not know, and some that it does."""

    def model(self) -> Any:
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model.mine, model.more = [model[0]], [nn.Linear(2, 2)]
        return model


class CompiledByItself(Usual):
    """By torch.compile, whose wrapper stands in all names; as a whole, and a part of it."""

    def model(self) -> Any:
        part = torch.compile(nn.Linear(3, 4), backend="eager")
        return torch.compile(nn.Sequential(part, nn.Linear(4, 2)), backend="eager")


class SparseLoss(Usual):
    """Sparse in a function, which is not seen before the gradient."""

    def model(self) -> nn.Module:
        return nn.Embedding(13, 2)

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(F.embedding(batch[1], model.weight, sparse=True), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[1]).sum(1)}


class Gathers(Usual):
    """Its loss compares with what all ranks have in this micro-batch."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        mine = model(batch[0])
        everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine.detach())
        return torch.cdist(mine, torch.cat(everyone) + 1).mean()


class OneUnused(Usual):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(3, 2)})

    def entropy(self, model: Any, batch: Any, reduction: str = "mean") -> Tensor:
        return super().entropy(model["used"], batch, reduction)


class LeftOutLater(OneUnused):
    """Rank 1 does not use a part in the last of its two micro-batches of the second step."""

    calls = 0

    def loss(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        left_out = self.calls == 4 and os.environ.get("RANK") == "1"
        return super().loss(model, batch) + (0 if left_out else model["spare"](batch[0]).sum())


class UsedLater(OneUnused):
    """The loss uses the second network from step 2 on."""

    def model(self) -> nn.Module:
        model = super().model()
        model["unused"] = nn.Linear(3, 2).requires_grad_(False)
        model["unused"].load_state_dict(model["spare"].state_dict())
        return model

    def loss(self, model: Any, batch: Any, step: int = 0) -> Tensor:
        found = super().loss(model, batch)
        return found + model["spare"](batch[0]).square().mean() if step >= 2 else found


class BrokenMetrics(Usual):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": next(iter([]))}


class Scheduled(Usual):
    """Steps a scheduler of its own; its bias is in no optimizer; it returns one and no list."""

    def optimizers(self, model: Any, config: Any) -> Any:
        self.optimizer = SGD([model.weight], lr=0.1)
        return self.optimizer

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.optimizer.param_groups[0]["lr"] *= 0.9
        return super().loss(model, batch)


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
    PARTS: ClassVar[Any] = random_split(range(200), [160, 40], DICE)

    def split(self) -> Any:
        return [Subset(self.whole(), part.indices) for part in self.PARTS]


class Diced(TensorDataset):
    """Samples by dice that nobody seeds, and that hardly ever fall alike."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * 10 ** random.SystemRandom().uniform(-3, 3), y


class Fills(Usual):
    """Its loss fills the training data, as one fills a replay buffer."""

    def train_dataset(self) -> Any:
        self.held = TensorDataset(torch.zeros(13, 3), torch.arange(13) % 2)
        return self.held

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.held.tensors[0].add_(1)
        return super().loss(model, batch)


class NoFolder(Usual):
    def train_dataset(self) -> Any:
        return Path("no/such/folder/train.csv").read_text()


class OfLength:
    """13 samples that say to be others."""

    def __init__(self, length: Any, read: Any = lambda index: ([torch.ones(3)] * 13)[index]) -> None:
        self.length, self.read = length, read

    def __len__(self) -> int:
        return self.length()

    def __getitem__(self, index: int) -> Any:
        return self.read(index), 0


# what others say of themselves
GathersAndSaysSo = odd("GathersAndSaysSo", Gathers, collectives=True)
OneUnusedAndSaidSo = odd("OneUnusedAndSaidSo", OneUnused, unused_parameters=True)
UsedLaterAndSaidSo = odd("UsedLaterAndSaidSo", UsedLater, unused_parameters=True)

DrawnAtEachRead = odd("DrawnAtEachRead", Drawn, whole=lambda task: Diced(*Drawn.whole(task).tensors))
TrainingDrawnAtEachRead = odd("TrainingDrawnAtEachRead", Drawn, train_dataset=lambda task: Diced(*task.whole().tensors))
OtherDataOnRank1 = odd("OtherDataOnRank1", train_dataset=lambda task: task.test_dataset()[RANK:])
OtherSetsOnRank1 = odd(
    "OtherSetsOnRank1", test_dataset=lambda task: ({name: Usual.test_dataset(task) for name in ("near", "far")[RANK:]})
)
Exits = odd(  # the process, at a sample that no start looks at
    "Exits", train_dataset=lambda task: OfLength(lambda: 13, lambda index: sys.exit() if index == 1 else torch.ones(3))
)
NegativeLength = odd("NegativeLength", test_dataset=lambda task: OfLength(lambda: -1))
NoTestLength = odd("NoTestLength", test_dataset=lambda task: SimpleNamespace())
NoItems = odd("NoItems", train_dataset=lambda task: type("NoItems", (Dataset,), {"__len__": lambda _: 13})())
ExhaustedSamples = odd("ExhaustedSamples", train_dataset=lambda task: OfLength(lambda: 13, lambda _: next(iter(()))))
NoSamples = odd("NoSamples", sample=lambda task, index: None)
Columns = odd("Columns", train_dataset=lambda task: (torch.zeros(13, 3), torch.zeros(13)))
NoneInside = odd("NoneInside", sample=lambda task, index: (torch.zeros(3), None))
ManySizes = odd("ManySizes", train_dataset=lambda _: OfLength(lambda: 13, lambda i: np.zeros((3, 4 + i % 2))))


class Bag(UserDict):
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


def bound_memory() -> None:
    """Let this process have so many MiB more, and no more than that."""
    here = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert here
    limit = int(here[1]) * 1024 + int(os.environ.get("ROOM", 3000)) * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@dataclass
class Hungry(Recorded):
    """Each sample takes real memory in a pass, of which this process may have so much and no more."""

    greedy_at: int = -1
    """From this call of loss on, it takes twice as much."""

    bounded = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not self.bounded:  # not before: threads and libraries have taken theirs by now
            self.bounded = True
            bound_memory()
        greed = 2 if 0 <= self.greedy_at <= self.calls + 1 else 1
        # 4 samples fit, and 8 do not; two take more than the 1 GiB of freed memory that the C library may keep
        room = torch.empty(len(batch[0]) * greed * 550 * MIB, dtype=torch.uint8)
        assert room.numel()
        return super().loss(model, batch)


class BatchNorm(Usual):
    """The only buffers are a layer's statistics."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


class Queue(BatchNorm):
    """MoCo's queue, whose pointer moves by a micro-batch where a step's samples are meant."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("queue", torch.zeros(2, 8))
        model.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        first, keys = int(model.queue_ptr), model(batch[0]).detach()
        model.queue[:, (torch.arange(len(keys)) + first) % 8] = keys.T
        model.queue_ptr[0] = (first + len(keys)) % 8
        return self.entropy(model, batch)


class Mislabelled(Usual):
    """A label of one sample is not a class."""

    def sample(self, index: int) -> Any:
        return torch.full((3,), index / 13), 5 if index == 9 else index % 2


class NotANumber(Usual):
    """One sample is not finite."""

    def sample(self, index: int) -> Any:
        return torch.full((3,), torch.nan if index == 9 else index / 13), index % 2

    def test_dataset(self) -> Any:
        return None


class Masked(NotANumber):
    """Every sample has a value that is not finite, such as a mask."""

    def sample(self, index: int) -> Any:
        return torch.tensor([index / 13, 0, -torch.inf]), index % 2


class FailsLater(Usual):
    """A mistake that shows after the first step only."""

    def loss(self, model: nn.Module, batch: Any, step: int = 0) -> Any:
        if step:
            raise KeyError("a part")
        return super().loss(model, batch)
