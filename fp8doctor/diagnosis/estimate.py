"""The estimate of a job, as far as its findings let the cost model speak of it: as it is, and with a plan."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from fp8doctor import registry
from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.layers import to_convert
from fp8doctor.analysis.modelled_speedup import Estimate, estimate
from fp8doctor.analysis.treatment_table import OPTIMIZER_LAST, STAY_IN_BF16, after, traits
from fp8doctor.analysis.watched import watched_run
from fp8doctor.answer.verdict import invalidates, why_not_engaged
from fp8doctor.cost.matmuls import NoNumbers
from fp8doctor.cost.step_cost import with_linears_compiled
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts, Unrecorded, path_of
from fp8doctor.finding import Finding, Treatment


class Expected:
    """What the cost model expects of a job, as far as all of its findings let it: of each step asked once."""

    def __init__(self, facts: Facts, findings: Sequence[Finding]) -> None:
        self.facts, self.findings = facts, findings

    @cached_property
    def _tried(self) -> tuple[Estimate | None, str]:
        try:
            return _expected(self.facts, self.findings), ""
        except NoNumbers as missing:
            return None, str(missing)
        except Unrecorded as missing:
            return None, f"{path_of(missing)} was not recorded"

    @property
    def now(self) -> Estimate | None:
        """The speedup of the job's FP8, or of its conversion; None if that is unknown."""
        return self._tried[0]

    @property
    def why_not(self) -> str:
        """Say why there is none; empty if there is."""
        return self._tried[1]

    def planned(self, steps: Sequence[Step]) -> Estimate | None:
        """Model the step with the tokens, the recipe and the layers in BF16 that the plan asks for, or None.

        Also None if the plan brings FP8 that it does not compile: a modelled conversion has compiled layers.
        """
        # what an estimate calls best is compiled and converted already
        changes = [step.treatment for step in steps if not (compiles(step) or converts(step))]
        try:
            found = _expected(self.facts, self.findings, changes) if changes else self.now
        except (NoNumbers, Unrecorded):
            return None
        if found is None or found.loses or not found.recipes or not any(map(changes_fp8, steps)):
            return found
        is_compiled = all(each.compiled is not None for each in to_convert(self.facts))
        return found if is_compiled or any(map(compiles, steps)) else None


def _expected(facts: Facts, findings: Iterable[Finding], fixes: Iterable[Treatment] = ()) -> Estimate:
    """Model the step, or that with its fix if a finding says that it is not what it seems.

    Raises `NoNumbers`.
    """
    if facts.get("network.fp8_calls") and not uses_fp8(facts):
        raise NoNumbers("FP8 is in functions, outside of layers")
    facts, invalid = as_it_runs(facts, findings)
    doubts = [each.treatment for each in invalid]
    run, job, fixed = watched_run(facts), after(facts, fixes), bool(doubts)
    if job is facts:
        found = estimate(facts, fixed=fixed, run=run)
    else:
        found = estimate(job, fixed=fixed, shared_ms=run.shared_ms if run else 0.0)
    left = {each.name for each in job.network.fp8}
    known = {each for each in doubts if each and each.layers and left.isdisjoint(each.layers)}
    if any(each is None or (traits(each.name).other_layers and each not in known) for each in doubts):
        raise NoNumbers("the fix changes the FP8 layers or their shapes")
    return found


def as_it_runs(facts: Facts, findings: Iterable[Finding]) -> tuple[Facts, list[Finding]]:
    """Leave layers uncompiled whose compilation has no effect, and list what else is not as it seems."""
    of, invalid = len(facts.network.fp8), list(filter(invalidates, findings))
    idle = [each for each in invalid if of and each.evidence.get("idle_fp8_linears") == of]
    runs = with_linears_compiled(facts, yes=False) if idle else facts
    return runs, [each for each in invalid if each not in idle]


def why_no_estimate(facts: Facts, findings: Sequence[Finding]) -> str:
    """Say why there is no estimate of a job's FP8, or why it has none."""
    reason = Expected(facts, findings).why_not
    return why_not_engaged(facts) or f"No estimate{reason and f': {reason}'}."


def stops_first(facts: Facts, findings: Iterable[Finding]) -> bool:
    """Return whether the job ends before a step, so that nothing is faster than it is now."""
    errors = (each.treatment for each in findings if each.severity == "error")
    return any(each and traits(each.name).to_start for each in errors) and not uses_fp8(facts)


def stays_in_bf16(steps: Iterable[Step]) -> bool:
    """Return whether the plan leaves FP8 off."""
    return any(step.treatment.name == STAY_IN_BF16 for step in steps)


def begins_fp8(steps: Sequence[Step], planned: Estimate) -> bool:
    """Return whether a model without FP8 trains in it with the plan."""
    return any(map(converts, steps)) or (not planned.loses and any(map(changes_fp8, steps)))


def compiles(step: Step) -> bool:
    return traits(step.treatment.name).compiles or ".compile(" in step.treatment.code


def converts(step: Step) -> bool:
    return traits(step.treatment.name).family == "convert"


def is_modelled(step: Step) -> bool:
    """Return whether the model of a fixed FP8 step holds what this step changes."""
    return traits(step.treatment.name).then is not None or changes_fp8(step)


def changes_fp8(step: Step) -> bool:
    """Return whether it changes how FP8 runs: before that, no time decides about FP8."""
    return any(check.changes_fp8 for check in fixed_checks(step))


def changes_fp8_alone(step: Step) -> bool:
    """Return whether nothing is left for it to fix once FP8 is off."""
    stays = step.treatment.name == OPTIMIZER_LAST or any(each.stays_in_bf16 for each in fixed_checks(step))
    return changes_fp8(step) and not stays


def fixed_checks(step: Step) -> list[registry.Check]:
    return [check for check in registry.discover() if check.name in step.names]
