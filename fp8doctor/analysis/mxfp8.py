"""Linears in torchao's MXFP8, and the lines that convert to it.

In torchao 0.17 and 0.18 such a layer loses its bias, so no line here converts one that has a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8doctor.facts import Linear
from fp8doctor.finding import Treatment

WRAPPER = "MXFP8TrainingWeightWrapperTensor"
"""torchao's class around the weight since 0.17; the layer itself stays an nn.Linear."""


def is_mxfp8(linear: Linear) -> bool:
    """Return whether a layer's weight is in torchao's MXFP8 wrapper."""
    return (linear.get("weight_class") or "").endswith(f".{WRAPPER}")


def is_grouped(linear: Linear) -> bool:
    """Return whether this is a 3-D expert weight, with a grouped matmul."""
    return bool(linear.get("gemms", 1) > 1)


def is_biased(linear: Linear) -> bool:
    """Return whether an MXFP8 Linear has a bias that torchao was not seen to add."""
    return is_mxfp8(linear) and not is_grouped(linear) and linear.bias and not adds_bias(linear)


def adds_bias(linear: Linear) -> bool:
    """Return whether the wrapper was tried and added a bias."""
    return linear.features.get("adds_bias") is True


def mxfp8_treatment(name: str, linears: Sequence[Linear], keep: list[str], kept: str, note: str) -> Treatment:
    """Convert layers without a bias to MXFP8 by a real kernel, others to Float8Linear.

    If MXFP8 is emulated now, the treatment is that of MOD005, so a plan converts once. ``keep`` are the lines
    that name what stays in 16 bits, ``kept`` is the condition that leaves it out, and ``note`` a comment.
    """
    in_mxfp8 = [linear for linear in linears if is_mxfp8(linear) and linear.use == "training"]
    biased = [linear for linear in in_mxfp8 if is_biased(linear)]
    emulated = any(linear.features.get("emulate") for linear in in_mxfp8)
    lines, summary = [*keep, *lines_by_bias(in_mxfp8, biased, kept, note)], []
    if biased:
        summary.append("convert layers with a bias to Float8Linear, which adds it")
    if emulated:
        summary.append(
            "take a recipe with a real kernel; on a GPU without MX train in BF16 or in tensorwise FP8"
        )
    return Treatment(
        name="real-mx-kernel" if emulated else name,
        summary="; ".join(summary),
        code="\n".join(lines),
    )


def lines_by_bias(of: Sequence[Linear], biased: Sequence[Linear], kept: str, note: str) -> Iterator[str]:
    """Write the lines for Float8Linear of layers with a bias, and MXFP8 of the others."""
    if biased:
        wanted = " and ".join(filter(None, ("layer.bias is not None", kept)))
        yield f"convert_to_float8_training(model, module_filter_fn=lambda layer, name: {wanted}){note}"
    if len(biased) < len(of):
        yield quantize_mxfp8(of, kept) + note


def quantize_mxfp8(linears: Sequence[Linear], kept: str = "") -> str:
    """Write the lines that convert to these layers' MXFP8 without losing a bias.

    ``kept`` is a condition on ``name``. Only real kernels are named.
    """
    converted = [linear for linear in linears if is_mxfp8(linear) and linear.use == "training"]
    in_high_precision = any(linear.features.get("wgrad_with_hp") for linear in converted)
    recipe = f"MXFP8_RCEIL{'_WGRAD_WITH_HP' if in_high_precision else ''}"
    wanted = "isinstance(layer, nn.Linear)"
    if not any(map(adds_bias, converted)):
        wanted += " and layer.bias is None"
    experts = dict.fromkeys(linear.kind.rpartition(".")[2] for linear in converted if is_grouped(linear))
    if experts:
        wanted = f"({wanted} or type(layer).__name__ in {tuple(experts)})"
    wanted = " and ".join(filter(None, (wanted, kept)))
    return (
        f"config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.{recipe})\n"
        f"quantize_(model, config, filter_fn=lambda layer, name: {wanted})"
    )
