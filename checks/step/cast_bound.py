"""The casts cost more than the FP8 GEMMs save

Looks at: the step as it is and the best BF16 step, kernel by kernel: what casts, amax and
transposes add, and what the GEMMs save. Modules outside of compiled regions are named. In a watched
script, which has no BF16 beside it: the casts, and the most that its FP8 GEMMs can save.

Why it costs time. FP8 pays where the GEMMs save more than the casts around them cost. A GEMM
grows with M x K x N, its casts with M x K + K x N + M x N: narrow layers and few tokens lose,
uncompiled casts lose everywhere, because each runs as some ten kernels that read the tensor anew.
Rowwise recipes cast twice as much. Compiled casts also do the norm or the activation before them;
what BF16 spends on those and FP8 does not is not counted as theirs. Where the GEMMs leave casts
unpaid for that are less than 3 % of the BF16 step, nothing is said.

Without a trial it is told of one thing, as information: trained experts in MXFP8 on a B200, where
by published kernel times the casts leave less than 1.1x of the grouped GEMMs. Experts of few rows
cast all their weights for little work.

What to do. Compile, so that casts fuse; leave small layers in BF16; take the recipe with the
cheapest casts. Where it stays so, BF16 is faster.

    config = Float8LinearConfig.from_recipe_name("rowwise")       # before
    config = Float8LinearConfig.from_recipe_name("tensorwise")    # after
    for block in model.blocks: block.compile()

Evidence: `h200-decoder_468m`, uncompiled: the casts take 282.7 ms a step and the GEMMs save 24.3
ms. `h200-llama_8b_float8`, uncompiled: 589.5 ms and 111.4 ms.
https://github.com/pytorch/ao/issues/685 https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, needs_compile
from fp8doctor.analysis.layers import in_words
from fp8doctor.analysis.losing_layers import is_given
from fp8doctor.analysis.outcome import measured_speed, watched_job
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.step_difference import SHOWN_MS, breakdown_of, watched_on_gpu, waterfall, why_unknown
from fp8doctor.cost import micro_batches, modelled_gpu, mxfp8_experts, routed_rows
from fp8doctor.diagnosis.treatments import recipe
from fp8doctor.facts import (
    Arm,
    Blocks,
    Breakdown,
    Facts,
    Linear,
    ModuleTime,
    Network,
    Training,
    Trial,
    recorded,
)
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import recipe_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural

SMALL_PCT = 100 * EVEN
"""Share of the BF16 step, in per cent, below which casts that the GEMMs do not pay for are left alone: what
this tool calls even."""

LITTLE_PCT = 10.0
"""Share of what FP8 takes longer, in per cent, below which casts are not what makes it slower. A choice;
seen: 0.4 ms of casts in a step that waits for its host for 17 of 19."""

MOST_SAVED = 1.5
"""Time that FP8 GEMMs save over BF16 / their own, at most. The rates of the datasheets give 1.0; seen on an
H200, which holds its clocks better in FP8: 1.3."""

LITTLE = 1.10
"""Speedup of experts over BF16 below which their casts are told of. A choice, as in STP003: published times
of one shape differ by that much between versions of torchao."""

NAMED = 3
"""Modules that are named. A choice of length."""


@check(
    "STP002",
    "cast-bound",
    area="step",
    severity="warning",
    explained_by=(
        "CMP001",
        "CMP002",
        "CMP003",
        "CMP004",
        "CMP005",
        "LORA003",
        "SHP002",
        "SHP003",
        "SHP004",
        "SHP005",
    ),
)
def cast_bound(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    watched = watched_on_gpu(facts) if not recorded(facts, "trial") else None
    if watched is not None:
        return in_a_script(watched, facts)
    if not recorded(facts, "trial") and (found := of_experts(facts)):
        return found
    measured = measured_speed(facts)
    if facts.trial.device == "cpu" or measured is None:
        return NotApplicable(reason="the step as it is and BF16 were not both timed on a GPU")
    now, bf16 = measured.as_is, measured.bf16
    difference = waterfall(now, bf16)
    if difference is None:
        return NotApplicable(
            reason="; ".join(
                f"{each.name} {why_unknown(each)}" for each in (now, bf16) if waterfall(each, each) is None
            )
        )
    casts, saved = difference.parts_ms["casts"], difference.gemms_saved_ms
    if measured.status != "fp8_slower" or 100 * difference.casts_unpaid_ms < max(
        SMALL_PCT * (bf16.step_ms or 0.0), LITTLE_PCT * difference.difference_ms
    ):
        return None
    most = dearest(now.breakdown.modules if now.breakdown else ())
    named = ", ".join(
        f"{in_words(each.name, facts.network)} ({each.families_ms['cast']:,.1f} ms)" for each in most
    )
    outside = (
        "Outside the compiled regions the most are in"
        if recorded(now, "graphs_run") and now.graphs_run
        else "The most are in"
    )
    where = f" {outside} {named}." if most else ""
    gemms = f"save {saved:,.1f}" if saved > 0 else f"cost {-saved:,.1f} more"
    return Finding(
        title=f"Casts cost {casts:,.1f} ms a step, and the GEMMs {gemms} in FP8",
        explanation=f"The step takes {difference.difference_ms:,.1f} ms more than the best BF16 "
        f"({bf16.step_ms:,.1f} ms), and casts that the GEMMs do not pay for are "
        f"{difference.casts_unpaid_ms:,.1f} ms of it.{where}",
        evidence={
            "casts_ms": casts,
            "gemms_saved_ms": saved,
            "difference_ms": difference.difference_ms,
            "fused_into_casts_ms": difference.fused_ms,
            "modules_with_most_casts": tuple(each.name for each in most),
            "module_casts_ms": tuple(each.families_ms["cast"] for each in most),
        },
        treatment=treatment(facts),
    )


def in_a_script(now: Arm, facts: Facts) -> Finding | NotApplicable | None:
    """Hold the casts of a watched script to the most that its FP8 GEMMs can save; no BF16 was timed beside
    it."""
    found = breakdown_of(now)
    if found is None or not now.step_ms:
        return NotApplicable(reason=f"{watched_job(facts)}'s step {why_unknown(now)}")
    casts, gemms = (found.families_ms.get(family, 0.0) for family in ("cast", "gemm_fp8"))
    unpaid = casts - MOST_SAVED * gemms
    if 100 * unpaid < SMALL_PCT * now.step_ms:
        return None
    return Finding(
        title=f"Casts cost {casts:,.1f} ms a step, more than its FP8 GEMMs of {gemms:,.1f} ms can save",
        explanation=f"That is {percent(100 * casts / now.step_ms)} of {watched_job(facts)}'s step of "
        f"{now.step_ms:,.1f} ms. GEMMs that take {gemms:,.1f} ms in FP8 take "
        f"{(1 + MOST_SAVED) * gemms:,.1f} ms in BF16 at most.",
        evidence={"casts_ms": casts, "fp8_gemms_ms": gemms, "step_ms": now.step_ms, "unpaid_ms": unpaid},
        treatment=treatment(facts),
    )


def of_experts(facts: Facts) -> Finding | None:
    """Tell of experts in MXFP8 whose casts take what their GEMMs save, modelled for a batch of the user's."""
    gpu = modelled_gpu(facts)
    if gpu is None or not is_given(facts):
        return None
    layers = [linear for linear in facts.network.linears if linear.use == "training"]
    costs = [(each, cost) for each in layers if (cost := mxfp8_experts(each, facts, gpu))]
    times = micro_batches(facts)
    bf16, in_fp8, casts = (times * sum(cost[part] for _, cost in costs) for part in range(3))
    if not costs or bf16 >= LITTLE * (in_fp8 + casts):
        return None
    first = costs[0][0]
    rows = (routed_rows(first, facts) or 0) // first.gemms
    return Finding(
        severity="info",
        title=f"The casts of {plural(len(costs), 'expert weight')} in MXFP8 cost {casts:,.1f} ms a step, and "
        f"the GEMMs save {bf16 - in_fp8:,.1f} (modelled)",
        explanation=f"Modelled on {gpu.name} from published times of kernels, GEMMs and casts of the experts "
        f"are {bf16 / (in_fp8 + casts):.2f}x as fast as in BF16. {first.name} has {first.gemms} experts of "
        f"{first.in_features} x {first.out_features}, with {rows:,} rows each: the fewer rows, the more of "
        "it is casting weights.",
        evidence={
            "expert_weights": len(costs),
            "experts": first.gemms,
            "rows_of_each": rows,
            "bf16_gemms_ms": bf16,
            "fp8_gemms_ms": in_fp8,
            "casts_ms": casts,
            "gpu": gpu.name,
        },
    )


