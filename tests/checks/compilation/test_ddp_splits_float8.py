"""CMP008 on what fp8doctor saw of a job with an older torchao, and on real layers in DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.checks.compilation.ddp_splits_float8 import FIRES, SILENT, ddp_splits_float8
from fp8doctor.facts import Facts, Observation, Package, Software, Unrecorded
from fp8doctor.finding import Finding, NotApplicable

RECORDED = Path(__file__).parents[2] / "versions" / "recorded"


def with_marks(backend: str) -> Facts:
    mark = replace(FIRES.training.compile_marks[0], backend=backend)
    return replace(FIRES, training=replace(FIRES.training, compile_marks=(mark,)))


def with_layers(**changes: object) -> Facts:
    layers = tuple(replace(each, **changes) for each in FIRES.network.linears)
    return replace(FIRES, network=replace(FIRES.network, linears=layers))


def in_ddp(**changes: object) -> Facts:
    assert FIRES.training.distributed
    distributed = replace(FIRES.training.distributed, **changes)
    return replace(FIRES, training=replace(FIRES.training, distributed=distributed))


def with_dynamo(**changes: object) -> Facts:
    dynamo = replace(FIRES.training.dynamo, **changes)
    return replace(FIRES, training=replace(FIRES.training, dynamo=dynamo))


def with_torchao(version: str | None) -> Facts:
    return replace(FIRES, software=Software(packages={"torchao": Package(version=version)}))


def test_torchao_that_raises() -> None:
    report = load_report(RECORDED / "cpu-ddp-torchao-0.12.0.json.gz")
    (finding,) = (each for each in report.findings if each.code == "CMP008")
    assert finding.title == "DDP splits the graphs of 8 FP8 Linears, so torchao 0.12.0 raises"
    assert finding.severity == "error"
    assert finding.treatment
    assert 'pip install "torchao>=0.13.0"' in finding.treatment.code
    assert report.verdict.status == "step_raises"


def test_torchao_that_mends_it() -> None:
    report = load_report(RECORDED / "cpu-ddp-torchao-0.13.0.json.gz")
    (outcome,) = (each for each in report.outcomes if each.code == "CMP008")
    assert outcome.outcome == "healthy"


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(with_marks("eager"), id="a backend that runs the graph as it is"),
        pytest.param(in_ddp(wrapper="FSDP2"), id="another wrapper"),
        pytest.param(
            with_layers(kind="torchao.float8.float8_linear.Float8LinearNoCompile"), id="other layers"
        ),
        pytest.param(with_layers(compiled=None), id="a mark that does not reach them"),
        pytest.param(with_dynamo(disabled=True), id="Dynamo is switched off"),
        pytest.param(with_dynamo(stance="force_eager"), id="the stance is eager"),
        pytest.param(with_layers(kind="torchao.prototype.mx_formats.mx_linear.MXLinear"), id="MX layers"),
    ],
)
def test_not_applicable(facts: Facts) -> None:
    assert isinstance(ddp_splits_float8(facts), NotApplicable)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(SILENT, id="newer torchao"),
        pytest.param(in_ddp(optimize_ddp=False), id="graphs are not split"),
        pytest.param(with_layers(parameters=64 * 64), id="less than the first bucket"),
        pytest.param(with_layers(requires_grad=False), id="frozen weights, which are in no bucket"),
        pytest.param(in_ddp(wrapper_at="generator"), id="DDP is around another part of the model"),
        pytest.param(replace(FIRES, observed=Observation(steps_ms=(12.0,))), id="steps were watched"),
    ],
)
def test_silent(facts: Facts) -> None:
    assert ddp_splits_float8(facts) is None


def test_the_first_bucket_is_held_by_bytes() -> None:
    assert ddp_splits_float8(with_layers(parameters=400_000)) is None
    assert isinstance(ddp_splits_float8(with_layers(parameters=400_000, dtype="float32")), Finding)


@pytest.mark.parametrize(
    "version", [None, "of nobody", "0.13.0.dev20250701+cu128", "0.13.0rc1", "0.13.0+git1234"]
)
def test_a_build_of_which_nobody_knows(version: str | None) -> None:
    with pytest.raises(Unrecorded, match="version"):
        ddp_splits_float8(with_torchao(version))


@pytest.mark.parametrize("version", ["0.12.0+git1234", "0.12.0.dev20250601", "0.10.0+cu126"])
def test_builds_before_it_raise(version: str) -> None:
    assert isinstance(ddp_splits_float8(with_torchao(version)), Finding)


@pytest.mark.parametrize("version", ["0.13.0+cu128", "0.14.0.dev20250801+cu128", "0.18.0"])
def test_builds_after_it_do_not(version: str) -> None:
    assert ddp_splits_float8(with_torchao(version)) is None


def test_ddp_around_a_part_with_these_layers() -> None:
    layers = with_layers(name="generator.up").network
    assert isinstance(ddp_splits_float8(replace(in_ddp(wrapper_at="generator"), network=layers)), Finding)


def test_what_is_trained_beside_frozen_fp8_splits_none_of_it() -> None:
    """As adapters do; with torch 2.8 and torchao 0.12 such a job ran."""
    (frozen,) = with_layers(requires_grad=False).network.linears
    adapter = replace(frozen, name="lora", stack="torch", use="none", requires_grad=True)
    facts = replace(FIRES, network=replace(FIRES.network, linears=(frozen, adapter)))
    assert ddp_splits_float8(facts) is None


def test_suppressed_errors_do_not_help() -> None:
    """The first step ends in the backward then, with another message."""
    assert isinstance(ddp_splits_float8(with_dynamo(suppress_errors=True)), Finding)
