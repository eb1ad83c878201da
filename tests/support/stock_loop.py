"""A stock DDP loop, as PyTorch's examples have it: it saves after each epoch, and a restart continues from there.

torchrun --standalone --nproc_per_node=2 tests/support/stock_loop.py --run-dir FOLDER EPOCHS BATCH PAUSE

Its lines in metrics.jsonl are what chaos follows a run by. benchmarks/kill.py draws it.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from evenkeel.tasks.digits import digits  # data and network are those of the other side, the loop is not
from evenkeel.tasks.models import SmallCNN


def main(folder: Path, epochs: int, batch_size: int, pause: float) -> None:
    """Train, and tell of each start, each step and the end as train.py does."""
    folder.mkdir(exist_ok=True)
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    rank = dist.get_rank()

    def tell(kind: str, step: int) -> None:
        if rank == 0:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"kind": kind, "step": step, "time": time.time()}) + "\n")

    torch.manual_seed(0)
    images, labels = digits(train=True).tensors
    data = TensorDataset(images / 255, labels)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size // dist.get_world_size(), sampler=sampler, pin_memory=gpus)
    model = DistributedDataParallel(SmallCNN(classes=10, dropout=0.3).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    first = 0
    if (folder / "last.pt").exists():
        saved = torch.load(folder / "last.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    tell("start", first * len(loader))
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        for i, (inputs, targets) in enumerate(loader):
            time.sleep(pause)
            inputs, targets = (it.to(device, non_blocking=True) for it in (inputs, targets))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            tell("train", epoch * len(loader) + i + 1)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, folder / "last.pt")
    if rank == 0:
        steps = epochs * len(loader)
        ended = {"state": "finished", "step": steps, "total_steps": steps}
        (folder / "status.json").write_text(json.dumps(ended))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
