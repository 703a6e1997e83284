"""FP8 is slower, and the reason is unknown

What it finds. FP8 is slower than BF16, and known causes explain less than four fifths of the difference.

Why it matters. fp8doctor reports this when it cannot explain most of the gap. The fixes it proposes cannot
close it, and BF16 stays faster with all of them. The parts of the step show where the rest is. Examples are
attention on a slower backend, an optimizer with more work, copies, communication, or matmuls that are no
faster in FP8.

Fix. Compare the step's trace with BF16's, at the parts that the finding names. Please report the case: an
unexplained gap is a missing check.

    fp8doctor model.py                       # before: only the parts

    fp8doctor model.py --trace step.json.gz  # after: a trace of the step, and one of BF16

When to ignore it. If you stay in BF16.

How it is detected, and limits. The trial profiles both steps. Explained are fixes that were timed and gave
time back, casts that the matmuls do not pay for, a GPU that waits for the host. So are norms and pointwise
kernels if only BF16 is compiled.

References. The parts add up to the measured difference of the two steps. With torchao not compiled at width
1024 on one H200, casts beyond the matmuls' savings explain 88% of it.
https://docs.pytorch.org/docs/stable/profiler.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, best_bf16, best_fp8, uses_fp8
from fp8doctor.analysis.outcome import measured_speed, waits_for_time
from fp8doctor.analysis.step_difference import (
    IDLE,
    REST,
    SHOWN_MS,
    Waterfall,
    parts_in_words,
    waits_for_the_host,
    waterfall,
    why_not_divided,
)
from fp8doctor.analysis.treatment_table import CUDA_GRAPHS
from fp8doctor.facts import Arm, ArmName, Facts
from fp8doctor.facts.examples import example, float8, profiled
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import minus

EXPLAINED = 0.8
"""Share of the difference that must be explained; two profiles of the same kernels differ by 4 to 27%."""


@check("STP006", "unexplained", area="step", severity="warning")
def unexplained(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    now, bf16, best = arm(facts.trial, ArmName.AS_IS), best_bf16(facts), best_fp8(facts)
    if (
        facts.trial.device == "cpu"
        or now is None
        or bf16 is None
        or best is None
        or not (now.step_ms and bf16.step_ms and best.step_ms)
    ):
        return NotApplicable(reason="the trial did not time both your step and BF16 on a GPU")
    measured = measured_speed(facts)
    if measured is None or measured.status != "fp8_slower":
        return None
    if waits_for_time(facts.trial):
        return NotApplicable(reason="the trial had no time left for a fix that may explain it")
    gap, given_back = minus(now.step_ms, bf16.step_ms), minus(now.step_ms, best.step_ms)
    if given_back >= EXPLAINED * gap:
        return None
    found = waterfall(best, bf16)
    if found is None:
        return NotApplicable(reason=why_not_divided(best, bf16))
    casts, idle = found.casts_unpaid_ms, max(0.0, found.parts_ms[IDLE]) if waits_for_the_host(best) else 0.0
    fused = gained_by_compiling(facts, best, bf16, found)
    explained = given_back + casts + idle + fused
    if explained >= EXPLAINED * gap:
        return None
    tried = f"The timed fixes give {given_back:,.1f} ms back. With them, a" if best is not now else "A"
    return Finding(
        title=f"No check knows the cause of {gap - explained:,.1f} of the {gap:,.1f} ms that FP8 is "
        f"slower{most_of_the_rest(found, gap - explained)}",
        explanation=f"{tried}gainst the best BF16 ({bf16.step_ms:,.1f} ms): {parts_in_words(found)}.",
        evidence={
            "difference_ms": gap,
            "explained_ms": explained,
            "given_back_by_changes_ms": given_back,
            "casts_beyond_gemms_ms": casts,
            "idle_for_the_host_ms": idle,
            "fused_in_bf16_only_ms": fused,
            "of_arm": best.name,
            "parts": tuple(found.parts_ms),
            "parts_ms": tuple(found.parts_ms.values()),
        },
        treatment=Treatment(
            name="look-at-the-trace",
            summary="compare the step's trace with BF16's",
            code="fp8doctor model.py --trace step.json.gz",
        ),
    )


def most_of_the_rest(found: Waterfall, unexplained_ms: float) -> str:
    """Name the part, other than casts and matmuls, that is half of the unexplained time."""
    others = {part: ms for part, ms in found.parts_ms.items() if part not in ("casts", "GEMMs", IDLE, REST)}
    part, most_ms = max(others.items(), key=lambda each: each[1])
    more = f"; most of it is {part}, +{most_ms:,.1f} ms"
    return more if most_ms >= unexplained_ms / 2 and most_ms >= SHOWN_MS else ""


def gained_by_compiling(facts: Facts, fp8: Arm, bf16: Arm, found: Waterfall) -> float:
    """Compute what compiled BF16 saves by fusing norms and pointwise kernels, which this FP8 still spends."""
    eager = arm(facts.trial, ArmName.BF16)
    if eager is None or bf16 is eager or not (eager.step_ms and bf16.step_ms) or is_compiled(facts, fp8):
        return 0.0
    return max(0.0, min(eager.step_ms - bf16.step_ms, found.parts_ms["norms and pointwise"]))


def is_compiled(facts: Facts, fp8: Arm) -> bool:
    """Whether an FP8 layer is compiled in this variant; compiled regions may be TE's own."""
    treatments = fp8.get("treatments", ())
    as_is = any(linear.compiled is not None for linear in facts.network.fp8)
    return as_is or any(name.startswith(("compile-", CUDA_GRAPHS)) for name in treatments)


def _slower_by(attention_ms: float, casts_ms: float) -> Facts:
    """FP8 that is slower by these parts, with invented times."""
    bf16 = {"gemm_16bit": 40.0, "attention": 10.0}
    fp8 = {"gemm_fp8": 22.0, "cast": 18.0 + casts_ms, "attention": 10.0 + attention_ms}
    both = {ArmName.AS_IS: fp8, ArmName.BF16_COMPILED: bf16}
    arms = tuple(profiled(name, families, host_wait_pct=None) for name, families in both.items())
    return example(linears=(float8(),), device="cuda", arms=arms)


SICK = _slower_by(attention_ms=8.0, casts_ms=2.0)
HEALTHY = _slower_by(attention_ms=0.5, casts_ms=9.0)
