"""`python -m evenkeel chaos`: break a running job at random, start it again, and report the cost.

    command.py      the options and their checks; leaves no process behind, whatever happens
    experiment.py   the loop: faults at their times, and restarts of the command when it ends too early; the report
    faults.py       the kinds of faults, and the seeded schedule of them
    job.py          the job's command and the processes below it: agents, ranks, orphans
    progress.py     how far the run has come, from metrics.jsonl
    nodes.py        several nodes on one machine, as network namespaces (needs root); `tests/nodes` uses it too

A fault is a name in `faults.KINDS` and a branch in `faults.strike`, which chooses a victim, announces it, and hits it.
To add one, add both, say in `Fault.restarts` whether the ranks must start again after it, and describe it in
docs/chaos.md and in the help of --faults. Put it into SAFE only if it affects nothing but the job and its folder.

Chaos knows a job only by its processes (torchrun's variables in /proc) and by the files in its run directory, so it
works for any job that writes these. It touches only processes that descend from it. Nothing imports this folder
but `__main__.py` and tests, so it may be deleted with `tests/cli/chaos`, `tests/nodes`, `tests/support/chaos.py` and
the tests that import them.

Not here: what makes a job survive (`resilience/`, `run/`), and the tests that it does (`tests/processes`).
"""
