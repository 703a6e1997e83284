"""STP007: real steps on the CPU, with AdamW in a loop and fused."""

import pytest
from msgspec.structs import replace

from fp8doctor.facts import Arm, Facts, KernelGroup
from tests.checks.rules import finding_of, found_by, outcome_of
from tests.checks.step.conftest import families_of, with_arms
from tests.checks.step.profiled import profiled, replaced

pytestmark = pytest.mark.slow

OPTIMIZER = "optimizer-bound"

FOREACH, FUSED = (
    KernelGroup(name="multi_tensor_apply_kernel", family="optimizer", operator=of, count=96, time_ms=9.0)
    for of in ("aten::_foreach_lerp_", "aten::_fused_adamw_")
)


def taking(ms: float, *groups: KernelGroup) -> Arm:
    return replaced(profiled("as_is", 100.0, gemm_fp8=80.0, optimizer=ms), groups=groups)


def test_a_loop_over_the_parameters_and_the_fused_form(sick: Facts, treated: Facts) -> None:
    finding = found_by(OPTIMIZER, sick)
    assert finding.evidence["optimizer_ms"] == pytest.approx(families_of(sick)["optimizer"])
    assert "fused=True" in finding.treatment.code
    real = treated.trial.arms[0].breakdown
    large = replaced(treated.trial.arms[0], families_ms={**real.families_ms, "optimizer": real.busy_ms})
    assert outcome_of(OPTIMIZER, with_arms(treated, large)) == "silent"


@pytest.mark.parametrize(
    ("arm", "fires"),
    [(taking(9.0, FOREACH), True), (taking(9.0, FUSED), False), (taking(4.9, FOREACH), False)],
    ids=["foreach", "fused", "a small share"],
)
def test_kernels_tell(sick: Facts, arm: Arm, fires: bool) -> None:
    facts = with_arms(sick, arm)
    assert (finding_of(OPTIMIZER, facts) is not None) is fires
    for other in ("bitsandbytes.optim.adamw.AdamW8bit", "someone.AdamW", "torch.optim.rmsprop.RMSprop"):
        training = replace(facts.training, optimizer=other)
        assert finding_of(OPTIMIZER, replace(facts, training=training)) is None, "it has no fused form"
    linears = tuple(replace(each, use="none") for each in facts.network.linears)
    in_bf16 = finding_of(OPTIMIZER, replace(facts, network=replace(facts.network, linears=linears)))
    assert (in_bf16 and in_bf16.severity) == ("info" if fires else None)
