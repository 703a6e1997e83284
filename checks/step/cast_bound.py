"""The casts cost more than the FP8 matmuls save

What it finds. FP8 is slower than BF16, and the FP8 casts cost more time than the FP8 matmuls save.

Why it matters. FP8 pays off if its matmuls save more than the casts around them cost. A matmul grows with M x
K x N, its casts with M x K + K x N + M x N. Narrow layers and few tokens lose. Casts that are not compiled
always lose, because each runs as about ten kernels that read the tensor again. Rowwise recipes cast twice as
much. In a 468M decoder that was not compiled, the casts took 282.7 ms/step and the matmuls saved 24.3 ms.

Fix. Compile, so casts fuse; leave small layers in BF16; use the recipe with the cheapest casts. If this does
not help, BF16 is faster.

    config = Float8LinearConfig.from_recipe_name("rowwise")     # before

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name("tensorwise")  # after
    convert_to_float8_training(model, config=config)
    for block in model.blocks:
        block.compile()

When to ignore it. If you study FP8 numerics and do not need speed.

How it is detected, and limits. The trial profiles your step and the best BF16 step, kernel by kernel. A
compiled cast also does the norm or activation before it; BF16's time for those is subtracted. Less than 3% of
the BF16 step is not reported. A watched script has no BF16: its casts are compared with the most that its FP8
matmuls can save. Without a trial, only trained MXFP8 experts on a B200 are estimated, as information.

References. `h200-decoder_468m`; `h200-llama_8b_float8`, not compiled: 589.5 ms and 111.4 ms.
https://github.com/pytorch/ao/issues/685 https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, needs_compile
from fp8doctor.analysis.layers import in_words
from fp8doctor.analysis.losing_layers import is_given
from fp8doctor.analysis.outcome import measured_speed, watched_job
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.step_difference import (
    SHOWN_MS,
    breakdown_of,
    watched_on_gpu,
    waterfall,
    why_not_divided,
    why_unknown,
)
from fp8doctor.cost import micro_batches, modelled_gpu, mxfp8_experts, routed_rows
from fp8doctor.diagnosis.treatments import recipe
from fp8doctor.facts import Arm, ArmName, Blocks, Facts, ModuleTime, recorded
from fp8doctor.facts.examples import example, float8, profiled
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import recipe_of
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural

SMALL_PCT = 100 * EVEN
"""Percent of the BF16 step below which unpaid casts are not reported: what fp8doctor calls even."""

LITTLE_PCT = 10.0
"""Percent of FP8's extra time below which casts are not the reason. A choice."""

MOST_SAVED = 1.5
"""Time that FP8 matmuls save at most, per own time. Datasheets give 1.0; an H200 gave 1.3."""

