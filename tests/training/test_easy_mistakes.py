"""What tasks get wrong without an error of torch's: each is named in a line, by real runs; and what must not be."""

from pathlib import Path

import pytest

from evenkeel.common.processes import count_cores
from evenkeel.run.manifest import load, step_folders
from tests.support.processes import TRAIN, Done, records, run_forked
from tests.support.small_runs import evaluation_of, model_of, options, told_step

BEFORE = """
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from evenkeel.training.task import Task


class Base(Task):
    def train_dataset(self) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, (x.sum(1) > 0).long())

    test_dataset = train_dataset

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])


class Own(Base):
"""


def train(folder: Path, body: str, *more: object, expect: int = 0) -> Done:
    """Eight steps of a task with these methods, written on the indentation of a class."""
    (folder / "own.py").write_text(BEFORE + body)
    words = ["--batch-size", 16, "--micro-batch", 4, "--epochs", 2, "--log-every", 1, *more]
    return run_forked(TRAIN, *options(f"{folder / 'own.py'}:Own", folder / "run", *words), expect=expect, warm=True)


HEAD = """
    def __init__(self) -> None:
        self.head = {made}

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy({used}, batch[1])
"""
LINEAR = "self.head(model(batch[0]))"


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("nn.Linear(2, 2)", LINEAR),
        ("nn.Parameter(torch.zeros(2))", "model(batch[0]) + self.head"),
        ("[nn.Linear(2, 2)]", "self.head[0](model(batch[0]))"),
        ("None\n    head = nn.Linear(2, 2)\n    def __init__(self) -> None: pass", LINEAR),
    ],
)
def test_weights_that_the_task_keeps_outside_its_model_are_refused(tmp_path: Path, made: str, used: str) -> None:
    line = train(tmp_path, HEAD.format(made=made, used=used), expect=2).stderr
    assert line.startswith("evenkeel: self.head of the task has weights that require a gradient: they would not be tr")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "body",
    [
        HEAD.format(made="nn.Linear(2, 2).requires_grad_(False)", used=LINEAR),
        "    def model(self) -> Any:\n        self.whole = super().model()\n        self.parts = list(self.whole)\n"
        "        self.bias = self.whole[0].bias\n        return self.whole\n",
    ],
)
def test_frozen_ones_and_parts_of_the_model_are_not(tmp_path: Path, body: str) -> None:
    train(tmp_path, body)


THAWS = """
    {flag}

    def model(self) -> Any:
        model = super().model()
        model[0].requires_grad_({learns})
        return model

    def optimizers(self, model: Any, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(self, model: Any, batch: Any, step: int = 0) -> Any:
        model[0].requires_grad_(step >= 3)
        return super().loss(model, batch)
"""


@pytest.mark.parametrize("flag", ["pass", "unused_parameters = True"])
def test_a_part_that_is_frozen_at_first_and_thaws_later_ends_the_run(tmp_path: Path, flag: str) -> None:
    err = train(tmp_path, THAWS.format(flag=flag, learns=False), expect=1).stderr
    assert "evenkeel: frozen at the start, and now with requires_grad: 0.weight, 0.bias; steps have no grad" in err
    assert told_step(tmp_path / "run") == 3, "it thaws in the fourth step"


@pytest.mark.slow
def test_the_way_that_works_is_to_freeze_it_in_the_loss(tmp_path: Path) -> None:
    weights = []
    for steps in (1, 3, 8):
        words = ["--schedule", "constant", "--run-dir", tmp_path / f"{steps}", "--max-steps", steps]
        train(tmp_path, THAWS.format(flag="unused_parameters = True", learns=True), *words)
        weights.append(model_of(tmp_path / f"{steps}"))
    first, third, last = weights
    assert third["0.weight"].equal(first["0.weight"])
    assert not third["2.weight"].equal(first["2.weight"])
    assert not third["0.weight"].equal(last["0.weight"])


FROZEN = """
    def model(self) -> Any:
        model = nn.ModuleDict({"net": super().model()})
        model.mask = nn.Parameter(torch.tensor([0.0, float("-inf")]), requires_grad=False)
        model.small = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
        model.teacher = nn.Parameter(torch.zeros(2), requires_grad=False)
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model["net"], batch)

    def after_step(self, model: Any, step: int, losses: Any) -> None:
        model.teacher += 1
"""


