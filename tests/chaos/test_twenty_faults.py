"""Twenty times a random rank dies or freezes in one run: no bit changes. And the control, a stock loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import TRAIN, finish_all, fork_ranks, read, records, run
from tests.test_train import BATCH, MICRO, SAMPLES, TASK

from .commands import chaos, faults_in, launcher, reported, still_running

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

FAULTS, SEED = 20, 21
EPOCHS, STEPS_PER_EPOCH = 11, 9
STEPS = EPOCHS * STEPS_PER_EPOCH


def job(run_dir: Path, *more: object) -> list[object]:
    """Long enough for twenty faults, and without a single planned checkpoint before the last step."""
    shape = ["--epochs", EPOCHS, "--batch-size", BATCH, "--micro-batch", MICRO, "--log-every", 1]
    rare = ["--checkpoint-every", 0, "--eval-every", STEPS, "--wandb", "disabled"]
    return ["--task", TASK, "--run-dir", run_dir, *shape, *rare, *more]


@pytest.mark.timeout(1000)
def test_twenty_ranks_that_die_or_freeze_change_no_bit(tmp_path: Path) -> None:
    finish_all(fork_ranks(2, TRAIN, *job(tmp_path / "undisturbed")))
    run_dir = tmp_path / "run"
    # as soon as it stands again
    mix = f"--kill-every 1s --seed {SEED} --count {FAULTS} --minutes 14 --faults kill,term,stop"
    done = run(chaos(mix, *launcher("--", *job(run_dir, "--pause", 0.15, "--hang-timeout", 5))), limit=900)
    print(f"\n{done.stdout[done.stdout.rindex('  run ') :]}")

    assert len(faults_in(done.stdout)) == FAULTS
    assert {whom[: len("rank 0")] for _, whom in faults_in(done.stdout)} == {"rank 0", "rank 1"}
    assert len(records(run_dir, "start")) == FAULTS + 1, "each of them had to start the ranks again"
    assert read(run_dir)["weights_sha256"] == read(tmp_path / "undisturbed")["weights_sha256"]
    assert read(run_dir)["samples_seen"] == EPOCHS * SAMPLES
    steps = [record["step"] for record in records(run_dir, "train")]
    assert sorted(set(steps)) == sorted(steps), "no step is done twice"
    assert reported(done.stdout, "lost, done again") == "0"
    assert still_running(run_dir) == []


# Saves at the end of each epoch and goes on from there, as most training scripts do. Its lines in metrics.jsonl
# are what chaos follows a run by.
STOCK = """
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
run_dir.mkdir(exist_ok=True)
dist.init_process_group("gloo")
rank = dist.get_rank()

def tell(kind, step):
    if rank == 0:
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, "time": time.time()}) + "\\n")

torch.manual_seed(0)
data = TensorDataset(torch.randn(120, 4), torch.randn(120, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=6, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
epoch = 0
if (run_dir / "last.pt").exists():
    saved = torch.load(run_dir / "last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    epoch = saved["epoch"]
tell("start", epoch * len(loader))
for epoch in range(epoch, 6):
    sampler.set_epoch(epoch)
    for i, (features, targets) in enumerate(loader):
        time.sleep(0.3)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        tell("train", epoch * len(loader) + i + 1)
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, run_dir / "last.pt")
if rank == 0:
    (run_dir / "status.json").write_text(json.dumps({"state": "finished", "step": 60, "total_steps": 60}))
dist.destroy_process_group()
"""


def test_the_control_a_stock_loop_does_its_steps_again_and_again(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "stock.py", tmp_path / "run"
    script.write_text(STOCK)
    mix = f"--kill-every 4s --seed {SEED} --count 5 --faults kill,term"
    done = run(chaos(mix, *launcher("--script", script, "--", "--run-dir", run_dir)), limit=500)
    print(f"\n{done.stdout[done.stdout.rindex('  run ') :]}")
    lost = int(reported(done.stdout, "lost, done again"))
    assert lost >= 3, "the samples of these steps were trained on twice"
    assert len(records(run_dir, "train")) == 60 + lost
