"""Explain the difference of two step times by its parts, in ms that add up to it."""

import re
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.own_step import watched
from fp8doctor.facts import Arm, ArmName, Breakdown, Facts, Family, KernelGroup, Unrecorded, recorded
from fp8doctor.finding import NotApplicable
from fp8doctor.wording import minus

SHARE_PCT = 10.0
"""Share of the GPU's working time, in per cent, from which softmax, batched matmuls and what lies between are
called attention. Of the step's time they would disappear where the GPU waits. A choice: small batched matmuls
of other layers stay below."""

SOFTMAX_PCT = 5.0
"""Softmax / batched matmuls, in per cent, from which the matmuls are the softmax's. In attention it goes over
heads x tokens x tokens several times: 12 and more were measured on an H200 (T5 and Llama, eager and
compiled). A router's, next to the matmuls of its experts, goes over tokens x experts: below 1."""

SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data", "aten::_safe_softmax")
BATCHED_GEMM = ("aten::bmm", "aten::baddbmm")
"""Operators of eager attention and of torch's math backend. The loss's is ``aten::_log_softmax``."""

FUSED = re.compile(r"flash|fmha|sdpa|cudnn::fusion|flex_attention|flex_decod", re.IGNORECASE)
"""Kernels of fused attention, by name."""


class PlainAttention(NamedTuple):
    """Attention without a fused kernel in one profiled step of the deepest cut."""

    total_ms: float
    """Softmax, products, and what lies between them if torch's attention launched it."""
    share_pct: float
    """Of the time the GPU works."""
    of_fp32_gemms: float
    """Share of the step's fp32 matmuls that are its own, 0 to 1: of those that no attention's operator
    encloses, as in a compiled graph."""


def plain_attention(arm: Arm) -> PlainAttention | None:
    """Return the variant's time in plain attention; None if little or not profiled."""
    breakdown = arm.get("breakdown")
    if breakdown is None or not breakdown.reliable or not recorded(arm, "cuts") or not arm.step_ms:
        return None
    works_ms = (arm.cuts[-1].step_ms or 0.0) * min(1.0, breakdown.busy_ms / arm.step_ms)
    gemms = [group for group in breakdown.groups if group.operator in BATCHED_GEMM]
    attention = [group for group in breakdown.groups if group.family == "attention" and group not in gemms]
    plain = [group for group in attention if not FUSED.search(group.name)]
    compiled = [each for each in plain if each.name.startswith("triton_")]
    softmax = [each for each in compiled if "_softmax" in each.name.replace("log_softmax", "")]
    softmax += [each for each in plain if each.operator in SOFTMAX and each not in softmax]
    softmax_ms, gemm_ms = _ms(softmax), _ms(gemms)
    total_ms = _ms(plain) + gemm_ms
    is_little = not works_ms or 100 * total_ms < SHARE_PCT * works_ms
    if is_little or not gemm_ms or 100 * softmax_ms < SOFTMAX_PCT * gemm_ms:
        return None
    fp32_ms = _ms(group for group in breakdown.groups if group.family == "gemm_fp32")
    own_ms = _ms(group for group in gemms if group.family == "gemm_fp32")
    own = own_ms / fp32_ms if fp32_ms else 0.0
    return PlainAttention(total_ms, 100 * total_ms / works_ms, own)


def _ms(groups: Iterable[KernelGroup]) -> float:
    return sum(group.time_ms for group in groups)


NORMS, WITH_NORMS = "norms and pointwise", "casts and norms"

PARTS = {
    "GEMMs": ("gemm_fp8", "gemm_16bit", "gemm_fp32"),
    "casts": ("cast",),
    NORMS: ("norm", "pointwise"),
    "attention": ("attention",),
    "optimizer": ("optimizer",),
    "loss": ("loss",),
    "communication": ("communication",),
    "copies": ("copy",),
}
"""Parts as people ask for them -> families of `Breakdown`. All matmuls together tell what FP8's save."""

PART_NAMES = {"GEMMs": "matmuls", "idle": "idle GPU"}
"""Part -> its name on a screen; the others are shown as they are."""

UNEXPLAINED = "unexplained"
"""What a watched step takes longer than the cost model's."""

IDLE, REST = "idle", "unclassified"
"""The GPU had nothing to do; kernels that no rule knows, and whatever else keeps the parts from adding up."""

SHOWN_MS = 0.05
"""Smallest difference of a part that is shown, in ms: one that does not round to 0.0."""

HOST_BOUND_PCT = 10.0
"""Idle share of the step, in per cent, from which the host may be the limit. Healthy steps measured on an
H200 have 1 to 4, uncompiled FP8 at 16,384 tokens among them."""

HOST_WAIT_PCT = 50.0
"""Share of the gaps, in per cent, that must end with a kernel launched too late before idle time is the
host's: most of it."""


class Waterfall(Struct, frozen=True):
    """The difference of two steps; a positive part costs time in the first."""

    difference_ms: float
    parts_ms: dict[str, float]
    """Part -> difference; they add up to ``difference_ms``. Casts that took over norms are one with them."""


def breakdown_of(arm: Arm) -> Breakdown | None:
    """Return where the variant's step goes; None if not profiled or not reliable."""
    found = with_attention_together(arm)
    return found if found is not None and found.reliable and arm.step_ms else None


