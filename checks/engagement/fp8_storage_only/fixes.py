"""Fixes of stored weights: BF16 weights in their place, or no compilation."""

from fp8doctor import kit

ROWS = 16
"""Multiple of rows that the matmul of an FP8 weight gradient takes. Source: ``torch._scaled_mm``."""

UNCOMPILED = kit.Treatment(
    name="stored-without-compile",
    summary="leave out torch.compile, or store the weights in another format",
    code="# without torch.compile each cast is a kernel of its own, which needs no Triton",
    kind="sketch",
)


def without_e4m3(stored: list[kit.Linear], facts: kit.Facts) -> kit.Gpu | None:
    """Find a GPU for which Triton does not compile these weights. Source: Triton 3.6.0, core.py:574."""
    gpus = kit.if_recorded(kit.recipe_support.gpus_of, facts) or []
    old = (each for each in gpus if not kit.recipe_support.has_fp8(each) and each.vendor != "amd")
    return next(old, None) if any(each.dtype == "float8_e4m3fn" for each in stored) else None


def from_bf16(facts: kit.Facts, *, works: bool) -> kit.Treatment | None:
    """Convert BF16 weights in the place of the stored ones; None if they may not fit, or nothing converts.

    Also None for adapters over a base that works as it is, if checkpointing says that memory is short.
    """
    network = facts.network
    takes = [linear for linear in network.linears if kit.if_recorded(would_convert, linear, facts)]
    if not takes or not kit.if_recorded(kit.memory.stored_weights_fit_in_bf16, facts):
        return None
    adapted = any(linear.get("adapter") for linear in network.linears)
    if adapted and works and any(each.active for each in facts.training.get("checkpointing", ())):
        return None
    out = [linear.name for linear in network.linears if linear not in takes]
    lines = "# model: rebuilt with weights in BF16", kit.conversion.conversion(facts, beside=out)
    return kit.Treatment(
        name="train-in-fp8",
        summary="load BF16 weights, which fit, and convert them for FP8 training",
        code="\n".join((*lines, *kit.compile_coverage.compile_all(network))),
        kind="sketch",
    )


def would_convert(linear: kit.Linear, facts: kit.Facts) -> bool:
    """Whether a conversion would take this layer with BF16 weights, and FP8 its rows."""
    even = not any(rows % ROWS for rows in kit.cost.rows_seen(linear, facts))
    fits = even and kit.layers.fits_fp8(linear)
    return fits and kit.stores_fp8(linear) and linear.role not in ("head", "router")
