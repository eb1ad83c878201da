"""`python -m evenkeel plan`: who would do what in a job, without running it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from .plan import Plan, chunks

if TYPE_CHECKING:
    from .config import Config
    from .tasks import Task


@dataclass(frozen=True)
class PlanCommand:
    """Show how a job is cut into steps and micro-batches, and what each rank would do. Runs nothing.

    Options of train.py come after `--`:  python -m evenkeel plan -w 3 -- --batch-size 60 --micro-batch 8
    """

    world_size: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 2
    """Ranks to plan for; with --strategy dp the GPUs of its one process."""

    def __call__(self, train_options: list[str]) -> int:
        """Print the plan."""
        from .cli import parse  # imports torch, which the help and the other subcommands can do without
        from .data import of_task

        config, task = parse(train_options)
        samples = len(of_task(task, config, "train"))
        dp = config.strategy == "dp"
        settled, why = self._settle(config, task)
        plan = Plan.of(settled, samples)
        cut = f"{plan.micro_batch} ({why})" if why else str(plan.micro_batch)
        most = plan.max_world_size
        ranks = f"up to {most} ranks have work" if most > 1 else "one rank has work"
        print(
            f"{_count(samples, 'sample')}, global batch {plan.global_batch}, micro-batch {cut}: "
            f"{_count(plan.steps_per_epoch, 'step')} an epoch, {plan.total_steps} in all; "
            f"{'each micro-batch is divided among the GPUs' if dp else ranks}"
        )
        steps = {"every full step": 0, "an epoch's last step": plan.steps_per_epoch - 1}
        for name, step in steps.items():
            print(f"{name}, {_count(plan.step_samples(step), 'sample')}:")
            for worker, sizes in enumerate(self._of_gpus(plan, step) if dp else self._of_ranks(plan, step)):
                name = f"{'GPU' if dp else 'rank'} {worker}"
                cut = f" as {' + '.join(map(str, sizes))}" if len(sizes) > 1 else ""
                print(f"  {name}: {_count(sum(sizes), 'sample')}{cut}")
        return 0

    def _settle(self, config: Config, task: Task) -> tuple[Config, str]:
        """The options with a cut, and why it is that; nothing where it was typed."""
        from .cut import has_batchnorm, settle
        from .randomness import seed_task
        from .records import recorded_options

        dp = config.strategy == "dp"
        ranks = 1 if dp else self.world_size
        if config.micro_batch == "auto":  # where the probe begins
            size = -(-config.batch_size // ranks)
            return replace(config, micro_batch=size), "auto, if that fits"
        recorded = {} if config.fresh else recorded_options(config.run_dir)

        def has_norm() -> bool:
            seed_task(config.seed, "weights")
            return has_batchnorm(task.model())

        settled = settle(config, ranks, has_norm, recorded)
        if settled == config:
            return config, ""
        if recorded and settled == settle(config, 1, lambda: False, recorded):
            return settled, f"as the run in {config.run_dir} has recorded it"
        if dp:
            return settled, "the whole batch"
        if config.reduce == "tree":
            return settled, "an eighth of the batch, with --reduce tree on any number of ranks"
        return settled, f"1/{settled.micro_batches} of a step, so that no rank is idle"

    def _of_ranks(self, plan: Plan, step: int) -> list[list[int]]:
        return [
            [micro_batch.size for micro_batch in plan.micro_batches(step, rank, self.world_size)]
            for rank in range(self.world_size)
        ]

    def _of_gpus(self, plan: Plan, step: int) -> list[list[int]]:
        """By GPU of one process: its shares of all micro-batches, as `nn.DataParallel` cuts them."""
        cuts = [chunks(micro_batch.size, self.world_size) for micro_batch in plan.micro_batches(step)]
        return [[cut[gpu] for cut in cuts if gpu < len(cut)] for gpu in range(self.world_size)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
