#!/usr/bin/env python3
"""What grows with the number of ranks, samples and steps, and what a start imports.

    python benchmarks/growth.py world       1 .. 32 ranks on this machine
    python benchmarks/growth.py samples     10^3 .. 10^9 samples
    python benchmarks/growth.py steps       10^5 steps
    python benchmarks/growth.py imports     the longest imports of a job of one step

Each prints a table of Markdown. Ranks are forked from one process that has imported torch, so that 32 of them fit into
a machine; times of more ranks than cores are those of ranks that wait for a core.
"""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: only a process of one thread can fork
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # rank 0 has the store, and the ranks stop in any order

import tyro
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DistributedSampler

from evenkeel.data.sampler import ElasticSampler
from evenkeel.distributed import world
from evenkeel.resilience import hang

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
TINY = ["--width", "2", "--batch-size", "64", "--micro-batch", "2", "--wandb", "disabled"]

COUNTED = ("set", "get", "add", "compare_set", "wait", "check", "append", "multi_get", "multi_set")


class CountingStore(Store):
    """torchrun's store, and how often it has been asked. (c10d's own keys count too.)"""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.calls = store, Counter[str]()

    def has_extended_api(self) -> bool:
        """Whether it has multi_get and multi_set."""
        return True

    def set_timeout(self, timeout: Any) -> None:
        """How long it may take."""
        self.store.set_timeout(timeout)


def _forwarded(name: str) -> Any:
    def call(self: CountingStore, *arguments: Any) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)(*arguments)

    return call


for _name in COUNTED:
    setattr(CountingStore, _name, _forwarded(_name))


@dataclass(frozen=True)
class Ranks:
    """Start-up, rendezvous, store operations and memory of a rank, and the broadcast of a resume, by world size."""

    ranks: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """World sizes."""

    def run(self) -> None:
        """Print a line for each."""
        _warm_up()
        print("| ranks | to the first step | rendezvous | store operations a rank: roll-call, all | own memory a rank |"
              " resume: to the first step, broadcast |")  # fmt: skip
        print("|---:|---:|---:|---:|---:|---:|")
        for ranks in self.ranks:
            with tempfile.TemporaryDirectory() as folder:
                first, again = (_attempt(ranks, Path(folder), stop_at) for stop_at in (3, 6))
            print(
                f"| {ranks} | {max(r['first'] for r in first):.2f} s | {max(r['rendezvous'] for r in first):.3f} s | "
                f"{median(r['roll_call'] for r in first):.0f}, {median(r['calls'] for r in first):.0f} (rank 0: "
                f"{first[0]['roll_call']}, {first[0]['calls']}) | {median(r['own_mb'] for r in first):.0f} MB | "
                f"{max(r['first'] for r in again):.2f} s, {max(r['broadcast'] for r in again):.3f} s |",
                flush=True,
            )


def _warm_up() -> None:
    """Import what all ranks have in common, torch's compiler too, which its optimizers import."""
    import torch._dynamo  # noqa: F401

    from evenkeel.tasks import classify  # noqa: F401


def _attempt(ranks: int, folder: Path, stop_at: int) -> list[dict[str, Any]]:
    """Start a job of so many ranks, which stops after a step as by a scheduler; what each rank has measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begun = time.time()
    children = []
    for rank in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        try:
            who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in (who | where).items()})
            _be_a_rank(rank, folder, begun, stop_at)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _be_a_rank(rank: int, folder: Path, begun: float, stop_at: int) -> None:
    """Run train.py in this process with its store counted and its stations timed."""
    told: dict[str, Any] = {"broadcast": 0.0}
    steps = [stop_at - 3]
    counting: list[CountingStore] = []
    names: Any = world  # some are replaced

    def counted(*arguments: Any) -> Store:
        counting.append(CountingStore(connect(*arguments)))
        return counting[0]

    connect, agree, broadcast = names.job_store, names.fresh_store, world.World.broadcast_tensors

    def timed_agreement(*arguments: Any) -> Store:
        start = time.perf_counter()
        store: Store = agree(*arguments)
        told["rendezvous"], told["roll_call"] = time.perf_counter() - start, counting[0].calls.total()
        return store

    def timed_broadcast(*arguments: Any) -> Any:
        start = time.perf_counter()
        received = broadcast(*arguments)
        told["broadcast"] = time.perf_counter() - start
        return received

    def after_a_step(*_: Any) -> None:
        if "first" not in told:
            told["first"], told["calls"] = time.time() - begun, counting[0].calls.total()
            told["own_mb"] = _own_memory()
            (folder / f"rank-{rank}.json").write_text(json.dumps(told))
        steps[0] += 1
        if steps[0] == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    names.job_store, names.fresh_store = counted, timed_agreement
    world.World.broadcast_tensors = timed_broadcast  # type: ignore[method-assign, assignment]
    # the watch's beats, some three operations a second, go around the count: a counted store cannot be cloned
    hang.PrefixStore = lambda name, _: PrefixStore(name, counting[0].store)  # type: ignore[assignment, attr-defined]
    register_optimizer_step_post_hook(after_a_step)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    sys.argv = [str(TRAIN), *TINY, "--run-dir", str(folder / "run"), "--checkpoint-every", "2", "--keeper", "off"]
    runpy.run_path(str(TRAIN), run_name="__main__")


def _own_memory() -> int:
    """MB of this process that no other has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) // 1024


