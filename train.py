#!/usr/bin/env python3
"""Train a task on one process or many, and continue where the last attempt stopped.

    torchrun --standalone --nproc_per_node=2 train.py
    python train.py --task my_job.py:MyTask --help

This is the whole job. A job with another loop is another file like this one: see Evenkeel's examples/.
"""

from __future__ import annotations

try:
    import evenkeel
except ModuleNotFoundError:  # another Python than that of `make setup`
    raise SystemExit(
        "train.py: this Python has no evenkeel; type `. .venv/bin/activate`, or first `make setup`"
    ) from None

if __name__ == "__main__":
    evenkeel.announce()  # the next import takes seconds, because it imports torch

from evenkeel import Run, clip_grad_norm, evaluate, parse, start


def main(arguments: list[str]) -> int:
    """Begin a run or continue it. Returns the exit code: 0, finished."""
    config, task = parse(arguments)
    if config.eval_only:
        return evaluate(config, task)
    with Run.open(config, task) as run:  # the last finished step is saved, unless a commit fails
        if not run.finished:
            train(run)
    return 0


def train(run: Run) -> None:
    """Take the remaining steps: all ranks take the same ones, each with its share of the samples."""
    config, task, state = run.config, run.task, run.state
    model = run.distribute(task.loss)  # DDP around the model and its loss

    for step in run.steps():
        for batch in model.micro_batches(step):  # this rank's; the gradients of all add up
            loss = model(batch)
            model.backward(loss)  # the last one also reduces the gradients over all ranks

        norm = clip_grad_norm(state.parameters, config.clip_norm)
        state.set_rates(task.rates(config, step.number, run.plan.total_steps))
        model.step(norm)  # the optimizers, unless the gradient is not finite

        run.after_step(model, norm)  # log, evaluate, save


if __name__ == "__main__":
    start(main)
