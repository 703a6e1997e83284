"""The steps that take a BF16 model to compiled BF16, or to FP8: as a trial timed it, or as estimated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, compiles_each_block
from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.analysis.known_form import runs_in_fp32
from fp8doctor.analysis.layers import may_be_taken, would_be_converted
from fp8doctor.analysis.memory_fit import step_now
from fp8doctor.analysis.modelled_speedup import (
    OFF,
    OFF_IN_BALANCE,
    is_in_balance,
    modelled_conversion,
    to_convert,
)
from fp8doctor.analysis.module_names import before_wrapping, names_in_python
from fp8doctor.analysis.plan_end import PlanEnd
from fp8doctor.analysis.treatment_table import AUTOCAST_BF16, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.answer.faults import fault_of, is_unclear
from fp8doctor.cost.step_cost import in_bf16, modelled_step, with_linears_compiled
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.expected_verdict import IN_FP32
from fp8doctor.diagnosis.leaving_fp8 import compiled_as
from fp8doctor.diagnosis.treatments import autocast_bf16, compile_blocks, converting, describe
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, keeps_users_compilation, recipe_of
from fp8doctor.finding import Finding, Saving, Treatment
from fp8doctor.recipes import RECIPES, default_of
from fp8doctor.wording import in_times


def of_bf16(held: Sequence[Step], view: TrialView, findings: Sequence[Finding]) -> tuple[Step, ...]:
    """Add what takes a job without FP8 to BF16, to FP8 or to compiled BF16, if nothing of it was timed."""
    facts = view.facts
    timed = view.on_gpu and view.as_is is not None
    fault = fault_of(facts, findings)
    stops = fault is not None and fault.status != "does_not_fit"
    if timed or uses_fp8(facts) or stops or is_unclear(facts):
        return tuple(held)
    return (*leaving_fp32(held, facts), *expected(facts), *held, *compiling(facts))


def leaving_fp32(held: Iterable[Step], facts: Facts) -> tuple[Step, ...]:
    """Bring a model without FP8 to BF16, which every estimate is of; the optimizer keeps fp32 weights.

    A trial times that by itself, and a check may have proposed it.
    """
    if fp8_was_asked_for(facts) or not if_recorded(runs_in_fp32, facts):
        return ()
    if any(step.treatment.name == AUTOCAST_BF16 for step in held):
        return ()
    treatment = autocast_bf16(facts)
    if facts.get("target.kind") == "file":
        code = f"{treatment.code}\n# if your script does that: autocast = torch.bfloat16 in the model file"
        treatment = msgspec.structs.replace(treatment, code=code)
    return (untold(IN_FP32, treatment),)


def expected(facts: Facts) -> tuple[Step, ...]:
    """Convert a model that surely gains from FP8 by its estimate, then compile it."""
    expects = if_recorded(modelled_conversion, facts)
    if expects is None or not expects.wins:
        return ()
    layers = to_convert(facts)
    eager = [linear for linear in layers if linear.compiled is None]
    names = {each.name for each in layers}
    converts = convert(facts, next(iter(expects.recipes)), names, before_own=not eager)
    compiles = [compile_treatment(facts, eager)] if eager else []
    title = expects.sentence.rstrip(".")
    return tuple(untold(title, each) for each in (converts, *compiles))


def compiling(facts: Facts) -> tuple[Step, ...]:
    """Compile a BF16 model that is not, if its estimate has no gain from FP8 but one from that.

    Beyond the model's error, and not if the host sets the pace: its work at graph breaks is not modelled.
    """
    if if_recorded(modelled_conversion, facts) is None or expected(facts):
        return ()
    step = None if fp8_was_asked_for(facts) else if_recorded(_compiling, facts)
    return (step,) if step else ()


def _compiling(facts: Facts) -> Step | None:
    linears, plain = facts.network.linears, in_bf16(facts)
    now, later = modelled_step(plain), modelled_step(with_linears_compiled(plain, yes=True))
    if now is None or later is None or any(each.compiled is not None for each in linears):
        return None
    off = OFF_IN_BALANCE if is_in_balance(now) else OFF
    faster = now.step_ms / later.step_ms
    if now.host_ms > now.busy_ms or faster - 1 < off:
        return None
    than = f"{in_times(faster)} faster than {step_now(facts)}"
    title = f"Compiled, BF16 would be about {than} (estimated for {now.gpu})"
    treatment = compile_blocks(facts)
    saves = [now.step_ms * (1 - 1 / max(faster / (1 + sign * off), 1)) for sign in (1, -1)]
    saving = Saving(low=saves[0], high=saves[1], basis="modelled", gpu=now.gpu)
    step = untold(title, msgspec.structs.replace(treatment, summary=_compile_what(facts)))
    return msgspec.structs.replace(step, saving_ms=saving)


def _compile_what(facts: Facts) -> str:
    return f"compile {'block by block' if facts.network.blocks else 'the model'}"


def starting(end: PlanEnd, view: TrialView) -> list[Step]:
    """Write the steps that compile a model without FP8, or convert and compile it."""
    facts, now, bf16 = view.facts, view.as_is, view.bf16
    assert now is not None
    assert bf16 is not None
    if end.in_bf16:
        if end.arm.name not in BF16_BASELINES:
            return []
        title = f"Compiled, a step takes {end.arm.step_ms:,.1f} ms instead of {now.step_ms:,.1f} ms"
        treatment = compile_treatment(facts, list(facts.network.linears))
        code = "\n".join(compiled_as(end.arm, facts))
        treatment = msgspec.structs.replace(treatment, summary=_compile_what(facts), code=code)
        return [untold(title, treatment)]
    title = f"With all fixes a step takes {end.arm.step_ms:,.1f} ms, the best BF16 {bf16.step_ms:,.1f} ms"
    first, *more = treatments(facts, end.arm.name, end.changes)
    return [untold(title, first), *(untold(f"Timed with {first.name}", each) for each in more)]


def untold(title: str, treatment: Treatment) -> Step:
    """Make a step that no finding proposed."""
    return Step(code="", mends=(), title=title, treatment=treatment)


def treatments(facts: Facts, fp8: str, names: tuple[str, ...]) -> Iterator[Treatment]:
    """Describe the steps of the variant ``fp8``, the conversion first."""
    for name in sorted(names, key=lambda each: traits(each).family != "convert"):
        if traits(name).family == "convert":
            layers = {each.name for each in facts.network.linears if would_be_converted(each)}
            yield convert(facts, recipe_of(fp8), layers, before_own=_is_compiled_by_user(facts, fp8))
        elif traits(name).compiles:
            yield compiled(facts)
        elif described := describe(name, facts):
            yield described


def _is_compiled_by_user(facts: Facts, fp8: str) -> bool:
    return keeps_users_compilation(fp8) or compiles_each_block(facts)


def convert(facts: Facts, recipe: str, layers: Collection[str], *, before_own: bool) -> Treatment:
    """Convert these layers with a recipe of torchao, before the job wraps them and compiles them itself."""
    left = [each.name for each in facts.linears() if may_be_taken(each) and each.name not in layers]
    sets = names_in_python(before_wrapping(left, facts.linears()))
    made = RECIPES[("torchao", recipe)]
    config = "" if made is default_of("torchao") else made.config
    distributed = facts.get("training.distributed")
    wrapper = distributed.get("wrapper") if distributed else None
    later = [f"{wrapper} and the optimizer"] if wrapper else []
    later += ["your own torch.compile, which stays as it is"] if before_own else []
    own = [f"# before {', and before '.join(later)}"] if later else []
    return Treatment(
        name=f"convert-{recipe}",
        summary=f"convert to FP8 ({recipe})",
        code="\n".join([*own, converting(facts, sets, config=config)]),
    )


def compiled(facts: Facts) -> Treatment:
    """Compile what was converted, in place of what the user compiles himself."""
    found = compile_treatment(facts, [each for each in facts.network.linears if would_be_converted(each)])
    otherwise = any(keeps_users_compilation(each.name) for each in facts.trial.arms)
    note = "# leave out your own torch.compile\n" if otherwise else ""
    return Treatment(name=found.name, summary=found.summary, code=note + found.code)
