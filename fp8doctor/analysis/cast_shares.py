"""What the casts of a layer are for: which of its three GEMMs needs them, by the bytes that they move.

Casts are timed all together, as a compiler sees them: apart, a kernel that casts into both layouts would be
two. What casts an operand as it lies is for the output, or for the input gradient; what turns it is for the
GEMM that wants it turned.
"""

from __future__ import annotations

from fp8doctor.cost.casts import COMPILED_CAST_BYTES, TE_CAST_BYTES
from fp8doctor.facts import LayerShape, Layout, Unrecorded

FROZEN_CAST_SHARE = {
    "tensorwise": 5.0 / 9.0,
    "rowwise": 6.4 / 25.0,
    "rowwise_with_gw_hp": 1.0,
    "delayed": 3.0 / 4.7,
    "current": 5.0 / 6.8,
}
"""Cast bytes of an activation in a frozen layer / in a trained one. Without a weight gradient, input and
gradient are written once, as they lie.

In the effective bytes of `fp8doctor.cost.casts`: two reads of 2 bytes and a write of 1, one read less with
delayed scales. Rowwise takes what ``rowwise_with_gw_hp`` does, which casts them once in any case.
"""


def cast_shares(shape: LayerShape) -> dict[Layout, float]:
    """Divide the casts of a shape over its GEMMs; the shares add up to 1.

    Input and gradient of a trained layer are turned for the weight gradient, the weight for the input
    gradient. Raises `Unrecorded` for a recipe whose casts were not measured.
    """
    if shape.recipe not in FROZEN_CAST_SHARE:
        raise Unrecorded(
            LayerShape, "casts_ms", f"how much of the casts each GEMM needs is not known of {shape.recipe!r}"
        )
    if shape.recipe in TE_CAST_BYTES:
        activation = weight = TE_CAST_BYTES[shape.recipe]
    else:
        activation, weight = COMPILED_CAST_BYTES[shape.recipe]
    straight = FROZEN_CAST_SHARE[shape.recipe] * activation
    input, gradient, of_weight = shape.m * shape.k, shape.m * shape.n, shape.k * shape.n
    parts: dict[Layout, float] = {
        "output": straight * (input + of_weight),
        "input_gradient": straight * gradient + (weight - straight) * of_weight,
    }
    if shape.trained:
        parts["weight_gradient"] = (activation - straight) * (input + gradient)
    whole = sum(parts.values())
    return {layout: part / whole for layout, part in parts.items()}
