"""How a job without FP8 begins: in BF16 where it is in fp32, in FP8 where that pays, compiled."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from fp8doctor.analysis.arms import Variant, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, covered_by_blocks, own_compile
from fp8doctor.analysis.conversion import convert
from fp8doctor.analysis.fp8_request import asks_for_torchao, fp8_was_asked_for, runs_in_fp32
from fp8doctor.analysis.layers import to_convert, waits_for_linears
from fp8doctor.analysis.modelled_fix import modelled_steps
from fp8doctor.analysis.modelled_speedup import TAKES_NONE, modelled_speedup
from fp8doctor.analysis.own_step import compiles_any
from fp8doctor.analysis.treatment_table import AUTOCAST_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.answer.verdict import fault_of, without_fp8
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import Expected, changes_fp8, compiles
from fp8doctor.diagnosis.treatments import CONV1D, compiled_as, describe, treatments_of
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName
from fp8doctor.finding import Treatment
from fp8doctor.recipes import TORCHAO
from fp8doctor.wording import in_times


def start_timed(end: Variant, view: TrialView) -> Iterator[Step]:
    """Write the steps that compile a model without FP8, or convert and compile it."""
    facts, now, bf16 = view.facts, view.as_is, view.bf16
    assert now is not None
    assert bf16 is not None
    if end.in_fp8:
        title = f"With all fixes a step takes {end.ms.value:,.1f} ms, the best BF16 {bf16.ms.value:,.1f} ms"
        for each in treatments_of(facts, end.name, end.changes):
            yield unasked(title, each)
        return
    form = end.name if end.name in BF16_BASELINES else end.arm.get("base") or ""
    if form in BF16_BASELINES and not (form == ArmName.BF16_COMPILED and own_compile(facts) == "blocks"):
        title = f"Compiled, a step takes {end.ms.value:,.1f} ms instead of {now.ms.value:,.1f} ms"
        treatment = compile_treatment(facts, list(facts.network.linears))
        code = "\n".join(compiled_as(form, facts))
        what = _compile_what(facts, by_block=form != ArmName.BF16_WHOLE)
        yield unasked(title, replace(treatment, summary=what, code=code))


def with_a_start(steps: Sequence[Step], view: TrialView, expected: Expected) -> tuple[Step, ...]:
    """Add what takes a job without FP8 to BF16, to FP8 or to compiled BF16, if nothing of it was timed."""
    facts, fault = view.facts, fault_of(view.facts, expected.findings)
    stops = fault is not None and fault.status != "does_not_fit"
    converts_none = expected.why_not == TAKES_NONE and not any(map(changes_fp8, steps))
    if not stops and converts_none and if_recorded(waits_for_linears, facts):
        return (*steps, unasked("FP8 takes an nn.Linear, and this model has Conv1D in its place", CONV1D))
    if view.on_gpu and view.as_is is not None:
        return tuple(steps)
    compiled = any(map(compiles, steps))
    if uses_fp8(facts):
        return tuple(steps)
    asked = fp8_was_asked_for(facts)
    by_torchao = bool(asked and asks_for_torchao(facts.variables()))
    begins = any(by_torchao or TORCHAO.name in step.treatment.code for step in filter(changes_fp8, steps))
    eager = [each for each in to_convert(facts) if each.compiled is None] if begins and not compiled else []
    if eager:
        title = "FP8 of torchao is slower than BF16 until it is compiled"
        return (*steps, unasked(title, compile_treatment(facts, eager)))
    _, may_run_in_fp8 = without_fp8(facts)
    if stops or may_run_in_fp8:
        return tuple(steps)
    in_fp32 = []
    stored = any(each.use == "storage" for each in facts.network.linears)
    added = [] if stored or any(map(changes_fp8, steps)) else [*_converting(expected)]
    leaves = any(step.treatment.name == AUTOCAST_BF16 for step in steps)
    if not asked and not leaves and if_recorded(runs_in_fp32, facts):
        treatment = describe(AUTOCAST_BF16, facts)  # estimates are of BF16; the optimizer keeps fp32 weights
        assert treatment is not None
        in_fp32 = [unasked("Its matmuls are in fp32: its weights are, and no autocast is on", treatment)]
    last = None if asked or added or stored else if_recorded(_compiling, facts)
    return (*in_fp32, *added, *steps, *filter(None, [last]))


def _converting(expected: Expected) -> Iterator[Step]:
    """Convert a model that surely gains from FP8 by its estimate, then compile it."""
    facts, expects = expected.facts, expected.now
    if expects is None or not expects.wins:
        return
    layers = to_convert(facts)
    eager = [linear for linear in layers if linear.compiled is None]
    recipe, names = next(iter(expects.recipes)), {each.name for each in layers}
    after = f" {expects.after}" if expects.after else ""
    title = (
        f"FP8 ({recipe}, compiled) would run at {expects.best.value:.2f}x the speed of the best BF16{after} "
        f"(estimated for {expects.gpu})"
    )
    yield unasked(title, convert(facts, recipe, names, before_own=not eager))
    if eager:
        yield unasked(title, compile_treatment(facts, eager))


def _compiling(facts: Facts) -> Step | None:
    """Compile BF16 if that surely gains by the cost model.

    It stays as it is if its host sets the pace: its work at graph breaks is not modelled.
    """
    if compiles_any(facts):
        return None
    fix = replace(compile_treatment(facts, covered_by_blocks(facts)), summary=_compile_what(facts))
    steps = modelled_steps(facts, fix)
    if steps is None or not steps.gains or steps.now.host_ms > steps.now.busy_ms:
        return None
    if modelled_speedup(facts) is None:
        return None
    faster = f"{in_times(steps.speedup)} faster (estimated for {steps.now.gpu})"
    title = f"With the model compiled, a step would be about {faster}"
    return replace(unasked(title, fix), saving_ms=steps.saving)


def _compile_what(facts: Facts, *, by_block: bool = True) -> str:
    return f"compile {'block by block' if facts.network.blocks and by_block else 'the model'}"


def unasked(title: str, treatment: Treatment) -> Step:
    """Make a step that no finding proposed."""
    return Step(code="", mends=(), title=title, treatment=treatment)
