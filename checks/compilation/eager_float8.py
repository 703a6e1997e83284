"""FP8 Linears that are not compiled

An FP8 matmul needs its operands cast first: largest magnitude, scale, clamp and convert, for input, weight
and gradient, each in two layouts. Compiled, this is part of the kernels around it: about 9 per layer and
step. Without torch.compile it is about 83, and most of them read or write the whole tensor. In a 468M decoder
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

from fp8doctor import kit

EAGER_KERNELS = 83
"""Extra kernels per uncompiled Float8Linear and step on one H200 (82.4, 83.0; torch 2.11, torchao 0.18)."""


@kit.check("CMP001", "eager-float8", severity="warning", changes_fp8=True)
def eager_float8(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    fp8 = [linear for linear in facts.network.linears if kit.needs_compile(linear)]
    if not fp8 or facts.network.get("trainable_parameters") == 0:
        return kit.NotApplicable(reason="no torchao FP8 Linear in a model that trains")
    if kit.compile_coverage.disabled_by_variable(facts) or kit.compile_coverage.unused_marks(facts):
        return kit.NotApplicable(reason="CMP002 says why nothing is compiled")
    eager = [linear for linear in fp8 if linear.compiled is None]
    if not eager:
        return None
    if kit.fp8_request.under_unsloth(facts):
        why = "Unsloth compiles blocks itself; fp8doctor did not see if it did"
        raise kit.Unrecorded(kit.Linear, "compiled", why)
    runs = [linear for linear in eager if not kit.recipe_support.unaligned(linear)]
    heads = [linear for linear in runs if kit.layers.makes_logits(linear, facts.network)]
    only_heads = len(eager) < len(fp8) and heads == runs
    which = ""
    if len(eager) < len(fp8):
        more = f" and {len(eager) - 3} more" if len(eager) > 3 else ""
        names = ", ".join(kit.in_python(linear.name, facts.network) for linear in eager[:3])
        which = f"Not compiled: {names}{more}. "
    return kit.Finding(
        title=f"{len(eager)} of {len(fp8)} FP8 Linears {'is' if len(eager) == 1 else 'are'} not compiled"
        f"{kit.named(eager, len(fp8))}",
        explanation=f"{which}Each of them casts its input, weight and gradient in about {EAGER_KERNELS} "
        f"kernels per step; compiled, it takes about 9.",
        evidence={
            "eager_linears": len(eager),
            "fp8_linears": len(fp8),
            "first": eager[0].name,
            "extra_kernels_per_step": EAGER_KERNELS * len(eager),
        },
        treatment=kit.keep_in_bf16([linear.name for linear in eager], facts)
        if only_heads
        else kit.compile_coverage.compile_treatment(facts, runs or eager),
    )


@kit.check("CMP001", "only-linears-compiled", severity="warning", was="CMP004", **kit.NO_FP8_STEP)
def only_linears_compiled(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    fp8 = filter(kit.needs_compile, facts.network.linears)
    compiled = [linear for linear in fp8 if linear.compiled is not None]
    if not compiled:
        return kit.NotApplicable(reason="no torchao FP8 Linear is compiled")
    regions = {mark.name for mark in facts.training.compile_marks if mark.get("compiles") is not False}
    alone = [
        linear
        for linear in compiled
        if linear.name and linear.compiled == linear.name
        if not any(kit.compile_coverage.is_below(linear.name, name) for name in regions - {linear.name})
    ]
    inside = [
        linear
        for linear in alone
        if any(kit.compile_coverage.is_inside(linear, each) for each in facts.network.blocks)
    ]
    few_beside = len(alone) - len(inside) <= kit.compile_coverage.BESIDE_AT_MOST
    if not inside and few_beside:
        return None
    return kit.Finding(
        title=f"{len(alone)} of {len(compiled)} compiled FP8 Linears are compiled one by one"
        f"{kit.named(alone, len(compiled))}",
        explanation=f"They do {kit.percent(kit.flops_share_pct(alone, facts))} of the matmul FLOPs. Their "
        "casts are not fused with the norm or activation next to them, and nothing else is compiled.",
        evidence={"alone": len(alone), "compiled_fp8_linears": len(compiled), "first": alone[0].name},
        treatment=kit.compile_coverage.compile_treatment(facts, inside if few_beside else alone),
    )


def _decoder(compiled: str | None, *marks: str) -> kit.Facts:
    model = {"linears": (kit.float8(compiled=compiled),), "blocks": (kit.Blocks(name="blocks", count=1),)}
    compile_marks = tuple(kit.CompileMark(name=each) for each in marks)
    return kit.example(**model, compile_marks=compile_marks, tokens=16384)


FIRES = (_decoder(None), _decoder("blocks.0.up", "blocks.0.up"))
_FROZEN = kit.example(linears=(kit.float8(compiled=None),), trainable_parameters=0, compile_marks=())
SILENT = (_decoder("blocks.0", "blocks.0"), _decoder("blocks.0", "blocks.0", "blocks.0.up"), _FROZEN)
