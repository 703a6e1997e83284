"""A torch.compile that compiles nothing

torchao's FP8 casts are fast only if the compiler fuses them; otherwise each layer launches about 83 more
kernels per step. Nothing warns you. A disabled Dynamo is silent, backend="eager" and "aot_eager" generate no
kernel, a suppressed failure falls back, and model.forward() or the unwrapped model runs uncompiled. Before
torch 2.14, model.compile() skips code in torch.nn: it compiles nothing in an nn.Sequential or
nn.TransformerEncoderLayer, except each Float8Linear alone.

    block.compile(backend="aot_eager")  # before: left over from debugging

    block.compile()                     # after

The finding prints the line for each cause, such as a debug backend or an nn.Sequential (`model =
torch.compile(model)`). TORCHDYNAMO_SUPPRESS_ERRORS=0 turns suppression on (torch 2.6 to 2.15), and
TORCH_COMPILE_DISABLE=0 disables in 2.6 and 2.7. Ignore it while you debug without compilation on purpose.
fp8doctor reads the compile marks, their backends, Dynamo's switches, stance and failures; under `fp8doctor
run` it also sees whether the steps compiled anything. TORCHDYNAMO_DISABLE=1 leaves no mark.
https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/config.py
https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fp8doctor.kit import (
    UNNAMED,
    CompileMark,
    Dynamo,
    Facts,
    Finding,
    Linear,
    NotApplicable,
    Severity,
    Treatment,
    check,
    compile_coverage,
    compile_treatment,
    eager_cast_saving,
    example,
    float8,
    in_python,
    is_below,
    module_names,
    needs_compile,
    plural,
    recorded,
)

NOT_FAILURES = ("Unsupported", "SkipFrame")
"""Dynamo's exceptions at a graph break and for a skipped frame (``torch/_dynamo/exc.py``)."""

OFF = ("0", "false", "no", "off")
"""What users write to switch a variable off."""

CALL = ("call-compiled-object", "call the compiled object itself, not its forward")