def with_attention_together(arm: Arm) -> Breakdown | None:
    """Move attention's fp32 products to ``attention``, as no compiled operator does."""
    found, plain = arm.breakdown, plain_attention(arm)
    if found is None or plain is None or not plain.of_fp32_gemms:
        return found
    families = found.families_ms
    own_ms = plain.of_fp32_gemms * families["gemm_fp32"]
    attention_ms = families.get("attention", 0.0) + own_ms
    moved = {"gemm_fp32": families["gemm_fp32"] - own_ms, "attention": attention_ms}
    return replace(found, families_ms=families | moved)


def why_unknown(arm: Arm) -> str:
    """Tell why `breakdown_of` a variant is None, in words that follow its name."""
    return "was not profiled" if not arm.get("breakdown") else "has no reliable breakdown"


def part_ms(of: Breakdown, part: str) -> float:
    """Sum up one of `PARTS` in a step."""
    return sum(of.families_ms.get(family, 0.0) for family in PARTS[part])


UNCHANGED: tuple[Family, ...] = ("attention", "optimizer")
"""Families whose kernels FP8 leaves as they are."""

MOST_APART, LEAST_SHARE = 1.25, 0.03
"""Most that such a family may differ by in two profiles, and its least share of the step. On a GPU of their
own they agree within 7% on most jobs; where others use it, attention took 1.6 and 3.4 times as long in one
profile as in the other (H200). The first is a choice between."""


def alike(one: Arm, other: Arm) -> bool:
    """Return whether two steps of a trial were profiled at one speed, by what FP8 leaves as it is."""
    profiles = [found for each in (one, other) if (found := breakdown_of(each))]
    least_ms = LEAST_SHARE * min(each.step_ms or 0.0 for each in (one, other))
    pairs = ([each.families_ms.get(name, 0.0) for each in profiles] for name in UNCHANGED)
    return all(max(pair) <= MOST_APART * min(pair) for pair in pairs if min(pair, default=0.0) >= least_ms)


def waterfall(of: Arm, against: Arm) -> Waterfall | None:
    """Divide the difference of two variants; None unless both breakdowns are reliable.

    A compiled cast kernel does the norm or the activation before it as well: what casts and norms take
    together is then what FP8 costs there.
    """
    one, other = breakdown_of(of), breakdown_of(against)
    if one is None or other is None or of.step_ms is None or against.step_ms is None:
        return None
    parts = {part: part_ms(one, part) - part_ms(other, part) for part in PARTS}
    casts, sign = (of, 1) if parts["casts"] > 0 else (against, -1)
    parts[IDLE] = one.idle_ms - other.idle_ms
    whole = minus(of.step_ms, against.step_ms)
    parts[REST] = whole - sum(parts.values())
    if casts.get("graphs_run") and min(sign * parts["casts"], -sign * parts[NORMS]) >= SHOWN_MS:
        parts = {WITH_NORMS: parts.pop("casts") + parts.pop(NORMS)} | parts
    return Waterfall(whole, parts)


def parts_in_words(found: Waterfall) -> str:
    """Write the parts, the largest first: ``casts +240.6, matmuls −33.0 ms``."""
    parts = sorted(found.parts_ms.items(), key=lambda each: -abs(each[1]))
    told = [f"{PART_NAMES.get(part, part)} {signed(ms)}" for part, ms in parts if abs(ms) >= SHOWN_MS]
    return f"{', '.join(told)} ms" if told else "no part differs"


def signed(ms: float, digits: int = 1) -> str:
    return f"{'−' if ms < 0 else '+'}{abs(ms):,.{digits}f}"


def waits_for_the_host(arm: Arm, share_pct: float = HOST_BOUND_PCT) -> bool:
    """Return whether late launches leave the GPU idle for more than this share of the step.

    The shortest step within the interval counts: a disturbed host makes single rounds longer, which says
    nothing about the job.
    """
    found = breakdown_of(arm)
    if found is None or not arm.step_ms or found.host_wait_pct is None:
        return False
    shortest = arm.get("low_ms") or arm.step_ms
    idle = found.idle_ms - (arm.step_ms - shortest)
    return 100 * idle / shortest > share_pct and found.host_wait_pct >= HOST_WAIT_PCT


def step_on_gpu(facts: Facts) -> Arm | None:
    """Return the step as it is on a GPU: the trial's, else a profiled one of a watched script.

    A script's waits for data are not idle time: another check reports them.
    """
    if recorded(facts, "trial.arms"):
        return None if facts.trial.device == "cpu" else arm(facts, ArmName.AS_IS)
    step = watched(facts) if facts.get("observed.clock") == "cuda" else None
    parts = step.get("breakdown") if step else None
    if step is None or parts is None:
        return None
    idle_ms = max(0.0, parts.idle_ms - median(facts.observed.data_ms or (0.0,)))
    return replace(step, breakdown=replace(parts, idle_ms=idle_ms))


def profiled_on_gpu(facts: Facts) -> tuple[Arm, Breakdown, float] | NotApplicable:
    """Return the GPU's step, its breakdown and ms; on a CPU nothing applies. Raises `Unrecorded`."""
    now = step_on_gpu(facts)
    if now is None and facts.trial.device == "cpu":
        return NotApplicable(reason="the step as it is was not timed on a GPU")
    found = breakdown_of(now) if now else None
    if now is None or found is None or not now.step_ms:
        why = why_unknown(now) if now else "was not timed"
        raise Unrecorded(Arm, "breakdown", f"the step as it is {why}")
    return now, found, now.step_ms
