"""A torch.compile that compiles nothing

What it finds. The job asks for torch.compile, but a switch, a backend or the way it is called keeps the
layers from being compiled.

Why it matters. torchao's FP8 casts are fast only if the compiler fuses them. If nothing is compiled, each
layer launches about 83 more kernels per step, and the script looks as if it were compiled. Nothing warns you:
a disabled Dynamo is silent, backend="eager" and "aot_eager" generate no kernel, and a suppressed failure
falls back silently. Before torch 2.14, model.compile() skips code in torch.nn: it compiles nothing in an
nn.Sequential or nn.TransformerEncoderLayer, except each Float8Linear alone.

Fix. The finding prints the line for each cause, such as a debug backend or an nn.Sequential (then: `model =
torch.compile(model)`). TORCHDYNAMO_SUPPRESS_ERRORS=0 turns suppression on (torch 2.6 to 2.15), and
TORCH_COMPILE_DISABLE=0 disables in 2.6 and 2.7.

    block.compile(backend="aot_eager")  # before: left over from debugging

    block.compile()                     # after

When to ignore it. While you debug without compilation on purpose.

How it is detected, and limits. fp8doctor reads the compile marks, their backends, Dynamo's switches, stance
and suppressed errors. Under `fp8doctor run` it also sees whether the steps compiled anything, for example
because they call model.forward() or the unwrapped model. TORCHDYNAMO_DISABLE=1 leaves no mark.

References. Each switch was set and the compiled frames were counted on torch 2.13; those of torch.nn on 2.6,
2.9, 2.13 and 2.15. https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/config.py
https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fp8doctor.analysis.compile_coverage import (
    BACKENDS_WITHOUT_KERNELS,
    BESIDE_AT_MOST,
    compile_treatment,
    disabled_by_variable,
    idle_marks,
    is_below,
    is_inside,
    needs_compile,
    ran_uncompiled,
    unused_marks,
)
from fp8doctor.analysis.layers import in_python
from fp8doctor.analysis.module_names import unwrapped, without_backend
from fp8doctor.cost import eager_cast_saving
from fp8doctor.facts import CompileMark, Dynamo, Facts, Linear, recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.facts.training import UNNAMED
from fp8doctor.finding import Finding, NotApplicable, Severity, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

NOT_FAILURES = ("Unsupported", "SkipFrame")
"""Dynamo's exceptions at a graph break and for a skipped frame (``torch/_dynamo/exc.py``)."""

UNSEEN_CALL = ", and call torch.compile unless your code does"
"""Under the variable, this cannot be seen."""

CALL_COMPILED = "call the compiled object itself, not its forward"

CALLS = {
    True: "output = model(batch)   # not model.forward(batch), nor the model that torch.compile wrapped",
    False: "x = block(x)   # not block.forward(x), nor the block that torch.compile wrapped",
}
"""Whether the whole model is compiled -> the line that calls it."""

OFF = ("0", "false", "no", "off")
"""What users write to switch a variable off."""


class Cause(NamedTuple):
    """One reason why nothing is compiled, and the lines that remove it."""

    name: str
    text: str
    summary: str
    code: str
    marks: tuple[CompileMark, ...] = ()
    """The marks that certainly compile nothing because of it."""
    severity: Severity | None = None
    layers: tuple[Linear, ...] = ()
    """FP8 layers that it leaves uncompiled, besides those that its marks cover."""


@check(
    "CMP002",
    "compile-without-effect",
    area="compilation",
    severity="warning",
    changes_fp8=True,
    invalidates_model=True,
    stays_in_bf16=True,
)
def compile_without_effect(facts: Facts) -> Finding | NotApplicable | None:
    marks = facts.training.compile_marks
    causes = sorted(find_causes(facts), key=lambda cause: cause.severity == "info")
    if not causes:
        if disabled_by_variable(facts):
            return NotApplicable(
                reason="under TORCHDYNAMO_DISABLE=1, torch.compile leaves no mark: fp8doctor cannot see "
                "whether anything asks for it"
            )
        return None if marks else NotApplicable(reason="nothing asks for torch.compile")
    first = causes[0]
    idle_names = {mark.name for cause in causes for mark in cause.marks}
    eager = {linear.name for cause in causes for linear in cause.layers}
    idle = [each for each in torchao_linears(facts) if each.compiled in idle_names or each.name in eager]
    return Finding(
        severity=first.severity,
        title=(
            "torch.compile can fail silently: "
            if first.severity == "info"
            else "torch.compile has no effect: "
        )
        + first.text,
        explanation=". ".join(sentence(cause.text) for cause in causes)
        + (f". {named(idle)} compiled but {'is' if len(idle) == 1 else 'are'} not." if idle else "."),
        evidence={
            "causes": tuple(cause.text for cause in causes),
            "compile_marks": len(marks),
            "idle_marks": len(idle_names),
            "idle_fp8_linears": len(idle),
            "examined_as_uncompiled": all(linear.compiled is None for linear in facts.network.linears),
        },
        saving_ms=eager_cast_saving(facts, idle) if idle else None,
        treatment=Treatment(
            name=first.name,
            summary="; ".join(cause.summary for cause in causes),
            code="\n".join(cause.code for cause in causes),
        ),
    )


