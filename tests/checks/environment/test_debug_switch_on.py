"""ENV006 on switches that are really set in a process, and silent on the values that switch nothing on."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from msgspec.structs import replace

from fp8doctor.checks.environment.debug_switch_on import OFF, SILENT, SWITCHES, Switch
from fp8doctor.examine import examine_surroundings
from fp8doctor.examine.environment import allowed
from fp8doctor.facts import Environment, Facts, Package, Software, Target
from tests.checks.environment.live import facts_of, finding_of

ON = {
    "AMD_SERIALIZE_KERNEL": "3",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "CUBLASLT_LOG_LEVEL": "5",
    "CUDNN_LOGLEVEL_DBG": "3",
    "TORCH_LOGS": "+dynamo",
    "NVTE_BACKWARD_OVERRIDE": "dequantized",
    "TORCH_COMPILE_OVERRIDE_BACKENDS": "0-5:aot_eager",
}
"""A value that switches on, where that is not 1."""

COMPANIONS = {"NVTE_DEBUG_LEVEL": "1", "WORLD_SIZE": "8"}

each_switch = pytest.mark.parametrize("switch", SWITCHES, ids=[switch.name for switch in SWITCHES])


def with_variables(packages: tuple[str, ...] = ("transformer_engine",), **variables: str) -> Facts:
    found = {name: Package(version="2.20.2", imported=True) for name in packages}
    environment = Environment(variables=variables, debug_switches={})
    return replace(SILENT, software=Software(packages=found), environment=environment)


def said(facts: Facts) -> str | None:
    finding = finding_of("ENV006", facts)
    return finding and finding.severity


@each_switch
def test_each_switch_is_found_and_switched_off(switch: Switch) -> None:
    assert allowed([(switch.name, "1")]), "it is on the list of variables that are read"
    value = ON.get(switch.name, "0" if switch.values == "0" else "1")
    finding = finding_of("ENV006", with_variables(**COMPANIONS, **{switch.name: value}))
    assert finding is not None
    assert finding.severity == ("warning" if switch.each_step else "info")
    assert finding.title == f"1 debug switch is on: {switch.name}={value}"
    assert switch.cost in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.code == f"unset {switch.name}"
    for off in (*OFF, "False", "OFF"):
        if off != switch.values:
            assert said(with_variables(**COMPANIONS, **{switch.name: off})) is None, off


@pytest.mark.parametrize(
    ("variable", "silent"),
    [
        ("TORCH_LOGS", ("recompiles,graph_breaks", "perf_hints", "-dynamo", "dynamo,inductor", "+help")),
        ("TORCH_DISTRIBUTED_DEBUG", ("INFO",)),
        ("CUBLASLT_LOG_LEVEL", ("1",)),
        ("CUDNN_LOGLEVEL_DBG", ("1",)),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("1",)),
    ],
)
def test_what_is_healthy_to_leave_on(variable: str, silent: tuple[str, ...]) -> None:
    for value in silent:
        assert said(with_variables(**COMPANIONS, **{variable: value})) is None, value
    for value in ("recompiles, +inductor", "all", "all,graph_breaks"):
        assert said(with_variables(TORCH_LOGS=value)) == "info"


def test_switches_without_what_they_need() -> None:
    assert said(with_variables(NVTE_DEBUG="1")) is None, "level 0 logs nothing"
    assert said(with_variables(TORCH_DISTRIBUTED_DEBUG="DETAIL", WORLD_SIZE="1")) is None
    assert said(with_variables((), NVTE_UNFUSED_FP8_UPDATE="1")) is None


@pytest.mark.slow
def test_full_determinism_of_transformers_and_anomaly_detection() -> None:
    program = """
from transformers import enable_full_determinism
enable_full_determinism(0)
torch.autograd.set_detect_anomaly(True)
"""
    finding = finding_of("ENV006", facts_of(program))
    assert finding is not None
    assert len(finding.evidence["switches"]) == 3  # type: ignore[arg-type]
    assert "filled with NaN first" in finding.explanation
    assert finding.treatment is not None
    _, *calls = finding.treatment.code.splitlines()
    undone = (
        "torch.autograd.set_detect_anomaly(True)",
        "torch.use_deterministic_algorithms(True)",
        *calls,
        "",
    )
    assert said(facts_of("\n".join(undone))) is None
    unfilled = program + "torch.utils.deterministic.fill_uninitialized_memory = False\n"
    finding = finding_of("ENV006", facts_of(unfilled))
    assert finding is not None
    assert "filled" not in finding.explanation


def test_nvdlfw_inspect_counts_once_it_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvdlfw_inspect 0.2.2, whose ``api.DEBUG_MANAGER`` is None until ``initialize``."""
    api = ModuleType("nvdlfw_inspect.api")
    monkeypatch.setitem(sys.modules, "nvdlfw_inspect.api", api)
    target = Target(kind="environment", name="environment")
    vars(api)["DEBUG_MANAGER"] = None
    assert said(examine_surroundings(target)) is None
    vars(api)["DEBUG_MANAGER"] = object()
    assert said(examine_surroundings(target)) == "warning"
