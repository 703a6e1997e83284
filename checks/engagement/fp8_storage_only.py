"""Weights stored in FP8 are not FP8 training

What it finds. Layers hold their weight in FP8 but are not made for FP8 training, or whose FP8 matmul has no
backward.

Why it matters. FP8 training speeds up three matmuls per layer: output, input gradient and weight gradient.
Stored FP8 weights speed up the first one at best. In the backward they are converted back to BF16 every step,
and they get no gradient; torchao's dynamic inference tensors raise there, except under Unsloth. A LoRA run on
such a base saves memory but is no faster than on BF16. In transformers 4.57 to 5.21, FP8Linear has no
backward: layers in front of it learn nothing, without an error. `torch._scaled_mm` has no derivative either.

Fix. Keep the FP8 weights if BF16 does not fit, and expect no speedup. If BF16 weights fit, load them and
convert them for training (torchao 0.18); these lines raise on weights that are stored in FP8.

    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_
    quantize_(model, Float8DynamicActivationFloat8WeightConfig())  # before: made for inference

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)                              # after: from BF16 weights
    for block in model.layers:
        block.compile()

When to ignore it. If you do not train this model, or FP8 weights are there only to save memory.

How it is detected, and limits. fp8doctor reads each layer's class and weight: FP8Linear, FbgemmFp8Linear,
tensors from `quantize_` or Unsloth's `load_in_fp8`, plain float8 parameters, and your own layers' code.
MOD009 covers bitsandbytes weights. A kernel of your own may compute in FP8 unseen.

References. transformers 4.57.3, 5.21.1, 5.22.0, 5.23; torchao 0.18. https://github.com/pytorch/ao/issues/4376
(derivative for aten::_scaled_mm is not implemented) https://github.com/huggingface/transformers/issues/46295
https://github.com/unslothai/unsloth/issues/3902
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor.analysis.compile_coverage import compile_all
from fp8doctor.analysis.fp8_request import under_unsloth
from fp8doctor.analysis.layers import (
    computes_forward_in_fp8,
    fits_fp8,
    flops_share_pct,
    layer_label,
    named,
    stores_fp8,
)
from fp8doctor.analysis.memory import USABLE, fit
from fp8doctor.analysis.recipe_support import installed
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost import rows_seen
from fp8doctor.diagnosis.treatments import NOT_THE_HEAD, TAKES, convert_all_but, converting
from fp8doctor.facts import NOT_RECORDED, Facts, Linear, if_recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

BACKWARD = {
    "FP8Linear": "its backward converts the weight back to BF16, multiplies there, and gives it no gradient",
    "FbgemmFp8Linear": "its kernel has no backward",
}
"""What the backward of a class does, by class name. Source: transformers 5.23,
``integrations/finegrained_fp8.py`` and ``fbgemm_fp8.py``; Unsloth 2026.10 patches both with a backward that
dequantizes."""

BACKWARD_SINCE = Version("5.22.0")
"""First transformers whose FP8Linear has a backward. Source: its ``integrations/finegrained_fp8.py``, read in
4.57.3, 5.21.1 and 5.22.0; transformers#46736."""

ROWS = 16
"""Multiple of rows that the matmul of an FP8 weight gradient takes. Source: ``torch._scaled_mm``."""

LOADED = "model = AutoModelForCausalLM.from_pretrained(bf16_checkpoint, dtype=torch.bfloat16)"

CAUSAL_LM = "ForCausalLM"
"""How the classes of decoders end in Hugging Face's libraries."""

NO_BACKWARD = "before transformers 5.22.0 its output carries no gradient: layers in front of it learn nothing"

DYNAMIC_TENSOR = 'its backward raises "derivative for aten::_scaled_mm is not implemented"'
"""torchao weights with dynamically quantized activations, 0.13 to 0.18; ao#4376."""

UNSLOTH_TENSOR = "under Unsloth its backward converts the weight back to BF16 and multiplies there"
"""The same weights under Unsloth's layers: 28 FP8 matmuls in the forward of 28 layers on an H200, none in the
backward (Unsloth 2026.10.9, torchao 0.18)."""

OWN_BACKWARD = Treatment(
    name="own-backward",
    summary="write a backward for the FP8 matmul, or convert with torchao",
    code="class Matmul(torch.autograd.Function):   # its forward calls the FP8 matmul\n"
    "    @staticmethod\n"
    "    def backward(ctx, grad):\n"
    "        x, weight = ctx.saved_tensors\n"
    "        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)",
    kind="sketch",
)

WEIGHT_ONLY_TENSOR = "its forward and backward dequantize the weight and multiply in 16 bits"
"""torchao weight-only tensors, 0.13 to 0.18: ``quantization/quantize_/workflows/float8/float8_tensor.py``."""

PLAIN_PARAMETER = (
    "PyTorch has no FP8 matmul for a plain float8 parameter: it is converted back before every use"
)

OF_NO_KNOWN_LAYER = (
    "torch converts such a parameter back before every use; fp8doctor cannot see whether your own kernel "
    "multiplies it in FP8"
)