@pytest.mark.slow
def test_the_average_has_frozen_parameters_as_they_are(tmp_path: Path) -> None:
    for name, steps in (("run", 4), ("run", 8), ("plain", 8)):
        words = ["--schedule", "constant", "--run-dir", tmp_path / name, "--max-steps", steps, "--ema", 0.9]
        train(tmp_path, FROZEN, *words)
    found, plain = (model_of(tmp_path / name) for name in ("run", "plain"))
    assert found["mask"].tolist() == [0, float("-inf")]
    assert found["small"].float().tolist() == [1, 1, 1]
    assert found["teacher"].tolist() == [8, 8]
    assert all(found[name].float().equal(value.float()) for name, value in plain.items())


AFTER = """
    def model(self) -> Any:
        model = super().model()
        model.append(nn.BatchNorm1d(2))
        model.register_buffer("tau", torch.ones(2))
        model[0].bias.requires_grad_(False)
        return model

    def after_step(self, model: Any, step: int, losses: Any) -> None:
        {does}
"""


@pytest.mark.parametrize(
    ("does", "named"),
    [
        ("model.tau.fill_(1 / (step + 1))", "the buffer tau"),
        ("model.tau = model.tau * 0.9", "the buffer tau"),
        ("model[0].bias.requires_grad_(step >= 3)", "requires_grad of 0.bias"),
        ("model.train()(torch.randn(3, 4))", ""),  # moves BatchNorm's statistics, which nobody wants to keep
    ],
)
def test_what_after_step_sets_and_is_put_back_ends_the_run(tmp_path: Path, does: str, named: str) -> None:
    err = train(tmp_path, AFTER.format(does=does), expect=1 if named else 0).stderr
    assert (f"evenkeel: after_step() changes {named}, which is put back after it: keep values in" in err) == (
        named > ""
    )


STATES = """
    center = torch.zeros(2)

    def __init__(self) -> None:
        self.queue, self.seen, self.cache, self.grown = deque([0] * 9, 99), [], None, torch.zeros(0)

    def loss(self, model: Any, batch: Any) -> Any:
        found = model(batch[0])
        if self.cache is None:
            self.cache = torch.ones(3)  # filled once
        self.grown = torch.zeros(max(len(self.grown), len(batch[0])))
        loss = F.cross_entropy(found - self.center, batch[1])
        self.last = found  # of this call only
        {in_loss}
        return loss

    def metrics(self, model: Any, batch: Any) -> Any:
        return {{"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="none")}}

    def after_step(self, model: Any, step: int, losses: Any) -> None:
        {after_step}
"""


@pytest.mark.parametrize(
    ("in_loss", "after_step", "named"),
    [
        ("self.center = 0.5 * self.center + 0.5 * found.detach().mean(0)", "pass", "loss() changes self.center [2]:"),
        ("self.queue.append(1)", "pass", "loss() changes self.queue (its length):"),
        ("pass", "self.center = self.center + 1", "after_step() changes self.center [2], which state_dict() does not"),
        ("pass", "self.seen.append(losses['loss'])", "after_step() changes self.seen (its length), which state_dict()"),
        ("pass", "model.temperature = 4.0 * 0.7**step", "after_step() changes model.temperature, which is no buffer:"),
        ("pass", "self.table = torch.ones(3)", ""),
    ],
)
def test_what_a_task_remembers_in_tensors_and_lists_is_named_once(
    tmp_path: Path, in_loss: str, after_step: str, named: str
) -> None:
    err = train(tmp_path, STATES.format(in_loss=in_loss, after_step=after_step)).stderr
    assert err.count(" changes ") == (named > ""), "no cache that is filled once or grows"
    assert named in err


SAVED = """
    temperature = 1.0

    def after_step(self, model: Any, step: int, losses: Any) -> None:
        model[0].temperature = self.temperature = 0.9**step

    def state_dict(self) -> Any:
        return {"temperature": self.temperature}

    def load_state_dict(self, state: Any) -> None:
        self.temperature = state["temperature"]
"""


@pytest.mark.parametrize("ema", [0, 0.9])
def test_a_number_of_the_model_that_is_saved_is_named_where_another_model_is_evaluated(
    tmp_path: Path, ema: float
) -> None:
    err = train(tmp_path, SAVED, "--ema", ema).stderr
    assert ("after_step() changes model.0.temperature, which is no buffer" in err) == (ema > 0)


