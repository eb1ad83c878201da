"""From the results of the probe and the jobs to the rows of the table. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...run.records import read_records
from ..digests import Digests, last_digests
from .rows import FAILED, MEASURED, PASSED, UNCHECKED, Row

LOOSE = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 2e-2, "fp16": 5e-3}
"""How far losses and gradient norms of a ring may differ, relatively, by --precision."""
EARLY = 1
"""Steps whose numbers are compared so: Adam's first steps amplify the last bits (3e-5 in the second, measured)."""

Found = Mapping[str, Any]

SEEDED = "draw from torch's, NumPy's or Python's global generators, which are seeded, and "
REMEDIES = {
    "read": SEEDED + "change nothing while reading",
    "rank": "a task must not depend on its rank, its process or the order of files, nor draw random numbers on import",
    "state": SEEDED + "change nothing in the task but in after_step(), and save it in state_dict()",
    "loss": "return the mean over the batch's samples (.mean()); with class weights or ignore_index it is a mean over "
    "something else, so divide by the number of samples; a loss that compares samples with each other, or "
    "a model that takes padding for data, depends on --micro-batch, but all other promises hold",
    "predict": "mend it before `evenkeel predict`; training does not call it",
    "metrics": "return a row for each sample, or sums that summarize() turns into the metric",
}


def failed(row: Row, figure: str, remedy: str, line: str) -> Row:
    """The row of a check that has failed, with the line to look at."""
    return row._replace(result=FAILED, figure=figure, remedy=REMEDIES[remedy] + (f"; look at {line}" if line else ""))


def of_probes(probes: Sequence[Found]) -> Iterator[Row]:
    """The rows about data, loss and metrics, from the probes of three ranks."""
    first, lines = probes[0], probes[0]["lines"]
    samples = {(name, number): bits for name, it in first["sets"].items() for number, bits in it["samples"].items()}
    row = Row(
        "data, each read", f"{len(samples)} samples of {', '.join(first['sets'])}, twice", PASSED, "the same bits"
    )
    for name, found in first["sets"].items():
        if found["differing"]:
            row = failed(row, f"{found['differing']} {name} samples differ {found['how']}", "read", found["line"])
    yield row
    row = Row("data, each rank", "samples and first weights as ranks 0, 1 and 2", PASSED, "the same bits")
    for rank, other in enumerate(probes):
        for name, found in first["sets"].items():
            theirs = other["sets"][name]
            pairs = [(bits, theirs["samples"].get(number, bits)) for number, bits in found["samples"].items()]
            if found["length"] != theirs["length"]:
                figure = f"rank {rank} has {theirs['length']} {name} samples, not {found['length']}"
                row = failed(row, figure, "rank", lines["rank"])
            elif not found["differing"] and (count := sum(a != b for a, b in pairs)):
                row = failed(row, f"{count} {name} samples of rank {rank} differ", "rank", lines["rank"])
        if first["rebuilt"] and other["weights"] != first["weights"]:
            row = failed(row, f"rank {rank} has different first weights", "rank", lines["rank"])
    yield row
    row = Row("same seed, same loss", "model() and loss(), called twice", PASSED, "the same bits")
    if not first["rebuilt"]:
        yield failed(row, "model() has different first weights each time", "state", lines["state"])
    elif not first["loss"].get("repeats", True):
        yield failed(row, "loss() gives different values for the same batch", "state", lines["state"])
    else:
        yield row if "repeats" in first["loss"] else row._replace(result=UNCHECKED, figure=first["loss"]["why"])
    for what in ("loss", "metrics"):
        found = first[what]
        compared, figure = "of a batch, and averaged over its parts", f"{found.get('name')} equal to 1e-4"
        row = Row(f"{what}, any cut", compared, PASSED, figure)
        if found["why"]:
            yield row._replace(result=UNCHECKED, figure=found["why"])
        elif found["off"]:
            figure = f"{found['name']} {found['whole']:.5g}, averaged over its parts {found['parts']:.5g}"
            yield failed(row, figure, what, found.get("line") or lines[what])
        else:
            yield row
    if "predict" in first:
        yield failed(Row("predict", "of a test sample", FAILED), first["predict"], "predict", "")


