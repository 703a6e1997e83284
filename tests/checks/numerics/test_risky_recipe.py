"""NUM003 on real torchao layers, the stand-in for Transformer Engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

from tests.checks.models import mlp, ran_in_te
from tests.checks.rules import Look, finding_of, found_by, outcome_of
from tests.stand_ins import transformer_engine

RISKY = "risky-recipe"


@pytest.mark.parametrize("operand", ["cast_config_input", "cast_config_weight"])
def test_e5m2_in_the_forward(operand: str, look: Look) -> None:
    e5m2, e4m3 = (CastConfig(target_dtype=each) for each in (torch.float8_e5m2, torch.float8_e4m3fn))
    config = Float8LinearConfig(**{operand: e5m2}, cast_config_grad_output=e4m3)
    finding = found_by(RISKY, look(convert_to_float8_training(mlp(), config=config)))
    assert (finding.severity, finding.evidence["settings"]) == ("warning", ("E5M2 in the forward",))
    names: dict[str, Any] = {"model": mlp()}
    exec(finding.treatment.code, names)
    assert outcome_of(RISKY, look(names["model"])) == "silent"
    assert outcome_of(RISKY, look(mlp())) == "not_applicable"


OLD_AMAX = {"amax_history_len": 1, "amax_compute_algo": "most_recent"}
HYBRID, E5M2 = SimpleNamespace(name="HYBRID"), SimpleNamespace(name="E5M2")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"fp8_format": HYBRID} | OLD_AMAX, "amax history of 1"),
        ({"fp8_format": HYBRID} | OLD_AMAX | {"amax_compute_algo": max}, None),
        ({"fp8_format": HYBRID} | OLD_AMAX | {"amax_history_len": 2}, None),
        ({"fp8_format": E5M2, "amax_history_len": 1024, "amax_compute_algo": "max"}, "E5M2 in the forward"),
    ],
)
def test_delayed_scaling(
    settings: dict[str, Any], name: str | None, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """With these attributes of the real recipe; current scaling has no history."""
    finding = finding_of(RISKY, look(ran_in_te(monkeypatch, "DelayedScaling", **settings)))
    assert (finding and finding.evidence["settings"]) == ((name,) if name else None)
    assert finding_of(RISKY, look(ran_in_te(monkeypatch, "Float8CurrentScaling"))) is None


class Layers(nn.Module):
    """Blocks of one te.Linear, the last few in BF16."""

    def __init__(self, te: Any, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(te.Linear(64, 64)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_nvfp4_to_the_last_block_and_its_treatment(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    te = transformer_engine.install(monkeypatch)

    def step(model: Layers, batch: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=transformer_engine.NVFP4BlockScaling()):
            return model(batch).sum()

    def ran(code: str = "") -> Layers:
        model = Layers(te, 16)
        exec(code, {"model": model, "te": te})
        step(model, torch.zeros(64, 64))
        return model

    finding = found_by(RISKY, look(ran()))
    assert finding.severity == "warning"
    treated = look(ran(finding.treatment.code))
    assert outcome_of(RISKY, treated) == "silent"
    assert [each.engaged for each in treated.network.linears] == [True] * 14 + [False] * 2
    not_run = look(Layers(te, 16), tokens=64, training_step=step)
    assert found_by(RISKY, not_run).evidence["settings"] != finding.evidence["settings"]
