"""LoRA adapters were converted to FP8

What it finds. An FP8 library replaced LoRA's A and B matrices by its own FP8 layers.

Why it matters. A and B are thin: one side is the rank. Their matmuls move memory and launch kernels, so FP8
tensor cores have almost nothing to speed up. FP8 still adds its cost: scaling and casting the input (tokens x
width) and the gradient, for a result of 16 columns. A converter that runs after `get_peft_model` treats them
as ordinary Linears if the rank is a multiple of 16. In a small Llama it took 43 of 43, of which 28 were
adapters. Their small updates lose precision too.

Fix. Convert the base first, or keep the adapters out of the conversion. Accelerate converts in `prepare`,
which comes last: use r=8 (not a multiple of 16) or a `module_filter_func` in AORecipeKwargs.

    model = get_peft_model(base, config)  # before: adapters, then conversion
    convert_to_float8_training(model)

    from peft import get_peft_model
    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(base)      # after: conversion, then adapters
    model = get_peft_model(base, config)

When to ignore it. If the rank is so large that the adapters are not thin.

How it is detected, and limits. fp8doctor looks for LoRA matrices among the layers that an FP8 library set up
for training. It does not time them one by one.

References. Both orders were run on a CPU with PEFT 0.21.2 and torchao 0.18.
https://github.com/meta-pytorch/torchtune/issues/2833 (1080 to 1410 tokens/s per GPU, base first)
https://arxiv.org/abs/2510.24061 (FALQON: FP8 is slower on LoRA's small matrices)
"""

from __future__ import annotations

from fp8doctor.analysis.layers import named
from fp8doctor.analysis.treatment_table import CONVERT_BASE_FIRST
from fp8doctor.diagnosis.treatments import convert_again
from fp8doctor.facts import Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

OF_TRANSFORMER_ENGINE = Treatment(
    name=CONVERT_BASE_FIRST,
    summary="convert the base to Transformer Engine before get_peft_model (peft >= 0.19)",
    code="base, optimizer = accelerator.prepare(base, optimizer)\nmodel = get_peft_model(base, config)",
)


@check("LORA003", "adapters-converted", area="lora", severity="warning", changes_fp8=True)
def adapters_converted(facts: Facts) -> Finding | NotApplicable | None:
    adapters = [linear for linear in facts.network.linears if linear.adapter == "adapter"]
    if not adapters:
        return NotApplicable(reason="no LoRA in the model")
    converted = [linear for linear in adapters if linear.use == "training"]
    if not converted:
        return None
    base = [each for each in facts.network.fp8 if each.adapter == "base"]
    return Finding(
        title=f"{len(converted)} of {len(adapters)} LoRA matrices were converted to FP8"
        f"{named(converted, len(adapters))}",
        explanation="Casting their inputs and gradients costs more than FP8 can save on such thin matrices. "
        "The conversion ran after the adapters were added.",
        evidence={
            "converted_adapters": len(converted),
            "adapters": len(adapters),
            "converted_base_layers": len(base),
            "rank": min(min(linear.in_features, linear.out_features) for linear in converted),
            "first": converted[0].name,
        },
        treatment=treatment(converted[0].stack, facts),
    )


def treatment(stack: str, facts: Facts) -> Treatment | None:
    if stack == "torchao":
        return Treatment(
            name=CONVERT_BASE_FIRST,
            summary="convert the base before get_peft_model, or keep the adapters out of the conversion",
            code=convert_again(facts, only='"lora_" not in name'),
        )
    return OF_TRANSFORMER_ENGINE if stack == "transformer_engine" else None


def _lora(**stack: str) -> Facts:
    base = float8("q_proj.base_layer", adapter="base")
    return example(
        linears=(base, float8("q_proj.lora_A.default", adapter="adapter", out_features=16, **stack))
    )


FIRES = _lora()
SILENT = _lora(stack="torch", use="none")
