"""Quantized weights are not FP8 training

FP8 training starts from 16- or 32-bit weights and speeds up three matmuls per layer: output, input gradient
and weight gradient. Stored FP8 weights speed up the first one at best. In the backward they are converted
back to BF16 every step, and they get no gradient. Dynamic inference tensors of torchao raise there, except
under Unsloth (`load_in_fp8=True`). In transformers 4.57 to 5.21, FP8Linear has no backward: layers in front
of it learn nothing, without an error. Weights of 4 or 8 bits (bitsandbytes, NF4, GPTQ, ...) must be
dequantized in each use: a converter misreads them, raises, or skips them. Keep such weights if BF16 does not
fit, and expect no speedup.

    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_
    quantize_(model, Float8DynamicActivationFloat8WeightConfig())  # before: made for inference

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)                              # after: from BF16 weights (torchao 0.18)
    for block in model.layers:
        block.compile()

Ignore it if you do not train this model, or quantized weights are there only to save memory. A kernel of your
own may compute in FP8 unseen.
https://github.com/pytorch/ao/issues/4376
https://github.com/huggingface/transformers/issues/46295
https://github.com/unslothai/unsloth/issues/3902
"""

from __future__ import annotations

from fp8doctor import kit

BACKWARD_SINCE = kit.Version("5.22.0")
"""First transformers whose FP8Linear has a backward. Source: its ``integrations/finegrained_fp8.py``, read in
4.57.3, 5.21.1 and 5.22.0; transformers#46736."""

ROWS = 16
"""Multiple of rows that the matmul of an FP8 weight gradient takes. Source: ``torch._scaled_mm``."""

NO_BACKWARD = 'its backward raises "derivative for aten::_scaled_mm is not implemented"'

BACKWARD = {
    "cut": "before transformers 5.22.0 its output carries no gradient: layers in front of it learn nothing",
    "none": "torch converts such a parameter back before every use; fp8doctor cannot see whether your own "
    "kernel multiplies it in FP8",
    "weight only": "its forward and backward dequantize the weight and multiply in 16 bits",
    "dynamic": NO_BACKWARD,
    "unsloth": "under Unsloth its backward converts the weight back to BF16 and multiplies there",
    "FP8Linear": "its backward converts the weight back to BF16, multiplies there, and gives it no gradient",
    "FbgemmFp8Linear": "its kernel has no backward",
    "": "PyTorch has no FP8 matmul for a plain float8 parameter: it is converted back before every use",
}
"""What the backward does. Sources: transformers 5.23, Unsloth 2026.10.9 (28 FP8 matmuls in 28 forwards on an
H200, none in the backwards), torchao 0.13 to 0.18, ao#4376."""

OWN_BACKWARD = kit.Treatment(
    name="own-backward",
    summary="write a backward for the FP8 matmul, or convert with torchao",
    code="class Matmul(torch.autograd.Function):   # its forward calls the FP8 matmul\n"
    "    @staticmethod\n"
    "    def backward(ctx, grad):\n"
    "        x, weight = ctx.saved_tensors\n"
    "        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)",
    kind="sketch",
)

QUANTIZED_WEIGHTS = (
    *("NF4Tensor", "Int4", "Int8", "IntxUnpacked", "AffineQuantizedTensor"),
    *("Params4bit", "Int8Params"),
)
"""Beginnings of the names of weight classes with 4 or 8 bits that are not FP8: torchao 0.10 to 0.18 and
bitsandbytes 0.41 to 0.49."""

OWN_TRAINING = "Int8MixedPrecisionTrainingLinearWeight"
"""A weight kept in 16 bits for INT8 training. Source: torchao 0.18 ``prototype/quantized_training``."""

METHODS = (
    "aqlm auto-round awq bitnet bitsandbytes eetq fouroversix fp_quant gguf gptq higgs hqq metal mxfp4 "
    "nvfp4 sinq spqr vptq"
).split()
"""Methods of a configuration that mean 8 bits or fewer and never FP8. Source: ``QuantizationMethod`` and the
configurations in transformers 5.23; quanto, quark and compressed-tensors know FP8 too."""

