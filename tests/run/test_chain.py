"""The ledger's chain: what a record is chained to, and what counts of options and samples."""

from evenkeel.config import Config
from evenkeel.run.chain import CHAINED, chained, options_digest, samples_digest, whole_steps

OPTIONS = {"schedule": "cosine", "lr": 0.5, "epochs": 2, "width": 3}


def test_each_chained_field_and_the_chain_before_count() -> None:
    record = {"step": 1, "options": "a", "samples": "b", "loss": None, "digests": {"w": "0"}}
    chains = {chained("", record), chained("x", record), *(chained("", record | {name: 7}) for name in CHAINED)}
    assert len(chains) == 2 + len(CHAINED)
    assert chained("", record | {"time": 3.0, "spent": {}}) == chained("", record)


def test_options_that_change_no_bit_do_not_count() -> None:
    assert options_digest(OPTIONS, set()) != options_digest(OPTIONS | {"lr": 0.25}, set())
    assert options_digest(OPTIONS, set()) != options_digest(OPTIONS | {"width": 4}, set())
    assert options_digest(OPTIONS, {"width"}) == options_digest(OPTIONS | {"width": 4, "keep": 9}, {"width"})
    constant = OPTIONS | {"schedule": "constant"}
    assert options_digest(constant, set()) == options_digest(constant | {"epochs": 5}, set()), "it was prolonged"


def test_samples_of_a_step_depend_on_its_place_but_not_on_the_cut() -> None:
    config = Config(batch_size=4)
    digests = [samples_digest(whole_steps(range(10), config, cut, 0), step) for cut in (1, 3) for step in range(1, 7)]
    assert digests[:6] == digests[6:]
    assert len(set(digests)) == 6
