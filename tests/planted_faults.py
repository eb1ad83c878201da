"""Plant 40 small faults, one at a time, and see whether the tests find them.

    python tests/planted_faults.py [--list] [--only 3,7]

Each fault is planted in a copy of the repository. The unit tests of its room run first, and tests that start processes
only if those pass. A test that fails must pass without the fault, or it has found nothing. Half an hour on two cores;
exit code 1 if a fault survives or its place is no longer there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2
LIMIT = 200
"""Seconds for one test. A fault that makes one hang is found as well."""


class Fault(NamedTuple):
    """One change of the source, and who should notice."""

    breaks: str
    files: str
    """Where to look for the text: a pattern below the root."""
    text: str
    """Must be there exactly once in all those files."""
    planted: str
    tests: str
    """Arguments of pytest: unit tests, then after a | those that start processes."""


ENGINE = "src/evenkeel/"

FAULTS = [
    Fault(
        "data that changes while the job runs is not found where loader processes read",
        ENGINE + "data/changes.py",
        "part.is_inference() else part._version",
        "part.is_inference() else 0",
        "tests/data/test_changes.py",
    ),
    Fault(
        "a collective in a loss is let through",
        ENGINE + "training/distributed_loss.py",
        'no_collectives("" if self._collectives else "loss()")',
        'no_collectives("")',
        "tests/training/test_checks.py",
    ),
    Fault(
        "a sample's random numbers: the same in each epoch",
        ENGINE + "data/*.py",
        "derive(self.seed, self.purpose, epoch, index)",
        "derive(self.seed, self.purpose, 0, index)",
        "tests/data | tests/promises/test_augmentation.py",
    ),
    Fault(
        "a block gives a sample of the next one",
        ENGINE + "data/*.py",
        'np.searchsorted(ends, places, side="right")',
        'np.searchsorted(ends, places, side="left")',
        "tests/data/test_blocks.py | tests/promises/test_shards.py",
    ),
    Fault(
        "a stream goes on one sample after the place of its source's state",
        ENGINE + "data/*.py",
        'self.at, self.begin = entry["place"], entry["begin"]',
        'self.at, self.begin = entry["place"] + 1, entry["begin"]',
        "tests/data/test_streams.py | tests/promises/test_streams.py",
    ),
    Fault(
        "loader processes go on with the epoch after the next",
        ENGINE + "data/*.py",
        "set_epoch(ahead.epoch + 1)",
        "set_epoch(ahead.epoch + 2)",
        "tests/data | tests/promises/test_augmentation.py",
    ),
    Fault(
        "uneven shares: the short last step of an epoch counts too little",
        ENGINE + "training/*.py",
        "micro_batch.size / self.plan.step_samples(",
        "micro_batch.size / self.plan.step_samples(0 * ",
        "tests/training | tests/promises/test_gradients.py",
    ),
    Fault(
        "a micro-batch's dropout depends on the rank",
        ENGINE + "training/*.py",
        "micro_batch.id), self.world.devices",
        "micro_batch.id, self.world.rank), self.world.devices",
        "tests/training | tests/promises/test_gradients.py tests/promises/test_tree.py",
    ),
    Fault(
        "a rank keeps BatchNorm statistics of its own (--reduce ring)",
        ENGINE + "distributed/*.py",
        "dist.all_reduce(total, async_op=True)",
        "dist.all_reduce(total.clone(), async_op=True)",
        "tests/distributed | tests/promises/test_gradients.py",
    ),
    Fault(
        "the averaged weights (EMA) are one step behind in their warm-up",
        ENGINE + "training/*.py",
        "(1 + step) / (10 + step)",
        "step / (9 + step)",
        "tests/training | tests/promises/test_recipes.py",
    ),
    Fault(
        "float16: a resume forgets for how long the loss scale was good",
        ENGINE + "training/*.py",
        '"good": self._good, ',
        "",
        "tests/training | tests/promises/test_recipes.py",
    ),
    Fault(
        "a checkpoint gets its name before it is on the disk",
        ENGINE + "run/checkpoint.py",
        "os.fsync(file.fileno())",
        "pass",
        "tests/run | tests/promises/test_damage.py",
    ),
    Fault(
        "a checkpoint's sha256 is not compared",
        ENGINE + "run/checkpoint.py",
        "!= written.sha256",
        "== None",
        "tests/run | tests/promises/test_damage.py",
    ),
    Fault(
        "a resume does the last step again",
        ENGINE + "training/*.py",
        'activity.step = captured["step"]',
        'activity.step = captured["step"] - 1',
        "tests/training | tests/promises/test_exactly_once.py",
    ),
    Fault(
        "the evaluation counts samples of the short last micro-batch more than once",
        ENGINE + "training/*.py",
        "values.double().sum(0)",
        "values.double().mean(0) * mine[0].size",
        "tests/training | tests/promises/test_exactly_once.py",
    ),
    Fault(
        "loader processes heed SIGTERM",
        ENGINE + "data/*.py",
        "signal.signal(number, signal.SIG_IGN)",
        "signal.signal(number, signal.SIG_DFL)",
        "tests/data | tests/processes/test_train.py",
    ),
    Fault(
        "the tree pairs neighbours that are no siblings, where a rank begins with an odd one",
        ENGINE + "distributed/tree.py",
        "while self.sums and node.place % 2 and",
        "while self.sums and",
        "tests/distributed | tests/promises/test_tree.py",
    ),
    Fault(
        "a step is committed while its state is being copied",
        ENGINE + "training/seqlock.py",
        "with self._host:",
        "if True:",
        "tests/training | tests/promises/test_endings.py",
    ),
    Fault(
        "other --epochs under a schedule that depends on them are not refused",
        ENGINE + "config.py",
        'if new["schedule"] == "constant" else set()',
        "if new else set()",
        "tests/test_config.py tests/run | tests/processes/test_run_directory.py",
    ),
    Fault(
        "--digest-every leaves out the optimizers",
        ENGINE + "training/state.py",
        '"optimizers": kept, **',
        "**",
        "tests/training tests/run | tests/processes/test_compare.py",
    ),
    Fault(
        "each step takes the learning rate of the one before",
        "train.py",
        "task.rates(config, step",
        "task.rates(config, max(0, step - 1)",
        "tests/training | tests/promises/test_two_networks.py tests/processes/test_old_runs.py",
    ),
    Fault(
        "a step that was left out counts for the schedulers of who loads the state",
        ENGINE + "training/*.py",
        "self.taken += ~bad",
        "self.taken += 1",
        "tests/training/test_schedulers.py",
    ),
    Fault(
        "gradients of parameters that no optimizer has are not cleared",
        ENGINE + "training/state.py",
        "for parameter in self.parameters:",
        'for parameter in [p for o in self.optimizers for group in o.param_groups for p in group["params"]]:',
        "tests/training | tests/promises/test_two_networks.py",
    ),
    Fault(
        "a rank answers the roll-call by the name that its dead predecessor had",
        ENGINE + "distributed/rendezvous.py",
        'name, nonce, waiting = uuid4().hex, "",',
        'name, nonce, waiting = str(rank), "",',
        "tests/distributed | tests/promises/test_rendezvous.py",
    ),
    Fault(
        "--sync-batchnorm: a sign in the backward pass",
        ENGINE + "distributed/*.py",
        "(gradient - mean - normalised * along)",
        "(gradient - mean + normalised * along)",
        "tests/distributed | tests/promises/test_sync_batchnorm.py",
    ),
    Fault(
        "a part of a line stays in a file when the disk is full",
        ENGINE + "common/files.py",
        "file.truncate(end)",
        "pass",
        "tests/common",
    ),
    Fault(
        "a process that writes the last step and is killed is not followed by another",
        ENGINE + "resilience/held.py",
        "if os.WIFSIGNALED(status) and tries:",
        "if os.WIFSIGNALED(status) and tries < 0:",
        "tests/resilience | tests/promises/test_held.py",
    ),
    Fault(
        "a state in memory is read by its path alone, which another container may have as well",
        ENGINE + "resilience/held.py",
        "if _identity(each.path) == each.identity:",
        "if _identity(each.path):",
        "tests/resilience | tests/promises/test_held.py",
    ),
    Fault(
        "a rank that makes no progress is healthy as long as it beats",
        ENGINE + "resilience/heartbeat.py",
        "if 0 < pulse.patience < idle:",
        "if 0 < pulse.patience < silent:",
        "tests/resilience",
    ),
    Fault(
        "an option that is newer than a run makes another run of it",
        ENGINE + "config.py",
        "options.get(n, defaults.get(n))",
        "options.get(n)",
        "tests/test_config.py",
    ),
    Fault(
        "the best checkpoint is deleted when it is old",
        ENGINE + "run/checkpoint.py",
        "if path != best:",
        "if path:",
        "tests/run | tests/processes/test_validation.py",
    ),
    Fault(
        "a rank on another kind of machine is not seen",
        ENGINE + "run/fingerprint.py",
        "in differences(fingerprints[0], theirs).items():",
        "in differences(theirs, theirs).items():",
        "tests/run",
    ),
    Fault(
        "--task lm: a document sees the ones before it",
        ENGINE + "tasks/transformer.py",
        "(tokens == end).cumsum(1)",
        "(tokens == end).cumsum(1) * 0",
        "tests/tasks/test_transformer.py",
    ),
    Fault(
        "--task lm: the padding of the last window counts as predicted tokens",
        ENGINE + "tasks/lm.py",
        "(batch[:, 1:] != PAD).sum(1)}",
        "(batch[:, 1:] != PAD - 1).sum(1)}",
        "tests/tasks/test_lm.py | tests/processes/test_lm.py",
    ),
    Fault(
        "torchrun expands ${...} in the options of a task",
        ENGINE + "launch/topology.py",
        'argument.replace("$", "$$")',
        "argument",
        "tests/launch",
    ),
    Fault(
        "a node whose rank refuses tells its scheduler that it has crashed",
        ENGINE + "launch/agent.py",
        "if REFUSED in codes:",
        "if codes == [REFUSED]:",
        "tests/launch",
    ),
    Fault(
        "Slurm's answer about a task of an array is taken for another job",
        ENGINE + "launch/slurm/jobs.py",
        'f"{array}_{task}" if task.isdecimal() else number',
        "number",
        "tests/launch/slurm | tests/processes/test_slurm.py",
    ),
    Fault(
        "compare: digests of steps that were done again are those of the first time",
        ENGINE + "cli/compare.py",
        'if step <= record["step"]}',
        "if step}",
        "tests/cli/test_compare.py | tests/processes/test_compare.py",
    ),
    Fault(
        "checkpoint verify: exit code 0 for a damaged one",
        ENGINE + "cli/checkpoint.py",
        "code = 1",
        "code = 0",
        "tests/cli/test_checkpoint.py | tests/processes/test_checkpoint_command.py",
    ),
    Fault(
        "predict: an image of no known class counts as wrong",
        ENGINE + "cli/predict.py",
        'known = rows["target"] >= 0',
        'known = rows["target"] >= -1',
        "tests/cli/test_predict.py",
    ),
]


def copied(place: Path) -> Path:
    """A copy of all files that git has or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def plant(fault: Fault, copy: Path) -> str:
    """Plant a fault in a copy; says why not, if that cannot be."""
    found = {path: path.read_text().count(fault.text) for path in copy.glob(fault.files)}
    if (times := sum(found.values())) != 1:
        return f"HAS LOST ITS PLACE: {fault.text!r} is {times} times in {fault.files}"
    path = next(path for path, count in found.items() if count)
    path.write_text(path.read_text().replace(fault.text, fault.planted))
    return ""


