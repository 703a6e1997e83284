"""FP8 Linears that are not compiled

An FP8 matmul needs its operands cast first: largest magnitude, scale, clamp and convert, for input, weight
and gradient, each in two layouts. Compiled, this is part of the kernels around it: about 9 per layer and
step. Without torch.compile it is about 83, each of which reads and writes the whole tensor. In a 468M decoder
(`h200-decoder_468m`) the casts cost 282.7 ms of a 371.8 ms step, and the FP8 matmuls save 24.3 ms. If each
Linear is compiled by itself, no cast joins the norm or activation next to it, and nothing between the Linears
is compiled. On Llama 3 8B, torchtitan measured 243 TFLOP/s that way, 297 with whole blocks, and 259 for
compiled BF16.

    convert_to_float8_training(model)  # before: not compiled

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)
    for block in model.layers:         # after: one region per block
        block.compile()

Blocks are as fast as the whole model, and many times quicker to compile. Compile one layer left outside alone
(`model.head.compile()`), or leave a vocabulary's head out of the conversion. Ignore it while you debug.
Transformer Engine and Float8LinearNoCompile have hand-written casts and are not reported. Under Unsloth the
answer is unknown: it compiles blocks itself unless a KV cache is passed.
https://github.com/pytorch/ao/issues/685
https://github.com/pytorch/torchtitan/issues/778
"""

from __future__ import annotations

from fp8doctor.kit import (
    Blocks,
    CompileMark,
    Facts,
    Finding,
    Linear,
    NotApplicable,
    Unrecorded,
    check,
    compile_coverage,
    compile_treatment,
    eager_balance,
    eager_cast_saving,
    example,
    float8,
    flops_share_pct,
    in_words,
    is_below,
    is_inside,
    keep_in_bf16,
    makes_logits,
    named,
    needs_compile,
    percent,
    unaligned,
    under_unsloth,
)

EAGER_KERNELS = 83
"""Extra kernels per uncompiled Float8Linear and step on one H200 (82.4, 83.0; torch 2.11, torchao 0.18)."""

NAMED = 3
"""Layers to name if only some are not compiled. A choice of length."""


def _idle(linear: Linear, facts: Facts) -> bool:
    """Whether a mark that compiles nothing covers the layer: CMP002 says so."""
    return any(is_below(linear, mark.name) for mark in compile_coverage.idle_marks(facts))


@check("CMP001", "eager-float8", area="compilation", severity="warning", changes_fp8=True)
def eager_float8(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = [linear for linear in facts.network.linears if needs_compile(linear)]
    if not fp8:
        return NotApplicable(reason="no torchao FP8 Linear in the model")
    if compile_coverage.without_effect(facts):
        return NotApplicable(reason="CMP002 says why nothing is compiled")
    eager = [linear for linear in fp8 if linear.compiled is None and not _idle(linear, facts)]
    if not eager:
        return None
    if under_unsloth(facts):
        raise Unrecorded(
            Linear, "compiled", "Unsloth compiles blocks itself; fp8doctor did not see if it did"
        )
    runs = [linear for linear in eager if not unaligned(linear)]
    only_heads = len(eager) < len(fp8) and all(makes_logits(linear, facts.network) for linear in runs)
    uncovered = [linear for linear in fp8 if linear in runs or _idle(linear, facts)]
    which = cost = ""
    if len(eager) < len(fp8):
        more = f" and {len(eager) - NAMED} more" if len(eager) > NAMED else ""
        names = ", ".join(in_words(linear.name, facts.network) for linear in eager[:NAMED])
        which = f"Not compiled: {names}{more}. "
    if balance := eager_balance(facts, eager):
        cost = f"these casts cost {balance.casts_ms:,.0f} ms/step"
        if balance.host_ms > balance.casts_ms:
            cost = (
                f"these casts take {balance.casts_ms:,.1f} ms/step on the GPU, and launching them keeps the "
                f"host busy for {balance.host_ms:,.0f} ms"
            )
        cost = f" Estimated for {balance.gpu}: {cost}; the FP8 matmuls save {balance.gemms_saved_ms:,.1f} ms."
    return Finding(
        title=f"{len(eager)} of {len(fp8)} FP8 Linears {'is' if len(eager) == 1 else 'are'} not compiled"
        f"{named(eager, len(fp8))}",
        explanation=f"{which}Each of them casts its input, weight and gradient in about {EAGER_KERNELS} "
        f"kernels per step; compiled, it takes about 9.{cost}",
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
        treatment=keep_in_bf16([linear.name for linear in eager], facts)
        if only_heads
        else compile_treatment(facts, uncovered or eager),
    )


@check(
    "CMP001",
    "only-linears-compiled",
    area="compilation",
    severity="warning",
    was="CMP004",
    changes_fp8=True,
    invalidates_model=True,
)
def only_linears_compiled(facts: Facts) -> Finding | NotApplicable | None:
    compiled = [each for each in facts.network.linears if needs_compile(each) and each.compiled is not None]
    if not compiled:
        return NotApplicable(reason="no torchao FP8 Linear is compiled")
    idle = compile_coverage.idle_marks(facts)
    regions = {mark.name for mark in facts.training.compile_marks if mark not in idle}
    alone = [
        linear
        for linear in compiled
        if linear.name and linear.compiled == linear.name and not _idle(linear, facts)
        if not any(linear.name != name and is_below(linear, name) for name in regions)
    ]
    inside = [linear for linear in alone if any(is_inside(linear, each) for each in facts.network.blocks)]
    few_beside = len(alone) - len(inside) <= compile_coverage.BESIDE_AT_MOST
    if not inside and few_beside:
        return None
    return Finding(
        title=f"{len(alone)} of {len(compiled)} compiled FP8 Linears are compiled one by one"
        f"{named(alone, len(compiled))}",
        explanation=f"Each is a region of its own ({percent(flops_share_pct(alone, facts))} of the matmul "
        "FLOPs). No cast is fused with the norm or activation next to it, and everything between the Linears "
        "is not compiled.",
        evidence={
            "compiled_alone": len(alone),
            "compiled_fp8_linears": len(compiled),
            "first": alone[0].name,
        },
        treatment=compile_treatment(facts, inside if few_beside else alone),
    )


def _decoder(compiled: str | None, *marks: str) -> Facts:
    model = {"linears": (float8(compiled=compiled),), "blocks": (Blocks(name="blocks", count=1),)}
    return example(**model, compile_marks=tuple(CompileMark(name=each) for each in marks), tokens=16384)


FIRES = (_decoder(None), _decoder("blocks.0.up", "blocks.0.up"))
SILENT = (_decoder("blocks.0", "blocks.0"), _decoder("blocks.0", "blocks.0", "blocks.0.up"))