COUNTING = """
    def optimizers(self, model: Any, config: Any) -> Any:
        class Counting(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                self.state["steps"] = self.state["steps"] + 1 if "steps" in self.state else 1
                return super().step()

        return Counting(model.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.mark.slow
def test_an_optimizer_with_a_value_of_its_own_goes_on(tmp_path: Path) -> None:
    for name, steps in (("run", 4), ("run", 8), ("plain", 8)):
        words = ["--schedule", "constant", "--run-dir", tmp_path / name, "--max-steps", steps]
        train(tmp_path, COUNTING, *words)
    found, plain = (load(step_folders(tmp_path / name / "checkpoints")[-1]) for name in ("run", "plain"))
    assert found["optimizers"][0]["state"]["steps"] == 8
    assert all(found["model"][name].equal(value) for name, value in plain["model"].items())


STEPS = """
    def loss(self, model: Any, batch: Any, step{default}) -> Any:
        return super().loss(model, batch), {{"step": float(step)}}
"""
WHOLE = """
    def loss(self, *_: Any) -> Any: ...
    loss = Task.loss

    def embed(self, model: Any, batch: Any) -> Any:
        return model(batch[0])

    def batch_loss(self, embeddings: Any, step{default}) -> Any:
        return embeddings.square().mean(), {{"step": float(step)}}
"""


@pytest.mark.parametrize("body", [STEPS.format(default="=0"), STEPS.format(default=""), WHOLE.format(default="=0")])
def test_an_evaluation_of_the_loss_has_the_number_of_the_last_step(tmp_path: Path, body: str) -> None:
    train(tmp_path, body, "--eval-every", 3)
    assert [it["test/step"] for it in records(tmp_path / "run", "eval")] == [2, 5, 7]
    done = train(tmp_path, body, "--eval-every", 3, "--eval-only")
    assert evaluation_of(done)["metrics"]["test/step"] == 7


@pytest.mark.parametrize("group", ["'lr': None", "'rate': 0.1"])
def test_an_optimizer_without_a_rate_is_refused(tmp_path: Path, group: str) -> None:
    body = "    def optimizers(self, model: Any, config: Any) -> Any:\n        "
    body += f"return torch.optim.Optimizer(model.parameters(), {{{group}}})\n"
    line = train(tmp_path, body, expect=2).stderr
    assert line.startswith("evenkeel: optimizers()[0] has lr = None, but each step sets it, to that number times the")


DROPS = """
    def train_dataset(self) -> Any:
        return [(*pair, number) for number, pair in enumerate(super().train_dataset())]

    test_dataset = train_dataset

    def collate(self, samples: Any) -> Any:
        kept = [it for it in samples if it[2] % 2 or not {drops}]
        return torch.stack([it[0] for it in kept]), torch.stack([it[1] for it in kept])
"""


@pytest.mark.parametrize("drops", [True, False])
def test_a_collate_that_leaves_samples_out_is_named_once(tmp_path: Path, drops: bool) -> None:
    body = DROPS.format(drops=drops)
    err = train(tmp_path, body, "--micro-batch", 8).stderr
    assert err.count("if it leaves samples out, they count all the same in the weights of") == drops


FORCES = """
    def metrics(self, model: Any, batch: Any) -> Any:
        x = batch[0].requires_grad_()
        {around}:
            return {{"loss": torch.autograd.grad(model(x).sum(), x)[0].square().mean(1)}}
"""


def test_gradients_in_an_evaluation_are_explained(tmp_path: Path) -> None:
    err = train(tmp_path, FORCES.format(around="if True"), expect=1).stderr
    assert "an evaluation has no gradients: where metrics need them, use `with torch.enable_grad():`" in err
    train(tmp_path, FORCES.format(around="with torch.enable_grad()"))


MODEL = "    def model(self) -> Any:\n        model = super().model()\n        {0}\n        return model\n"


def test_an_expanded_buffer_is_refused(tmp_path: Path) -> None:
    line = train(tmp_path, MODEL.format("model.register_buffer('m', torch.ones(1, 1).expand(3, 3))"), expect=2).stderr
    assert "whose m is an expanded tensor, which cannot be loaded: clone() it in model()" in line
    train(tmp_path, MODEL.format("model.register_buffer('m', torch.ones(1, 1).expand(3, 1).T[:0])"))


MERGES = """
    def model(self) -> Any:
        class Lora(nn.Linear):
            def __init__(self) -> None:
                super().__init__(4, 8)
                self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(8, 2))
                self.merged = False

            def train(self, mode: bool = True) -> Any:
                if {merges} and mode == self.merged:
                    self.weight.data += (-1 if mode else 1) * self.b @ self.a
                    self.merged = not mode
                return super().train(mode)

            def forward(self, x: Any) -> Any:
                return super().forward(x) + (0 if self.merged else x @ self.a.T @ self.b.T)

        return nn.Sequential(Lora(), nn.Tanh(), nn.Linear(8, 2))
