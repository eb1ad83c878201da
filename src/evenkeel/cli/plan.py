"""`python -m evenkeel plan`: which rank would compute what in a job, without running it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import tyro

from ..common.display import say
from ..config import option
from ..data.plan import Plan

if TYPE_CHECKING:
    from ..config import Config
    from ..training.task import Task


@dataclass(frozen=True)
class PlanCommand:
    """Show how a job is cut into steps, and what each rank computes.

    Example: python -m evenkeel plan -w 3 -- --batch-size 60 --micro-batch 8

    It trains nothing. What follows after `--` are options of train.py.
    """

    world_size: Annotated[int, tyro.conf.arg(aliases=["-w"])] = option(2, 1, 2**16)
    """Ranks to plan for; with --strategy dp the GPUs of its one process."""

    def __call__(self, train_options: list[str]) -> int:
        """Print the plan."""
        from ..data.order import order_name, positions_in, token_batches
        from ..data.streams import stream_of
        from ..tasks.command_line import parse  # imports torch, which the help does without
        from ..training.task_data import training_set
        from ..training.whole_batch import has_batch_loss

        config, task = parse(train_options)
        dp, train_set = config.strategy == "dp", training_set(task, config)
        config, why = self._decide_cut(config, task)
        plan = Plan.of(config, positions_in(train_set), batches := token_batches(train_set))
        most = plan.micro_batches_per_step
        ranks = f"up to {most} ranks have work" if most > 1 else "one rank has work"
        size = _count(len(train_set), "sample")
        if order := order_name(train_set):
            size += f", read in {order}"
        if plan.left_out:
            size += f", the last {plan.left_out} of each epoch left out (--drop-last)"
        length = f"{_count(plan.steps_per_epoch, 'step')} an epoch, {plan.total_steps} in all"
        steps = {"every full step": 0, "an epoch's last step": plan.steps_per_epoch - 1}
        if batches:
            length += f"; {batches.padded.sum() / batches.length:.1f} tokens a sample with padding"
            steps = {"the first step": 0, "an epoch's last step": plan.steps_per_epoch - 1}
        if stream := stream_of(train_set):
            size, length = f"a stream ({stream.name})", _count(plan.total_steps, "step")
            steps = {"every step": 0}
        say(
            f"{size}, global batch {'at most ' if batches else ''}{plan.global_batch}, "
            f"micro-batch {'at most ' if batches else ''}{plan.micro_batch}{f' ({why})' if why else ''}: {length}; "
            f"{'each micro-batch is divided among the GPUs' if dp else ranks}"
        )
        if has_batch_loss(task):
            say("each micro-batch is embedded twice: batch_loss() is over all samples of a step, and then its gradient")
        self._say_divided(config, task)
        for name, step in steps.items():
            say(f"{name}, {_count(plan.step_samples(step), 'sample')}:")
            for worker in range(self.world_size):
                sizes = self._sizes(config, plan, step, worker)
                parts = f" as {' + '.join(map(str, sizes))}" if len(sizes) > 1 else ""
                share = f"{_count(sum(sizes), 'sample')}{parts}" if sizes else "no micro-batch is left for it"
                say(f"  {'GPU' if dp else 'rank'} {worker}: {share}")
        return 0

    def _sizes(self, config: Config, plan: Plan, step: int, worker: int) -> list[int]:
        """The samples in each micro-batch of a step that a rank computes, or in a GPU's part of each."""
        from ..distributed.data_parallel import chunks
        from ..training.balance import first_counts

        if config.strategy == "dp":  # nn.DataParallel gives each GPU a share of every micro-batch
            shares = [chunks(micro.size, self.world_size) for micro in plan.micro_batches(step)]
            return [share[worker] for share in shares if worker < len(share)]
        unequal = first_counts(config, plan, self.world_size)
        if config.shard == "off":
            return [micro.size for micro in plan.micro_batches(step, worker, self.world_size, unequal)]
        dealt = plan.micro_batches(step, worker, self.world_size, unequal, "round_robin")
        # a rank that has fewer repeats the first one, which is rank 0's
        return [micro.size for micro in dealt if micro.id or not worker]

    def _say_divided(self, config: Config, task: Task) -> None:
        """How --shard on divides the state; a Refusal, as in the job, if it cannot."""
        if config.shard == "off":
            return
        from ..config import shard_size
        from ..run.build import build_model, refuse_old_torch
        from ..training.freezing import freeze
        from ..training.memory_parts import bytes_of_rank_0

        refuse_old_torch(config)
        from ..training.sharding import refuse_unshardable

        freeze(model := build_model(config, task), config.freeze)
        optimizers = task.optimizers(model, config)
        refuse_unshardable(task, model, optimizers)
        more = config.ema > 0, config.precision == "bf16"
        ranks = shard_size(config, self.world_size)
        sizes = bytes_of_rank_0(model, optimizers, task.blocks(model), ranks, *more)
        parts = ", ".join(f"{part} {size / 1e6:.2f} MB" for part, size in sizes.items() if size)
        say(f"--shard {config.shard}, each rank: {parts}; activations come on top")

    def _decide_cut(self, config: Config, task: Task) -> tuple[Config, str]:
        """The options with the micro-batch filled in, and the reason for its size; no reason if it was typed."""
        from ..data.randomness import seed_task
        from ..run.earlier_run import recorded_options
        from ..training.cut import decide_cut, has_batchnorm

        ranks = 1 if config.strategy == "dp" else self.world_size
        if config.micro_batch == "auto":  # the search begins with each rank's whole share
            return replace(config, micro_batch=-(-config.batch_size // ranks)), "auto, if that fits"
        recorded = {} if config.fresh else recorded_options(config.run_dir)

        def has_norm() -> bool:
            seed_task(config.seed, "weights")
            return has_batchnorm(task.model())

        settled = decide_cut(config, ranks, has_norm, recorded)
        if settled == config:
            return config, ""
        if recorded and settled == decide_cut(config, 1, lambda: False, recorded):
            return settled, f"as the run in {config.run_dir} has recorded it"
        if config.strategy == "dp":
            return settled, "the whole batch"
        if config.reduce == "tree":
            return settled, "an eighth of the batch, with --reduce tree on any number of ranks"
        return settled, f"each step in {settled.micro_batches} parts, so that every rank has work"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