@check(
    "MOD003",
    "fp8-storage-only",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
    stays_in_bf16=True,
)
def fp8_storage_only(facts: Facts) -> Finding | NotApplicable | None:
    forward_only = list(filter(lacks_backward, facts.network.linears))
    if forward_only and not ran_on_a_gpu(facts):
        return without_backward(forward_only, facts)
    stored = [linear for linear in facts.network.linears if stores_fp8(linear)]
    if not stored and not facts.network.float8_parameters:
        return (
            None
            if any(linear.use == "training" for linear in facts.network.linears)
            else NotApplicable(reason="no FP8 in the model")
        )
    trained = facts.network.trainable_parameters > 0
    cut = cuts_gradient(stored, facts)
    kinds = sorted({linear.weight_class or linear.kind for linear in stored})
    return Finding(
        severity="info" if not trained else "error" if cut else "warning",
        title=what_is_in_fp8(stored, facts)
        + (", and nothing is trainable" if not trained else ", and pass no gradient on" if cut else ""),
        breaks="layers_do_not_learn" if trained and cut else NOT_RECORDED,
        explanation="This is FP8 for inference and for memory"
        + (", not for training. " if trained else ". It does no harm unless you want to train the model. ")
        + "At best the forward matmul runs in FP8, and "
        f"{NO_BACKWARD if cut else backward_of(stored, facts)}."
        + (" It saves memory; do not expect it to be faster than BF16." if trained and stored else ""),
        evidence={
            "stored_linears": len(stored),
            "linears": len(facts.network.linears),
            "flops_share_pct": round(flops_share_pct(stored, facts), 1),
            "float8_parameters": facts.network.float8_parameters,
            "trainable_parameters": facts.network.trainable_parameters,
            "classes": tuple(kinds),
            "first": stored[0].name if stored else None,
        },
        treatment=from_bf16(facts) if trained else None,
    )


def what_is_in_fp8(stored: list[Linear], facts: Facts) -> str:
    """Say how far FP8 goes: only in memory, or in the forward too."""
    if not stored:
        count = plural(facts.network.float8_parameters, "parameter")
        return f"{count} {'is' if facts.network.float8_parameters == 1 else 'are'} stored in FP8"
    linears, computing = len(facts.network.linears), sum(map(computes_forward_in_fp8, stored))
    if not computing:
        return f"{len(stored)} of {linears} Linears only store their weights in FP8{named(stored, linears)}"
    others = f"; in {len(stored) - computing} more only the weights are in FP8"
    return (
        f"{computing} of {linears} Linears multiply in FP8 only in the "
        f"forward{others if len(stored) > computing else ''}"
    )


def lacks_backward(linear: Linear) -> bool:
    """Whether the forward calls torch's FP8 matmul where autograd needs its derivative."""
    return linear.get("features", {}).get("backward") is False


def without_backward(layers: list[Linear], facts: Facts) -> Finding:
    """Report a user's layers over an FP8 matmul that autograd cannot differentiate."""
    first = layers[0]
    return Finding(
        severity="error",
        title=f"{plural(len(layers), 'FP8 layer')} {'has' if len(layers) == 1 else 'have'} no backward: the "
        f"forward calls {first.features.get('gemm')} outside an autograd.Function"
        f"{named(layers, len(layers))}",
        explanation=f'The backward of {layer_label(first)} raises "derivative for aten::_scaled_mm is not '
        'implemented": the forward itself calls the matmul, and torch has no derivative for it. fp8doctor '
        "read this from the code.",
        evidence={"layers": len(layers), "linears": len(facts.network.linears), "first": first.name},
        treatment=OWN_BACKWARD,
        breaks="step_raises",
    )


def from_bf16(facts: Facts) -> Treatment | None:
    """Convert BF16 weights in the place of the stored ones; None if they may not fit, or nothing converts."""
    network, memory = facts.network, if_recorded(fit, facts)
    takes = [linear for linear in network.linears if if_recorded(would_convert, linear, facts)]
    if not takes or memory is None or memory.bf16.gib > USABLE * memory.gpu_gib:
        return None
    adapted = any(linear.get("adapter") for linear in network.linears)
    whole = network.get("kind", "").endswith(CAUSAL_LM) and not adapted
    rebuilt = LOADED if whole else "# model: rebuilt with weights in BF16" + ", LoRA around them" * adapted
    out = [linear.name for linear in network.linears if linear not in takes]
    converted = if_recorded(convert_all_but, out, facts) or f"{converting(facts, only=TAKES)}{NOT_THE_HEAD}"
    return Treatment(
        name="train-in-fp8",
        summary="load BF16 weights, which fit, and convert them for FP8 training",
        code="\n".join((rebuilt, converted, *compile_all(network))),
        kind="sketch",
    )


def would_convert(linear: Linear, facts: Facts) -> bool:
    """Whether a conversion would take this layer with BF16 weights, and FP8 its rows."""
    ragged = any(rows % ROWS for rows in rows_seen(linear, facts))
    return stores_fp8(linear) and linear.role not in ("head", "router") and fits_fp8(linear) and not ragged


def cuts_gradient(stored: list[Linear], facts: Facts) -> bool:
    """Whether these are FP8Linears of a transformers that gives them no backward, and Unsloth none either."""
    version = installed(facts, "transformers")
    of_checkpoint = any(linear.kind.endswith(".FP8Linear") for linear in stored)
    return of_checkpoint and version is not None and version < BACKWARD_SINCE and not under_unsloth(facts)


def backward_of(stored: list[Linear], facts: Facts) -> str:
    """Say what the backward of these layers does, by the class of the first."""
    if not stored:
        return OF_NO_KNOWN_LAYER
    first = stored[0]
    if first.stack == "torchao":
        if not first.features.get("activations_quantized"):
            return WEIGHT_ONLY_TENSOR
        return UNSLOTH_TENSOR if under_unsloth(facts) else DYNAMIC_TENSOR
    return BACKWARD.get(first.kind.rpartition(".")[2], PLAIN_PARAMETER)


def _model(layer: Linear) -> Facts:
    stored = int(layer.dtype.startswith("float8"))
    return example(linears=(layer,), float8_parameters=stored, trainable_parameters=4096)


OF_A_CHECKPOINT = "transformers.integrations.finegrained_fp8.FP8Linear"

FIRES = _model(float8(kind=OF_A_CHECKPOINT, stack="huggingface", use="storage", dtype="float8_e4m3fn"))
SILENT = _model(float8())