def failed_test(copy: Path, tests: list[str]) -> str:
    """Run tests in a copy to the first that fails; its name, or ""."""
    folder = tempfile.mkdtemp(prefix="planted-")  # in this copy others may be at work as well
    options = ["-x", "-q", "--no-header", "-o", f"cache_dir={folder}/cache", "-o", f"timeout={LIMIT}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={folder}/tmp", *tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    failed = Path(folder) / "cache" / "v" / "cache" / "lastfailed"
    names = list(json.loads(failed.read_text())) if failed.exists() else []
    shutil.rmtree(folder, ignore_errors=True)
    if done.returncode and not names:
        raise RuntimeError(f"pytest {' '.join(tests)}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
    return names[0] if names else ""


def examine(fault: Fault, copy: Path, whole: Path) -> str:
    """What came of a fault, in a line."""
    try:
        if trouble := plant(fault, copied(copy)):
            return trouble
        for tests in fault.tests.split("|"):
            if name := failed_test(copy, tests.split()):
                if failed_test(whole, [name]):
                    return f"UNCLEAR: {name} fails without it as well"
                return f"found by {name}"
        return "SURVIVED"
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def main() -> int:
    """Plant them, and say what came of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="say what there is, and whether it has its place")
    parser.add_argument("--only", default="", help="numbers, e.g. 3,7")
    typed = parser.parse_args()
    chosen = [int(number) for number in typed.only.split(",") if number] or range(1, len(FAULTS) + 1)
    results: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        whole = copied(Path(folder) / "whole")

        def work(number: int) -> None:
            fault, begun, copy = FAULTS[number - 1], time.monotonic(), Path(folder) / str(number)
            results[number] = (
                plant(fault, copied(copy)) or "has its place" if typed.list else examine(fault, copy, whole)
            )
            seconds = time.monotonic() - begun
            print(f"{number:2}  {fault.breaks}\n    {results[number]} ({seconds:.0f} s)", flush=True)

        list(pool.map(work, chosen))
    good = [result for result in results.values() if result.startswith(("found by", "has its place"))]
    print(f"{len(good)} of {len(results)}")
    return 0 if len(good) == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
