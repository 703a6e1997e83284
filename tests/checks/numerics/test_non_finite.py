"""NUM001 on real Float8Linears, one of which overflows, in a real trial on the CPU."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.checks.numerics.non_finite import FIRES
from fp8doctor.facts import Facts, Workload, recorded
from tests.checks.arms import failed, ran
from tests.checks.rules import found_by, outcome_of
from tests.checks.trials import tried

NAN = "non-finite"


class Overflowing(Float8Linear):
    """A stand-in for a cast that does not saturate, as torch's own up to 2.11: what is too large for E5M2
    becomes infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = (x.float() * 1e6).to(torch.float8_e5m2)
        return super().forward((cast.float() / 1e6).to(x.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("overflows", [True, False], ids=["FP8 alone", "BF16 too"])
def test_a_real_step(overflows: bool) -> None:
    model: Any = convert_to_float8_training(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).bfloat16())
    if overflows:
        model[1].__class__ = Overflowing
    batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    facts = tried(model, batch if overflows else batch * torch.inf, "as_is", "bf16")
    finding = found_by(NAN, facts)
    assert (finding.severity, finding.breaks, finding.treatment) == ("error", "not_finite", None)
    assert finding.evidence["non_finite"] == ("loss", "gradients")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def with_arms(*arms: object, **linears: Any) -> Facts:
    """The example's facts with these variants, and these fields of its layers."""
    layers = tuple(replace(each, **linears) for each in FIRES.network.linears)
    network, trial = replace(FIRES.network, linears=layers), replace(FIRES.trial, arms=arms)
    return replace(FIRES, trial=trial, network=network)


FINITE = (ran("as_is", non_finite=()), ran("bf16", non_finite=()))


def test_only_a_step_of_the_user_breaks_the_job() -> None:
    later = found_by(NAN, with_arms(*FINITE, ran("prescribed", non_finite=("loss",))))
    assert (later.severity, recorded(later, "breaks"), later.treatment) == ("error", False, None)
    assert later.evidence["arms"] == ("prescribed",)
    assert outcome_of(NAN, with_arms(*FINITE)) == "silent"


def test_bf16_clears_fp8_or_without_it_there_is_no_answer() -> None:
    """Any BF16 that is not finite. What is known of each step: `tests/analysis/test_finite_steps.py`."""
    bf16 = (ran("bf16", non_finite=()), ran("bf16_compiled", non_finite=("loss",)))
    random = with_arms(ran("as_is", non_finite=("gradients",)), *bf16)
    finding = found_by(NAN, random)
    assert (finding.severity, recorded(finding, "breaks"), finding.treatment) == ("warning", False, None)
    given = found_by(NAN, replace(random, workload=Workload(batch_source="given")))
    assert (given.severity, given.breaks) == ("error", "not_finite")
    assert outcome_of(NAN, with_arms(failed("as_is", "it raises"), *bf16)) == "not_applicable"


@pytest.mark.parametrize(
    ("linears", "fix"),
    [
        ({"stack": "transformer_engine", "recipe": "delayed"}, "te-current"),
        ({"recipe": "rowwise", "compiled": "block"}, "round-as-eager"),
        ({"recipe": "rowwise", "compiled": None}, None),
    ],
)
def test_what_is_known_of_the_recipe_is_the_fix(linears: dict[str, Any], fix: str | None) -> None:
    arms = (ran("as_is", non_finite=("loss",)), ran("bf16", non_finite=()))
    treatment = found_by(NAN, with_arms(*arms, **linears)).treatment
    assert (treatment and treatment.name) == fix
    assert fix != "te-current" or fix in TREATMENTS
    assert hasattr(torch._inductor.config, "emulate_precision_casts")
