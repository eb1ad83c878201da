"""Whether a run is what its ledger says: the chain, the samples, the checkpoints, and parts that are run again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..cli.digests import Digests, different, digests_of, last_of_steps
from ..common.errors import Refusal
from ..run.chain import chained, options_digest, samples_digest, whole_steps
from ..run.manifest import step_folders, step_of
from ..run.records import read_config, read_facts, read_records
from ..run.state_files import Damaged
from ..tasks.command_line import parse_as_recorded
from ..training.task_data import training_set
from .replay import Asked, refuse_unless_run, replay

Record = Mapping[str, Any]
"""A line of metrics.jsonl."""


class Audit:
    """Checks one run; each check yields what is wrong, a line each.

    Args:
        run: the run; nothing in it changes.
        script: whose `train(run)` is the loop.
        words: options of train.py that differ from the run's, such as --data-dir.

    Raises:
        Refusal: it is no run, or has no ledger that one process could compute again.
    """

    def __init__(self, run: Path, script: Path, words: list[str]) -> None:
        refuse_unless_run(run)
        self.run, self.script, self.words = run, script, words
        self.options = read_config(run / "config.toml")
        self.status = read_facts(run / "status.json")[0]
        self.lines = list(read_records(run / "metrics.jsonl"))
        self.ledger: list[Record] = [it for it in self.lines if it["kind"] == "digest" and "chain" in it]
        if not self.ledger or self.options.get("reduce") != "tree":
            raise Refusal(f"{run}: has no ledger to audit; train with --digest-every N and --reduce tree")
        self.last: Mapping[int, Record] = last_of_steps(self.lines, "digest", "chain")
        """Step -> its record by the last attempt that did the step."""
        self.good: set[int] = {0}
        """Steps from which parts can be run again: the start, and checkpoints that are as the ledger says."""
        self.shown: set[int] = set()
        """Steps that were run again, with the ledger's result."""

    def chain(self) -> Iterator[str]:
        """Each record follows from the one before it, and none is missing at the end."""
        every, ledger = int(self.options.get("digest_every", 0)), self.ledger
        for number, record in enumerate(ledger):
            before: Record = ledger[number - 1] if number else {"step": 0, "chain": ""}
            if chained(before["chain"], record) == record["chain"]:
                continue
            here, after = f"the record of step {record['step']}", ledger[number + 1 : number + 2]
            if after and chained(before["chain"], after[0]) == after[0]["chain"]:
                yield f"{here} was added"
            elif record["step"] > before["step"] + every:
                yield f"records between step {before['step']} and step {record['step']} were removed"
            else:
                yield f"{here} was edited, or one between it and that of step {before['step']} was replaced or removed"
        # a run that was stopped in the evaluation of a step has saved that step, and records it when it goes on
        unrecorded = every * (self.status.get("state") != "finished")
        if every and self.status.get("step", 0) >= ledger[-1]["step"] + every + unrecorded:
            yield f"records after step {ledger[-1]['step']} were removed: the run was at step {self.status['step']}"

    def losses(self) -> Iterator[str]:
        """The logged losses are the ledger's."""
        logged: dict[int, Any] = {}
        for it in self.lines:
            if it["kind"] == "start":  # its ledger has no losses of steps that it has not done
                logged = {}
            elif it["kind"] == "train":
                logged[it["step"]] = it.get("train/loss")
            elif "chain" in it and logged.get(it["step"]) != it.get("loss"):
                yield f"step {it['step']} has the logged loss {logged.get(it['step'])}, the ledger {it.get('loss')}"

    def samples(self) -> Iterator[str]:
        """The samples of each step, and the options, are those of config.toml."""
        config, task = parse_as_recorded(self.run, self.words)
        options = options_digest(self.options, task.harmless)
        if other := [it["step"] for it in self.ledger if it.get("options") != options]:
            yield f"step {other[0]} was trained with other options than config.toml has ({len(other)} records)"
        cut = (int(self.status.get(name, 0)) for name in ("micro_batch", "micro_batches"))
        sampler = whole_steps(training_set(task, config), config, *cut)
        for it in self.ledger:
            if it.get("samples") != samples_digest(sampler, it["step"]):
                yield f"step {it['step']} used other samples than its place in the order has: repeated or left out"

    def checkpoints(self) -> Iterator[str]:
        """Each checkpoint has the state that the ledger has at its step."""
        for folder in step_folders(self.run / "checkpoints"):
            step = step_of(folder)
            try:
                found = digests_of(folder) if step in self.last else {}
            except Damaged as error:
                yield f"{error}"
                continue
            if found and _same(self.last[step]["digests"], found):
                self.good.add(step)
            elif found:
                yield f"the checkpoint of step {step} is not the state that the ledger has at step {step}"

    def segments(self, number: int, seed: int) -> list[tuple[int, int]]:
        """`number` random parts between kept checkpoints, in order: (step before the first, last)."""
        ends = sorted(self.good | {max(self.last, default=0)})
        parts = [(a, b) for a, b in pairwise(ends) if any(a < step <= b for step in self.last)]
        return sorted(random.Random(seed).sample(parts, min(number, len(parts))))

    def again(self, begin: int, end: int) -> Iterator[str]:
        """Steps `begin` + 1 to `end`, run again on this process, have the states of the ledger."""
        found = replay(Asked(self.run, end + 1, end, self.script, self.words, begin))
        other = f" (here {found.other})" if found.other else ""
        for step in sorted(step for step in self.last if begin < step <= end):
            recorded, computed = self.last[step]["digests"], found.again.digests.get(step, {})
            if recorded != computed:
                wrong = different(recorded, computed)[0]
                yield f"step {step}, run again from step {begin}, has another {wrong} than the ledger{other}"
                return
            self.shown |= set(range(begin + 1, step + 1))


def _same(recorded: Digests, checkpoint: Digests) -> bool:
    """A checkpoint counts an optimizer's parameters, so its tensors are compared without their names."""
    common = recorded.keys() & checkpoint.keys()
    mine, theirs = (
        Counter(it for name, it in found.items() if name.startswith("optimizers.")) for found in (recorded, checkpoint)
    )
    return not mine - theirs and bool(common) and all(recorded[name] == checkpoint[name] for name in common)
