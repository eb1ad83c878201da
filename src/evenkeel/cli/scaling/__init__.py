"""`python -m evenkeel scaling`: how much faster a job gets with more ranks, and what limits it.

    command.py   the options; starts short real runs in turn, and prints the tables
    analysis.py  one run's speed and waits from its files; speed-up, efficiency, losses by cause; the prediction
    plot.py      the plot, with matplotlib

Nothing else imports this folder: to remove the command, delete it, its line in `__main__.py` and its tests.
"""
