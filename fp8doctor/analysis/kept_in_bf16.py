"""FP8 layers that are kept out of the autocast on purpose, and so run in BF16."""

from __future__ import annotations

from collections.abc import Iterable

from fp8doctor.facts import Linear, recorded

END = 0.25
"""Share of the FP8 layers that may be left out at either end. A choice: recipes keep one block there, and
torchtitan's NVFP4 keeps the last 15 % of the layers in BF16."""


def multiplied_in_fp8(linears: Iterable[Linear]) -> list[Linear]:
    """List the FP8 layers that call an FP8 GEMM of the GPU: neither kept in BF16 nor emulated."""
    linears = tuple(linears)
    kept = kept_in_bf16(linears)
    return [
        linear
        for linear in linears
        if linear.use == "training" and linear.name not in kept and not linear.features.get("emulate")
    ]


def kept_in_bf16(linears: Iterable[Linear]) -> frozenset[str]:
    """Name the first and the last few FP8 layers where they alone ran in BF16, and all between them in FP8.

    Empty where others ran in BF16 too: then the autocast is missing.
    """
    fp8 = [linear for linear in linears if linear.use == "training"]
    ran = [i for i, each in enumerate(fp8) if not (recorded(each, "engaged") and each.engaged is False)]
    if not ran or ran[-1] - ran[0] + 1 != len(ran):
        return frozenset()
    if max(ran[0], len(fp8) - 1 - ran[-1]) > END * len(fp8):
        return frozenset()
    return frozenset(linear.name for linear in (*fp8[: ran[0]], *fp8[ran[-1] + 1 :]))
