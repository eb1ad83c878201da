"""The gradient of a step is that of the mean over the global batch, at any world size."""

from pathlib import Path

import torch

from tests.support.small_runs import results_of

WORKER = "gradient_worker.py"


def test_any_world_size_agrees_with_one_process_and_a_naive_loop_does_not(tmp_path: Path) -> None:
    """Weights and losses after 12 steps at W = 1, 2, 3, 4, 6 with BatchNorm, dropout, a tail and idle ranks."""
    results = {}
    for ranks in (1, 2, 3, 4, 6):
        results[ranks] = results_of(ranks, WORKER, tmp_path, "worlds")
    for ranks, result in results.items():
        assert result["ranks_agree"], f"weights differ between the {ranks} ranks"
        for name in ("weights", "losses", "statistics"):
            assert distance(result["ours"][name], results[1]["ours"][name]) < 1e-5, (ranks, name)
        # the control: batches cut by rank, as in most tutorials, agree with one process only on one process
        assert (distance(result["naive"]["weights"], results[1]["naive"]["weights"]) < 1e-5) == (ranks == 1)


def distance(got: list[float], expected: list[float]) -> float:
    """Relative distance of two vectors, in the 2-norm."""
    one, other = torch.tensor(got), torch.tensor(expected)
    return float((one - other).norm() / other.norm())


def test_a_resume_on_as_many_ranks_is_exact_in_every_bit_and_with_stock_ddp_it_is_not(tmp_path: Path) -> None:
    """Four ranks, because with two the order of an addition does not matter."""
    assert results_of(4, WORKER, tmp_path, "resume") == {"ours": True, "stock": False}


def test_each_step_of_several_micro_batches_a_rank_is_reduced(tmp_path: Path) -> None:
    """DDP's `static_graph` has silently stopped to in the third one, beside `no_sync`."""
    found = results_of(2, WORKER, tmp_path, "reduced")
    assert found == {"ours": [True] * 4, "control": [True, True, False, True]}


def test_gradients_exchanged_in_bfloat16_take_half_the_bytes_and_are_rounded(tmp_path: Path) -> None:
    found = results_of(2, WORKER, tmp_path, "compressed")
    exact, rounded = found["fp32"], found["bf16"]
    assert exact["agree"], "the control"
    assert rounded["agree"]
    assert rounded["bytes"] * 2 == exact["bytes"] > 0
    assert 1e-5 < distance(rounded["gradient"], exact["gradient"]) < 0.01
    alone = results_of(1, WORKER, tmp_path, "compressed")
    assert alone["bf16"]["gradient"] == alone["fp32"]["gradient"], "one process rounds nothing"


def test_collectives_of_a_rank_come_in_an_order_and_their_errors_reach_the_user(tmp_path: Path) -> None:
    """What would dead-lock NCCL, or hide an error, and shows without a GPU."""
    found = results_of(3, "collectives_worker.py", tmp_path)
    assert found["threads"] == 1, "the tree, where parameters may be unused"
    assert found["threads, control"] == 2
    assert found["threads, own"] == 1, "the tree, where the loss calls collectives of its own"
    assert found["not waited for"] == 0, "BatchNorm gathers while DDP reduces, in another group"
    assert found["not waited for, control"] > 0
    assert "gloo:all_to_all" in found["recorded"]
    assert found["failure"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