@dataclass(frozen=True)
class Samples:
    """The sampler's time for a batch and its memory, by the number of samples."""

    batch: int = 4096
    """Samples of a global batch, all of them for this process."""
    batches: int = 50
    """That are drawn."""
    torch_up_to: int = 10**7
    """The largest number for which torch's `DistributedSampler` is measured too."""

    def run(self) -> None:
        """Print a line for each number."""
        print("| samples | ElasticSampler: first batch, each, memory | DistributedSampler: first batch, memory |")
        print("|---:|---:|---:|")
        for power in range(3, 10):
            line = f"| 10^{power} | {_forked(lambda n=10**power: self._ours(n))} |"
            theirs = _forked(lambda n=10**power: self._torchs(n)) if 10**power <= self.torch_up_to else ""
            print(f"{line} {theirs} |", flush=True)

    def _ours(self, samples: int) -> str:
        before, times = _peak(), []
        sampler = ElasticSampler(range(samples), self.batch, self.batch, num_replicas=1, rank=0)
        start = time.perf_counter()
        for _, _batch in zip(range(self.batches), sampler, strict=False):
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
        return f"{1e3 * times[0]:.1f} ms, {1e3 * median(times):.1f} ms, {_peak() - before} MB"

    def _torchs(self, samples: int) -> str:
        before, start = _peak(), time.perf_counter()
        sampler = DistributedSampler(range(samples), num_replicas=1, rank=0)  # type: ignore[arg-type, var-annotated]
        next(iter(sampler))
        return f"{1e3 * (time.perf_counter() - start):.1f} ms, {_peak() - before} MB"


def _forked(work: Any) -> str:
    """The result of a function in a process of its own, so that each begins with the same memory."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        os.waitpid(child, 0)
        return os.read(reading, 1 << 16).decode()
    os.write(writing, str(work()).encode())
    os._exit(0)


def _peak() -> int:
    """MB that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@dataclass(frozen=True)
class Steps:
    """Memory, files and the time of a step in the course of a long run of a tiny job, in one process."""

    steps: int = 100_000
    """How many."""
    parts: int = 10
    """Lines of the table."""

    def run(self) -> None:
        """Print a line for each part."""
        with tempfile.TemporaryDirectory() as folder:
            run_dir, seen = Path(folder) / "run", [0]
            start = [time.perf_counter()]
            every = self.steps // self.parts

            def after_a_step(*_: Any) -> None:
                seen[0] += 1
                if seen[0] % every:
                    return
                seconds = time.perf_counter() - start[0]
                rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // (1 << 20)
                sizes = [(run_dir / "metrics.jsonl").stat().st_size]
                sizes += [sum(path.stat().st_size for path in (run_dir / "logs").rglob("*") if path.is_file())]
                files = sum(path.is_file() for path in run_dir.rglob("*"))
                kept = f"{rss} MB | {sizes[0] / 1e6:.2f} MB | {sizes[1] / 1e3:.1f} kB | {files}"
                print(f"| {seen[0]:,} | {1e3 * seconds / every:.2f} ms | {kept} |", file=sys.stderr, flush=True)
                start[0] = time.perf_counter()

            print("| step | a step | memory | metrics.jsonl | logs | files |", file=sys.stderr)
            print("|---:|---:|---:|---:|---:|---:|", file=sys.stderr)
            register_optimizer_step_post_hook(after_a_step)
            steps = ["--max-steps", str(self.steps), "--epochs", str(self.steps), "--eval-every", str(self.steps)]
            small = ["--width", "1", "--batch-size", "4", "--micro-batch", "4", "--wandb", "disabled"]
            sys.argv = [str(TRAIN), *small, *steps, "--checkpoint-every", "1000", "--run-dir", str(run_dir)]
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            runpy.run_path(str(TRAIN), run_name="__main__")


@dataclass(frozen=True)
class Imports:
    """The longest imports of a job of one step, by -X importtime."""

    most: int = 12
    """Lines of the table."""

    def run(self) -> None:
        """Print the packages whose own modules take longest."""
        with tempfile.TemporaryDirectory() as folder:
            job = [str(TRAIN), *TINY, "--max-steps", "1", "--run-dir", f"{folder}/run"]
            command = [sys.executable, "-X", "importtime", *job]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        own, modules = Counter[str](), Counter[str]()
        for line in told.splitlines():
            if found := re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", line):
                name = _package(found[2])
                own[name] += int(found[1])
                modules[name] += 1
        print("| package | modules | own time |\n|---|---:|---:|")
        for name, microseconds in own.most_common(self.most):
            print(f"| {name} | {modules[name]} | {microseconds / 1e3:.0f} ms |")
        print(f"| all | {modules.total()} | {own.total() / 1e3:.0f} ms |")


def _package(module: str) -> str:
    """The distribution, and of torch the part of it that is imported by itself."""
    first, *rest = module.split(".")
    return f"torch.{rest[0]}" if first == "torch" and rest and rest[0] in ("_dynamo", "_inductor") else first


def main() -> None:
    """Measure what is asked for."""
    kinds: Any = (
        Annotated[Ranks, tyro.conf.subcommand("world")]
        | Annotated[Samples, tyro.conf.subcommand("samples")]
        | Annotated[Steps, tyro.conf.subcommand("steps")]
        | Annotated[Imports, tyro.conf.subcommand("imports")]
    )
    tyro.cli(kinds, description=__doc__).run()


if __name__ == "__main__":
    main()