"""


def test_a_module_that_merges_weights_to_evaluate_is_refused(tmp_path: Path) -> None:
    line = train(tmp_path, MERGES.format(merges=True), expect=2).stderr
    assert line.startswith("evenkeel: 0 is a Lora, whose eval() changes parameters, so each evaluation would change")
    train(tmp_path, MERGES.format(merges=False))


ROWS = """
    def train_dataset(self) -> Any:
        x, y = super().train_dataset().tensors
        return [{{"image": a, "label": b}} for a, b in zip(x, y)] if {as_dict} else TensorDataset(x, y[:, None])

    test_dataset = train_dataset

    def loss(self, model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch["image"]), batch["labels"]) if {as_dict} else super().loss(model, batch)
"""


@pytest.mark.parametrize(
    ("as_dict", "line"),
    [
        (True, "KeyError: 'labels' (the batch is a dict of 'image': [4, 4] float32, 'label': [4] int64) at "),
        (False, "labels[:, 0]) (the batch is a list of [4, 4] float32, [4, 1] int64) at "),
    ],
)
def test_a_mistake_in_the_first_step_is_shown_with_what_the_batch_is(tmp_path: Path, as_dict: bool, line: str) -> None:
    done = train(tmp_path, ROWS.format(as_dict=as_dict), expect=1)
    assert line in done.stderr.splitlines()[-1]
    assert "nothing to save" not in done.stdout, "before the cause"


BROADCASTS = """
    def loss(self, model: Any, batch: Any) -> Any:
        return F.mse_loss({loss})

    def metrics(self, model: Any, batch: Any) -> Any:
        return {{"loss": F.{metric}}}
"""
ONE, RIGHT = "model(batch[0])[:, :1]", "mse_loss(model(batch[0])[:, 0], batch[1].float(), reduction='none')"


@pytest.mark.parametrize(
    ("loss", "metric", "said"),
    [
        (f"{ONE}, batch[1].float()", RIGHT, "outputs of shape [4, 1] and targets of shape [4] at {}:30, and"),
        (f"{ONE}[:, 0], batch[1][:, None].float()", RIGHT, "take .squeeze(1) of the targets, or .unsqueeze(1) of "),
        (f"{ONE}[:, 0], batch[1].float()", f"l1_loss({ONE}, batch[1].float())", "targets of shape [4] at {}:33, and"),
        (f"{ONE}, torch.ones(())", f"huber_loss({ONE}, torch.ones(1))", ""),
    ],
)
def test_outputs_of_one_column_and_flat_targets_end_the_run_at_once(
    tmp_path: Path, loss: str, metric: str, said: str
) -> None:
    """Each sample would be compared with all. The last row is the control: one target for all may be meant."""
    done = train(tmp_path, BROADCASTS.format(loss=loss, metric=metric), expect=int(said > ""))
    assert said.format(tmp_path / "own.py") in done.stderr
    assert "evenkeel: a loss of torch gets " in done.stderr or not said
    assert told_step(tmp_path / "run") == (0 if said else 8)


FETCHES = """
    def train_dataset(self) -> Any:
        class Shards(TensorDataset):
            def __getitems__(self, rows: Any) -> Any:
                if 63 in rows:
                    raise KeyError("shard-7")
                return [self[row] for row in rows]

        return Shards(*super().train_dataset().tensors)
"""


def test_a_mistake_of_the_data_set_is_not_shown_with_the_batch_before(tmp_path: Path) -> None:
    line = train(tmp_path, FETCHES, expect=1).stderr.splitlines()[-1]
    assert "KeyError: 'shard-7'" in line
    assert "the batch is" not in line


def test_more_loader_processes_than_cores_are_a_line_and_not_one_for_each_set(tmp_path: Path) -> None:
    many = count_cores() + 1
    err = train(tmp_path, "    pass\n", "--num-workers", many, "--max-steps", 1).stderr
    assert err.count(f"--num-workers {many}: ") == 1
    assert "This DataLoader" not in err


@pytest.mark.parametrize(
    ("way", "which"), [("min", ", also the best"), ("max", "; the best: {}/checkpoints/step-00000004")]
)
def test_the_closing_line_says_of_which_step_the_weights_are(tmp_path: Path, way: str, which: str) -> None:
    *_, last = train(tmp_path, f"    best = ('loss', '{way}')\n").stdout.splitlines()
    assert last.endswith(f"/model.pt (last step{which.format(tmp_path / 'run')})")
