"""Options: what is refused, what is saved, and which changes make another run."""

import sys
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from evenkeel.common.errors import Refusal
from evenkeel.config import CUTTING, HARMLESS, UNSAVED, Config, changed_options, saved_options, validate
from tests.support.raised import refusal_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


SHAPING = frozenset(f.name for f in fields(Config)) - HARMLESS - CUTTING


def config(**options: Any) -> Config:
    """Resolved options, as after the command line."""
    return Config(**options).resolved()


def refusal(options: Config, **sizes: int) -> str:
    """The message of the refusal that must come, which is one line."""
    return refusal_of(validate, options, **sizes)


def test_defaults_that_depend_on_other_options() -> None:
    assert config().run_dir == Path("runs/classify")
    assert config(task="my/job.py:MyTask").run_dir == Path("runs/MyTask")
    assert config(task="package.module:MyTask").run_dir == Path("runs/MyTask")
    assert config(run_dir=Path("elsewhere")).run_dir == Path("elsewhere")


def test_text_will_do_for_a_path() -> None:
    made = Config(run_dir="runs/api", config="my.toml", init_from="weights.pt")  # type: ignore[arg-type]
    assert (made.run_dir, made.config, made.init_from) == (Path("runs/api"), Path("my.toml"), Path("weights.pt"))
    assert Config().run_dir is None
    assert Config(run_dir=Path("~/x")).run_dir == Path.home() / "x", "a shell leaves it in --run-dir=~/x"


@pytest.mark.parametrize(
    ("options", "named", "remedy"),
    [
        ({"epochs": 0}, "--epochs 0", "at least 1"),
        ({"batch_size": 0}, "--batch-size 0", "at least 1"),
        ({"micro_batch": -1}, "--micro-batch -1", "at least 0"),
        ({"clip_norm": -0.5}, "--clip-norm -0.5", "at least 0"),
        ({"lr": float("nan")}, "--lr nan", "at least 0"),
        ({"lr": float("inf")}, "--lr inf", "finite"),
        ({"seed": 2**63}, f"--seed {2**63}", f"at most {2**63 - 1}"),
        ({"grace": float("inf")}, "--grace inf", "at most 604800"),
        ({"hang_timeout": float("nan")}, "--hang-timeout nan", "at least 0"),
        ({"num_workers": 100_000}, "--num-workers 100000", "at most 1024"),
        ({"place": "a=99999999999999999999999"}, "--place a=9999", "device 1 has no network"),
        ({"batch_size": 16, "micro_batch": 17}, "--micro-batch 17: is above --batch-size 16", "part of the batch"),
        ({"batch_size": 16, "micro_batches": 17}, "--micro-batches 17: is above --batch-size 16", "part of the batch"),
        ({"micro_batch": 8, "micro_batches": 4}, "--micro-batch 8 --micro-batches 4", "leave one of them out"),
        ({"strategy": "dp", "sync_batchnorm": True}, "--strategy dp --sync-batchnorm", "rank for each micro-batch"),
        ({"micro_batch": "auto", "sync_batchnorm": True}, "--micro-batch auto --sync-batchnorm", "divided by the"),
        ({"strategy": "dp", "reduce": "tree"}, "--reduce tree: with --strategy dp", "leave one of the two out"),
        (
            {"reduce_dtype": "bf16", "reduce": "tree"},
            "--reduce-dtype bf16 --reduce tree: its sums are exact",
            "leave one of",
        ),
        ({"reduce_dtype": "bf16", "strategy": "dp"}, "--reduce-dtype bf16 --strategy dp: one process", "leave one out"),
        ({"strategy": "dp", "share_gpu": True}, "--strategy dp --share-gpu", "leave one of them out"),
        ({"micro_batch": "auto", "share_gpu": True}, "--micro-batch auto --share-gpu", "give a number"),
        ({"init_from": Path("no/model.pt"), "run_dir": Path("no/run")}, "--init-from no/model.pt", "no such file"),
        ({"init_partial": True}, "--init-partial", "name a file or leave it out"),
        ({"ema": 1.0}, "--ema 1.0", "must be below 1"),
        ({"ema": -0.1}, "--ema -0.1", "must be at least 0"),
        *(({"loss_scale": it}, f"--loss-scale {it:.0f}", "must be a power of two") for it in (1000.0, inf, 0.0)),
        ({"patience": -1}, "--patience -1", "must be at least 0"),
        ({"limit_batches": -1}, "--limit-batches -1", "must be at least 0"),
        ({"eval_only": True, "fresh": True}, "--eval-only --fresh", "one evaluates"),
        ({"compile": True, "strategy": "dp"}, "--compile --strategy", ""),
        ({"compile": True, "model_parallel": 2}, "--compile --model-parallel", ""),
        ({"compile": True, "place": "a=0"}, "--compile --place", ""),
        ({"compile": True, "sync_batchnorm": True}, "--compile --sync-batchnorm", ""),
        ({"compile": True, "checkpoint_activations": True}, "--compile --checkpoint-activations: ", ""),
        ({"place": "a"}, "--place a", "'a' is not NETWORK=NUMBER"),
        ({"place": "a=x"}, "--place a=x", "'a=x' is not NETWORK=NUMBER"),
        ({"place": "a=0,a=1"}, "--place a=0,a=1", "'a=1' is not NETWORK=NUMBER, once for each"),
        ({"place": "a=0,b=2"}, "--place a=0,b=2", "device 1 has no network"),
        ({"place": "a=0,b=1", "model_parallel": 2}, "--", "leave one of them out"),
        ({"model_parallel": 0}, "--model-parallel 0", "must be at least 1"),
    ],
)
def test_a_value_that_cannot_be_meant(options: dict[str, Any], named: str, remedy: str) -> None:
    message = refusal(config(**options))
    assert message.startswith(named)
    assert remedy in message


