"""The commands of `python -m evenkeel`: they look at a job or at what a run has left, and one breaks jobs on purpose.

    plan.py         plan: which rank would compute what, without running it
    checkpoint.py   checkpoint: list, inspect, verify and export the checkpoints of a run
    compare.py      compare: the first step and the tensors in which two runs differ
    status.py       status: all runs below some folders, a line each
    chaos/          chaos: break a running job again and again, and report what that has cost
    tail.py         the new lines of a metrics.jsonl that grows, for status and chaos

A command is a dataclass. Its fields are the options and their docstrings the help, read by tyro; its own docstring
says in a sentence what the command does, and shows an example. It is called, with the words after `--` if it takes any,
and returns the exit code. Bad input raises `Refusal`, in a line that names the flag or the file and the remedy. torch
is imported where it is needed, so that the help and most commands take a tenth of a second.

To add a command: write such a file, name it in `__main__.py`, give numbers bounds by `config.option`, and
test it in `tests/cli`. To remove one: delete its file, its line in `__main__.py` and its tests; nothing else imports
it. All but chaos only read (`checkpoint export` writes the file that it is told to).

Not here: `follow`, which is Slurm's (`launch/slurm/follow.py`); the launchers and submit.py (`launch/`); the options
of train.py (`config.py`, `tasks/command_line.py`); the formats of what a run writes (`run/`).
"""
