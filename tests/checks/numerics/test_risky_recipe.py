"""NUM003 on real torchao layers, the stand-in for Transformer Engine, and what Accelerate's variables ask
for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

from fp8doctor.facts import Facts
from tests.checks.environment.live import finding_of, outcome_of
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]

E5M2 = CastConfig(target_dtype=torch.float8_e5m2)
E4M3 = CastConfig(target_dtype=torch.float8_e4m3fn)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKEND", "AMAX_HISTORY_LEN", "AMAX_COMPUTE_ALGO", "FORMAT"):
        monkeypatch.delenv(f"ACCELERATE_FP8_{name}", raising=False)


def float8(config: Any = None) -> nn.Module:
    return convert_to_float8_training(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16(), config=config
    )


@pytest.mark.parametrize(
    "config",
    [
        Float8LinearConfig(cast_config_input=E5M2, cast_config_grad_output=E4M3),
        Float8LinearConfig(cast_config_weight=E5M2, cast_config_grad_output=E4M3),
    ],
    ids=["input", "weight"],
)
def test_e5m2_in_the_forward(config: Any, look: Look) -> None:
    finding = finding_of("NUM003", look(float8(config)))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.title == "A setting is known to harm training: E5M2 in the forward"
    assert "2 layers (0, ...)" in finding.explanation
    assert finding.treatment is not None
    names: dict[str, Any] = {"model": nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))}
    exec(finding.treatment.code, names)
    assert outcome_of("NUM003", look(names["model"])).outcome == "healthy"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_recipes_of_torchao_are_healthy(recipe: str, look: Look) -> None:
    facts = look(float8(Float8LinearConfig.from_recipe_name(recipe)))
    assert [(scaling.layers, scaling.forward_dtypes) for scaling in facts.network.scalings] == [
        (2, ("float8_e4m3fn",))
    ]
    assert outcome_of("NUM003", facts).outcome == "healthy"


def te_model(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> nn.Module:
    """A stand-in module after a forward with a recipe that has these attributes of the real
    ``DelayedScaling``."""
    te: Any = stand_in.install(monkeypatch, "quantization")
    recipe = stand_in.DelayedScaling()
    vars(recipe).update(
        {
            "fp8_format": SimpleNamespace(name="HYBRID"),
            "amax_history_len": 1024,
            "amax_compute_algo": "max",
            **settings,
        }
    )
    model = nn.Sequential(te.Linear(64, 64))
    with te.autocast(recipe=recipe):
        model(torch.zeros(16, 64))
    return model


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"amax_history_len": 1, "amax_compute_algo": "most_recent"}, "amax history of 1"),
        ({"amax_history_len": 1}, "amax history of 1"),
        ({"amax_history_len": 1, "amax_compute_algo": max}, None),
        ({"amax_history_len": 16, "amax_compute_algo": "most_recent"}, None),
        ({"fp8_format": SimpleNamespace(name="E5M2")}, "E5M2 in the forward"),
        ({"fp8_format": SimpleNamespace(name="E4M3")}, None),
        ({}, None),
    ],
)
def test_delayed_scaling(
    settings: dict[str, Any], name: str | None, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    finding = finding_of("NUM003", look(te_model(monkeypatch, **settings)))
    assert (finding.evidence["settings"] if finding else None) == ((name,) if name else None)


def test_a_recipe_without_history(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    te: Any = stand_in.install(monkeypatch, "quantization")
    model = nn.Sequential(te.Linear(64, 64))
    assert look(model).network.scalings == ()
    with te.autocast(recipe=stand_in.Float8CurrentScaling()):
        model(torch.zeros(16, 64))
    facts = look(model)
    assert [scaling.amax_history_len for scaling in facts.network.scalings] == [None]
    assert outcome_of("NUM003", facts).outcome == "healthy"


@pytest.mark.parametrize(
    ("name", "value", "cure"), [("AMAX_HISTORY_LEN", "1", "unset {}"), ("FORMAT", "E5M2", "export {}=HYBRID")]
)
def test_accelerates_variables(
    name: str, value: str, cure: str, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    variable = f"ACCELERATE_FP8_{name}"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    monkeypatch.setenv(variable, value)
    finding = finding_of("NUM003", look(nn.Sequential(nn.Linear(64, 64))))
    assert finding is not None
    assert finding.evidence["settings"] == (f"{variable}={value}",)
    assert finding.treatment is not None
    assert finding.treatment.code == cure.format(variable)
    if cure.startswith("unset"):
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, cure.rpartition("=")[2])
    assert outcome_of("NUM003", look(nn.Sequential(nn.Linear(64, 64)))).outcome == "healthy"
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    assert outcome_of("NUM003", look(nn.Sequential(nn.Linear(64, 64)))).outcome == "healthy"


def test_without_fp8_there_is_no_recipe(look: Look) -> None:
    assert outcome_of("NUM003", look(nn.Sequential(nn.Linear(64, 64)))).outcome == "not_applicable"