class Cause(NamedTuple):
    """One reason why nothing is compiled, and the lines that remove it."""

    text: str
    name: str
    summary: str
    code: str
    marks: tuple[CompileMark, ...] = ()
    """The marks that certainly compile nothing because of it."""
    layers: tuple[Linear, ...] = ()
    """FP8 layers that it leaves uncompiled, besides those that its marks cover."""
    severity: Severity | None = None


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
    if not causes and compile_coverage.disabled_by_variable(facts):
        return NotApplicable(
            reason="under TORCHDYNAMO_DISABLE=1, torch.compile leaves no mark: fp8doctor cannot see whether "
            "anything asks for it"
        )
    if not causes:
        return None if marks else NotApplicable(reason="nothing asks for torch.compile")
    first, names = causes[0], {mark.name for cause in causes for mark in cause.marks}
    eager = {linear.name for cause in causes for linear in cause.layers}
    idle = [each for each in _torchao(facts) if each.compiled in names or each.name in eager]
    look = f" {plural(len(idle), 'FP8 Linear')} looks compiled but {'is' if len(idle) == 1 else 'are'} not."
    look = look if len(idle) == 1 else look.replace("looks", "look")
    texts = [cause.text for cause in causes]
    said = [text[0].upper() + text[1:] if text.split(" ")[0].isalpha() else text for text in texts]
    return Finding(
        severity=first.severity,
        title=f"torch.compile {'can fail silently' if first.severity else 'has no effect'}: {first.text}",
        explanation=f"{'. '.join(said)}.{look if idle else ''}",
        evidence={
            "causes": tuple(texts),
            "compile_marks": len(marks),
            "idle_marks": len(names),
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


def _torchao(facts: Facts) -> list[Linear]:
    """List the FP8 layers whose speed depends on the compiler."""
    return [each for each in facts.network.fp8 if each.stack == "torchao"]


def find_causes(facts: Facts) -> Iterator[Cause]:
    """List every reason why the compile marks of this job compile nothing."""
    marks, dynamo, elsewhere = (
        facts.training.compile_marks,
        facts.training.dynamo,
        facts.training.compiled_elsewhere,
    )
    variables, network = facts.environment.variables, facts.network
    layers = tuple(linear for linear in _torchao(facts) if linear.compiled is None)
    if compile_coverage.disabled_by_variable(facts) and (marks or _torchao(facts)):
        # Under it torch.compile(model) returns the model itself: there may be no mark left to find.
        more = "" if marks else ", and call torch.compile unless your code does"
        unset = ("unset-torchdynamo-disable", f"unset the variable{more}", "unset TORCHDYNAMO_DISABLE")
        yield Cause("TORCHDYNAMO_DISABLE=1 is set", *unset, marks, layers)
    if marks and dynamo.disabled and (value := variables.get("TORCH_COMPILE_DISABLE")):
        any_value = f", and torch {facts.software.torch} reads any value as true" if value != "1" else ""
        unset = ("unset-torch-compile-disable", "unset the variable", "unset TORCH_COMPILE_DISABLE")
        yield Cause(f"TORCH_COMPILE_DISABLE={value} is set{any_value}", *unset, marks)
    elif marks and dynamo.disabled:
        enable = ("enable-dynamo", "set it to False", "torch._dynamo.config.disable = False")
        yield Cause("torch._dynamo.config.disable is True", *enable, marks)
    if marks and dynamo.stance == "force_eager":
        back = ("default-stance", "go back to the default stance", 'torch.compiler.set_stance("default")')
        yield Cause("the stance is force_eager", *back, marks)
    if elsewhere and not marks:
        named = "" if elsewhere == (UNNAMED,) else ", ".join(elsewhere)
        text = f"{named} is a compiled wrapper, but the model that fp8doctor examined is not compiled"
        if recorded(facts, "observed"):
            text = f"the training step calls the model, not {named or 'the compiled one'}"
        summary = f"call {named or 'what torch.compile returns'}, or compile in place"
        yield Cause(
            text, "use-compiled-object", summary, "model.compile()   # in place: for every caller", (), layers
        )
    elif unused := compile_coverage.unused_marks(facts):
        text = f"{plural(len(unused), 'torch.compile call')} compiled nothing in the watched training steps"
        if not unused[0].name and not facts.get("observed.before_forward_ms", True):
            text = f"the training step calls {in_python('', network)}.forward(), which is not compiled"
        yield Cause(text, *CALL, _call("block" if unused[0].name else "model"), unused, layers)
    elif uncompiled := compile_coverage.ran_uncompiled(facts):
        text = f"all {uncompiled} Linears under a torch.compile call ran uncompiled in a training step"
        yield Cause(text, *CALL, _call("model"), marks)
    if bare := tuple(mark for mark in marks if mark.backend in compile_coverage.BACKENDS_WITHOUT_KERNELS):
        text = f"{len(bare)} of {len(marks)} torch.compile calls use backend={bare[0].backend!r}"
        code = module_names.without_backend(bare, network)
        yield Cause(
            f"{text}, which generates no kernel",
            "default-backend",
            "use the default backend, inductor",
            code,
            bare,
        )
    if lost := compile_coverage.compiled_in_vain(facts):
        yield _in_torch_nn(facts, lost)
    if marks and dynamo.suppress_errors:
        value = variables.get("TORCHDYNAMO_SUPPRESS_ERRORS")
        failures = [failure for failure in dynamo.failures or () if not failure.startswith(NOT_FAILURES)]
        code = (
            "unset TORCHDYNAMO_SUPPRESS_ERRORS" if value else "torch._dynamo.config.suppress_errors = False"
        )
        if failures:
            text = f"compilations failed and the errors were suppressed ({failures[0]})"
            yield Cause(text, "show-compile-errors", "let the failure raise, and fix it", code)
        elif value and value.lower() in OFF:
            text = (
                f"TORCHDYNAMO_SUPPRESS_ERRORS={value} turns suppression on, like any value that is not empty"
            )
            yield Cause(text, "show-compile-errors", "unset the variable", code, severity="info")


def _call(what: str) -> str:
    """Write the line that calls the compiled object."""
    call = "output = model(batch)" if what == "model" else "x = block(x)"
    argument = call.partition("(")[2]
    return f"{call}   # not {what}.forward({argument}, nor the {what} that torch.compile wrapped"


def _in_torch_nn(facts: Facts, lost: list[Linear]) -> Cause:
    """Describe marks on objects without a forward, or in place on torch.nn's classes."""
    idle, network = compile_coverage.idle_marks(facts), facts.network
    marks = tuple(mark for mark in idle if any(is_below(linear, mark.name) for linear in lost))
    module, more = in_python(marks[0].name, network), f" and {len(marks) - 1} more" if len(marks) > 1 else ""
    wrapped, needing = marks[0].form == "wrapped", [linear for linear in lost if needs_compile(linear)]
    text = f"{module}.compile(){more} in place: its forward is torch.nn's own, or none, which Dynamo skips"
    if wrapped:
        text = (
            f"torch.compile({module}){more}: the wrapped object has no forward of its own and is never called"
        )
    if alone := sum(linear.compiled is not None for linear in needing):
        text += f"; {alone} FP8 Linears are compiled alone"
    fix = compile_treatment(facts, needing or lost)
    code = f"{module_names.unwrapped(marks, network)}\n{fix.code}" if wrapped else fix.code
    return Cause(
        text, fix.name, fix.summary, code, marks, tuple(each for each in lost if each.compiled is None)
    )


def _compiled(backend: str) -> Facts:
    marks = (CompileMark(name="blocks.0", form="in_place", backend=backend),)
    dynamo = Dynamo(disabled=False, suppress_errors=False, stance="default", failures=())
    of_model = {"linears": (float8(compiled="blocks.0"),), "blocks": (), "tokens": 16384, "variables": {}}
    return example(**of_model, compile_marks=marks, compiled_elsewhere=(), dynamo=dynamo)


FIRES = _compiled(backend="aot_eager")
SILENT = _compiled(backend="inductor")
