"""FP8 training on top of 4- or 8-bit weights

What it finds. FP8 training was asked for or is in the model, and the weights are quantized to 4 or 8 bits
that are not FP8.

Why it matters. FP8 training starts from 16- or 32-bit weights, which it casts in every step. A quantized
weight must first be dequantized, each time, and its packed data has another shape and dtype. A converter that
swaps such a layer reads packed integers as weights, or raises. One that skips it converts little, and the
base runs at the speed of its dequantization.

Fix. Choose one: FP8 for speed, or 4 bits for memory. For memory, use `Accelerator(mixed_precision="bf16")`.

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=bnb_4bit)  # before

    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)  # after: for FP8

When to ignore it. If only small parts of the model are quantized and your converter leaves exactly these out.

How it is detected, and limits. fp8doctor reads each weight's class and dtype (bitsandbytes, NF4 and other
torchao tensors). It also reads the quantization method in the model's configuration (gptq, awq, gpt-oss's
mxfp4, ...), unless loading dequantized it. The methods quanto, quark and compressed-tensors know FP8 too:
their name alone proves nothing.

References. bitsandbytes' Linear4bit and Linear8bitLt derive from nn.Linear, so torchao 0.18 and Accelerate
1.15 accept them.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/transformer_engine.py
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear_utils.py
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import converted_nothing, fp8_was_asked_for
from fp8doctor.analysis.layers import flops_share_pct, layer_label
from fp8doctor.facts import Facts, Linear
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

QUANTIZED_WEIGHTS = (
    "NF4Tensor",
    "Int4",
    "Int8",
    "IntxUnpacked",
    "AffineQuantizedTensor",
    "Params4bit",
    "Int8Params",
)
"""Beginnings of the names of weight classes with 4 or 8 bits that are not FP8: torchao 0.10 to 0.18 and
bitsandbytes 0.41 to 0.49."""

OWN_TRAINING = ("Int8MixedPrecisionTrainingLinearWeight",)
"""A weight kept in 16 bits for INT8 training. Source: torchao 0.18 ``prototype/quantized_training``."""

METHODS = (
    "bitsandbytes",
    "gptq",
    "awq",
    "aqlm",
    "vptq",
    "eetq",
    "higgs",
    "hqq",
    "bitnet",
    "spqr",
    "auto-round",
    "mxfp4",
    "nvfp4",
    "gguf",
    "fp_quant",
    "fouroversix",
    "sinq",
    "metal",
)
"""Methods of a configuration that mean 8 bits or fewer and never FP8. Source: ``QuantizationMethod`` and the
configurations in transformers 5.23; quanto, quark and compressed-tensors know FP8 too."""

ONE_OF_THEM = Treatment(
    name="one-precision",
    summary="load the base in BF16, and convert that",
    code="model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)   # for speed, with FP8\n"
    'accelerator = Accelerator(mixed_precision="bf16")                         # for memory, with the '
    "quantized base",
)


@check(
    "MOD009", "quantized-base", area="engagement", severity="error", changes_fp8=True, invalidates_model=True
)
def quantized_base(facts: Facts) -> Finding | NotApplicable | None:
    linears = facts.network.linears
    asked, fp8 = asked_by(facts), [linear for linear in linears if linear.use == "training"]
    if not fp8 and asked is None:
        return NotApplicable(reason="the model has no FP8 layer, and nothing asks for FP8")
    quantized = [linear for linear in linears if is_quantized(linear)]
    known = facts.get("network.quantization") in METHODS
    method = facts.network.quantization if known else None
    if not quantized and method is None:
        return None
    swapped = [linear for linear in quantized if linear.use == "training"]
    what = (
        f"{plural(len(quantized), 'Linear')} with quantized weights"
        if quantized
        else f"a base quantized with {method}"
    )
    return Finding(
        title=f"FP8 training is combined with {what}",
        explanation=(
            f"{len(swapped)} of them were still converted: an FP8 layer around packed data dequantizes it in "
            "every step, misreads it, or raises."
            if swapped
            else "FP8 starts from 16- or 32-bit weights. These layers stay out of FP8, and each use of them "
            "dequantizes."
        ),
        evidence={
            "quantized_linears": len(quantized),
            "converted": len(swapped),
            "fp8_layers": len(fp8),
            "asked_by": asked,
            "classes": tuple(sorted({linear.weight_class or layer_label(linear) for linear in quantized}))
            or (str(method),),
            "flops_share_pct": round(flops_share_pct(quantized, facts), 1),
            "first": quantized[0].name if quantized else None,
        },
        treatment=ONE_OF_THEM,
    )


def asked_by(facts: Facts) -> str | None:
    """Say who asked for FP8, including a converter that found no layer to replace."""
    return fp8_was_asked_for(facts) or ("convert_to_float8_training" if converted_nothing(facts) else None)


def is_quantized(linear: Linear) -> bool:
    """Whether the weight is kept in 4 or 8 bits that are not FP8, in an FP8 layer or not."""
    if (
        linear.use == "storage" and linear.dtype.startswith(("int", "uint"))
    ) or linear.stack == "bitsandbytes":
        return True
    name = (linear.weight_class or "").rpartition(".")[2]
    return name.startswith(QUANTIZED_WEIGHTS) and name not in OWN_TRAINING


def _model(base: Linear) -> Facts:
    asked = {"ACCELERATE_MIXED_PRECISION": "fp8"}
    return example(variables=asked, linears=(base,), quantization=None, accelerate=None, trainer=None)


NF4 = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor"

FIRES = _model(float8(use="storage", dtype="uint8", weight_class=NF4))
SILENT = _model(float8())
