"""The options as a run records them, and what has changed since."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..common.arguments import flag
from ..common.errors import Refusal
from .options import CUTTING, HARMLESS, UNSAVED, Config


def changed_options(
    old: dict[str, Any],
    new: dict[str, Any],
    harmless: frozenset[str] = frozenset(),
    fixed: frozenset[str] = frozenset(),
) -> list[tuple[str, Any, Any]]:
    """(name, old value, new value) of the options that shape the result and have changed since the run was saved.

    `old` and `new` are as :func:`saved_options` returns them; `harmless` options of the task do not count. An option
    that is newer than the run had its default. The length (epochs, max_steps) counts unless the learning rate is
    constant, because such a run may be prolonged. `fixed` ones count in any case.
    """
    free = HARMLESS | harmless | CUTTING | ({"epochs", "max_steps"} if new["schedule"] == "constant" else set())
    free -= fixed | ({"eval_every"} if new.get("patience") else set())  # it then decides when the run ends
    defaults = {it.name: list(it.default) if isinstance(it.default, tuple) else it.default for it in fields(Config)}
    names = [name for name in new | old if name not in free]
    before, now = ({n: options.get(n, defaults.get(n)) for n in names} for options in (old, new))
    return [(n, before[n], now[n]) for n in names if before[n] != now[n]]


def saved_options(config: Config, task_options: dict[str, Any]) -> dict[str, Any]:
    """The options of job and task for config.toml; absent means None. Refuses types that TOML cannot hold."""
    options = {k: v for k, v in asdict(config).items() if k not in UNSAVED} | task_options
    return {k: _plain(k, v) for k, v in options.items() if v is not None}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and value != value.encode(errors="replace").decode():
        raise Refusal(f"{flag(name)} {value!a}: is not UTF-8, so config.toml cannot hold it; rename the file")
    if type(value) not in (bool, int, float, str):
        raise Refusal(
            f"{flag(name)}: config.toml cannot hold its value of type {type(value).__name__}; an option is a bool, "
            "int, float, str, Path, Literal, or a list or tuple of them"
        )
    return value
