"""Weights stored in FP8 are not FP8 training

Looks at: layers that hold their weight in FP8 without being made for training: Hugging Face's
FP8Linear (checkpoints with `quant_method: fp8`) and FbgemmFp8Linear, torchao tensors made by
`quantize_` (Float8WeightOnlyConfig, Float8DynamicActivationFloat8WeightConfig) or by Unsloth's
`load_in_fp8`, plain float8 parameters, and layers of your own whose forward calls torch's FP8 GEMM
where autograd looks for its derivative.

Why it costs time. FP8 training pays in three GEMMs of a layer: output, input gradient, weight
gradient. Stored FP8 weights give the first one at best. In the backward pass they are converted
back to BF16 every step and multiplied there, they get no gradient, and with torchao's dynamic
inference tensors the backward raises, but under Unsloth. So a LoRA run on such a base is no faster
than on a BF16 one, and often slower; what it saves is memory. FP8Linear of transformers 4.57 to
5.21 has no backward at all: its output carries no gradient, and layers in front of it learn
nothing, without an error. `torch._scaled_mm` has no derivative: a layer that calls it outside of a
`torch.autograd.Function` of its own runs forward, and its backward raises.

What to do. For speed load BF16 weights and convert them for training; for memory keep them and
expect no speed.

    quantize_(model, Float8DynamicActivationFloat8WeightConfig())   # before: made for inference
    convert_to_float8_training(model)                               # after: for training, on BF16
    for block in model.layers: block.compile()

Weights of bitsandbytes (4 or 8 bits, not FP8) are another matter.

Evidence: read in transformers 4.57.3 and 5.21.1 (the forward calls a kernel, with no autograd
function around it), 5.22.0 and 5.23 (`FP8LinearFunction.backward` dequantises and returns no
gradient for the weight) and torchao 0.18, and run on a CPU. "derivative for aten::_scaled_mm is not
implemented": https://github.com/pytorch/ao/issues/4376
https://github.com/huggingface/transformers/issues/46295
https://github.com/unslothai/unsloth/issues/3902
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from fp8doctor.analysis.compile_coverage import compile_all
from fp8doctor.analysis.fp8_request import under_unsloth
from fp8doctor.analysis.layers import (
    computes_forward_in_fp8,
    fits_fp8,
    flops_share_pct,
    layer_label,
    stores_fp8,
)
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost import rows_seen
from fp8doctor.diagnosis.treatments import convert_all_but
from fp8doctor.facts import NOT_RECORDED, Facts, Linear, Network, Use, if_recorded, recorded
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

BACKWARD = {
    "FP8Linear": "its backward converts the weight back to BF16, multiplies there, and gives it no gradient",
    "FbgemmFp8Linear": "its kernel has no backward",
}
"""What the backward of a class does, by class name. Source: transformers 5.23,
``integrations/finegrained_fp8.py`` and ``fbgemm_fp8.py``; Unsloth 2026.10 patches both with a backward that
dequantises."""

BACKWARD_SINCE = Version("5.22.0")
"""First transformers whose FP8Linear has a backward. Source: its ``integrations/finegrained_fp8.py``, read in
4.57.3, 5.21.1 and 5.22.0; transformers#46736."""

ROWS = 16
"""Multiple of rows that the GEMM of an FP8 weight gradient takes. Source: ``torch._scaled_mm``."""

UNNAMED = (
    'convert_to_float8_training(model, module_filter_fn=lambda layer, name: "lora_" not in name\n'
    "    and not (layer.in_features % 16 or layer.out_features % 16))   # and not your head"
)

CAUSAL_LM = "ForCausalLM"
"""How the classes of decoders end in Hugging Face's libraries."""

NO_BACKWARD = "before transformers 5.22.0 its output carries no gradient: layers in front of it learn nothing"

DYNAMIC_TENSOR = 'its backward raises "derivative for aten::_scaled_mm is not implemented"'
"""torchao weights with dynamically quantized activations, 0.13 to 0.18; ao#4376."""

UNSLOTH_TENSOR = "under Unsloth its backward converts the weight back to BF16 and multiplies there"
"""The same weights under Unsloth's layers: 28 FP8 GEMMs in the forward of 28 layers on an H200, none in the
backward (Unsloth 2026.10.9, torchao 0.18)."""

OWN_BACKWARD = Treatment(
    name="own-backward",
    summary="give the FP8 matmul a backward of its own, or convert with torchao",
    code="class Matmul(torch.autograd.Function):   # its forward calls the FP8 GEMM\n"
    "    @staticmethod\n"
    "    def backward(ctx, grad):\n"
    "        x, weight = ctx.saved_tensors\n"
    "        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)",
    kind="sketch",
)

WEIGHT_ONLY_TENSOR = "its forward and backward dequantise the weight and multiply in 16 bits"
"""torchao weight-only tensors, 0.13 to 0.18: ``quantization/quantize_/workflows/float8/float8_tensor.py``."""

PLAIN_PARAMETER = (
    "PyTorch has no FP8 matmul for a plain float8 parameter: it is converted back before every use"
)

OF_NO_KNOWN_LAYER = (
    "torch converts such a parameter back before every use; whether a kernel of your own multiplies it in "
    "FP8 was not seen"
)