class Left:
    """The results of the jobs in their folders.

    Args:
        folder: that has them all.
        missing: why a job failed, by name; after "not run: ", why it was not run.
        probe: the findings of rank 0.
    """

    def __init__(self, folder: Path, missing: Mapping[str, str], probe: Found) -> None:
        self.folder, self.missing, self.probe = folder, missing, probe

    def rows(self, breaks: Sequence[tuple[str, str, str, int, int]]) -> Iterator[Row]:
        """The rows about jobs; ``breaks``: of each its name, what happened, job, attempt after it, and step from 0."""
        limit, lines = LOOSE[self.probe["precision"]], self.probe["lines"]
        row = Row("samples, 1-3 ranks", "position and bits of each micro-batch", PASSED)
        yield self._on_ranks(row, "tree", self._samples, "rank", lines["rank"])
        row = Row("numbers, 1-3 ranks", f"loss and gradient norm of the first step, equal to {limit:.0e}", PASSED)
        yield self._on_ranks(row, "ring", self._numbers, "state", lines["state"], limit)
        row = Row("bits, 1-3 ranks", "all tensors after each step, with --reduce tree", PASSED)
        yield (bits := self._on_ranks(row, "tree", self._digests, "state", lines["state"]))
        row = Row("evaluation, 1-3 ranks", "each evaluation, to the last digit", PASSED)
        if bits.result == FAILED:
            yield row._replace(result=UNCHECKED, figure="the weights differ already")
        elif self.probe["metrics"]["why"].endswith("no test data"):
            yield row._replace(result=UNCHECKED, figure=self.probe["metrics"]["why"])
        else:
            yield self._on_ranks(row, "tree", self._metrics, "metrics", lines["metrics"])
        for number, (name, event, job, attempt, step) in enumerate(breaks):
            later = next((it[-1] for it in breaks[number + 1 :] if it[2] == job), 10**9)
            yield self._survived(name, event, job, attempt, step, later)
        yield self._cost()

    def _records(self, job: str, kind: str) -> list[dict[str, Any]]:
        found = read_records(self.folder / job / "run" / "metrics.jsonl")
        return [record for record in found if record["kind"] == kind]

    def _samples(self, job: str) -> dict[Any, Any]:
        """(step, micro-batch) -> first position, samples, digest."""
        files = sorted((self.folder / job).glob("samples-*.jsonl"))
        found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return {f"step {step + 1}, micro-batch {micro}": rest for step, micro, *rest in sorted(found)}

    def _numbers(self, job: str) -> dict[Any, Any]:
        names = ("train/loss", "train/grad_norm")
        return {f"step {it['step']}: {name}": it[name] for it in self._records(job, "train")[:EARLY] for name in names}

    def _metrics(self, job: str) -> dict[Any, Any]:
        found = self._records(job, "eval")
        return {f"step {it['step']}: {name}": value for it in found for name, value in it.items() if "/" in name}

    def _digests(self, job: str) -> dict[Any, Any]:
        found = self._last(job).items()
        return {f"step {step}: {name}": bits for step, it in found for name, bits in it.items()}

    def _last(self, job: str) -> dict[int, Digests]:
        return last_digests(read_records(self.folder / job / "run" / "metrics.jsonl"))

    def _absent(self, row: Row, *jobs: str) -> Row | None:
        """The row if one of the jobs it needs has failed or was not run."""
        whys = [self.missing[job] for job in jobs if job in self.missing]
        if not whys:
            return None
        why = min(whys, key=lambda why: why.startswith("not run: "))  # rather one that has failed
        result = UNCHECKED if why.startswith("not run: ") else FAILED
        return row._replace(result=result, figure=why.removeprefix("not run: "))

    def _on_ranks(
        self, row: Row, reduce: str, read: Callable[[str], dict[Any, Any]], remedy: str, line: str, limit: float = 0.0
    ) -> Row:
        """Compare the results of jobs on 1, 2 and 3 ranks by name, numbers to a relative limit."""
        jobs = [f"{reduce}-{ranks}" for ranks in (1, 2, 3)]
        if absent := self._absent(row, *jobs):
            return absent
        first, *others = map(read, jobs)
        if not first:
            return row._replace(result=UNCHECKED, figure="the script writes none: it does not use Evenkeel's loop")
        for ranks, other in enumerate(others, start=2):
            for name in [*first, *other]:
                mine, theirs = first.get(name), other.get(name)
                near = limit and mine and theirs and abs(mine - theirs) <= limit * abs(mine)
                if mine != theirs and not near:
                    return failed(row, f"{name}: {mine} on 1 rank, {theirs} on {ranks}", remedy, line)
        return row._replace(figure=f"{len(first)} compared")

    def _survived(self, name: str, event: str, job: str, attempt: int, step: int, until: int) -> Row:
        """A job that was interrupted in a step, from 0: the next attempt must begin there, with the same bits."""
        where = "mid-epoch" if step % self.probe["steps"] else "between epochs"
        compared = f"{event} in step {step + 1} ({where}), against a job without it"
        row = Row(name, compared, PASSED, "no step lost, the same bits")
        if absent := self._absent(row, job) or self._absent(row, "tree-2"):
            return absent
        starts = [record["step"] for record in self._records(job, "start")]
        if starts[attempt : attempt + 1] != [step]:
            figure = f"attempts began after steps {starts}, none after {step}"
            return row._replace(result=FAILED, figure=figure, remedy="see the output of the job")
        first, second = self._last("tree-2"), self._last(job)
        # a signal may come before the last step's digest is written, which is no lost step
        differing = min((it for it in first if it in second and first[it] != second[it]), default=until + 1)
        if differing <= step:
            return row._replace(result=UNCHECKED, figure=f"the bits differ from step {differing} on, before this")
        if differing > until:
            return row
        mine, theirs = first[differing], second[differing]
        names = [it for it in mine if mine[it] != theirs.get(it)]
        figure = f"from step {differing} on {len(names)} of {len(mine)} tensors differ, {names[0]} for one"
        return failed(row, figure, "state", self.probe["lines"]["kill"])

    def _cost(self) -> Row:
        """The time of a step, by part."""
        row = Row("cost of a step", "rank 0 of 2", MEASURED)
        file = self.folder / "ring-2" / "times-0.json"
        if (absent := self._absent(row, "ring-2")) or not file.exists():
            return absent or row._replace(result=UNCHECKED, figure="the script does not use Run.after_step")
        times = json.loads(file.read_text())
        seconds, steps = times["seconds"], max(1, times["steps"])
        evaluation, _ = seconds.pop("evaluation", 0.0), seconds.pop("notes", 0.0)
        total, batch = sum(seconds.values()) / steps, self.probe["batch_size"]
        names = ("data", "transfer", "forward", "backward", "reduction", "optimizer", "checkpoint", "other")
        shares = ", ".join(f"{name} {seconds.get(name, 0) / steps / total:.0%}" for name in names)
        data = 1e3 * seconds.get("data", 0) / steps
        figure = f"{1e3 * total:.1f} ms ({batch / total:,.0f} samples/s): {shares}; the data of a step {data:.1f} ms"
        return row._replace(figure=f"{figure}; its evaluations {1e3 * evaluation:.0f} ms")
