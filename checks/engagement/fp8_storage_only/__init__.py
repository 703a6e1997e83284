"""Quantized weights are not FP8 training

FP8 training starts from 16- or 32-bit weights and speeds up three matmuls per layer. Stored FP8 weights speed
up the forward's at best. In the backward they are converted back to BF16 every step, and they get no
gradient. Dynamic inference tensors of torchao raise there, except under Unsloth (`load_in_fp8=True`). In
transformers 4.57 to 5.21, FP8Linear has no backward: layers in front of it learn nothing, without an error.
Weights of 4 bits (NF4, ...) are dequantized in each use, those of LLM.int8 in the backward. Keep such
weights if BF16 does not fit, expect no speedup, and compile the blocks, which fuses the casts.
Below compute capability 8.9 Triton compiles none of them.

    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_
    quantize_(model, Float8DynamicActivationFloat8WeightConfig())  # before: made for inference

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)                              # after: from BF16 weights (torchao 0.18)

Ignore it if you do not train this model, or quantized weights are there only to save memory.
https://github.com/pytorch/ao/issues/4376
https://github.com/huggingface/transformers/issues/46295
https://github.com/unslothai/unsloth/issues/3902
"""

from packaging.version import Version

from fp8doctor import kit

from .fixes import UNCOMPILED, from_bf16, without_e4m3

BACKWARD_SINCE = Version("5.22.0")
"""First transformers whose FP8Linear has a backward. Source: its ``integrations/finegrained_fp8.py``, read in
4.57.3, 5.21.1 and 5.22.0; transformers#46736."""

BACKWARD = {
    "cut": "before transformers 5.22.0 its output carries no gradient: layers in front of it learn nothing",
    "dynamic": 'its backward raises "derivative for aten::_scaled_mm is not implemented"',
}
"""Known backwards. Sources: transformers 5.23, torchao 0.13 to 0.18, ao#4376."""

OTHERWISE = "otherwise the weights are converted back to 16 bits in every use, and multiplied there"
"""Under Unsloth (2026.10.9) 28 forwards on an H200 had 28 FP8 matmuls, and their backwards none."""


@kit.check("MOD003", "fp8-storage-only", severity="error", **kit.BROKEN_IN_BF16_TOO)
def fp8_storage_only(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    network = facts.network
    stored = [linear for linear in network.linears if kit.stores_fp8(linear)]
    if not stored:
        trains = any(linear.use == "training" for linear in network.linears)
        return None if trains else kit.NotApplicable(reason="no FP8 in the model")
    linears, computing = len(network.linears), sum(map(kit.layers.computes_forward_in_fp8, stored))
    title = f"{computing} of {linears} Linears multiply in FP8 only in the forward"
    if not computing:
        title = f"{len(stored)} of {linears} Linears only store their weights in FP8"
        title += kit.named(stored, linears)
    trained, backward = network.trainable_parameters > 0, backward_of(stored, facts)
    cut, once = trained and backward == "cut", 2.0 * stored[-1].in_features * stored[-1].out_features
    raises = backward == "dynamic" and (stored[-1].get("flops_per_token") or 0.0) > once  # trains before it
    cast, refusing = backward == "casts", without_e4m3(stored, facts)
    if cast and refusing and any(each.compiled is not None for each in stored):
        return kit.Finding(
            title=f"Triton compiles no layer with float8_e4m3fn weights for {refusing.name}: the step raises",
            explanation=f"{title}, and they are compiled. It needs compute capability 8.9.",
            evidence={"stored_linears": len(stored), "gpu": refusing.name, "first": stored[0].name},
            breaks="step_raises",
            treatment=UNCOMPILED,
        )
    kept = kit.treatments.compile_stored(facts, stored) if cast and not refusing else None
    title += ", and nothing is trainable" * (not trained) + ", and pass no gradient on" * cut
    return kit.Finding(
        severity="error" if cut or raises else "warning" if trained else "info",
        title=title + ", and their backward raises" * (trained and raises),
        breaks="layers_do_not_learn" if cut else "step_raises" if raises else kit.NOT_RECORDED,
        explanation="This is FP8 for inference and for memory"
        + (", not for training. " if trained else ". It does no harm unless you want to train the model. ")
        + f"At best the forward matmul runs in FP8; {BACKWARD.get(backward, OTHERWISE)}."
        + " It saves memory; do not expect it to be faster than BF16." * trained,
        evidence={
            "stored_linears": len(stored),
            "flops_share_pct": round(kit.flops_share_pct(stored, facts), 1),
            "first": stored[0].name,
        },
        treatment=(from_bf16(facts, works=not (cut or raises)) or kept) if trained else None,
    )


def backward_of(stored: list[kit.Linear], facts: kit.Facts) -> str:
    """Tell what the backward does: a key of `BACKWARD`, or ``casts`` if each use is a cast."""
    first, version = stored[0], kit.installed(facts, "transformers")
    unsloth = kit.fp8_request.under_unsloth(facts)
    of_checkpoint = any(linear.kind.endswith(".FP8Linear") for linear in stored)
    if of_checkpoint and version is not None and version < BACKWARD_SINCE and not unsloth:
        return "cut"
    if first.features.get("activations_quantized"):
        return "" if unsloth else "dynamic"
    return "" if kit.layers.computes_forward_in_fp8(first) else "casts"


def _model(layer: kit.Linear, **variables: str) -> kit.Facts:
    of_job = {"quantization": None, "accelerate": None, "trainer": None, "trainable_parameters": 4096}
    stored = int(layer.dtype.startswith("float8"))
    return kit.example(variables=variables, linears=(layer,), float8_parameters=stored, **of_job)


FP8_LINEAR = "transformers.integrations.finegrained_fp8.FP8Linear"
NF4 = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor"

FIRES = (
    _model(kit.float8(kind=FP8_LINEAR, stack="huggingface", use="storage", dtype="float8_e4m3fn")),
    _model(kit.float8(use="storage", dtype="uint8", weight_class=NF4), ACCELERATE_MIXED_PRECISION="fp8"),
)
SILENT = _model(kit.float8())
