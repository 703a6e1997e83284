"""FP8 Linears that are not compiled

What it finds. torchao's Float8Linear or MX layers run without torch.compile.

Why it matters. An FP8 matmul needs its operands cast first: find the largest magnitude (amax), scale, clamp
and convert. Input, weight and output gradient need it, each in two layouts. With torch.compile, it is part of
the kernels around it. Without it, each small operation is a kernel that reads and writes the whole tensor in
BF16 or FP32. That is about 83 more kernels per layer and step, instead of 9. On a 468M decoder, the casts
then cost 282.7 ms of a 371.8 ms step, and the FP8 matmuls save 24.3 ms.

Fix. Compile block by block: as fast as compiling the whole model, and many times quicker to compile. If one
layer outside the blocks is left, compile it alone (`model.head.compile()`), or leave a vocabulary's head out
of the conversion (SHP004).

    convert_to_float8_training(model)  # before: not compiled

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)
    for block in model.layers:         # after
        block.compile()

When to ignore it. While you debug without compilation. Transformer Engine and Float8LinearNoCompile have
hand-written casts and are not reported.

How it is detected, and limits. fp8doctor checks which layers a compile mark covers, and estimates the casts.
Under Unsloth the answer is unknown: it compiles blocks itself unless a KV cache is passed.

References. `h200-decoder_468m` runs at 0.26x of compiled BF16, and at 1.06x with compiled blocks;
`h200-llama_8b_float8`, a wider model, at 0.40x and 1.19x. https://github.com/pytorch/ao/issues/685
https://github.com/pytorch/ao/issues/1199 https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.compile_coverage import (
    compile_treatment,
    idle_marks,
    is_below,
    needs_compile,
    without_effect,
)
from fp8doctor.analysis.fp8_request import under_unsloth
from fp8doctor.analysis.layers import in_words, makes_logits, named
from fp8doctor.analysis.recipe_support import unaligned
from fp8doctor.cost import eager_balance, eager_cast_saving
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import Blocks, CompileMark, Facts, Linear, Unrecorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

EAGER_KERNELS = 83
"""Extra kernels per uncompiled Float8Linear and step on one H200 (82.4, 83.0; torch 2.11, torchao 0.18)."""

NAMED = 3
"""Layers to name if only some are not compiled. A choice of length."""


@check("CMP001", "eager-float8", area="compilation", severity="warning", changes_fp8=True)
def eager_float8(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = [linear for linear in facts.network.linears if needs_compile(linear)]
    if not fp8:
        return NotApplicable(reason="no torchao FP8 Linear in the model")
    if without_effect(facts):
        return NotApplicable(reason="CMP002 says why nothing is compiled")
    idle = idle_marks(facts)  # CMP002 covers their layers
    eager = [
        linear
        for linear in fp8
        if linear.compiled is None and not any(is_below(linear, mark.name) for mark in idle)
    ]
    if not eager:
        return None
    if under_unsloth(facts):
        raise Unrecorded(
            Linear, "compiled", "Unsloth compiles blocks itself; fp8doctor did not see if it did"
        )
    balance = eager_balance(facts, eager)
    modelled = ""
    if balance:
        cost = f"these casts cost {balance.casts_ms:,.0f} ms/step"
        if balance.host_ms > balance.casts_ms:
            cost = (
                f"these casts take {balance.casts_ms:,.1f} ms/step on the GPU, and launching them keeps the "
                f"host busy for {balance.host_ms:,.0f} ms"
            )
        modelled = (
            f" Estimated for {balance.gpu}: {cost}; the FP8 matmuls save {balance.gemms_saved_ms:,.1f} ms."
        )
    names = ", ".join(in_words(linear.name, facts.network) for linear in eager[:NAMED]) + (
        f" and {len(eager) - NAMED} more" if len(eager) > NAMED else ""
    )
    which = f"Not compiled: {names}. " if len(eager) < len(fp8) else ""
    return Finding(
        title=f"{len(eager)} of {len(fp8)} FP8 Linears {'is' if len(eager) == 1 else 'are'} not compiled"
        f"{named(eager, len(fp8))}",
        explanation=f"{which}Each of them casts its input, weight and gradient in about {EAGER_KERNELS} "
        f"kernels per step; compiled, it takes about 9.{modelled}",
        evidence={
            "eager_linears": len(eager),
            "fp8_linears": len(fp8),
            "first": eager[0].name,
            "extra_kernels_per_step": EAGER_KERNELS * len(eager),
            "modelled_casts_ms": balance.casts_ms if balance else None,
            "modelled_host_ms": balance.host_ms if balance else None,
            "modelled_gemms_saved_ms": balance.gemms_saved_ms if balance else None,
        },
        saving_ms=eager_cast_saving(facts, eager),
        treatment=_treatment(facts, fp8, eager, idle),
    )


def _treatment(facts: Facts, fp8: list[Linear], eager: list[Linear], idle: list[CompileMark]) -> Treatment:
    """Compile the layers; leave out what no GPU runs, and a head if it is the only one left."""
    runs = [linear for linear in eager if not unaligned(linear)]
    if len(eager) < len(fp8) and all(makes_logits(linear, facts.network) for linear in runs):
        return keep_in_bf16([linear.name for linear in eager], facts)
    uncovered = [
        linear for linear in fp8 if linear in runs or any(is_below(linear, mark.name) for mark in idle)
    ]
    return compile_treatment(facts, uncovered or eager)


def _decoder(compiled: str | None) -> Facts:
    blocks = (Blocks(name="blocks", count=1),)
    return example(linears=(float8(compiled=compiled),), blocks=blocks, compile_marks=(), tokens=16384)


FIRES = _decoder(compiled=None)
SILENT = _decoder(compiled="blocks.0")
