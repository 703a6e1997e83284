"""Which of the job's own step and BF16 is finite: nobody's NaN is put on FP8 that BF16 gives too."""

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.own_step import FiniteSteps, finite_steps
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts import Arm, Facts, NotFinite, Observation, Trial
from tests.checks.arms import ran
from tests.facts_of import DECODER_468M

BOTH = ("loss", "gradients")
LATER = NotFinite(step=99, what="gradients", where="")


def job(*, fp8: bool = True, losses: tuple[float | None, ...] = (), **arms: tuple[str, ...] | None) -> Facts:
    facts = DECODER_468M
    if not fp8:
        plain = tuple(replace(each, use="none") for each in facts.network.linears)
        facts = replace(facts, network=replace(facts.network, linears=plain))
    if losses:
        facts = replace(facts, observed=Observation(losses=losses))
    timed = tuple(Arm(name=name, tried=True, non_finite=found) for name, found in arms.items())
    return replace(facts, trial=Trial(arms=timed)) if arms else facts


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (job(), (None, None)),
        (job(as_is=None, bf16=None), (None, None)),
        (job(as_is=(), bf16=()), ((), True)),
        (job(as_is=BOTH, bf16=()), (BOTH, True)),
        (job(as_is=BOTH, bf16=(), bf16_compiled=("loss",)), (BOTH, False)),
        (job(losses=(1.0, None)), (("loss",), None)),
        (job(losses=(1.0, None), as_is=("gradients",), bf16=()), (BOTH, True)),
        (job(fp8=False, losses=(1.0, 0.9)), ((), True)),
        (job(fp8=False, losses=(1.0, None)), (("loss",), False)),
        (replace(job(losses=(1.0, 0.9)), not_finite=LATER), (("gradients",), None)),
    ],
)  # fmt: skip
def test_what_was_seen_is_told_of_the_step_that_it_was_seen_in(
    facts: Facts, expected: tuple[tuple[str, ...] | None, bool | None]
) -> None:
    assert finite_steps(facts) == FiniteSteps(*expected)


@pytest.mark.parametrize(("of_bf16", "best"), [((), "compiled"), (("loss",), "broken")])
def test_the_fastest_fp8_is_one_without_nan_unless_bf16_has_it_too(
    of_bf16: tuple[str, ...], best: str
) -> None:
    times = {"as_is": 90.0, "bf16": 60.0, "compiled": 50.0, "broken": 40.0}
    found = {"broken": BOTH, "bf16": of_bf16}
    arms = tuple(
        ran(name, ms, treatments=(name,), non_finite=found.get(name, ())) for name, ms in times.items()
    )
    fastest = TrialView(replace(DECODER_468M, trial=Trial(arms=arms))).fp8
    assert fastest is not None
    assert fastest.name == best
