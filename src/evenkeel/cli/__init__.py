"""The commands of `python -m evenkeel`: they look at a job or at the files of a run; one breaks jobs on purpose.

    new/            new: a small project with this package as a dependency; update: compare it with a newer version
    plan.py         plan: which rank would compute what, without running it
    checkpoint.py   checkpoint: list, inspect, verify and export the checkpoints of a run
    export.py       what checkpoint exports with the task's model: .onnx files, folders of transformers
    data.py         data: index a folder of shards, or verify it
    compare.py      compare: the first step and the tensors in which two runs differ
    compare_metrics.py  compare --metrics: the last and best metrics of several runs
    digests.py      what compare, check and time_travel share: the first step at which digests differ, and why
    html_page.py    what report and time_travel share: an HTML page in one file, and its tables
    predict.py      predict: a run's model on a folder of images or a data set, to CSV or Parquet
    sample.py       sample: continue a text with a run's language model
    status.py       status: all runs below some folders, a line each
    follow.py       follow: show one run live until it ends
    profile.py      profile: merge the traces of a run's ranks onto one clock
    scaling/        scaling: short runs on more and more ranks; the speed-up, and what limits it
    sweep.py        sweep: a run for each combination of some options; mean and deviation of their metrics
    doctor/         doctor: check the machines, alone or on all ranks, before a job
    report/         report: an HTML page about a run or several, with pictures and numbers if asked
    check/          check: prove the promises for a user's own task
    chaos/          chaos: break a running job again and again, and report the cost

A command is a dataclass. Its fields are the options and their docstrings the help, read by tyro; its own docstring
says in a sentence what the command does, and shows an example. Calling it, with the words after `--` if it takes any,
returns the exit code. Bad input raises `Refusal`, a line that names the flag or the file and the remedy. torch is
imported where it is needed, so that the help and most commands take a tenth of a second.

To add a command: write such a file, name it in `__main__.py`, give numbers bounds by `config.option`, and
test it in `tests/cli`. To remove one: delete its file, its line in `__main__.py` and its tests; nothing else imports
it, except that `follow` and `report` use `status`. All but chaos, check, scaling and sweep only read
(`checkpoint export`, `predict`, `report` and `profile` write output files, and `data index` an index).

Not here: the log of a Slurm job, which `follow` shows (`launch/slurm/follow.py`); the launchers and submit.py
(`launch/`); the options of train.py (`config/`, `tasks/command_line.py`); the formats of what a run writes (`run/`).
"""
