"""FP8 training on a base that is quantized to 4 or 8 bits."""

from fp8doctor import kit

QUANTIZED_WEIGHTS = ("NF4Tensor", "Int4", "Int8", "IntxUnpacked", "AffineQuantizedTensor", "Params4bit")
"""Beginnings of the names of weight classes with 4 or 8 bits that are not FP8: torchao 0.10 to 0.18 and
bitsandbytes 0.41 to 0.49."""

OWN_TRAINING = "Int8MixedPrecisionTrainingLinearWeight"
"""A weight kept in 16 bits for INT8 training. Source: torchao 0.18 ``prototype/quantized_training``."""

LEFT_OUT = "FP8 starts from 16- or 32-bit weights. These layers stay out of it, and each use dequantizes."
CONVERTED = "{} of them were still converted: each step dequantizes packed data, misreads it, or raises."

ONE_OF_THEM = kit.Treatment(
    name="one-precision",
    summary="load the base in BF16, and convert that",
    code="# for speed, with FP8\n"
    "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\n"
    "# for memory, with the quantized base\n"
    'accelerator = Accelerator(mixed_precision="bf16")',
)


@kit.check("MOD003", "quantized-base", severity="error", was="MOD009", **kit.NO_FP8_STEP)
def quantized_base(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears = facts.network.linears
    asked = kit.fp8_was_asked_for(facts) or (
        "convert_to_float8_training" if kit.fp8_request.converted_nothing(facts) else None
    )
    if not facts.network.fp8 and asked is None:
        return kit.NotApplicable(reason="the model has no FP8 layer, and nothing asks for FP8")
    quantized = [linear for linear in linears if is_quantized(linear)]
    if not quantized:
        return None
    swapped = sum(linear.use == "training" for linear in quantized)
    return kit.Finding(
        title=f"FP8 training is combined with {kit.plural(len(quantized), 'Linear')} with quantized weights",
        explanation=CONVERTED.format(swapped) if swapped else LEFT_OUT,
        evidence={"quantized_linears": len(quantized), "converted": swapped, "asked_by": asked},
        treatment=ONE_OF_THEM,
    )


def is_quantized(linear: kit.Linear) -> bool:
    """Whether the weight is kept in 4 or 8 bits that are not FP8, in an FP8 layer or not."""
    if linear.stack == "bitsandbytes" or (
        linear.use == "storage" and linear.dtype.startswith(("int", "uint"))
    ):
        return True
    name = (linear.weight_class or "").rpartition(".")[2]
    return name.startswith(QUANTIZED_WEIGHTS) and name != OWN_TRAINING
