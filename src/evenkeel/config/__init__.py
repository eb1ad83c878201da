"""The options of `train.py`: all of them describe the job as a whole, none of them a single rank.

    options.py  the options with their defaults, bounds and help
    checks.py   options that cannot be meant, or exclude each other
    saved.py    the options as a run records them, and what has changed since

Not here: options of tasks (fields of the task), reading the command line and --config (`tasks/command_line.py`).
"""

from .checks import (
    check_numbers,
    devices_per_rank,
    placed_networks,
    profile_window,
    shard_size,
    shares_of,
    unshardable,
    validate,
)  # fmt: skip
from .options import (
    BELOW_1,
    BOUNDS,
    CUTTING,
    FINITE,
    FLOOR,
    GROUPS,
    HARMLESS,
    NAME,
    OPTION_NAMES,
    SEEDS,
    UNSAVED,
    Config,
    Flag,
    MaybePath,
    option,
)  # fmt: skip
from .saved import changed_options, saved_options

__all__ = [
    "BELOW_1", "BOUNDS", "CUTTING", "FINITE", "FLOOR", "GROUPS", "HARMLESS", "NAME", "OPTION_NAMES", "SEEDS", "UNSAVED",
    "Config", "Flag", "MaybePath", "changed_options", "check_numbers", "devices_per_rank", "option", "placed_networks",
    "profile_window", "saved_options", "shard_size", "shares_of", "unshardable", "validate",
]  # fmt: skip