CONVERTED = (
    "{} of them were still converted: an FP8 layer around packed data dequantizes it in every step, "
    "misreads it, or raises."
)
LEFT_OUT = (
    "FP8 starts from 16- or 32-bit weights. These layers stay out of FP8, and each use of them dequantizes."
)

ONE_OF_THEM = kit.Treatment(
    name="one-precision",
    summary="load the base in BF16, and convert that",
    code="# for speed, with FP8\n"
    "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\n"
    "# for memory, with the quantized base\n"
    'accelerator = Accelerator(mixed_precision="bf16")',
)


@kit.check(
    "MOD003",
    "fp8-storage-only",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
    stays_in_bf16=True,
)
def fp8_storage_only(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    network = facts.network
    forward_only = [each for each in network.linears if each.get("features", {}).get("backward") is False]
    if forward_only and not kit.ran_on_a_gpu(facts):
        gemm = forward_only[0].features.get("gemm")
        return kit.Finding(
            severity="error",
            title=f"{kit.plural(len(forward_only), 'FP8 layer')} without a backward: the forward calls "
            f"{gemm} outside an autograd.Function{kit.named(forward_only, len(forward_only))}",
            explanation=f"By its code, {kit.layer_label(forward_only[0])} calls torch's matmul in the "
            f"forward itself: {NO_BACKWARD}.",
            evidence={"layers": len(forward_only), "first": forward_only[0].name},
            treatment=OWN_BACKWARD,
            breaks="step_raises",
        )
    stored = [linear for linear in network.linears if kit.stores_fp8(linear)]
    if not stored and not network.float8_parameters:
        trains = any(linear.use == "training" for linear in network.linears)
        return None if trains else kit.NotApplicable(reason="no FP8 in the model")
    trained, backward = network.trainable_parameters > 0, backward_of(stored, facts)
    cut = trained and backward == "cut"
    return kit.Finding(
        severity="error" if cut else "warning" if trained else "info",
        title=what_is_in_fp8(stored, facts)
        + (", and nothing is trainable" * (not trained) or ", and pass no gradient on" * cut),
        breaks="layers_do_not_learn" if cut else kit.NOT_RECORDED,
        explanation="This is FP8 for inference and for memory"
        + (", not for training. " if trained else ". It does no harm unless you want to train the model. ")
        + f"At best the forward matmul runs in FP8, and {BACKWARD[backward]}."
        + " It saves memory; do not expect it to be faster than BF16." * bool(trained and stored),
        evidence={
            "stored_linears": len(stored),
            "linears": len(network.linears),
            "flops_share_pct": round(kit.flops_share_pct(stored, facts), 1),
            "float8_parameters": network.float8_parameters,
            "trainable_parameters": network.trainable_parameters,
            "classes": tuple(sorted({linear.weight_class or linear.kind for linear in stored})),
            "first": stored[0].name if stored else None,
        },
        treatment=from_bf16(facts) if trained else None,
    )


def what_is_in_fp8(stored: list[kit.Linear], facts: kit.Facts) -> str:
    """Say how far FP8 goes: only in memory, or in the forward too."""
    linears, computing = len(facts.network.linears), sum(map(kit.computes_forward_in_fp8, stored))
    if not stored:
        count = facts.network.float8_parameters
        return f"{kit.plural(count, 'parameter')} {'is' if count == 1 else 'are'} stored in FP8"
    if not computing:
        return (
            f"{len(stored)} of {linears} Linears only store their weights in FP8{kit.named(stored, linears)}"
        )
    others = f"; in {len(stored) - computing} more only the weights are in FP8" * (len(stored) > computing)
    return f"{computing} of {linears} Linears multiply in FP8 only in the forward{others}"


def backward_of(stored: list[kit.Linear], facts: kit.Facts) -> str:
    """Find what the backward of these layers does, as a key of `BACKWARD`, by the class of the first."""
    if not stored:
        return "none"
    first, version, unsloth = stored[0], kit.installed(facts, "transformers"), kit.under_unsloth(facts)
    of_checkpoint = any(linear.kind.endswith(".FP8Linear") for linear in stored)
    if of_checkpoint and version is not None and version < BACKWARD_SINCE and not unsloth:
        return "cut"
    if first.stack == "torchao":
        quantizes = first.features.get("activations_quantized")
        return ("unsloth" if unsloth else "dynamic") if quantizes else "weight only"
    kind = first.kind.rpartition(".")[2]
    return kind if kind in BACKWARD else ""


def from_bf16(facts: kit.Facts) -> kit.Treatment | None:
    """Convert BF16 weights in the place of the stored ones; None if they may not fit, or nothing converts."""
    network, memory = facts.network, kit.if_recorded(kit.fit, facts)
    takes = [linear for linear in network.linears if kit.if_recorded(would_convert, linear, facts)]
    if not takes or memory is None or memory.bf16.gib > kit.USABLE * memory.gpu_gib:
        return None
    adapted = any(linear.get("adapter") for linear in network.linears)
    rebuilt = "# model: rebuilt with weights in BF16" + ", LoRA around them" * adapted
    if network.get("kind", "").endswith("ForCausalLM") and not adapted:
        rebuilt = "model = AutoModelForCausalLM.from_pretrained(bf16_checkpoint, dtype=torch.bfloat16)"
    out = [linear.name for linear in network.linears if linear not in takes]
    converted = (
        kit.if_recorded(kit.convert_all_but, out, facts)
        or f"{kit.converting(facts, only=kit.TAKES)}{kit.NOT_THE_HEAD}"
    )
    return kit.Treatment(
        name="train-in-fp8",
        summary="load BF16 weights, which fit, and convert them for FP8 training",
        code="\n".join((rebuilt, converted, *kit.compile_all(network))),
        kind="sketch",
    )


def would_convert(linear: kit.Linear, facts: kit.Facts) -> bool:
    """Whether a conversion would take this layer with BF16 weights, and FP8 its rows."""
    ragged = any(rows % ROWS for rows in kit.rows_seen(linear, facts))
    return (
        kit.stores_fp8(linear)
        and linear.role not in ("head", "router")
        and kit.fits_fp8(linear)
        and not ragged
    )


@kit.check(
    "MOD003",
    "quantized-base",
    area="engagement",
    severity="error",
    was="MOD009",
    changes_fp8=True,
    invalidates_model=True,
)
def quantized_base(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears = facts.network.linears
    asked = kit.fp8_was_asked_for(facts) or (
        "convert_to_float8_training" if kit.converted_nothing(facts) else None
    )
    fp8 = [linear for linear in linears if linear.use == "training"]
    if not fp8 and asked is None:
        return kit.NotApplicable(reason="the model has no FP8 layer, and nothing asks for FP8")
    quantized = [linear for linear in linears if is_quantized(linear)]
    method = facts.get("network.quantization")
    if not quantized and method not in METHODS:
        return None
    swapped = sum(linear.use == "training" for linear in quantized)
    what = f"{kit.plural(len(quantized), 'Linear')} with quantized weights"
    return kit.Finding(
        title=f"FP8 training is combined with {what if quantized else f'a base quantized with {method}'}",
        explanation=CONVERTED.format(swapped) if swapped else LEFT_OUT,
        evidence={
            "quantized_linears": len(quantized),
            "converted": swapped,
            "fp8_layers": len(fp8),
            "asked_by": asked,
            "method": method,
            "classes": tuple(
                sorted({linear.weight_class or kit.layer_label(linear) for linear in quantized})
            ),
            "flops_share_pct": round(kit.flops_share_pct(quantized, facts), 1),
        },
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


def _model(layer: kit.Linear, **variables: str) -> kit.Facts:
    return kit.example(
        variables=variables,
        linears=(layer,),
        float8_parameters=int(layer.dtype.startswith("float8")),
        trainable_parameters=4096,
        quantization=None,
        accelerate=None,
        trainer=None,
    )


FP8_LINEAR = "transformers.integrations.finegrained_fp8.FP8Linear"
NF4 = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor"

FIRES = (
    _model(kit.float8(kind=FP8_LINEAR, stack="huggingface", use="storage", dtype="float8_e4m3fn")),
    _model(kit.float8(use="storage", dtype="uint8", weight_class=NF4), ACCELERATE_MIXED_PRECISION="fp8"),
)
SILENT = _model(kit.float8())
