"""The most that FP8 can give: the best BF16 step with its GEMMs at the speed of FP8 and every cast for free.

No change of the casts can beat it, so it says when there is little to look for. It rests on FP8 GEMMs that were timed, in a
step or alone; where there are none, on the datasheet, and is called modelled then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8doctor.cost import modelled_gpu, step_gemms_ms, step_tokens
from fp8doctor.facts import Arm, Breakdown, Facts, recorded
from fp8doctor.finding import Basis
from fp8doctor.waterfall import breakdown_of, part_ms


@dataclass(frozen=True)
class Ceiling:
    """An upper bound on the speedup over the best BF16."""

    speedup: float
    basis: Basis
    source: str
    """What the time of the FP8 GEMMs rests on, in words."""
    gemms_ms: float
    """GEMMs of the BF16 step."""
    fp8_gemms_ms: float
    """What they would take in FP8, those that lose left in BF16."""
    step_ms: float
    """The BF16 step."""

    @property
    def gemms_pct(self) -> float:
        """Share of the BF16 step that FP8 can make faster, in per cent."""
        return 100 * self.gemms_ms / self.step_ms


def bound(facts: Facts, bf16: Arm, fp8: Iterable[Arm]) -> Ceiling | None:
    """The bound for a job whose best BF16 is ``bf16``; ``fp8`` are arms that do the same work in FP8.

    Of what was measured the least time counts, because it is a bound. None when the BF16 step was not profiled, or nothing
    is known about the FP8 GEMMs.
    """
    step = breakdown_of(bf16)
    if step is None or not bf16.step_ms:
        return None
    gemms = part_ms(step, "GEMMs")
    measured = [("measured", *each) for each in (_in_a_step(fp8), _alone(facts, gemms)) if each]
    modelled = [("modelled", *each) for each in (_by_datasheet(facts, gemms),) if each]
    known = min(measured, key=lambda each: each[2], default=None) or next(iter(modelled), None)
    if known is None:
        return None
    basis: Basis = "measured" if known[0] == "measured" else "modelled"
    fastest = min(known[2], gemms)
    return Ceiling(bf16.step_ms / (bf16.step_ms - gemms + fastest), basis, known[1], gemms, fastest, bf16.step_ms)


def _in_a_step(arms: Iterable[Arm]) -> tuple[str, float] | None:
    """All GEMMs of the fastest FP8 step that was profiled."""
    profiled: list[tuple[float, str, Breakdown]] = []
    for arm in arms:
        found = breakdown_of(arm)
        if found is not None and arm.step_ms and found.families_ms.get("gemm_fp8"):
            profiled.append((arm.step_ms, arm.name, found))
    if not profiled:
        return None
    _, name, fastest = min(profiled, key=lambda each: each[0])
    return f"the GEMMs of the arm {name}", part_ms(fastest, "GEMMs")


def _alone(facts: Facts, gemms_ms: float) -> tuple[str, float] | None:
    """The step's GEMMs, sped up as those of the Linears are that were timed alone."""
    shapes = facts.trial.shapes if recorded(facts.trial) and recorded(facts.trial.shapes) else ()
    bf16 = sum(len(each.layers) * each.bf16_ms for each in shapes)
    if not bf16 or all(each.fp8_ms is None for each in shapes):
        return None
    best = sum(len(each.layers) * min(each.bf16_ms, each.fp8_ms if each.fp8_ms is not None else each.bf16_ms) for each in shapes)
    return "the GEMMs of every shape timed alone", gemms_ms * best / bf16


def _by_datasheet(facts: Facts, gemms_ms: float) -> tuple[str, float] | None:
    """The step's GEMMs, sped up as those of the Linears are by the cost model."""
    gpu, tokens = modelled_gpu(facts), step_tokens(facts)
    if tokens is None or gpu.fp8_tflops is None or not recorded(facts.network):
        return None
    bf16 = best = 0.0
    for linear in facts.network.linears:
        shape, count = (tokens, linear.in_features, linear.out_features), linear.gemms if recorded(linear.gemms) else 1
        trained = linear.requires_grad is not False
        wide, narrow = (step_gemms_ms(*shape, gpu, fp8=in_fp8, weight_gradient=trained) or 0.0 for in_fp8 in (False, True))
        bf16 += count * wide
        best += count * (wide if linear.adapter == "adapter" else min(wide, narrow))
    return (f"the datasheet of {gpu.name}", gemms_ms * best / bf16) if bf16 else None
