"""The steps that convert a BF16 model, if the cost model expects FP8 to be faster."""

from __future__ import annotations

from fp8doctor.analysis.compile_coverage import compile_treatment
from fp8doctor.analysis.layers import may_be_taken
from fp8doctor.analysis.modelled_speedup import modelled_conversion, to_convert
from fp8doctor.analysis.module_names import names_in_python
from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.treatments import KEEP_OWN_COMPILE, keep
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.finding import Treatment


def expected_plan(answer: Verdict, facts: Facts) -> tuple[Step, ...]:
    """Convert a model whose verdict estimates a clear gain from FP8, then compile it."""
    if answer.status != "no_fp8" or answer.basis != "modelled":
        return ()
    expects = if_recorded(modelled_conversion, facts)
    if expects is None or not expects.wins:
        return ()
    layers = to_convert(facts)
    eager = [linear for linear in layers if linear.compiled is None]
    treatments = [
        _convert(facts, next(iter(expects.recipes)), {each.name for each in layers}, before_own=not eager)
    ]
    treatments += [compile_treatment(facts, eager)] if eager else []
    title = expects.sentence.rstrip(".")
    return tuple(Step(code="", mends=(), title=title, treatment=each) for each in treatments)


def _convert(facts: Facts, recipe: str, layers: set[str], *, before_own: bool) -> Treatment:
    kept = [each.name for each in facts.linears() if may_be_taken(each) and each.name not in layers]
    sets = names_in_python(kept)
    arguments = ["model"]
    arguments += [] if recipe == "tensorwise" else [f'config=Float8LinearConfig.from_recipe_name("{recipe}")']
    arguments += ["module_filter_fn=lambda layer, name: name not in keep"] if sets else []
    own = [f"{KEEP_OWN_COMPILE}, after this"] if before_own else []
    return Treatment(
        name=f"convert-{recipe}",
        summary=f"convert to FP8 ({recipe})",
        code="\n".join([*keep(sets), f"convert_to_float8_training({', '.join(arguments)})", *own]),
    )
