"""ENV005 on real layers and on a stand-in for Transformer Engine, with releases put into the facts.

One process has one of each. What those releases do is in research/versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.checks.environment.incompatible_versions import SILENT
from fp8doctor.facts import Accelerate, Facts, Package
from tests.checks.checkpointing.test_recompute_not_fp8 import with_te_checkpoint
from tests.checks.rules import Look, finding_of, outcome_of
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


def asked(*, prepared: bool = False, by: str = "variable", backend: str = "AO", **packages: str) -> Facts:
    """A job that asks for FP8 by a variable or by an argument, before ``prepare`` or after it."""
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8"} if by == "variable" else {}
    facts = with_releases(SILENT, **packages)
    accelerate = (
        Accelerate(mixed_precision="fp8", prepared=prepared) if prepared or by == "argument" else None
    )
    return replace(
        facts,
        environment=replace(facts.environment, variables=variables, backend_imports={backend: None}),
        network=replace(facts.network, linears=()),
        training=replace(facts.training, accelerate=accelerate),
    )


@pytest.mark.parametrize(
    ("facts", "severity"),
    [
        (asked(accelerate="1.3.0"), None),
        (asked(accelerate="1.7.0"), "info"),
        (asked(accelerate="1.7.0", prepared=True), "warning"),
        (asked(accelerate="1.8.1"), "warning"),
        (asked(accelerate="1.8.1", by="argument", torchao="0.17.0"), "warning"),
        (asked(accelerate="1.9.0"), None),
        (asked(accelerate="1.8.1", prepared=True), None),
        (asked(accelerate="1.12.0", transformer_engine="2.9.0", backend="TE"), "warning"),
        (asked(accelerate="1.12.0", transformer_engine="2.8.0", backend="TE"), None),
        (asked(accelerate="1.12.0", transformer_engine="2.9.0"), None),
        (asked(accelerate="1.13.0", transformer_engine="2.9.0", backend="TE"), None),
        (asked(accelerate="1.15.0", peft="0.18.1", torchao="0.18.0"), "info"),
        (asked(accelerate="1.15.0", peft="0.18.1", transformer_engine="2.20.2", backend="TE"), "info"),
        (asked(accelerate="1.15.0", peft="0.19.0", torchao="0.18.0"), None),
        (asked(accelerate="not a version"), None),
    ],
)
def test_versions_that_fail_together(facts: Facts, severity: str | None) -> None:
    finding = finding_of(VERSIONS, facts)
    assert (finding and finding.severity) == severity


@pytest.mark.parametrize(
    ("te", "cudnn", "cuda", "found"),
    [
        ("2.20.2", "9.10.2.21", "12.8", True),
        ("2.20.2", "9.10.2.21", "13.0", True),
        ("2.19.0", "9.10.2.21", "12.8", False),
        ("2.20.2", "9.19.0.56", "13.0", False),
        ("2.20.2", None, "13.0", False),
    ],
)
def test_a_cudnn_that_transformer_engine_refuses(te: str, cudnn: str | None, cuda: str, found: bool) -> None:
    """Versions as pip gives them: torch 2.8 to 2.10 pin the first cuDNN, torch 2.11 the other."""
    packages = {"transformer_engine": Package(version=te, imported=False)}
    facts = replace(asked(), software=replace(SILENT.software, packages=packages, cudnn=cudnn, cuda=cuda))
    finding = finding_of(VERSIONS, facts)
    line = f'pip install "nvidia-cudnn-cu{cuda[:2]}>=9.12"'
    assert (finding and (finding.severity, finding.treatment.code)) == (("info", line) if found else None)
