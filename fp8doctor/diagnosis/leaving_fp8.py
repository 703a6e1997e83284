"""How to train without FP8: the lines that leave it off, and those that compile the fastest BF16."""

from __future__ import annotations

from fp8doctor.analysis.compile_coverage import (
    BACKENDS_WITHOUT_KERNELS,
    blocks_are_compiled,
    compile_all_without_cache,
    compile_whole,
)
from fp8doctor.analysis.fp8_request import (
    asked_by_environment,
    fp8_was_asked_for,
    may_have_converted,
    precision_of,
)
from fp8doctor.analysis.layers import layer_label
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.facts import Arm, Facts, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Treatment
from fp8doctor.recipes import stack_of

LEAVE_OUT_OWN_COMPILE = "# leave out your own torch.compile"
KEEP_OWN_COMPILE = "# leave your own torch.compile as it is"


def stay_in_bf16(facts: Facts, why: str = "", *, for_now: bool = False) -> Treatment:
    """Write how to train without FP8: as the user compiles, unless another BF16 was faster.

    ``for_now`` says that FP8 may turn out to be faster.
    """
    view = TrialView(facts)
    bf16 = view.own_bf16_left_out or view.bf16_of_the_plan
    how = BF16_FORMS.get(ArmName(bf16.name), ", compiled") if bf16 else ", compiled"
    lines = [
        KEEP_OWN_COMPILE if _is_compiled(facts) else "model = torch.compile(model)   # or block by block"
    ]
    runs = any(each.get("use") == "training" and each.get("engaged") is not False for each in facts.linears())
    begin = "go back to" if runs else "train in" if fp8_was_asked_for(facts) else "stay in"
    begin = f"unset {BACKEND} and {begin}" if _against_backend(facts) else begin
    return Treatment(
        name=STAY_IN_BF16,
        summary=f"{begin} BF16{' for now' if for_now else ''}{how}{why and f': {why}'}",
        code="\n".join([without_fp8(facts), *(compiled_as(bf16, facts) if bf16 else lines)]),
    )


BACKEND = "ACCELERATE_FP8_BACKEND"
"""The variable at which Accelerate's ``prepare`` looks even if the precision is not fp8."""


def _against_backend(facts: Facts) -> str | None:
    """Return the precision of a job that names an FP8 backend, if it is another than fp8."""
    decided = precision_of(facts.accelerate(), facts.trainer())
    asked = asked_by_environment(facts.variables())
    return decided if BACKEND in facts.variables() and not asked and decided != "fp8" else None


BF16_FORMS = {
    ArmName.BF16: "",
    ArmName.BF16_AS_COMPILED: ", under your own torch.compile",
    ArmName.BF16_WHOLE: ", compiled as one graph",
}
"""Baseline -> how it is compiled, unless by torch.compile alone."""


def _is_compiled(facts: Facts) -> bool:
    """Return whether the user compiles the whole model, or all of its blocks, with kernels."""
    marks = facts.get("training.compile_marks", ())
    whole = any(mark.name == "" and mark.get("compiles") for mark in marks)
    every = whole or (recorded(facts, "network.blocks") and blocks_are_compiled(facts.network))
    backends = {mark.backend for mark in marks if recorded(mark, "backend")}
    return every and not backends.intersection(BACKENDS_WITHOUT_KERNELS)


def replaces_own_compile(bf16: Arm, facts: Facts) -> bool:
    """Return whether this baseline beat the one compiled the user's way, or that one did not run."""
    own = any(each.name == ArmName.BF16_AS_COMPILED for each in facts.trial.arms)
    return own and bf16.name != ArmName.BF16_AS_COMPILED and TrialView(facts).own_bf16_left_out is None


def compiled_as(bf16: Arm, facts: Facts) -> list[str]:
    """Write the lines that compile BF16 as in this variant."""
    if bf16.name == ArmName.BF16_AS_COMPILED:
        return [KEEP_OWN_COMPILE]
    own = [LEAVE_OUT_OWN_COMPILE] if replaces_own_compile(bf16, facts) else []
    if bf16.name == ArmName.BF16:
        return own
    if bf16.name == ArmName.BF16_WHOLE:
        by_block = [LEAVE_OUT_OWN_COMPILE] if _is_compiled(facts) else own
        return [*by_block, *compile_whole(facts.network)]
    if not own and _is_compiled(facts):
        return [KEEP_OWN_COMPILE]
    lines = compile_all_without_cache(facts) if facts.network.blocks else ["model = torch.compile(model)"]
    return [*own, *lines]


def without_fp8(facts: Facts) -> str:
    """Tell what leaves FP8 out, if it is asked for."""
    if decided := _against_backend(facts):
        return f"# in the shell: unset {BACKEND} (the precision is {decided} already)"
    named = BACKEND in facts.variables()
    if named or asked_by_environment(facts.variables()) or may_have_converted(facts):
        return (
            '# leave FP8 out: Accelerator(mixed_precision="bf16"), or accelerate launch --mixed_precision '
            "bf16" + (f",\n# without {BACKEND} in the environment" if named else "")
        )
    in_fp8 = [each for each in facts.linears() if each.get("use") == "training"]
    built = next((each for each in in_fp8 if not stack_of(each).converter), None)
    if built is None:
        return "# leave out the conversion to FP8"
    stack = stack_of(built)
    autocast = "no te.autocast, and " if stack.under_autocast else ""
    return f"# leave FP8 out: {autocast}torch.nn.Linear in place of {stack.layer or layer_label(built)}"