@check(
    "MOD003",
    "fp8-storage-only",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
    stays_in_bf16=True,
    may_raise=True,
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
        title=what_is_in_fp8(stored, facts) + ("" if trained else ", and nothing is trainable"),
        breaks="layers_do_not_learn" if trained and cut else NOT_RECORDED,
        explanation="This is FP8 for inference and for memory: at best the forward GEMM runs in FP8, and "
        f"{NO_BACKWARD if cut else backward_of(stored, facts)}. "
        + (
            "Training gets no FP8 speed from it."
            if trained
            else "It does no harm unless the model is meant to be trained."
        ),
        evidence={
            "stored_linears": len(stored),
            "linears": len(facts.network.linears),
            "flops_share_pct": round(flops_share_pct(stored, facts), 1),
            "float8_parameters": facts.network.float8_parameters,
            "trainable_parameters": facts.network.trainable_parameters,
            "classes": tuple(kinds),
            "first": stored[0].name if stored else None,
        },
        treatment=Treatment(
            name="train-in-fp8",
            summary="load BF16 weights and convert them for FP8 training; or keep FP8 weights for their "
            "memory alone",
            code=lines(facts),
        )
        if trained
        else None,
    )


def what_is_in_fp8(stored: list[Linear], facts: Facts) -> str:
    """Say how far FP8 goes: to the weights in memory, to the forward, or to where nobody looked."""
    if not stored:
        count = plural(facts.network.float8_parameters, "parameter")
        return f"{count} {'is' if facts.network.float8_parameters == 1 else 'are'} stored in FP8"
    linears, computing = len(facts.network.linears), sum(map(computes_forward_in_fp8, stored))
    if not computing:
        return f"{len(stored)} of {linears} Linears only store their weights in FP8"
    others = f"; in {len(stored) - computing} more only the weights are in FP8"
    return (
        f"{computing} of {linears} Linears multiply in FP8 in the forward alone"
        f"{others if len(stored) > computing else ''}"
    )


def lacks_backward(linear: Linear) -> bool:
    """Whether the forward calls torch's FP8 GEMM where autograd looks for its derivative."""
    return recorded(linear, "features") and linear.features.get("backward") is False


def without_backward(layers: list[Linear], facts: Facts) -> Finding:
    """Tell of layers that a user wrote over an FP8 GEMM which autograd cannot differentiate."""
    first = layers[0]
    return Finding(
        severity="error",
        title=f"{plural(len(layers), 'FP8 layer')} {'has' if len(layers) == 1 else 'have'} no backward: the "
        f"forward calls {first.features.get('gemm')} outside of an autograd.Function",
        explanation=f'The backward of {layer_label(first)} raises "derivative for aten::_scaled_mm is not '
        'implemented": autograd looks for one where the forward itself calls the GEMM, and torch has none. '
        "Read from its code.",
        evidence={"layers": len(layers), "linears": len(facts.network.linears), "first": first.name},
        treatment=OWN_BACKWARD,
        breaks="step_raises",
    )


def lines(facts: Facts) -> str:
    """Write how to train this in FP8: by Hugging Face's names, or with the blocks of this very model."""
    network = facts.network
    if not recorded(network, "kind") or network.kind.endswith(CAUSAL_LM):
        return (
            "model = AutoModelForCausalLM.from_pretrained(bf16_checkpoint, dtype=torch.bfloat16)\n"
            'convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")\n'
            "for layer in model.model.layers:\n    layer.compile()"
        )
    converted = if_recorded(conversion, facts) or UNNAMED
    anew = "# model: built anew, with weights in BF16" + (", LoRA around them" if lora(network) else "")
    return "\n".join((anew, converted, *compile_all(network)))


def lora(network: Network) -> bool:
    """Whether layers are wrapped by LoRA's matrices, as far as that was recorded."""
    return any(recorded(linear, "adapter") and linear.adapter for linear in network.linears)


def conversion(facts: Facts) -> str | None:
    """Write the line that converts what is stored in FP8 now, as far as few lines name the rest: not LoRA's
    matrices, heads, or layers whose rows or sides the FP8 GEMM cannot take."""
    linears = facts.network.linears
    stored = any(map(stores_fp8, linears))
    out = [
        linear.name
        for linear in linears
        if (stored and not stores_fp8(linear))
        or linear.role in ("head", "router")
        or not fits_fp8(linear)
        or any(rows % ROWS for rows in rows_seen(linear, facts))
    ]
    return convert_all_but(out, facts) if out else "convert_to_float8_training(model)"


def cuts_gradient(stored: list[Linear], facts: Facts) -> bool:
    """Whether these are FP8Linears of a transformers that gives them no backward, and Unsloth none either."""
    packages = facts.packages()
    installed = packages.get("transformers")
    if (
        not any(linear.kind.endswith(".FP8Linear") for linear in stored)
        or installed is None
        or not recorded(installed, "version")
        or under_unsloth(facts)
    ):
        return False
    try:
        return Version(installed.version or "") < BACKWARD_SINCE
    except InvalidVersion:
        return False


def backward_of(stored: list[Linear], facts: Facts) -> str:
    """Tell what the backward of these layers does, by the class of the first."""
    if not stored:
        return OF_NO_KNOWN_LAYER
    first = stored[0]
    if first.stack == "torchao":
        if not first.features.get("activations_quantized"):
            return WEIGHT_ONLY_TENSOR
        return UNSLOTH_TENSOR if under_unsloth(facts) else DYNAMIC_TENSOR
    return BACKWARD.get(first.kind.rpartition(".")[2], PLAIN_PARAMETER)


def _layer(kind: str, stack: str, use: Use, dtype: str) -> Facts:
    layer = Linear(
        name="layers.0.q_proj",
        kind=kind,
        stack=stack,
        use=use,
        weight_class=None,
        dtype=dtype,
        flops_share_pct=100.0,
    )
    return Facts(
        network=Network(
            linears=(layer,), float8_parameters=int(dtype.startswith("float8")), trainable_parameters=4096
        )
    )


SICK = _layer(
    "transformers.integrations.finegrained_fp8.FP8Linear", "huggingface", "storage", "float8_e4m3fn"
)
HEALTHY = _layer("torchao.float8.float8_linear.Float8Linear", "torchao", "training", "bfloat16")
