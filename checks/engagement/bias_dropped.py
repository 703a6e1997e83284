"""MXFP8 layers that lose their bias

What it finds. torchao's MXFP8 wrapper is around the weight of Linears with a bias, and ignores the bias.

Why it matters. torchao 0.17 and 0.18 pass input and weight to the MXFP8 kernel and forget the bias. The layer
computes without it, and the bias gets no gradient. Nothing raises: the loss still falls, and the checkpoint
holds biases that were never used. In a test with a bias of 100, the mean output was -0.01 instead of 99.99.
Qwen2, gpt-oss, most vision transformers and most diffusion models have biases.

Fix. Convert only layers without a bias to MXFP8, and those with one to `Float8Linear`.

    quantize_(model, config)  # before

    from torch import nn
    from torchao.float8 import convert_to_float8_training
    from torchao.quantization import quantize_
    with_bias = lambda layer, name: layer.bias is not None
    without = lambda layer, name: isinstance(layer, nn.Linear) and layer.bias is None
    convert_to_float8_training(model, module_filter_fn=with_bias)  # after
    quantize_(model, config, filter_fn=without)

When to ignore it. If all these biases are zero and stay frozen.

How it is detected, and limits. fp8doctor runs one tiny layer with the installed wrapper on the CPU. For older
reports it goes by torchao's version. If the layer has its own forward, fp8doctor does not know, because that
forward may add the bias. torchao's rowwise FP8 wrapper adds the bias.

References. Run on a CPU with torchao 0.18 (emulated recipe), read in 0.17 and 0.18:
https://github.com/pytorch/ao/issues/4846
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_weights import is_grouped, is_mxfp8
from fp8doctor.analysis.layers import named
from fp8doctor.analysis.recipe_support import installed
from fp8doctor.analysis.training_bugs import training_bugs
from fp8doctor.diagnosis.treatments import mxfp8_without_biases
from fp8doctor.facts import Facts, Linear, Unrecorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import plural

DROPPED = next(bug for bug in training_bugs() if bug.check == "MOD013")
"""Releases of torchao whose MXFP8 wrapper drops the bias, and their sources."""

CANNOT_TELL = "fp8doctor could not test whether this torchao's MXFP8 wrapper adds the bias"
OWN_FORWARD = "the layer's own forward may add the bias"


@check(
    "MOD013",
    "bias-dropped",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
    explained_by=("GPU001", "GPU002"),
)
def bias_dropped(facts: Facts) -> Finding | NotApplicable | None:
    wrapped = [each for each in facts.network.fp8 if not is_grouped(each) and (is_mxfp8(each) or tried(each))]
    if not wrapped:
        return NotApplicable(reason="no Linear has a weight in torchao's MXFP8 wrapper")
    biased = [linear for linear in wrapped if linear.bias]
    adds = {linear.name: adds_bias(linear, facts) for linear in biased}
    dropped = [linear for linear in biased if adds[linear.name] is False]
    if not dropped:
        if unknown := next((linear for linear in biased if adds[linear.name] is None), None):
            own = unknown.features.get("own_forward")
            raise Unrecorded(Linear, "features", OWN_FORWARD if own else CANNOT_TELL)
        return None
    first = dropped[0]
    found = installed(facts, "torchao")
    return Finding(
        title=f"{plural(len(dropped), 'MXFP8 layer')} {'loses its' if len(dropped) == 1 else 'lose their'} "
        f"bias{named(dropped, len(wrapped))}",
        explanation=f"torchao{f' {found}' if found else ''} multiplies input and weight in MXFP8 and omits "
        "the bias. The output is wrong, and the bias gets no gradient.",
        evidence={"layers": len(dropped), "mxfp8_layers": len(wrapped), "first": first.name},
        breaks="layers_do_not_learn",
        treatment=mxfp8_without_biases("biases-in-float8", facts),
    )


def tried(linear: Linear) -> bool:
    """Whether a tiny layer with the same wrapper was run."""
    return "adds_bias" in linear.features


def adds_bias(linear: Linear, facts: Facts) -> bool | None:
    """Whether the wrapper adds the bias: as tried, else by torchao's version; None if neither shows it."""
    if tried(linear):
        return linear.features["adds_bias"] is True
    return None if linear.features.get("own_forward") or not DROPPED.concerns(facts) else False


def _layer(bias: bool) -> Facts:
    layer = float8(
        kind="torch.nn.modules.linear.Linear",
        recipe="mxfp8",
        weight_class="torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor",
        features={"emulate": False, "adds_bias": False} if bias else {"emulate": False},
        bias=bias,
    )
    return example(packages={"torchao": "0.18.0"}, linears=(layer,))


FIRES = _layer(bias=True)
SILENT = _layer(bias=False)
