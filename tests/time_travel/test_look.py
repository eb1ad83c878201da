"""What the ranks of `replay --ranks` have found in a step, as one."""

from __future__ import annotations

import math
from typing import Any

from evenkeel.time_travel.look import merged


def found(samples: dict[int, float | None], **more: Any) -> dict[str, Any]:
    rows = [{"sample": number, "loss": loss} for number, loss in samples.items()]
    return {"loss": 2.0, "nonfinite": None, "note": "", "samples": rows, "activations": {}} | more


def test_the_samples_of_all_ranks_are_there_with_the_largest_loss_first_and_nan_before_it() -> None:
    one = merged([found({3: 1.0, 4: 3.0}, note="as it is"), found({1: math.nan, 2: 2.0}), found({5: None}), found({})])
    assert [row["sample"] for row in one["samples"]] == [1, 4, 2, 3, 5]
    assert one["note"] == "as it is"


def test_what_any_rank_has_found_first_counts_and_the_largest_activation_of_a_module() -> None:
    bad = {"operation": "aten.log"}
    ranks = [found({}, activations={"0": 1.0, "1": 5.0}), found({}, nonfinite=bad, activations={"0": 9.0})]
    one = merged(ranks)
    assert one["nonfinite"] == bad
    assert one["activations"] == [{"module": "0", "largest": 9.0}, {"module": "1", "largest": 5.0}]


def test_a_loss_that_is_no_mean_of_the_samples_of_all_ranks_is_noted() -> None:
    assert merged([found({1: 1.0}), found({2: 3.0})])["note"] == ""
    assert "have the mean 1" in merged([found({1: 1.0}), found({2: 1.0})])["note"]
