"""The table of releases that do not work, and the conditions of its rows."""

import re
from typing import Any

import pytest
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet

from fp8doctor.analysis.training_bugs import TrainingBug, bugs_of, training_bugs
from fp8doctor.checks.environment.incompatible_versions import FIRES, SILENT
from fp8doctor.facts import Accelerate, Facts, Package, if_recorded
from tests.checks.environment.test_incompatible_versions import VERSIONS, with_releases
from tests.checks.rules import finding_of


@pytest.mark.parametrize("bug", training_bugs(), ids=lambda bug: bug.name)
def test_each_row_has_a_source_and_a_release_that_is_not_affected(bug: TrainingBug) -> None:
    assert bug.when or bug.job
    assert bug.sources
    assert all(each.startswith("https://") for each in bug.sources)
    assert bug.effect.endswith(".")
    assert "\\n" not in bug.lines
    for fixed in re.findall(rf"{bug.library}(?:-core)?>=([\d.]+)[\"}}]", bug.lines):
        assert fixed not in SpecifierSet(bug.versions)


def split(facts: Facts = FIRES, **of_layers: Any) -> bool:
    layers = tuple(replace(each, **of_layers) for each in facts.network.linears if each.stack == "torchao")
    found = if_recorded(bugs_of, replace(facts, network=replace(facts.network, linears=layers))) or ()
    return any(bug.name == "DDP splits the graphs of compiled layers" for bug, _ in found)


def changed(part: str, **changes: Any) -> Facts:
    return replace(
        FIRES, training=replace(FIRES.training, **{part: replace(getattr(FIRES.training, part), **changes)})
    )


def test_when_ddp_splits_the_graph_of_fp8_layers() -> None:
    (mark,) = FIRES.training.compile_marks
    eager = replace(FIRES.training, compile_marks=(replace(mark, backend="eager"),))
    assert split()
    for facts in (
        changed("dynamo", disabled=True),
        changed("distributed", wrapper="FSDP2"),
        changed("distributed", optimize_ddp=False),
        changed("distributed", wrapper_at="generator"),
        replace(FIRES, training=eager),
    ):
        assert not split(facts)
    assert not split(compiled=None)
    assert not split(requires_grad=False)
    assert not split(kind="torchao.prototype.mx_formats.mx_linear.MXLinear")
    assert split(with_releases(FIRES, torchao="0.12.0+git1234"))
    assert not split(with_releases(FIRES, torchao="0.13.0+cu128"))


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
