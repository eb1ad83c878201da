"""Which rank prints the error that ends a job."""

from typing import get_args

import pytest

from evenkeel.common.errors import Ended, EndedForGood, EndedHere, Uncollated
from evenkeel.distributed.attempt_files import Place
from evenkeel.distributed.exits import prints

FIRST, ALIKE, OTHER = PLACES = get_args(Place)


@pytest.mark.parametrize(
    ("kind", "on_rank_0", "elsewhere"),
    [
        (Ended, {FIRST, ALIKE, OTHER}, set()),
        (EndedForGood, {FIRST, ALIKE, OTHER}, set()),
        (EndedHere, {FIRST, OTHER}, {FIRST}),
        (Uncollated, {FIRST}, {FIRST}),
        (ValueError, {FIRST}, {FIRST}),
    ],
)
def test_an_error_is_printed_by(kind: type[Exception], on_rank_0: set[Place], elsewhere: set[Place]) -> None:
    for rank_0, expected in ((True, on_rank_0), (False, elsewhere)):
        assert {place for place in PLACES if prints(kind("why"), rank_0, place)} == expected
