"""--optimizer, --betas and --momentum: what torch's optimizers get, what muon takes of a model, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from evenkeel.common.errors import Refusal
from evenkeel.config import Config
from evenkeel.tasks.command_line import parse
from evenkeel.training.checks import checked_optimizers
from evenkeel.training.optimization import build_optimizer, build_optimizers, load_optimizer, rate_names
from tests.support.recording_task import Recorded

WITH_MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Conv1d(8, 2, 1), nn.Linear(2, 2))


def stepped(model: nn.Module, optimizers: list[Optimizer]) -> list[torch.Tensor]:
    for number in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number - 1.5) + parameter.detach()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def of(config: Config) -> list[torch.Tensor]:
    return stepped(model := network(), build_optimizers(model, config))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"optimizer": "adam", "betas": (0.5, 0.9)}, lambda p: Adam(p, 0.1, betas=(0.5, 0.9), fused=True)),
        (
            {"optimizer": "adamw", "betas": (0.9, 0.95)},
            lambda p: AdamW(p, 0.1, (0.9, 0.95), weight_decay=0, fused=True),
        ),
        ({"optimizer": "adamw"}, lambda p: AdamW(p, 0.1, weight_decay=0, fused=True)),
        ({"optimizer": "sgd"}, lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, fused=True)),
        ({"optimizer": "sgd", "momentum": 0.5}, lambda p: SGD(p, 0.1, momentum=0.5, nesterov=True, fused=True)),
        ({"optimizer": "sgd", "momentum": 0.0}, lambda p: SGD(p, 0.1, fused=True)),
    ],
)
def test_torchs_optimizers_get_the_options(options: dict[str, Any], make: Any) -> None:
    config, model = Config(lr=0.1, weight_decay=0, **options), network()
    assert same(of(config), stepped(model, [make(model.parameters())]))
    assert not same(of(config), of(Config(lr=0.1, weight_decay=0, optimizer="adamw", betas=(0.3, 0.3)))), "the control"


@WITH_MUON
@pytest.mark.parametrize("typed", [{}, {"momentum": 0.8, "betas": (0.9, 0.95)}])
def test_muon_takes_the_matrices_that_are_of_no_embedding_and_adamw_the_rest(typed: dict[str, Any]) -> None:
    model, config = network(), Config(optimizer="muon", lr=0.02, weight_decay=0.1, **typed)
    muon, adamw = checked_optimizers(build_optimizers(model, config), model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = [[names[id(p)] for group in it.param_groups for p in group["params"]] for it in (muon, adamw)]
    assert parts[0] == ["1.weight", "4.weight"]
    assert sorted(parts[0] + parts[1]) == sorted(names.values())
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
    assert rate_names([muon, adamw], model) == ["lr", "lr_1"]

    plain = network()
    matrices = [plain[1].weight, plain[4].weight]
    others = [p for p in plain.parameters() if not any(p is it for it in matrices)]
    groups = [{"params": [p for p in others if p.dim() >= 2]}]
    groups.append({"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0})
    hands = [
        torch.optim.Muon(matrices, 0.02, 0.1, typed.get("momentum", 0.95), adjust_lr_fn="match_rms_adamw"),
        AdamW(groups, 0.02, typed.get("betas", (0.9, 0.999)), weight_decay=0.1, fused=True),
    ]
    assert same(stepped(model, [muon, adamw]), stepped(plain, hands))


@WITH_MUON
def test_frozen_and_tied_matrices_and_a_model_that_is_all_matrices() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight  # tied, as in most language models
    muon, adamw = build_optimizers(model, Config(optimizer="muon"))
    assert [len(it.param_groups[0]["params"]) for it in (muon, adamw)] == [1, 1]
    model[0].weight.requires_grad_(False)
    (muon,) = build_optimizers(model, Config(optimizer="muon"))
    assert muon.param_groups[0]["params"] == [model[1].weight]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"optimizer": "sgd", "betas": (0.9, 0.95)}, r"--betas 0\.9 0\.95: sgd has none; set --momentum"),
        ({"momentum": 0.9}, r"--momentum 0\.9: adamw has none; set --betas"),
        pytest.param({"optimizer": "muon"}, "the model has no matrix to train", marks=WITH_MUON),
    ],
)
def test_options_that_would_have_no_effect_or_no_meaning_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(Refusal, match=line):
        build_optimizers(nn.Embedding(3, 2), Config(**options))


def test_muon_is_refused_on_an_older_torch_and_for_optimizers_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusal, match=r"--optimizer muon: needs a task without its own optimizers\(\)"):
        build_optimizer(network().parameters(), Config(optimizer="muon"))
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(Refusal, match=r"--optimizer muon: torch 2.* has none; install 2\.9 or later, or use adamw"):
        build_optimizers(network(), Config(optimizer="muon"))


def test_they_are_typed_and_read_from_a_file(tmp_path: Path) -> None:
    config, _ = parse(["--betas", "0.8", "0.95", "--momentum", "0"], Recorded)
    assert (config.betas, config.momentum) == ((0.8, 0.95), 0.0)
    (tmp_path / "my.toml").write_text("betas = [0.7, 0.9]\nmomentum = 0.5\n")
    config, _ = parse(["--config", str(tmp_path / "my.toml")], Recorded)
    assert (tuple(config.betas), config.momentum) == ((0.7, 0.9), 0.5)
    assert parse([], Recorded)[0].momentum is None
    with pytest.raises(Refusal, match=r"^--betas 1\.0: must be below 1$"):
        parse(["--betas", "0.9", "1.0"], Recorded)


def with_gaps() -> nn.Module:
    """A weight as of a network whose first columns are taken."""
    torch.manual_seed(0)
    (made := nn.Linear(3, 4)).weight = nn.Parameter(torch.randn(4, 6)[:, :3])
    return made


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_parameter_with_gaps_in_memory_is_trained_as_any_other(name: Any) -> None:
    """torch's fused kernels for the CPU step what lies in the gaps."""
    config, dense = Config(optimizer=name, clip_norm=0.0), with_gaps()
    dense.weight = nn.Parameter(dense.weight.detach().contiguous())
    apart = with_gaps()
    found = stepped(apart, build_optimizers(apart, config)), stepped(dense, build_optimizers(dense, config))
    assert all(map(torch.allclose, *found))
    control = with_gaps()
    assert not torch.allclose(stepped(control, [SGD(control.parameters(), 0.1, fused=True)])[0], found[1][0])
    with pytest.raises(Refusal, match=r"fused=True, which passes over the gaps in the memory of weight"):
        checked_optimizers(SGD(control.parameters(), 0.1, fused=True), control)


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "the control, by torch"])
def test_a_state_of_another_dtype_than_its_parameter_comes_back_with_every_bit(loaded: bool) -> None:
    model = nn.Linear(3, 2).double()
    stepped(model, [first := torch.optim.NAdam(model.parameters())])
    saved = first.state_dict()
    second = torch.optim.NAdam(model.parameters())
    if loaded:
        load_optimizer(second, saved, list(model.parameters()))
    else:
        second.load_state_dict(saved)
    value, other = (it.state[model.weight]["mu_product"] for it in (first, second))
    assert (value.dtype == other.dtype) is loaded
    assert not loaded or torch.equal(value, other)
