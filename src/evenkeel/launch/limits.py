"""Limits of a job as people type them for any cluster: --time and --mem."""

from __future__ import annotations

import re

from ..common.errors import Refusal

DAY = 24 * 60  # minutes


def parse_time(text: str, where: str = "--time ") -> int:
    """Minutes of --time, or of another place; a Refusal if it is malformed."""
    minutes = minutes_of(text)
    if not 1 <= (minutes or 0) <= 366 * DAY:
        raise Refusal(f"{where}{text}: give minutes, H:MM:SS or D-HH:MM:SS, or 90m, 12h, 2d, a year at most")
    return minutes or 0


def check_memory(text: str) -> None:
    """Refuse a --mem that no cluster would understand."""
    if not re.fullmatch(r"[0-9]{1,9}[KMGT]?", text, re.IGNORECASE):
        raise Refusal(f"--mem {text}: give a number with K, M, G or T, such as 64G")


def minutes_of(text: str) -> int | None:
    """Minutes of a time as sbatch reads it (M, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS), or 90m, 12h, 2d; else None."""
    if unit := re.fullmatch(r"([0-9]{1,6})([mhd])", text):
        return int(unit[1]) * {"m": 1, "h": 60, "d": DAY}[unit[2]]
    found = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,6}(?::[0-9]{1,6}){0,2})", text)
    if not found:
        return None
    parts = [int(part) for part in found[2].split(":")]
    if found[1] is None and len(parts) < 3:
        parts = [0, *parts]  # without days it begins with minutes
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(found[1] or 0) * DAY + hours * 60 + minutes + (seconds + 59) // 60


def show_time(minutes: int) -> str:
    """Minutes as Slurm writes them."""
    days, rest = divmod(minutes, DAY)
    return (f"{days}-" if days else "") + f"{rest // 60:02d}:{rest % 60:02d}:00"
