"""For all promises."""

from tests.support.small_runs import job, weights_undisturbed

undisturbed = weights_undisturbed(2, job, "--checkpoint-every", 0, "--eval-every", 1000, scope="session")
"""Of the recording task on two ranks."""
