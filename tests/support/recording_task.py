"""A task whose data set writes down every sample it hands out, and which can be told to die or to be slow."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from evenkeel.common import keeper_link
from evenkeel.common.phases import CHECKPOINT, START_UP, activity
from evenkeel.data.loader import Seeded
from evenkeel.training.task import Task

SAMPLES = 101


def first_attempt_of_the_last_rank() -> bool:
    last = os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", 1)) - 1)
    return last and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and not keeper_link.restarts()


def is_compared() -> bool:
    """Whether a sample is asked for to be compared with what it was, which is no part of the training."""
    loader = get_worker_info()  # loader processes are forked before the training begins
    return not isinstance(loader.dataset, Seeded) if loader else activity.phase in (START_UP, CHECKPOINT)


class Recording(Dataset[Any]):
    """Sample i is (features, i); a line "rank i" goes to a file of this attempt for each one handed out."""

    def __init__(self, folder: str, stick_at: int = -1) -> None:
        self.left = stick_at
        self.features = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        name = f"rank-{os.environ.get('RANK', 0)}-{time.time_ns()}"
        self.path = Path(folder) / name if folder else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if is_compared():
            return self.features[index], index
        if self.path:
            with self.path.open("a") as file:
                file.write(f"{index}\n")
        self.left -= 1
        if self.left == 0 and first_attempt_of_the_last_rank():
            time.sleep(3600)
        return self.features[index], index


@dataclass
class Recorded(Task):
    """Linear regression on noise."""

    best: ClassVar[Any] = None

    record: str = ""
    """Folder for the records; empty: none."""
    pause: float = 0.0
    """Seconds that a micro-batch takes."""
    hold: str = ""
    """A file; without it there is no pause. Empty: there is one always."""
    die_at: int = -1
    """The last rank kills itself in this call of loss, in the first attempt."""

    fail_at: int = -1
    """Every rank raises in this call of loss."""
    failing_rank: int = -1
    """Only this one does."""

    stick_at: int = -1
    """The last rank gets stuck while it loads its sample of this number, in the first attempt."""

    nan_at: int = -1
    """The loss of rank 0 is NaN in this call, with a gradient that is finite."""

    _calls = (0,)  # of the loss; not a number, because a number that a loss changes is warned of

    @property
    def calls(self) -> int:
        return self._calls[0]

    def train_dataset(self) -> Any:
        return Recording(self.record, self.stick_at)

    def test_dataset(self) -> Any:
        features = torch.randn(37, 4, generator=torch.Generator().manual_seed(1))
        return [(row, i) for i, row in enumerate(features)]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._calls = (self.calls + 1,)
        if not self.hold or Path(self.hold).exists():
            time.sleep(self.pause)
        if self.calls == self.fail_at and self.failing_rank in (-1, int(os.environ.get("RANK", "0"))):
            raise ZeroDivisionError("a bug in the user's loss")
        if self.calls == self.die_at and first_attempt_of_the_last_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        features, index = batch
        loss = (model(features).squeeze(1) - index / SAMPLES).square().mean()
        return loss + torch.nan if self.calls == self.nan_at and os.environ.get("RANK", "0") == "0" else loss

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        features, index = batch
        return {"loss": (model(features).squeeze(1) - index / SAMPLES).square()}
