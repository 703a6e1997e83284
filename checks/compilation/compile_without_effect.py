"""A torch.compile that compiles nothing

torchao's FP8 casts are fast only if the compiler fuses them; otherwise each layer launches about 83 more
kernels per step. Nothing warns you. A disabled Dynamo is silent, backend="eager" and "aot_eager" generate no
kernel, and model.forward() or the unwrapped model runs uncompiled.

    block.compile(backend="aot_eager")  # before: left over from debugging

    block.compile()                     # after

The finding prints the line for each cause. Ignore it while you debug without compilation. Whether the steps
compiled anything, only `fp8doctor run` sees, and TORCHDYNAMO_DISABLE=1 leaves no mark.
https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from collections.abc import Iterator
from typing import NamedTuple

from fp8doctor import kit


class Cause(NamedTuple):
    """One reason why nothing is compiled, the lines that remove it, and the marks that it makes idle."""

    text: str
    name: str
    summary: str
    code: str
    marks: tuple[kit.CompileMark, ...] = ()


@kit.check("CMP002", "compile-without-effect", severity="warning", **kit.BROKEN_IN_BF16_TOO)
def compile_without_effect(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    marks = facts.training.compile_marks
    fp8 = [each for each in facts.network.fp8 if each.stack == "torchao"]
    causes = [*causes_of(facts, bool(marks or fp8))]
    if not causes:
        return None if marks else kit.NotApplicable(reason="nothing asks for torch.compile")
    names = {mark.name for cause in causes for mark in cause.marks} if marks else {""}
    under = [each for each in fp8 if any(kit.compile_coverage.is_below(each.name, name) for name in names)]
    idle = [each for each in under if each.compiled in {None, *names}]
    texts = tuple(cause.text for cause in causes)
    look = f" Not compiled: {kit.plural(len(idle), 'FP8 Linear')}." if idle else ""
    return kit.Finding(
        title=f"torch.compile has no effect: {texts[0]}",
        explanation=f"{'. '.join(text[0].upper() + text[1:] for text in texts)}.{look}",
        evidence={
            "causes": texts,
            "compile_marks": len(marks),
            "idle_fp8_linears": len(idle),
            "examined_as_uncompiled": all(linear.compiled is None for linear in facts.network.linears),
        },
        treatment=kit.Treatment(
            name=causes[0].name,
            summary="; ".join(cause.summary for cause in causes),
            code="\n".join(cause.code for cause in causes),
        ),
    )


def causes_of(facts: kit.Facts, compilable: bool) -> Iterator[Cause]:
    """Find Dynamo switched off, compiled objects that the step does not call, and debug backends."""
    marks, dynamo = facts.training.compile_marks, facts.training.dynamo
    if kit.compile_coverage.disabled_by_variable(facts) and compilable:
        # Under it torch.compile(model) returns the model itself: there may be no mark left to find.
        summary = f"unset the variable{'' if marks else ', and call torch.compile unless your code does'}"
        fix = ("unset-torchdynamo-disable", summary, "unset TORCHDYNAMO_DISABLE")
        yield Cause("TORCHDYNAMO_DISABLE=1 is set", *fix, marks)
    if marks and dynamo.disabled:
        value = facts.variables().get("TORCH_COMPILE_DISABLE")
        code = "unset TORCH_COMPILE_DISABLE" if value else "torch._dynamo.config.disable = False"
        by = f"TORCH_COMPILE_DISABLE={value}" if value else "torch._dynamo.config.disable"
        yield Cause(f"Dynamo is switched off by {by}", "enable-dynamo", "switch Dynamo on", code, marks)
    if unused := kit.compile_coverage.unused_marks(facts):
        module = kit.in_python(unused[0].name, facts.network)
        text = f"the training steps run {module} uncompiled: they call its forward, or another object"
        line = f"output = {module}(x)   # not {module}.forward(x), nor the module that torch.compile wrapped"
        yield Cause(text, "call-compiled-object", "call the compiled object itself", line, unused)
    if bare := kit.compile_coverage.marks_without_kernels(facts):
        text = f"{len(bare)} of {len(marks)} torch.compile calls use backend={bare[0].backend!r}"
        lines = "\n".join(kit.compile_coverage.with_default_backend(facts))
        fix = ("default-backend", "use the default backend, inductor", lines)
        yield Cause(f"{text}, which generates no kernel", *fix, bare)


def _compiled(backend: str) -> kit.Facts:
    marks = (kit.CompileMark(name="blocks.0", form="in_place", backend=backend),)
    dynamo = kit.facts.Dynamo(disabled=False)
    of_job = {"blocks": (), "tokens": 16384, "variables": {}}
    layers = (kit.float8(compiled="blocks.0"),)
    return kit.example(linears=layers, compile_marks=marks, dynamo=dynamo, **of_job)


FIRES = _compiled(backend="aot_eager")
SILENT = _compiled(backend="inductor")
