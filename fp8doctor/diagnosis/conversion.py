"""The fastest timed conversion of a model without FP8, if it pays on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.analysis.arms import ratio, saved_ms
from fp8doctor.analysis.compile_coverage import compile_treatment
from fp8doctor.analysis.layers import may_be_taken, would_be_converted
from fp8doctor.analysis.module_names import names_in_python
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import keeps_users_compilation, recipe_of
from fp8doctor.finding import Treatment


def conversion(view: TrialView) -> list[Step]:
    """List the steps to a model's fastest FP8; empty if BF16 may be as fast."""
    facts = view.facts
    if not recorded(facts, "trial") or not recorded(facts, "network") or view.uses_fp8:
        return []
    now, bf16, fp8 = view.as_is, view.bf16, view.fp8
    if facts.trial.device == "cpu" or now is None or bf16 is None or fp8 is None:
        return []
    speedup, saved = ratio(bf16, fp8), saved_ms(now, fp8)
    made_of = fp8.get("treatments", ())
    if not made_of or speedup.low <= 1 or speedup.median < 1 + EVEN or view.fp8_is_noise:
        return []
    title = f"With all fixes a step takes {fp8.step_ms:,.1f} ms, the best BF16 {bf16.step_ms:,.1f} ms"
    saving = view.saving(saved)
    first, *others = treatments(facts, fp8.name, made_of)
    return [
        Step(code="", mends=(), title=title, treatment=first, saving_ms=saving),
        *(Step(code="", mends=(), title=f"Timed with {first.name}", treatment=each) for each in others),
    ]


def treatments(facts: Facts, fp8: str, names: tuple[str, ...]) -> Iterator[Treatment]:
    """Describe the steps of the variant ``fp8``, the conversion first."""
    for name in sorted(names, key=lambda each: traits(each).family != "convert"):
        if traits(name).family == "convert":
            yield convert(facts, name, fp8)
        elif traits(name).compiles:
            yield compiled(facts)
        elif described := describe(name, facts):
            yield described


def convert(facts: Facts, name: str, fp8: str) -> Treatment:
    """Convert what the variant converted, before what the user compiles himself."""
    recipe, linears = recipe_of(fp8), facts.network.linears
    kept = [each.name for each in linears if may_be_taken(each) and not would_be_converted(each)]
    sets = names_in_python(kept)
    lines = [f"keep {'|=' if number else '='} {each}" for number, each in enumerate(sets)]
    arguments = ["model"]
    arguments += [] if recipe == "tensorwise" else [f'config=Float8LinearConfig.from_recipe_name("{recipe}")']
    arguments += ["module_filter_fn=lambda layer, name: name not in keep"] if sets else []
    own = ["# before your own torch.compile, which stays as it is"] if keeps_users_compilation(fp8) else []
    return Treatment(
        name=name,
        summary=f"convert to FP8 ({recipe})",
        code="\n".join([*own, *lines, f"convert_to_float8_training({', '.join(arguments)})"]),
    )


def compiled(facts: Facts) -> Treatment:
    """Compile what was converted, in place of what the user compiles himself."""
    found = compile_treatment(facts, [each for each in facts.network.linears if would_be_converted(each)])
    otherwise = any(keeps_users_compilation(each.name) for each in facts.trial.arms)
    note = "# leave out your own torch.compile\n" if otherwise else ""
    return Treatment(name=found.name, summary=found.summary, code=note + found.code)
