"""The prescription as the trial leaves it: what was timed together, and the last word where FP8 stays slower than BF16."""

from __future__ import annotations

from fp8doctor.cures import STAY_IN_BF16, describe
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Saving, Treatment
from fp8doctor.interval import Interval
from fp8doctor.measured import PRESCRIBED, arm, base_of, saved_ms, stays_in_bf16
from fp8doctor.prescription import Prescription, Step


def as_timed(proposed: Prescription, facts: Facts) -> Prescription:
    """The proposed steps, held to the trial; as they are without one.

    Once a prescription was timed, the steps are what it consists of, beside those that no arm carried out. Where FP8 stays
    slower than BF16 beyond doubt, the last step says so.
    """
    if not recorded(facts.trial):
        return proposed
    steps, saved = _of_the_total(proposed, facts), stays_in_bf16(facts)
    if saved is not None:
        last = _step(STAY_IN_BF16, "FP8 stays slower than BF16 with everything that was tried", saved, facts)
        named = next((step for step in steps if step.treatment.name == STAY_IN_BF16.name), last)
        steps = [*(step for step in steps if step is not named), named]
    return Prescription(steps, facts)


def _of_the_total(proposed: Prescription, facts: Facts) -> list[Step]:
    """The steps without those that were timed and left out of the total, and with what the trial added to it.

    A total that costs time is no total.
    """
    total, as_is = arm(facts.trial, PRESCRIBED), arm(facts.trial, "as_is")
    if total is None or as_is is None:
        return list(proposed)
    if saved_ms(as_is, total).high <= 0:
        return [step for step in proposed if step.treatment.name not in total.treatments]
    timed = {name for each in facts.trial.arms if each.tried and recorded(each.treatments) and base_of(facts.trial, each) for name in each.treatments}
    kept = [step for step in proposed if step.treatment.name in total.treatments or step.treatment.name not in timed]
    named = {step.treatment.name for step in kept}
    return kept + [step for name in total.treatments if name not in named and (step := _found_by_trial(name, facts))]


def _found_by_trial(name: str, facts: Facts) -> Step | None:
    """A treatment that is part of the total and that no finding names, with what it saved alone."""
    treatment = describe(name, facts)
    pairs = ((each, base_of(facts.trial, each)) for each in facts.trial.arms if each.tried and each.treatments == (name,))
    saved = next((saved_ms(base, each) for each, base in pairs if base is not None), None)
    if treatment is None or saved is None:
        return None
    return _step(treatment, f"{name} is faster, timed with all else equal", saved, facts)


def _step(treatment: Treatment, title: str, saved: Interval, facts: Facts) -> Step:
    """A step of the trial's own, which no finding names."""
    saving = Saving(low=saved.low, high=saved.high, basis="measured", gpu=facts.trial.gpu or facts.trial.device.upper())
    return Step(code="", mends=(), title=title, treatment=treatment, saving_ms=saving)
