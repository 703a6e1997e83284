"""One real job on the CPU, profiled as it is, once for all checks of this area; and what it is compared
with."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.facts import Arm, Facts
from tests.checks.arms import ran
from tests.checks.models import Decoder, float8
from tests.checks.trials import tried


class Head(nn.Linear):
    """Multiplies in its own dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def job(head: torch.dtype, *, fused: bool) -> Facts:
    """Blocks in FP8 and a wide head, with its trial, relied upon."""
    torch.manual_seed(0)
    model = float8(Decoder())
    model.head = Head(64, 16384, bias=False, dtype=head)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=False)
    return relied_upon(tried(model, torch.randn(32, 64, dtype=torch.bfloat16), "as_is", optimizer=optimizer))


def relied_upon(facts: Facts) -> Facts:
    """The trial of one arm, said to be of a GPU: checks of the step do not judge a CPU, whose FP8 is
    emulated.

    The step takes what its profile says, and the profile is relied upon: a machine that does other things
    meanwhile is no matter here.
    """
    (arm,) = facts.trial.arms
    found = arm.breakdown
    assert found, arm.reason
    families = {family: found.scale * ms for family, ms in found.families_ms.items()}
    # Some CPUs emulate an FP8 GEMM in 100 ms, which leaves all else within the noise of a step.
    families["gemm_fp8"] = min(families["gemm_fp8"], families["cast"])
    busy_ms = sum(families.values())
    parts = replace(found, families_ms=families, busy_ms=busy_ms, idle_ms=0.0, scale=1.0, reliable=True)
    return with_arms(facts, ran("as_is", busy_ms, breakdown=parts, graphs_run=arm.graphs_run))


def with_arms(facts: Facts, *arms: Arm) -> Facts:
    return replace(facts, trial=replace(facts.trial, device="cuda", gpu="a CPU", arms=arms))


def families_of(facts: Facts) -> dict[str, float]:
    """Families of the step as it is, in ms."""
    return dict(facts.trial.arms[0].breakdown.families_ms)


@pytest.fixture(scope="package")
def sick() -> Facts:
    """A head in fp32, and AdamW in a loop over the parameters."""
    return job(torch.float32, fused=False)


@pytest.fixture(scope="package")
def treated() -> Facts:
    """A head in BF16, and fused AdamW."""
    return job(torch.bfloat16, fused=True)