def dearest(modules: tuple[ModuleTime, ...]) -> list[ModuleTime]:
    """List the modules whose own casts take longest; they are known outside of compiled regions."""
    casting = [each for each in modules if each.families_ms.get("cast", 0.0) >= SHOWN_MS]
    return sorted(casting, key=lambda each: -each.families_ms["cast"])[:NAMED]


def treatment(facts: Facts) -> Treatment | None:
    """Compile what is eager, else propose the recipe with the cheapest casts; None when both are so
    already."""
    fp8 = [linear for linear in facts.network.linears if needs_compile(linear)]
    eager = [linear for linear in fp8 if linear.compiled is None]
    if eager:
        return compile_treatment(facts, eager)
    dear = any(recorded(each, "recipe") and recipe_of(each).granularity == "row" for each in fp8)
    return recipe("recipe-tensorwise", facts) if dear else None


def _decoder_of_width_1024(
    compiled: str | None, step_ms: float, fp8_ms: float, casts_ms: float, pointwise_ms: float
) -> Facts:
    """The 468 M decoder on an H200: its GEMMs, casts and attention as measured, the rest put together."""
    bf16 = {"gemm_16bit": 62.4, "attention": 11.0, "pointwise": 18.0}
    fp8 = {
        "gemm_fp8": fp8_ms,
        "gemm_16bit": 4.2,
        "cast": casts_ms,
        "attention": 10.4,
        "pointwise": pointwise_ms,
    }
    modules = (
        () if compiled else (ModuleTime(name="blocks.1.up", families_ms={"cast": 2.6, "gemm_fp8": 0.3}),)
    )
    arms = tuple(
        Arm(
            name=name,
            tried=True,
            step_ms=ms,
            rounds_ms=(ms,) * 6,
            breakdown=Breakdown(
                families_ms=families,
                idle_ms=ms - sum(families.values()),
                host_wait_pct=5.0,
                busy_ms=sum(families.values()),
                reliable=True,
                kernels=2000,
                unclassified_pct=0.0,
                modules=modules,
            ),
        )
        for name, ms, families in ((ArmName.AS_IS, step_ms, fp8), (ArmName.BF16_COMPILED, 92.7, bf16))
    )
    layer = Linear(
        name="blocks.0.up",
        kind="torchao.float8.float8_linear.Float8Linear",
        stack="torchao",
        use="training",
        recipe="tensorwise",
        compiled=compiled,
        weight_class=None,
    )
    blocks = (Blocks(name="blocks", count=24, compiled=24 if compiled else 0),)
    network = Network(linears=(layer,), blocks=blocks, wrappers=())
    return Facts(network=network, training=Training(use_cache=None), trial=Trial(device="cuda", arms=arms))


SICK = _decoder_of_width_1024(None, step_ms=366.1, fp8_ms=25.2, casts_ms=273.6, pointwise_ms=39.4)
HEALTHY = _decoder_of_width_1024("blocks.0", step_ms=88.3, fp8_ms=32.1, casts_ms=19.7, pointwise_ms=18.8)