def named(idle: list[Linear]) -> str:
    return f"{plural(len(idle), 'FP8 Linear')} {'looks' if len(idle) == 1 else 'look'}"


def sentence(text: str) -> str:
    """Begin the text with a capital, unless it begins with code."""
    return text[0].upper() + text[1:] if text.split(" ")[0].isalpha() else text


def find_causes(facts: Facts) -> Iterator[Cause]:
    """List every reason why the compile marks of this job compile nothing."""
    yield from switched_off(facts)
    yield from not_called(facts)
    yield from not_compiled(facts)
    yield from suppressed(facts)


def switched_off(facts: Facts) -> Iterator[Cause]:
    """Find what keeps Dynamo from compiling anything in this process."""
    training, variables = facts.training, facts.environment.variables
    marks, dynamo = training.compile_marks, training.dynamo
    if disabled_by_variable(facts) and (marks or torchao_linears(facts)):
        # Under it torch.compile(model) returns the model itself: there may be no mark left to find.
        yield Cause(
            "unset-torchdynamo-disable",
            "TORCHDYNAMO_DISABLE=1 is set",
            "unset the variable" + ("" if marks else UNSEEN_CALL),
            "unset TORCHDYNAMO_DISABLE",
            marks,
            layers=tuple(linear for linear in torchao_linears(facts) if linear.compiled is None),
        )
    if marks and dynamo.disabled:
        value = variables.get("TORCH_COMPILE_DISABLE")
        if value:
            zero = (
                f" is set, and torch {facts.software.torch} reads any value as true"
                if value != "1"
                else " is set"
            )
            yield Cause(
                "unset-torch-compile-disable",
                f"TORCH_COMPILE_DISABLE={value}{zero}",
                "unset the variable",
                "unset TORCH_COMPILE_DISABLE",
                marks,
            )
        else:
            yield Cause(
                "enable-dynamo",
                "torch._dynamo.config.disable is True",
                "set it to False",
                "torch._dynamo.config.disable = False",
                marks,
            )
    if marks and dynamo.stance == "force_eager":
        yield Cause(
            "default-stance",
            "the stance is force_eager",
            "go back to the default stance",
            'torch.compiler.set_stance("default")',
            marks,
        )


def not_called(facts: Facts) -> Iterator[Cause]:
    """Find compiled objects that the training step does not call."""
    marks, names = facts.training.compile_marks, facts.training.compiled_elsewhere
    layers = tuple(linear for linear in torchao_linears(facts) if linear.compiled is None)
    if names and not marks:
        named = "" if names == (UNNAMED,) else ", ".join(names)
        text = (
            f"the training step calls the model, not {named or 'the compiled one'}"
            if recorded(facts, "observed")
            else f"{named} is a compiled wrapper, but the model that fp8doctor examined is not compiled"
        )
        summary = f"call {named or 'what torch.compile returns'}, or compile in place"
        code = "model.compile()   # in place: for every caller"
        yield Cause("use-compiled-object", text, summary, code, layers=layers)
    elif unused := unused_marks(facts):
        text, summary, code = _calls_forward(unused, facts)
        yield Cause("call-compiled-object", text, summary, code, unused, layers=layers)
    elif uncompiled := ran_uncompiled(facts):
        text = f"all {uncompiled} Linears under a torch.compile call ran uncompiled in a training step"
        yield Cause("call-compiled-object", text, CALL_COMPILED, CALLS[True], marks)


def _calls_forward(unused: tuple[CompileMark, ...], facts: Facts) -> tuple[str, str, str]:
    """Say why marks compiled nothing, what to do, and its lines."""
    name = unused[0].name
    if name or facts.get("observed.before_forward_ms", True):
        text = f"{plural(len(unused), 'torch.compile call')} compiled nothing in the watched training steps"
        return text, CALL_COMPILED, CALLS[not name]
    model = in_python("", facts.network)
    return f"the training step calls {model}.forward(), which is not compiled", CALL_COMPILED, CALLS[True]


