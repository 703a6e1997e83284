"""ENV006 on switches that are really set in a process, and silent on the values that switch nothing on."""

import pytest
from msgspec.structs import replace

from fp8doctor.checks.environment.debug_switch_on import OFF, SILENT, SWITCHES, Switch
from fp8doctor.examine.environment import allowed
from fp8doctor.facts import Distributed, Environment, Facts, Package, Software, Training
from tests.checks.distributed.sharded import blocks, processes, shard
from tests.checks.rules import Look, finding_of, fix_of, found_by
from tests.programs import facts_of

SWITCH = "debug-switch-on"
BOUNDARIES = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "INFO"),
    "CUBLASLT_LOG_LEVEL": ("5", "1"),
    "CUDNN_LOGLEVEL_DBG": ("3", "1"),
    "NVTE_BACKWARD_OVERRIDE": ("dequantized", ""),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", "1"),
    "TORCH_COMPILE_OVERRIDE_BACKENDS": ("0-5:aot_eager", ""),
}
"""A value that switches on, where that is not 1, and one beside it that does not."""


def said(facts: Facts) -> str | None:
    finding = finding_of(SWITCH, facts)
    return finding and finding.severity


def with_variables(engine: str = "transformer_engine", **variables: str) -> Facts:
    software = Software(packages={engine: Package(version="2.20.2", imported=True)})
    environment = Environment(variables={"WORLD_SIZE": "8"} | variables, debug_switches={})
    training = Training(distributed=Distributed(wrapper="FSDP2"))
    return replace(SILENT, software=software, environment=environment, training=training)


@pytest.mark.parametrize("switch", SWITCHES, ids=[switch.name for switch in SWITCHES])
def test_each_switch_is_found_and_switched_off(switch: Switch) -> None:
    assert allowed([(switch.name, "1")]), "it is on the list of variables that are read"
    on, beside = BOUNDARIES.get(switch.name, ("1", ""))
    facts = with_variables(**{switch.name: on})
    assert said(facts) == "warning"
    assert fix_of(SWITCH, facts).code == f"unset {switch.name}"
    for off in {*OFF, "OFF", beside} - {switch.values}:
        assert said(with_variables(**{switch.name: off})) is None, off


def test_who_reads_a_switch() -> None:
    assert said(with_variables(TORCH_DISTRIBUTED_DEBUG="DETAIL", WORLD_SIZE="1")) is None
    assert said(with_variables("torchao", NVTE_UNFUSED_FP8_UPDATE="1")) is None


def test_one_connection_is_for_tensor_parallelism(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with processes(8):
        sharded, whole = look(shard(blocks())), look(blocks())
    assert found_by(SWITCH, sharded).evidence["switches"] == ("CUDA_DEVICE_MAX_CONNECTIONS=1",)
    assert said(whole) is None


@pytest.mark.slow
def test_full_determinism_of_transformers_and_anomaly_detection() -> None:
    program = """
from transformers import enable_full_determinism
enable_full_determinism(0)
torch.autograd.set_detect_anomaly(True)
"""
    facts = facts_of(program)
    assert len(found_by(SWITCH, facts).evidence["switches"]) == 3  # type: ignore[arg-type]
    unset, *calls = fix_of(SWITCH, facts).code.splitlines()
    assert unset == "# in the shell: unset CUDA_LAUNCH_BLOCKING"
    on = "torch.autograd.set_detect_anomaly(True)\ntorch.use_deterministic_algorithms(True)\n"
    assert said(facts_of(on + "\n".join(calls) + "\n")) is None
