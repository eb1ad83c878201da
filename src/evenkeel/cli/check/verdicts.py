"""From what the probe and the jobs have left to the rows of the table. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...run.records import read_records
from ..digests import compare_digests, last_digests
from .rows import FAILED, MEASURED, PASSED, UNCHECKED, Row

RANKS = (1, 2, 3)
LOOSE = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 2e-2, "fp16": 5e-3}
"""How far losses and gradient norms of a ring may differ, relatively, by --precision."""
EARLY = 3
"""Steps whose numbers are compared so: later ones also differ by what the optimizer makes of the last bits."""

Found = Mapping[str, Any]


def at(line: str) -> str:
    """A line of the task to look at first."""
    return f"; look at {line}" if line else ""


def data_at_each_read(probe: Found) -> Row:
    """Whether samples are the same when they are read again."""
    sets = probe["sets"]
    count = sum(len(it["samples"]) for it in sets.values())
    row = Row("data, each read", f"{count} samples of {', '.join(sets)}, read twice", PASSED, "the same bits")
    for name, found in sets.items():
        if found["differing"]:
            return row._replace(
                result=FAILED,
                figure=f"{found['differing']} {name} samples differ {found['how']}",
                remedy="draw from torch's, NumPy's or Python's global generator, which are seeded for each sample, and "
                f"change nothing while reading{at(found['line'])}",
            )
    return row


def data_on_each_rank(probes: Sequence[Found]) -> Row:
    """Whether all ranks see the same data, and begin with the same weights."""
    row = Row("data, each rank", "the same samples, and the first weights, on 3 ranks", PASSED, "the same bits")
    first = probes[0]
    remedy = "a task must not ask for its rank, its process or the order of files, nor draw on import"
    for rank, other in enumerate(probes):
        for name, found in first["sets"].items():
            theirs = other["sets"].get(name, {"length": 0, "samples": {}})
            pairs = [(value, theirs["samples"].get(number, value)) for number, value in found["samples"].items()]
            count = sum(mine != other_ for mine, other_ in pairs)
            if found["length"] != theirs["length"] or (count and not found["differing"]):
                length = f"{theirs['length']} {name} samples on rank {rank}, {found['length']} on rank 0"
                figure = (
                    length if found["length"] != theirs["length"] else f"{count} {name} samples of rank {rank} differ"
                )
                return row._replace(result=FAILED, figure=figure, remedy=f"{remedy}{at(first['lines']['rank'])}")
        if first["rebuilt"] and other["weights"] != first["weights"]:
            figure = f"the first weights of rank {rank} differ"
            return row._replace(result=FAILED, figure=figure, remedy=f"{remedy}{at(first['lines']['rank'])}")
    return row


def no_hidden_state(probe: Found) -> Row:
    """Whether model and loss are functions of the seed and the batch."""
    row = Row("same seed, same loss", "model() and loss() called twice", PASSED, "the same bits")
    remedy = (
        "draw from torch's global generators, seeded for each micro-batch, and keep nothing in the task: what "
        f"changes belongs into buffers of the model{at(probe['lines']['state'])}"
    )
    if not probe["rebuilt"]:
        return row._replace(result=FAILED, figure="model() has other first weights each time", remedy=remedy)
    if "repeats" not in probe["loss"]:
        return row._replace(result=UNCHECKED, figure=probe["loss"]["why"])
    if not probe["loss"]["repeats"]:
        return row._replace(result=FAILED, figure="loss() gives another value for the same batch", remedy=remedy)
    return row


def of_the_cut(probe: Found, what: str) -> Row:
    """Whether the loss or the metrics of a batch are the mean of those of its parts."""
    found = probe[what]
    row = Row(
        f"{what}, any cut", "of a batch, and of its parts by their samples", PASSED, f"{found.get('name', '')} to 1e-4"
    )
    if found.get("why"):
        return row._replace(result=UNCHECKED, figure=found["why"])
    if not found["off"]:
        return row
    line = probe["lines"]["cut"] if what == "loss" else found.get("line") or probe["lines"]["metrics"]
    remedies = {
        "loss": "return the mean over the batch's samples (.mean()); a loss that compares samples with each other "
        "keeps all other promises, but depends on --micro-batch",
        "metrics": "return a row for each sample, or what adds up, and finish in summarize()",
    }
    figure = f"{found['name']} {found['whole']:.5g}, of its parts {found['parts']:.5g}"
    return row._replace(result=FAILED, figure=figure, remedy=f"{remedies[what]}{at(line)}")


class Left:
    """What the jobs have left in their folders.

    Args:
        folder: that has them all.
        failed: what went wrong with a job, by name.
        probe: rank 0's.
    """

    def __init__(self, folder: Path, failed: Mapping[str, str], probe: Found) -> None:
        self.folder, self.failed, self.probe = folder, failed, probe

    def broken(self, row: Row, *names: str) -> Row | None:
        """The row if one of the jobs has failed, or has not been run."""
        for name in names:
            if why := self.failed.get(name):
                result = UNCHECKED if why.startswith("not run: ") else FAILED
                return row._replace(result=result, figure=why.removeprefix("not run: "))
        return None

    def records(self, name: str, kind: str) -> dict[int, dict[str, Any]]:
        """The last record of a kind for each step."""
        return {
            it["step"]: it for it in read_records(self.folder / name / "run" / "metrics.jsonl") if it["kind"] == kind
        }

    def samples(self, name: str) -> dict[tuple[int, int], tuple[int, int, str]]:
        """(step, micro-batch) -> first position, samples, digest."""
        lines = [
            line for file in (self.folder / name).glob("samples-*.jsonl") for line in file.read_text().splitlines()
        ]
        return {(step, micro): (start, size, bits) for step, micro, start, size, bits in map(json.loads, lines)}

    def same_samples(self) -> Row:
        """The same samples in each step on 1, 2 and 3 ranks, each position once."""
        row = Row("samples, 1-3 ranks", "every micro-batch of each step, its place and its bits", PASSED)
        names = [f"tree-{ranks}" for ranks in RANKS]
        if found := self.broken(row, *names):
            return found
        first, *others = [self.samples(name) for name in names]
        if not first:
            return row._replace(result=UNCHECKED, figure="the script does not use DistributedLoss.micro_batches")
        for ranks, other in zip(RANKS[1:], others, strict=True):
            differing = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
            if differing:
                step, micro = differing[0]
                figure = f"step {step + 1}, micro-batch {micro}: on {ranks} ranks other samples than on 1"
                remedy = "see the rows about data" + at(self.probe["lines"]["rank"])
                return row._replace(result=FAILED, figure=figure, remedy=remedy)
        count = sum(size for _, size, _ in first.values())
        return row._replace(figure=f"{count} samples in {len({step for step, _ in first})} steps")

    def same_numbers(self) -> Row:
        """Losses and gradient norms of a ring on 1, 2 and 3 ranks."""
        limit = LOOSE[self.probe["precision"]]
        row = Row("numbers, 1-3 ranks", f"loss and gradient norm of {EARLY} steps, to {limit:.0e}", PASSED)
        names = [f"ring-{ranks}" for ranks in RANKS]
        if found := self.broken(row, *names):
            return found
        first, *others = [self.records(name, "train") for name in names]
        worst = 0.0
        for ranks, other in zip(RANKS[1:], others, strict=True):
            for step in sorted(first)[:EARLY]:
                for key in ("train/loss", "train/grad_norm"):
                    mine, theirs = (records.get(step, {}).get(key) or 0.0 for records in (first, other))
                    off = abs(mine - theirs) / max(abs(mine), 1e-6)
                    worst = max(worst, off)
                    if not off <= limit:
                        figure = f"step {step}: {key} {mine:.6g} on 1 rank, {theirs:.6g} on {ranks}"
                        return row._replace(result=FAILED, figure=figure, remedy=self._why())
        return row._replace(figure=f"{worst:.0e} at most")

    def same_bits(self) -> Row:
        """Weights and optimizers with the tree on 1, 2 and 3 ranks, after each step."""
        row = Row("bits, 1-3 ranks", "all tensors after each step, with --reduce tree", PASSED)
        for ranks in RANKS[1:]:
            if found := self.broken(row, "tree-1", f"tree-{ranks}"):
                return found
            equal, figure, _ = self._compared("tree-1", f"tree-{ranks}")
            if not equal:
                return row._replace(result=FAILED, figure=f"on {ranks} ranks {figure}", remedy=self._why())
        return row._replace(figure=figure)

    def exact_evaluation(self) -> Row:
        """The same metrics to the last digit on 1, 2 and 3 ranks."""
        row = Row("evaluation, 1-3 ranks", "all metrics of each evaluation, every digit", PASSED)
        names = [f"tree-{ranks}" for ranks in RANKS]
        if found := self.broken(row, *names):
            return found
        first, *others = [self.records(name, "eval") for name in names]
        if not first:
            return row._replace(result=UNCHECKED, figure="there was no evaluation")
        for ranks, other in zip(RANKS[1:], others, strict=True):
            for step, record in first.items():
                for key, value in record.items():
                    if "/" in key and other.get(step, {}).get(key) != value:
                        figure = f"step {step}: {key} {value} on 1 rank, {other.get(step, {}).get(key)} on {ranks}"
                        return row._replace(result=FAILED, figure=figure, remedy=self._why("metrics"))
        return row._replace(figure=f"{len(first)} evaluations")

    def survived(self, name: str, event: str, job: str, begins: int, step: int, until: int = 10**9) -> Row:
        """A job that was broken off in a step (from 0): the next attempt begins there, and all has the same bits.

        Args:
            name: of the row.
            event: what happened.
            job: its name.
            begins: which attempt follows, from 0.
            step: that was broken off.
            until: the last step of that attempt.
        """
        epoch = self.probe["steps"]
        where = f"step {step + 1} ({'mid-epoch' if step % epoch else 'between epochs'}, {epoch} steps each)"
        row = Row(name, f"{event} in {where}, and the undisturbed job", PASSED)
        if found := self.broken(row, "tree-2", job):
            return found
        starts = [
            it["step"] for it in read_records(self.folder / job / "run" / "metrics.jsonl") if it["kind"] == "start"
        ]
        if len(starts) <= begins or starts[begins] != step:
            figure = (
                f"the next attempt began at step {starts[begins] if len(starts) > begins else '-'} and not at {step}"
            )
            return row._replace(
                result=FAILED, figure=figure, remedy="steps are lost; see the output of the job (--keep)"
            )
        equal, figure, first = self._compared("tree-2", job)
        if not equal and first <= step:
            return row._replace(result=UNCHECKED, figure=f"the bits differ from step {first} on, before this")
        if not equal and first <= until:
            remedy = (
                "what the loss or the model keeps outside of parameters and buffers is gone after it: make it a buffer"
            )
            return row._replace(result=FAILED, figure=figure, remedy=remedy + at(self.probe["lines"]["kill"]))
        return row._replace(figure="no step lost, the same bits")

    def cost(self) -> Row:
        """What a step costs, and where."""
        row = Row("cost of a step", "2 ranks, rank 0's time", MEASURED)
        if found := self.broken(row, "ring-2"):
            return found
        file = self.folder / "timed" / "times-0.json"
        if (found := self.broken(row, "timed")) or not file.exists():
            return found or row._replace(result=UNCHECKED, figure="the script does not use Run.after_step")
        told = json.loads(file.read_text())
        seconds, steps = told["seconds"], max(1, told["steps"])
        evaluation = seconds.pop("evaluation", 0.0)
        total = sum(seconds.values())
        names = ["data", "transfer", "forward", "backward", "reduction", "optimizer", "checkpoint", "other"]
        shares = [f"{name} {seconds.get(name, 0) / total:.0%}" for name in names]
        batch = self.probe["batch_size"]
        figure = f"{1e3 * total / steps:.1f} ms, {batch * steps / total:,.0f} samples/s: {', '.join(shares)}"
        data = 1e3 * seconds.get("data", 0) / steps
        return row._replace(figure=f"{figure}; a batch {data:.1f} ms; all evaluations {1e3 * evaluation:.0f} ms")

    def _compared(self, a: str, b: str) -> tuple[bool, str, int]:
        """Whether two jobs have the same bits in all steps; what to say of it, and the first step that differs."""
        first, second = (last_digests(read_records(self.folder / it / "run" / "metrics.jsonl")) for it in (a, b))
        if missing := sorted(first.keys() ^ second.keys()):
            return False, f"step {missing[0]} is missing", missing[0]
        equal, text = compare_digests(first, second) if first else (True, "no steps")
        step = next((it for it in sorted(first) if first[it] != second[it]), 0)
        line, _, tensors = text.partition("\n")
        names = [it.strip() for it in tensors.splitlines()[1:4]]
        return equal, line if equal else f"{line.partition(' (')[0]}, in {', '.join(names)}", step

    def _why(self, what: str = "") -> str:
        """The remedy where numbers of ranks differ: what the rows above have found, else the loss."""
        if what:
            return f"metrics() must depend on the batch and the weights alone{at(self.probe['lines'][what])}"
        return (
            "the loss must depend on the batch, the weights and torch's seeded generators alone, not on rank, time "
            f"or earlier calls{at(self.probe['lines']['state'])}"
        )
