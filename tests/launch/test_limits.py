"""--time and --mem as people type them for a cluster."""

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.launch.limits import minutes_of, parse_time


def test_times_as_people_write_them_and_limits_as_sinfo_does() -> None:
    times = {"90": 90, "90m": 90, "12h": 720, "2d": 2880, "1:30:00": 90, "30:30": 31, "2-12": 3600, "1-0:0:30": 1441}
    assert {text: parse_time(text) for text in times} == times
    for text in ("", "0", "-5", "soon", "1.5h", "1:2:3:4"):
        with pytest.raises(Refusal, match="--time"):
            parse_time(text)
    limits = {"infinite": None, "30:00": 30, "1:00:00": 60, "2-00:00:00": 2880, "n/a": None}
    assert {text: minutes_of(text) for text in limits} == limits