LITTLE = 1.10
"""Speedup of experts below which their casts are reported. A choice, as in STP003."""

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
    costs_of_fp8=True,
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
        return NotApplicable(reason="the trial did not time both your step and BF16 on a GPU")
    now, bf16 = measured.as_is, measured.bf16
    difference = waterfall(now, bf16)
    if difference is None:
        return NotApplicable(reason=why_not_divided(now, bf16))
    casts, saved = difference.parts_ms["casts"], difference.gemms_saved_ms
    if measured.status != "fp8_slower" or 100 * difference.casts_unpaid_ms < max(
        SMALL_PCT * (bf16.step_ms or 0.0), LITTLE_PCT * difference.difference_ms
    ):
        return None
    most = most_casts(now.breakdown.modules if now.breakdown else ())
    named = ", ".join(
        f"{in_words(each.name, facts.network)} ({each.families_ms['cast']:,.1f} ms)" for each in most
    )
    outside = "Outside the compiled regions, most" if now.get("graphs_run") else "Most"
    where = f" {outside} are in {named}." if most else ""
    matmuls = f"save only {saved:,.1f} ms" if saved > 0 else f"cost {-saved:,.1f} ms more than in BF16"
    return Finding(
        title=f"FP8 casts cost {casts:,.1f} ms per step; the FP8 matmuls {matmuls}",
        explanation=f"The step takes {difference.difference_ms:,.1f} ms more than the best BF16 "
        f"({bf16.step_ms:,.1f} ms). Casts that the matmuls do not pay for are "
        f"{difference.casts_unpaid_ms:,.1f} ms of this.{where}",
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
    """Compare a watched script's casts with the most that its FP8 matmuls can save: it has no BF16 step."""
    found = breakdown_of(now)
    if found is None or not now.step_ms:
        return NotApplicable(reason=f"{watched_job(facts)}'s step {why_unknown(now)}")
    casts, gemms = (found.families_ms.get(family, 0.0) for family in ("cast", "gemm_fp8"))
    unpaid = casts - MOST_SAVED * gemms
    if 100 * unpaid < SMALL_PCT * now.step_ms:
        return None
    return Finding(
        title=f"FP8 casts cost {casts:,.1f} ms per step, more than {gemms:,.1f} ms of FP8 matmuls can save",
        explanation=f"This is {percent(100 * casts / now.step_ms)} of {watched_job(facts)}'s step of "
        f"{now.step_ms:,.1f} ms. Matmuls that take {gemms:,.1f} ms in FP8 take at most "
        f"{(1 + MOST_SAVED) * gemms:,.1f} ms in BF16.",
        evidence={"casts_ms": casts, "fp8_gemms_ms": gemms, "step_ms": now.step_ms, "unpaid_ms": unpaid},
        treatment=treatment(facts),
    )


def of_experts(facts: Facts) -> Finding | None:
    """Report MXFP8 experts whose casts take what their matmuls save, modelled for a user's batch."""
    gpu = modelled_gpu(facts)
    if gpu is None or not is_given(facts):
        return None
    layers = facts.network.fp8
    costs = [(each, cost) for each in layers if (cost := mxfp8_experts(each, facts, gpu))]
    times = micro_batches(facts)
    bf16, in_fp8, casts = (times * sum(cost[part] for _, cost in costs) for part in range(3))
    if not costs or bf16 >= LITTLE * (in_fp8 + casts):
        return None
    first = costs[0][0]
    rows = (routed_rows(first, facts) or 0) // first.gemms
    return Finding(
        severity="info",
        title=f"MXFP8 casts of {plural(len(costs), 'expert weight')} cost {casts:,.1f} ms per step; the "
        f"matmuls save {bf16 - in_fp8:,.1f} ms (estimated)",
        explanation=f"Estimated for {gpu.name} from published kernel times: the experts' matmuls and casts "
        f"are {bf16 / (in_fp8 + casts):.2f}x as fast as in BF16. {first.name} has {first.gemms} experts of "
        f"{first.in_features} x {first.out_features}, with {rows:,} rows each. The fewer rows, the larger "
        "the weights' share of the casts.",
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


def most_casts(modules: tuple[ModuleTime, ...]) -> list[ModuleTime]:
    """List the modules whose own casts take longest; they are known outside compiled regions."""
    casting = [each for each in modules if each.families_ms.get("cast", 0.0) >= SHOWN_MS]
    return sorted(casting, key=lambda each: -each.families_ms["cast"])[:NAMED]


def treatment(facts: Facts) -> Treatment | None:
    """Compile the layers, else propose the recipe with the cheapest casts; None if both are done."""
    fp8 = [linear for linear in facts.network.linears if needs_compile(linear)]
    eager = [linear for linear in fp8 if linear.compiled is None]
    if eager:
        return compile_treatment(facts, eager)
    rowwise = any(recorded(each, "recipe") and recipe_of(each).granularity == "row" for each in fp8)
    return recipe("recipe-tensorwise", facts) if rowwise else None


def _decoder_468m(compiled: str | None, step_ms: float, **fp8_ms: float) -> Facts:
    """The 468M decoder on an H200: its matmuls, casts and attention as measured, the rest invented."""
    bf16_ms = {"gemm_16bit": 62.4, "attention": 11.0, "pointwise": 18.0}
    fp8_ms |= {"gemm_16bit": 4.2, "attention": 10.4}
    modules = () if compiled else (ModuleTime(name="blocks.1.up", families_ms={"cast": 2.6}),)
    arms = tuple(
        profiled(name, ms, whole - sum(ms.values()), host_wait_pct=5.0, unclassified_pct=0.0, modules=modules)
        for name, ms, whole in ((ArmName.AS_IS, fp8_ms, step_ms), (ArmName.BF16_COMPILED, bf16_ms, 92.7))
    )
    blocks = (Blocks(name="blocks", count=24, compiled=24 if compiled else 0),)
    model = {"linears": (float8(compiled=compiled),), "blocks": blocks, "wrappers": (), "use_cache": None}
    return example(**model, device="cuda", arms=arms)


SICK = _decoder_468m(None, 366.1, gemm_fp8=25.2, cast=273.6, pointwise=39.4)
HEALTHY = _decoder_468m("blocks.0", 88.3, gemm_fp8=32.1, cast=19.7, pointwise=18.8)
