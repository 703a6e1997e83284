"""NUM003 on real torchao layers, the stand-in for Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

from fp8doctor.facts import Facts
from tests.checks.rules import finding_of, found_by, outcome_of
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]
RISKY = "risky-recipe"


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()


@pytest.mark.parametrize("operand", ["cast_config_input", "cast_config_weight"])
def test_e5m2_in_the_forward(operand: str, look: Look) -> None:
    e5m2, e4m3 = (CastConfig(target_dtype=each) for each in (torch.float8_e5m2, torch.float8_e4m3fn))
    config = Float8LinearConfig(**{operand: e5m2}, cast_config_grad_output=e4m3)
    finding = found_by(RISKY, look(convert_to_float8_training(two(), config=config)))
    assert (finding.severity, finding.evidence["settings"]) == ("warning", ("E5M2 in the forward",))
    names: dict[str, Any] = {"model": two()}
    exec(finding.treatment.code, names)
    assert outcome_of(RISKY, look(names["model"])) == "silent"
    assert outcome_of(RISKY, look(two())) == "not_applicable"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"amax_history_len": 1, "amax_compute_algo": "most_recent"}, "amax history of 1"),
        ({"amax_history_len": 1}, "amax history of 1"),
        ({"amax_history_len": 1, "amax_compute_algo": max}, None),
        ({"amax_history_len": 2, "amax_compute_algo": "most_recent"}, None),
        ({"fp8_format": SimpleNamespace(name="E5M2")}, "E5M2 in the forward"),
        ({"fp8_format": SimpleNamespace(name="E4M3")}, None),
        (None, None),
    ],
)
def test_scaling_of_transformer_engine(
    settings: dict[str, Any] | None, name: str | None, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """Delayed scaling with these attributes of the real recipe; None: current scaling, without a history."""
    te: Any = stand_in.install(monkeypatch, "quantization")
    recipe = stand_in.Float8CurrentScaling() if settings is None else stand_in.DelayedScaling()
    if settings is not None:
        hybrid = SimpleNamespace(name="HYBRID")
        vars(recipe).update(
            {"fp8_format": hybrid, "amax_history_len": 1024, "amax_compute_algo": "max"} | settings
        )
    model = nn.Sequential(te.Linear(64, 64))
    with te.autocast(recipe=recipe):
        model(torch.zeros(16, 64))
    finding = finding_of(RISKY, look(model))
    assert (finding and finding.evidence["settings"]) == ((name,) if name else None)
