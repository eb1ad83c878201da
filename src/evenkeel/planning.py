"""`python -m evenkeel plan`: who would do what in a job, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from .errors import Refusal
from .plan import Plan


@dataclass(frozen=True)
class PlanCommand:
    """Show how a job is cut into steps and micro-batches, and what each rank would do. Runs nothing.

    Options of train.py come after `--`:  python -m evenkeel plan -w 3 -- --batch-size 60 --micro-batch 8
    """

    world_size: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 2
    """Ranks to plan for."""

    def __call__(self, train_options: list[str]) -> int:
        """Print the plan."""
        from .cli import parse  # imports torch, which the help and the other subcommands can do without
        from .data import limited

        if self.world_size < 1:
            raise Refusal(f"--world-size {self.world_size}: must be at least 1")
        config, task = parse(train_options)
        samples = len(limited(task.train_dataset(), config.limit_batches * config.batch_size))
        plan = Plan(samples, config.batch_size, config.micro_batch, config.epochs, config.max_steps)
        print(
            f"{samples} samples, global batch {plan.global_batch}, micro-batch {plan.micro_batch}: "
            f"{plan.steps_per_epoch} steps an epoch, {plan.total_steps} in all; "
            f"up to {plan.max_world_size} ranks have work"
        )
        steps = {"every full step": 0, "an epoch's last step": plan.steps_per_epoch - 1}
        for name, step in steps.items():
            print(f"{name}, {plan.step_samples(step)} samples:")
            for rank in range(self.world_size):
                sizes = [micro_batch.size for micro_batch in plan.micro_batches(step, rank, self.world_size)]
                print(f"  rank {rank}: {sum(sizes)} samples" + (f" as {' + '.join(map(str, sizes))}" if sizes else ""))
        return 0
