"""ENV006 on switches that are really set in a process, and silent on the values that switch nothing on."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.checks.environment.debug_switch_on import FIRES, OFF, SILENT, SWITCHES, Switch
from fp8doctor.examine import examine_surroundings
from fp8doctor.examine.environment import allowed
from fp8doctor.facts import Environment, Facts, Package, Software, Target
from tests.checks.environment.live import facts_of, finding_of, outcome_of

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


def with_variables(**variables: str) -> Facts:
    te = Software(packages={"transformer_engine": Package(version="2.20.2", imported=True)})
    return msgspec.structs.replace(
        SILENT, software=te, environment=Environment(variables=variables, debug_switches={})
    )


def value_of(switch: Switch) -> str:
    return ON.get(switch.name, "0" if switch.values == "0" else "1")


@each_switch
def test_each_switch_is_found_and_unsetting_it_makes_it_silent(switch: Switch) -> None:
    finding = finding_of("ENV006", with_variables(**COMPANIONS, **{switch.name: value_of(switch)}))
    assert finding is not None
    assert finding.severity == ("warning" if switch.each_step else "info")
    assert finding.title == f"1 debug switch is on: {switch.name}={value_of(switch)}"
    assert switch.cost in finding.explanation
    assert finding.treatment is not None
    assert finding.treatment.code == f"unset {switch.name}"
    assert outcome_of("ENV006", with_variables(**COMPANIONS)).outcome == "healthy"


@each_switch
def test_values_that_switch_nothing_on(switch: Switch) -> None:
    for value in (*OFF, "False", "OFF"):
        if value != switch.values:
            assert (
                outcome_of("ENV006", with_variables(**COMPANIONS, **{switch.name: value})).outcome
                == "healthy"
            ), value


@each_switch
def test_each_switch_is_on_the_list_of_what_is_read(switch: Switch) -> None:
    assert allowed([(switch.name, "1")])


@pytest.mark.parametrize(
    ("variable", "healthy"),
    [
        ("TORCH_LOGS", ("recompiles,graph_breaks", "perf_hints", "-dynamo", "dynamo,inductor", "+help")),
        ("TORCH_DISTRIBUTED_DEBUG", ("INFO",)),
        ("CUBLASLT_LOG_LEVEL", ("1",)),
        ("CUDNN_LOGLEVEL_DBG", ("1",)),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("1",)),
    ],
)
def test_what_is_healthy_to_leave_on(variable: str, healthy: tuple[str, ...]) -> None:
    for value in healthy:
        assert outcome_of("ENV006", with_variables(**COMPANIONS, **{variable: value})).outcome == "healthy", (
            value
        )


@pytest.mark.parametrize("value", ["+dynamo", "recompiles, +inductor", "all", "all,graph_breaks"])
def test_floods_of_the_log(value: str) -> None:
    finding = finding_of("ENV006", with_variables(TORCH_LOGS=value))
    assert finding is not None
    assert finding.severity == "info"


def test_switches_without_what_they_need() -> None:
    assert outcome_of("ENV006", with_variables(NVTE_DEBUG="1")).outcome == "healthy", "level 0 logs nothing"
    assert (
        outcome_of("ENV006", with_variables(TORCH_DISTRIBUTED_DEBUG="DETAIL", WORLD_SIZE="1")).outcome
        == "healthy"
    )
    without_te = msgspec.structs.replace(
        with_variables(NVTE_UNFUSED_FP8_UPDATE="1"), software=Software(packages={})
    )
    assert outcome_of("ENV006", without_te).outcome == "healthy"


@pytest.mark.slow
def test_full_determinism_of_transformers_and_anomaly_detection() -> None:
    program = """
from transformers import enable_full_determinism
enable_full_determinism(0)
torch.autograd.set_detect_anomaly(True)
"""
    finding = finding_of("ENV006", facts_of(program))
    assert finding is not None
    assert finding.severity == "warning"
    assert finding.evidence["switches"] == (
        "CUDA_LAUNCH_BLOCKING=1",
        "autograd anomaly detection",
        "deterministic algorithms",
    )
    assert "every new tensor is filled with NaN first" in finding.explanation
    assert finding.treatment is not None
    first, *calls = finding.treatment.code.splitlines()
    assert first == "# in the shell: unset CUDA_LAUNCH_BLOCKING"
    undone = facts_of(
        "\n".join(
            (
                "torch.autograd.set_detect_anomaly(True)",
                "torch.use_deterministic_algorithms(True)",
                *calls,
                "",
            )
        )
    )
    assert outcome_of("ENV006", undone).outcome == "healthy"


def test_filling_of_memory_is_told_apart() -> None:
    switches = {"deterministic_algorithms": True, "fill_uninitialized_memory": False}
    finding = finding_of(
        "ENV006",
        msgspec.structs.replace(FIRES, environment=Environment(variables={}, debug_switches=switches)),
    )
    assert finding is not None
    assert "filled" not in finding.explanation


def test_nvdlfw_inspect_counts_once_it_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvdlfw_inspect 0.2.2, whose ``api.DEBUG_MANAGER`` is None until ``initialize``."""
    import sys
    from types import ModuleType

    api = ModuleType("nvdlfw_inspect.api")
    monkeypatch.setitem(sys.modules, "nvdlfw_inspect.api", api)
    target = Target(kind="environment", name="environment")
    vars(api)["DEBUG_MANAGER"] = None
    assert outcome_of("ENV006", examine_surroundings(target)).outcome == "healthy"
    vars(api)["DEBUG_MANAGER"] = object()
    finding = finding_of("ENV006", examine_surroundings(target))
    assert finding is not None
    assert finding.evidence["switches"] == ("nvdlfw_inspect",)


def test_an_ordinary_process_is_healthy() -> None:
    assert outcome_of("ENV006", facts_of("")).outcome == "healthy"