def not_compiled(facts: Facts) -> Iterator[Cause]:
    """List marks that compile nothing by themselves."""
    training = facts.training
    marks = training.compile_marks
    bare = tuple(mark for mark in marks if mark.backend in BACKENDS_WITHOUT_KERNELS)
    if bare:
        text = (
            f"{len(bare)} of {len(marks)} torch.compile calls use backend={bare[0].backend!r}, "
            "which generates no kernel"
        )
        yield Cause(
            "default-backend",
            text,
            "use the default backend, inductor",
            without_backend(bare, facts.network),
            bare,
        )
    if lost := compiled_in_vain(facts):
        yield in_torch_nn(facts, lost)


def suppressed(facts: Facts) -> Iterator[Cause]:
    """List compiler failures that nobody sees."""
    variables, dynamo = facts.environment.variables, facts.training.dynamo
    if facts.training.compile_marks and dynamo.suppress_errors:
        value = variables.get("TORCHDYNAMO_SUPPRESS_ERRORS")
        code = (
            "unset TORCHDYNAMO_SUPPRESS_ERRORS" if value else "torch._dynamo.config.suppress_errors = False"
        )
        failures = [failure for failure in dynamo.failures or () if not failure.startswith(NOT_FAILURES)]
        if failures:
            text = f"compilations failed and the errors were suppressed ({failures[0]})"
            yield Cause("show-compile-errors", text, "let the failure raise, and fix it", code)
        elif value and value.lower() in OFF:
            text = (
                f"TORCHDYNAMO_SUPPRESS_ERRORS={value} turns suppression on, like any value that is not empty"
            )
            yield Cause("show-compile-errors", text, "unset the variable", code, severity="info")


def compiled_in_vain(facts: Facts) -> list[Linear]:
    """List layers under marks without a frame of their own, and in no other region.

    Empty if a user's modules inside are regions, like the blocks of an nn.Sequential, and cover all that
    matters. Leaves out layers with their own mark, and 16-bit layers in an FP8 model.
    """
    lost: dict[str, Linear] = {}
    by_hand = {mark.name for mark in facts.training.compile_marks if mark not in idle_marks(facts)}
    for mark in idle_marks(facts):
        if mark in unused_marks(facts):
            continue
        below = [linear for linear in facts.network.linears if is_below(linear, mark.name)]
        if not any(map(needs_compile, below)) and any(map(needs_compile, facts.network.linears)):
            continue
        left = [linear for linear in below if linear.compiled in {None, linear.name} - by_hand]
        if len(left) < len(below) or [linear.name for linear in below] == [mark.name]:
            left = [linear for linear in left if needs_compile(linear)]
            alone = [
                linear for linear in left if not any(is_inside(linear, each) for each in facts.network.blocks)
            ]
            if len(alone) == len(left) <= BESIDE_AT_MOST and None not in [linear.compiled for linear in left]:
                continue
        lost.update((linear.name, linear) for linear in left)
    return list(lost.values())


def in_torch_nn(facts: Facts, lost: list[Linear]) -> Cause:
    """Describe marks on objects without a forward, or in place on torch.nn's classes."""
    marks = tuple(mark for mark in idle_marks(facts) if any(is_below(linear, mark.name) for linear in lost))
    module, more = (
        in_python(marks[0].name, facts.network),
        f" and {len(marks) - 1} more" if len(marks) > 1 else "",
    )
    alone = sum(needs_compile(linear) and linear.compiled is not None for linear in lost)
    wrapped = marks[0].form == "wrapped"
    text = (
        f"torch.compile({module}){more}: the wrapped object has no forward of its own and is never called"
        if wrapped
        else f"{module}.compile(){more} in place: its forward is torch.nn's own, or none, which Dynamo skips"
    ) + (f"; {alone} FP8 Linears are compiled alone" if alone else "")
    eager = tuple(linear for linear in lost if linear.compiled is None)
    treatment = compile_treatment(facts, [linear for linear in lost if needs_compile(linear)] or lost)
    code = f"{unwrapped(marks, facts.network)}\n{treatment.code}" if wrapped else treatment.code
    return Cause(treatment.name, text, treatment.summary, code, marks, layers=eager)


def torchao_linears(facts: Facts) -> list[Linear]:
    """List the FP8 layers whose speed depends on the compiler."""
    return [each for each in facts.network.fp8 if each.stack == "torchao"]


def _compiled(backend: str) -> Facts:
    marks = (CompileMark(name="blocks.0", form="in_place", backend=backend),)
    dynamo = Dynamo(disabled=False, suppress_errors=False, stance="default", failures=())
    of_model = {"linears": (float8(compiled="blocks.0"),), "blocks": (), "tokens": 16384, "variables": {}}
    return example(**of_model, compile_marks=marks, compiled_elsewhere=(), dynamo=dynamo)


FIRES = _compiled(backend="aot_eager")
SILENT = _compiled(backend="inductor")
