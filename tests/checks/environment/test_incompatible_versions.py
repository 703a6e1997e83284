"""ENV005 on a stand-in for Transformer Engine, with releases put into the facts.

One process has one of each. What those releases do is in research/versions."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.facts import Facts, Package
from tests.checks.checkpointing.test_recompute_not_fp8 import with_te_checkpoint
from tests.checks.rules import Look, outcome_of
from tests.stand_ins import transformer_engine as stand_in

VERSIONS = "incompatible-versions"


def with_releases(facts: Facts, torch_release: str = "2.13.0", **packages: str) -> Facts:
    found = {name: Package(version=release, imported=True) for name, release in packages.items()}
    return replace(facts, software=replace(facts.software, torch=torch_release, packages=found))


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stand_in.install(monkeypatch, "fp8")


def test_te_checkpoint_over_delayed_scaling(te: Any, look: Look) -> None:
    """The jobs of the other rows are in research/versions."""
    layer = te.Linear(64, 64)

    def outcome(recipe: Any, release: str) -> str:
        if recipe:
            with te.fp8_autocast(fp8_recipe=recipe):
                layer(torch.zeros(16, 64))
        model = nn.Sequential(with_te_checkpoint(layer))
        return outcome_of(VERSIONS, with_releases(look(model), transformer_engine=release))

    assert outcome(None, "2.3") == "unknown", "only a forward in FP8 shows the recipe"
    assert outcome(stand_in.DelayedScaling(), "2.3.0") == "fires"
    assert outcome(stand_in.DelayedScaling(), "2.4.0") == "silent"
    assert outcome(stand_in.Float8CurrentScaling(), "2.3.0") == "silent"
