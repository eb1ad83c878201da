"""`python -m evenkeel check`: prove the promises for a user's own task, with short real runs, in about two minutes.

    command.py    the options, what is run in which order, and the table
    jobs.py       jobs of torchrun that run side by side, are killed and stopped, and leave nothing behind
    observed.py   what a rank of such a job notes: its samples and its time; it can wait to be killed
    probe.py      the task alone, as each rank would have it: data, weights, loss and metrics, read and computed twice
    verdicts.py   from what the jobs have left to the rows of the table
    rows.py       a row of the table, and the lines of a task that are probably to blame

A check is a function in `verdicts.py` that returns a `Row`, and a job or a part of the probe that it reads. Nothing
imports this folder but `__main__.py`, `evenkeel/testing.py` and tests, so they may be deleted together.

Not here: faults at random in a job of any size (`cli/chaos`); the tests that Evenkeel keeps its promises (`tests`).
"""
