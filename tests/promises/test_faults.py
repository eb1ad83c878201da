"""A random rank dies or freezes, again and again in one run: no bit changes. And the control, a stock loop."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.chaos import chaos, faults_in, launcher, reported, still_running
from tests.support.processes import TRAIN, finish_all, fork_ranks, read, records, run
from tests.support.small_runs import BATCH, MICRO, SAMPLES, TASK, options


def disturb(folder: Path, faults: int, epochs: int, seed: int) -> None:
    """Let so many faults come over a run without planned checkpoints, and look at all that it leaves."""

    def job(run_dir: Path, *more: object) -> list[str]:
        shape = ["--epochs", epochs, "--batch-size", BATCH, "--micro-batch", MICRO, "--log-every", 1]
        return options(TASK, run_dir, *shape, "--checkpoint-every", 0, "--eval-every", 9 * epochs, *more)

    finish_all(fork_ranks(2, TRAIN, *job(folder / "undisturbed")))
    run_dir, begun = folder / "run", time.monotonic()
    # the next one as soon as it stands again
    mix = f"--kill-every 1s --seed {seed} --count {faults} --minutes 14 --faults kill,term,stop"
    done = run(chaos(mix, *launcher("--", *job(run_dir, "--pause", 0.15, "--hang-timeout", 5))), limit=900)
    wall = time.monotonic() - begun
    print(f"\n{done.stdout[done.stdout.rindex('  run ') :]}")

    assert len(faults_in(done.stdout)) == faults
    assert {kind for kind, _ in faults_in(done.stdout)} == {"kill", "term", "stop"}
    assert {whom[: len("rank 0")] for _, whom in faults_in(done.stdout)} == {"rank 0", "rank 1"}
    assert len(records(run_dir, "start")) == faults + 1, "each of them had to start the ranks again"
    assert read(run_dir)["weights_sha256"] == read(folder / "undisturbed")["weights_sha256"]
    assert read(run_dir)["samples_seen"] == epochs * SAMPLES
    steps = [record["step"] for record in records(run_dir, "train")]
    assert sorted(set(steps)) == sorted(steps), "no step is done twice"
    assert reported(done.stdout, "lost, done again") == "0"
    assert wall - 60 < sum(read(run_dir)["ledger"].values()) < wall, "every second has an account"
    assert still_running(run_dir) == []


def test_ranks_that_die_or_freeze_change_no_bit(tmp_path: Path) -> None:
    """One SIGTERM, one SIGKILL, one SIGSTOP; tests/processes has twenty faults in one run."""
    disturb(tmp_path, faults=3, epochs=3, seed=13)


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
data = TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
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
for epoch in range(epoch, 2):
    sampler.set_epoch(epoch)
    for i, (features, targets) in enumerate(loader):
        time.sleep(0.2)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        tell("train", epoch * len(loader) + i + 1)
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, run_dir / "last.pt")
if rank == 0:
    (run_dir / "status.json").write_text(json.dumps({"state": "finished", "step": 40, "total_steps": 40}))
dist.destroy_process_group()
"""


def test_the_control_a_stock_loop_does_its_steps_again(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "stock.py", tmp_path / "run"
    script.write_text(STOCK)
    mix = "--kill-every 2s --seed 1 --count 1 --faults kill"
    done = run(chaos(mix, *launcher("--script", script, "--", "--run-dir", run_dir)), limit=500)
    print(f"\n{done.stdout[done.stdout.rindex('  run ') :]}")
    lost = int(reported(done.stdout, "lost, done again"))
    assert lost >= 1, "the samples of these steps were trained on twice"
    assert len(records(run_dir, "train")) == 40 + lost
