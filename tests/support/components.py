"""Rooms of the package that a copy of the template may leave out, with the tests of their own."""

from importlib import import_module


def optional(name: str) -> list:
    """A class by its dotted name, such as `launch.slurm.submission.Submit`; empty where it has been left out."""
    module, _, attribute = f"evenkeel.{name}".rpartition(".")
    try:
        return [getattr(import_module(module), attribute)]
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):
            raise  # it is there, and what it needs is not
        return []


def has(command: str) -> bool:
    """Whether there is a command of `python -m evenkeel`."""
    return command in import_module("evenkeel.__main__").subcommands()
