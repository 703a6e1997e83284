"""STP001 on Transformer Engine that was not timed: what its launches take the host is modelled."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from fp8doctor.facts import Facts
from tests.checks.environment.live import finding_of, outcome_of
from tests.facts_of import DECODER_468M
from tests.stand_ins import transformer_engine

Look = Callable[..., Facts]


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return transformer_engine.install(monkeypatch)


class Mlp(nn.Module):
    """Pairs of layers, as many as a small decoder has."""

    def __init__(self, kind: Callable[[int, int], nn.Module], width: int, pairs: int = 24) -> None:
        super().__init__()
        self.up = nn.ModuleList(kind(width, 4 * width) for _ in range(pairs))
        self.down = nn.ModuleList(kind(4 * width, width) for _ in range(pairs))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(up(x))
        return x


def on_meta(kind: Callable[[int, int], nn.Module], width: int) -> Mlp:
    with torch.device("meta"):
        return Mlp(kind, width).bfloat16()


def test_a_narrow_model_stays_in_bf16(te: ModuleType, look: Look) -> None:
    finding = finding_of("STP001", look(on_meta(te.Linear, 512), tokens=1024))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.evidence["host_ms"] > finding.evidence["busy_ms"]
    assert finding.evidence["fp8_layers"] == 48
    assert finding.title.endswith("(estimated)")
    assert finding.treatment is not None
    assert finding.treatment.name == "stay-in-bf16"


def test_a_wide_model_wants_more_tokens_and_has_enough_with_them(te: ModuleType, look: Look) -> None:
    model = on_meta(te.Linear, 2048)
    finding = finding_of("STP001", look(model, tokens=256))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.name == "more-tokens"
    tokens = finding.evidence["pays_from_tokens"]
    assert isinstance(tokens, int)
    assert 512 <= tokens <= 16_384
    assert finding_of("STP001", look(model, tokens=tokens)) is None


@pytest.mark.parametrize("ran", [False, True], ids=["before its first forward", "after it"])
def test_the_default_recipe_counts_until_a_forward_tells_another(
    ran: bool, te: ModuleType, look: Look
) -> None:
    model = on_meta(te.Linear, 512)
    if ran:
        with te.autocast(enabled=True, recipe=transformer_engine.DelayedScaling()):
            model(torch.zeros(16, 512, dtype=torch.bfloat16, device="meta"))
    assert finding_of("STP001", look(model, tokens=1024)) is not None


def test_layers_that_ran_in_bf16_are_not_modelled_in_fp8(te: ModuleType, look: Look) -> None:
    model = on_meta(te.Linear, 512)
    model(torch.zeros(16, 512, dtype=torch.bfloat16, device="meta"))
    assert outcome_of("STP001", look(model, tokens=1024)).outcome == "unknown"


def test_torchao_and_a_step_that_pays_are_left_to_the_trial(te: ModuleType, look: Look) -> None:
    assert outcome_of("STP001", DECODER_468M).outcome == "unknown"
    assert outcome_of("STP001", look(on_meta(te.Linear, 4096), tokens=16_384)).outcome == "unknown"
