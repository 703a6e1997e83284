"""STP008: forwards on fake tensors see what each micro-batch tells Transformer Engine's layers (stand-in)."""

import pytest
import torch
from torch import nn

from fp8doctor.report import Report
from tests.looked import looked
from tests.stand_ins import transformer_engine as te


class Telling(nn.Module):
    """Tells its layer that a micro-batch is the first: always, of every four, or never."""

    def __init__(self, always: bool | None) -> None:
        super().__init__()
        self.layer, self.always, self.calls = te.Linear(4096, 4096, bias=False).bfloat16(), always, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = None if self.always is None else self.always or self.calls % 4 == 0
        self.calls += 1
        return self.layer(x, is_first_microbatch=first)


def telling(monkeypatch: pytest.MonkeyPatch, always: bool | None, accumulate: int = 4) -> Report:
    te.install(monkeypatch)
    with torch.device("meta"):
        model, batch = Telling(always), torch.zeros(2048, 4096, dtype=torch.bfloat16)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
            return model(batch).float().mean()

    return looked(model, batch, training_step=step, accumulate=accumulate, assume_gpu="H100")


@pytest.mark.parametrize(
    ("always", "accumulate", "outcome"),
    [(True, 4, "fires"), (False, 4, "silent"), (None, 4, "fires"), (True, 1, "not_applicable")],
)
def test_the_first_of_several_micro_batches_casts_for_all(
    always: bool | None, accumulate: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = telling(monkeypatch, always, accumulate)
    assert next(each.outcome for each in report.outcomes if each.code == "STP008") == outcome
    fixes = [each.treatment.name for each in report.prescription]
    assert ("first-microbatch" in fixes) == (outcome == "fires")


class Handing(Telling):
    """Hands on what its caller tells."""

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        return self.layer(x, is_first_microbatch=is_first_microbatch)


class OwnLinear(te.Linear):
    """Tells itself, as Megatron's layers do."""


@pytest.mark.parametrize(
    ("kind", "layer", "outcome"),
    [(Telling, te.Linear, "fires"), (Handing, te.Linear, "unknown"), (Telling, OwnLinear, "unknown")],
)
def test_an_argument_that_nobody_passed_is_known_of_plain_layers(
    kind: type[Telling], layer: type[te.Linear], outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    with torch.device("meta"):
        model, batch = kind(None), torch.zeros(2048, 4096, dtype=torch.bfloat16)
        model.layer = layer(4096, 4096, bias=False).bfloat16()
    with te.autocast(enabled=True, recipe=te.Float8CurrentScaling()):
        model.layer(batch)
    of_one = {"x": batch, "is_first_microbatch": True}  # says nothing of the others
    for given in (batch, of_one) if kind is Handing else (batch,):
        report = looked(model, given, accumulate=4, assume_gpu="H100")
        assert next(each.outcome for each in report.outcomes if each.code == "STP008") == outcome