@pytest.mark.parametrize("name", ["max_steps", "warmup_steps", "clip_norm", "num_workers", "eval_every", "lr", "seed"])
def test_zero_is_a_value_where_it_means_something(name: str) -> None:
    validate(config(**{name: 0}))


def test_a_batch_above_the_data_set() -> None:
    validate(config(), samples=1437)
    validate(config(batch_size=100), samples=100)
    message = refusal(config(batch_size=101), samples=100)
    assert message.startswith("--batch-size 101")
    assert "only 100 samples" in message
    assert refusal(config(), samples=0) == "--task classify: its training data is empty (train_dataset() has length 0)"


def test_the_saved_options_are_those_about_the_run_and_fit_into_toml() -> None:
    of_task = {"sizes": (1, 2), "roots": [Path("x")], "none": None}
    saved = saved_options(config(init_from=Path("a/model.pt"), momentum=0.5), of_task)
    assert set(saved) == {f.name for f in fields(Config)} - UNSAVED | {"sizes", "roots"}
    assert saved["init_from"] == "a/model.pt"
    assert (saved["sizes"], saved["roots"]) == ([1, 2], ["x"])
    assert tomllib.loads(tomli_w.dumps(saved)) == saved, "or a run could not be told from another one"


def test_the_options_of_a_task_shape_the_result_but_for_those_that_it_names() -> None:
    old = saved_options(config(), {"width": 32, "gone": 1, "cache": "a"})
    new = saved_options(config(), {"width": 64, "new": 2, "cache": "b"})
    different = [("width", 32, 64), ("new", None, 2), ("gone", 1, None)]
    assert changed_options(old, new, frozenset({"cache"})) == different
    assert set(changed_options(old, new)) == {*different, ("cache", "a", "b")}


@pytest.mark.parametrize("value", [object(), {"a": 1}, {1, 2}, b"bytes", [object()]])
def test_an_option_that_the_file_cannot_hold(value: Any) -> None:
    with pytest.raises(Refusal, match=r"^--my-option: .* of type (object|dict|set|bytes); an option is a bool, int"):
        saved_options(config(), {"my_option": value})


@pytest.mark.parametrize("name", sorted((HARMLESS | CUTTING) - UNSAVED))
def test_a_harmless_option_may_change(name: str) -> None:
    old = saved_options(config(), {})
    assert changed_options(old, old | {name: "changed"}) == []


@pytest.mark.parametrize("name", sorted(SHAPING))
def test_any_other_option_makes_another_run(name: str) -> None:
    old = saved_options(config(), {})
    assert changed_options(old, old | {name: "changed"}) == [(name, old.get(name), "changed")]


def test_which_options_are_harmless() -> None:
    """A new option shapes the result until somebody has thought about it: this list is that thought."""
    tuning = {"num_workers", "checkpoint_every", "grace", "hang_timeout", "keep", "eval_every", "log_every", "wandb"}
    tuning |= {"keep_best", "keep_every", "verify_every"}
    watching = {"digest_every", "strict_bits", "threads"}
    # a run that was stopped by a NaN may go on without that step; the same data may lie elsewhere
    free = tuning | watching | {"on_nonfinite", "data_dir"}
    free |= {"place", "model_parallel", "share_gpu", "shares"}  # where something is computed, as is the number of ranks
    free |= {"keeper", "keeper_restarts", "keeper_memory", "replicate"}  # who starts ranks again, and from what
    free |= {"checkpoint_activations", "shard"}  # the same bits; another norm and optimizer, which the fingerprint has
    free |= {"csv", "tensorboard", "tracker", "save_predictions", "wandb_report"}  # what is written besides
    assert free == HARMLESS - UNSAVED
    assert {"micro_batch", "micro_batches", "strategy"} == CUTTING, (
        "how a batch is cut, which a run out of memory must be able to change"
    )
    assert {"batch_size", "seed", "task", "lr", "optimizer", "init_from", "init_partial"} <= SHAPING


def test_an_option_that_is_newer_than_the_run_had_its_default() -> None:
    new = saved_options(config(), {})
    old = {name: value for name, value in new.items() if name != "init_partial"}
    assert changed_options(old, new) == []
    assert changed_options(old, new | {"init_partial": True}) == [("init_partial", False, True)]


def test_another_schedule_does_not_make_the_length_free() -> None:
    old, new = config(schedule="cosine", epochs=1), config(schedule="constant", epochs=5)
    assert [name for name, *_ in changed_options(saved_options(old, {}), saved_options(new, {}))] == ["schedule"]


@pytest.mark.parametrize(("schedule", "may"), [("constant", True), ("linear", False), ("cosine", False)])
def test_only_a_run_with_a_constant_learning_rate_may_be_prolonged(schedule: Any, may: bool) -> None:
    short = config(schedule=schedule, epochs=1, max_steps=10)
    long = replace(short, epochs=5, max_steps=0)
    changed = [name for name, *_ in changed_options(saved_options(short, {}), saved_options(long, {}))]
    assert changed == ([] if may else ["epochs", "max_steps"])
