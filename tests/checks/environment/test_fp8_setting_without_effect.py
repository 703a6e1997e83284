"""ENV002: settings that nobody reads are named, and what the launcher writes by itself is not."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fp8doctor.checks.environment.fp8_setting_without_effect import DEFAULTS, PREFIX, SILENT, backend_in_use
from fp8doctor.examine import examine_surroundings
from fp8doctor.facts import (
    NOT_RECORDED,
    Accelerate,
    Environment,
    Facts,
    Linear,
    Network,
    Package,
    Target,
    Training,
)
from tests.checks.environment.live import finding_of, launched, outcome_of

BOTH = {"accelerate": "1.15.0", "torchao": "0.18.0", "transformer_engine": "2.20.2"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith(("ACCELERATE_", "FP8_")):
            monkeypatch.delenv(name)


def here() -> Facts:
    """Facts of this very process."""
    return examine_surroundings(Target(kind="environment", name="environment"))


def facts(
    variables: dict[str, str],
    packages: dict[str, str] = BOTH,
    section: bool | None = None,
    distributed: str = "NO",
) -> Facts:
    return msgspec.structs.replace(
        SILENT,
        software=msgspec.structs.replace(
            SILENT.software,
            packages={name: Package(version=version, imported=False) for name, version in packages.items()},
        ),
        environment=Environment(variables=variables, deepspeed_fp8_section=section),
        training=Training(accelerate=Accelerate(mixed_precision="fp8", distributed=distributed)),
    )


def idle(subject: Facts) -> tuple[object, ...]:
    finding = finding_of("ENV002", subject)
    settings = finding.evidence["settings"] if finding else ()
    assert isinstance(settings, tuple)
    return settings


def test_the_variables_of_llama_factory_are_read_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8_BACKEND", "te")
    monkeypatch.setenv("FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "true")
    finding = finding_of("ENV002", here())
    assert finding is not None
    assert (
        finding.title
        == "2 FP8 settings have no effect: FP8_BACKEND=te, FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=true"
    )
    assert finding.severity == "warning"
    assert finding.treatment is not None
    assert finding.treatment.code.splitlines() == [
        "unset FP8_BACKEND   # or, to train with TE: export ACCELERATE_FP8_BACKEND=TE",
        "unset FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
    ]


def test_the_name_that_is_read_is_set_where_it_keeps_the_backend() -> None:
    variables = {"FP8_BACKEND": "torchao", "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false"}
    finding = finding_of("ENV002", facts(variables, {"accelerate": "1.15.0", "torchao": "0.18.0"}))
    assert finding is not None
    assert finding.treatment is not None
    assert finding.treatment.code.splitlines() == [
        "unset FP8_BACKEND",
        "export ACCELERATE_FP8_BACKEND=AO",
        "unset FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
        "export ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false",
    ]


def test_the_treatment_makes_it_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    monkeypatch.setenv("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "true")
    assert outcome_of("ENV002", here()).outcome == "healthy"


def test_a_name_that_is_not_read_beside_one_that_says_the_same_is_harmless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8_BACKEND", "torchao")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    assert idle(here()) == ()
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    assert "FP8_BACKEND" in idle(here())


def test_no_setting_no_question() -> None:
    assert outcome_of("ENV002", here()).outcome == "not_applicable"


def test_a_real_deepspeed_configuration_with_an_fp8_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp8": {"enabled": True}}))
    finding = finding_of("ENV002", here())
    assert finding is not None
    assert finding.title == '1 FP8 setting has no effect: deepspeed "fp8" section'
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert outcome_of("ENV002", here()).outcome == "not_applicable"


def test_a_configuration_that_cannot_be_read_does_not_silence_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "no/such.json")
    monkeypatch.setenv("FP8_BACKEND", "te")
    assert idle(here()) == ("FP8_BACKEND",)


@pytest.mark.parametrize("packages", [BOTH, {"torchao": "0.18.0"}, {"transformer_engine": "2.20.2"}, {}])
@pytest.mark.parametrize("backend", [None, "TE", "AO", "MSAMP"])
@pytest.mark.parametrize("distributed", ["NO", "DEEPSPEED"])
def test_what_the_launcher_writes_by_itself_is_never_reported(
    packages: dict[str, str], backend: str | None, distributed: str
) -> None:
    variables = launched("--mixed_precision", "fp8") | ({PREFIX + "BACKEND": backend} if backend else {})
    assert idle(facts(variables, packages, distributed=distributed)) == ()


def test_what_older_launchers_write_is_not_reported_either() -> None:
    """accelerate up to 1.7 writes FORMAT=E4M3 by default."""
    variables = {**launched("--mixed_precision", "fp8"), PREFIX + "FORMAT": "E4M3", PREFIX + "BACKEND": "AO"}
    assert idle(facts(variables, {**BOTH, "accelerate": "1.7.0"})) == ()
    assert idle(facts(variables, {**BOTH, "accelerate": "1.15.0"})) == (PREFIX + "FORMAT",)


def test_the_real_launcher_with_a_recipe_of_the_other_backend() -> None:
    variables = {
        **launched("--mixed_precision", "fp8", "--fp8_format", "E4M3", "--fp8_margin", "2"),
        PREFIX + "BACKEND": "AO",
    }
    finding = finding_of("ENV002", facts(variables))
    assert finding is not None
    assert (
        finding.title == "2 FP8 settings have no effect: ACCELERATE_FP8_MARGIN=2, ACCELERATE_FP8_FORMAT=E4M3"
    )
    assert "belongs to the backend TE, but AO is in use" in finding.explanation


@pytest.mark.parametrize("owner", sorted(DEFAULTS))
def test_every_variable_of_a_backend_is_idle_under_another(owner: str) -> None:
    old = {**BOTH, "transformer_engine": "1.13.0"}
    for suffix, default in DEFAULTS[owner].items():
        changed = "false" if default == "true" else "true" if default == "false" else default + "1"
        for backend in DEFAULTS:
            found = idle(facts({PREFIX + suffix: changed, PREFIX + "BACKEND": backend}, old))
            assert found == (() if backend == owner else (PREFIX + suffix,)), (suffix, backend)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OVERRIDE_FPROP", "0"),
        ("PAD_INNER_DIM", "yes"),
        ("USE_AUTOCAST_DURING_EVAL", "off"),
        ("INTERVAL", "1"),
        ("MARGIN", "0"),
    ],
)
def test_defaults_in_any_spelling_are_not_reported(name: str, value: str) -> None:
    for backend in DEFAULTS:
        assert idle(facts({PREFIX + name: value, PREFIX + "BACKEND": backend})) == ()


def test_transformer_engine_gets_no_recipe_under_deepspeed() -> None:
    variables = {
        PREFIX + "BACKEND": "TE",
        PREFIX + "AMAX_HISTORY_LEN": "16",
        PREFIX + "USE_MXFP8_BLOCK_SCALING": "true",
    }
    assert idle(facts(variables)) == ()
    assert idle(facts(variables, distributed="DEEPSPEED")) == (
        PREFIX + "AMAX_HISTORY_LEN",
        PREFIX + "USE_MXFP8_BLOCK_SCALING",
    )
    by_launcher = msgspec.structs.replace(
        facts({**variables, "ACCELERATE_USE_DEEPSPEED": "true"}), training=NOT_RECORDED
    )
    assert idle(by_launcher) == (PREFIX + "AMAX_HISTORY_LEN", PREFIX + "USE_MXFP8_BLOCK_SCALING")


@pytest.mark.parametrize(
    ("suffix", "value", "dropped_in", "kept_until"),
    [("OVERRIDE_DGRAD", "true", "2.0.0", "1.13.0"), ("INTERVAL", "4", "2.2.0", "2.1.0")],
)
def test_what_transformer_engine_dropped_has_no_effect(
    suffix: str, value: str, dropped_in: str, kept_until: str
) -> None:
    variables = {PREFIX + "BACKEND": "TE", PREFIX + suffix: value}
    for version in (dropped_in, "2.20.2"):
        finding = finding_of("ENV002", facts(variables, {**BOTH, "transformer_engine": version}))
        assert finding is not None
        assert finding.evidence["settings"] == (PREFIX + suffix,)
        assert f"dropped {'interval' if suffix == 'INTERVAL' else 'override'}" in finding.explanation
        assert finding.treatment is not None
        assert finding.treatment.code == f"unset {PREFIX + suffix}"
    assert idle(facts(variables, {**BOTH, "transformer_engine": kept_until})) == ()


def test_most_recent_set_by_hand_never_arrives() -> None:
    by_hand = {PREFIX + "BACKEND": "TE", PREFIX + "AMAX_COMPUTE_ALGO": "most_recent"}
    assert idle(facts(by_hand)) == (PREFIX + "AMAX_COMPUTE_ALGO",)
    assert idle(facts({**by_hand, PREFIX + "AMAX_COMPUTE_ALGO": "max"})) == ()


def test_the_backend_is_what_converted_the_layers_then_the_name_then_the_only_one_installed() -> None:
    unnamed = facts({PREFIX + "MARGIN": "2"})
    assert backend_in_use(unnamed) is None
    assert idle(unnamed) == ()
    assert backend_in_use(facts({PREFIX + "BACKEND": "TE"})) == "TE"
    assert backend_in_use(facts({}, {"torchao": "0.18.0"})) == "AO"
    layers = Network(
        linears=(
            Linear(name="up", stack="torchao", use="training"),
            Linear(name="head", stack="torch", use="none"),
        )
    )
    assert backend_in_use(msgspec.structs.replace(facts({PREFIX + "BACKEND": "TE"}), network=layers)) == "AO"
