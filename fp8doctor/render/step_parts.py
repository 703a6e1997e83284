"""The difference of an FP8 step and the best BF16, measured or estimated, in a sentence of its parts."""

from __future__ import annotations

from fp8doctor.analysis.arms import best_bf16, timed_on_cpu, uses_fp8
from fp8doctor.analysis.compile_coverage import blocks_are_compiled
from fp8doctor.analysis.modelled_speedup import FIXED, ModelledSpeedup
from fp8doctor.analysis.no_estimate import unknown_part
from fp8doctor.analysis.rank_comparison import exposed_of_ranks
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.step_difference import PART_NAMES, REST, Waterfall, signed
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.expected_verdict import expected_speedup, fp8_outside_layers, invalidates
from fp8doctor.diagnosis.outlook import counted_in_words, loses_as_modelled
from fp8doctor.facts import if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.render.timing import NONE_MS
from fp8doctor.wording import minus

UNEXPLAINED = "fp8doctor cannot explain the gap"
"""Says that FP8 is slower, and no cause is known."""


MOST_PARTS = 3
"""Parts of a difference that a sentence names; the chart has them all."""


LONG_MS = 10.0
"""Step from which a tenth of a ms tells parts apart; a shorter one has another digit."""


RESIDUAL = "not explained by the estimate"
"""A measured step less its estimate, if no profile says what it is."""


def estimate_told(report: Document) -> ModelledSpeedup | None:
    """Return the estimated speedup if it is the answer."""
    verdict = report.verdict
    if verdict.status not in ("no_fp8", "not_measured") or verdict.basis != "modelled" or verdict.step_ms:
        return None
    return expected_speedup(report.facts, report.findings)


def measured_parts(found: Waterfall, report: Document) -> str:
    """Divide the measured difference, the largest part first."""
    known = ((name, ms) for name, ms in found.parts_ms.items() if name != REST)
    parts = sorted(known, key=lambda each: -abs(each[1]))[:MOST_PARTS]
    shown = [(PART_NAMES.get(name, name), round(ms, 1)) for name, ms in parts]
    rest = ("other parts", found.difference_ms - sum(ms for _, ms in shown))
    named = ", ".join(f"{name} {signed(ms)}" for name, ms in (*shown, rest) if abs(ms) >= NONE_MS)
    takes = "would take" if report.verdict.status == "no_fp8" else "takes"
    noise = ", within the noise" if report.verdict.status == "too_noisy" else ""
    longer = f"{abs(found.difference_ms):,.1f} ms/step {'longer' if found.difference_ms > 0 else 'less'}"
    return f"FP8 {takes} {longer}{noise}: {named}."


def only_bf16_is_compiled(report: Document) -> bool:
    """Return whether no block of the FP8 step is compiled, and the best BF16 is."""
    facts, bf16 = report.facts, if_recorded(best_bf16, report.facts)
    if bf16 is None or bf16.name not in (ArmName.BF16_COMPILED, ArmName.BF16_AS_COMPILED):
        return False
    blocks = facts.network.get("blocks", ())
    eager = all(recorded(each, "compiled") and not each.compiled for each in blocks)
    return bool(blocks) and eager and bool(if_recorded(uses_fp8, facts))


def is_profiled(report: Document) -> bool:
    """Return whether a watched script's step was profiled."""
    return recorded(report.facts, "observed.breakdown")


def estimated_parts(report: Document) -> str:
    """Divide the estimated difference of FP8 and BF16; empty if that explains nothing."""
    expects = expected_speedup(report.facts, report.findings)
    if expects is None or expects.parts is None:
        return ""
    parts, verdict = expects.parts, report.verdict
    digits = 1 if parts.bf16_ms >= LONG_MS else 2
    bf16_ms, fp8_ms, saved_ms, casts_ms, idle_ms = (
        round(ms, digits)
        for ms in (parts.bf16_ms, parts.fp8_ms, parts.saved_ms, parts.casts_ms, parts.idle_ms)
    )
    longer_ms = fp8_ms - bf16_ms
    if verdict.speedup and (longer_ms < 0) != (verdict.speedup > 1):
        return ""
    named = {"matmuls": -saved_ms, "casts": casts_ms, "idle GPU": idle_ms}
    if verdict.basis == "measured":
        if (apart_ms := _measured_apart(report)) is not None:
            named[RESIDUAL] = apart_ms - sum(named.values())
        return f"The difference was not profiled: {_told(named, digits)} ms/step (estimated)."
    unknown_ms = 0.0
    if not (expects.ran_ms or idle_ms):
        named["idle GPU"] = round(parts.modelled_idle_ms, digits)
    if expects.ran_ms and expects.modelled_ms and not is_profiled(report):
        unknown_ms = round(expects.ran_ms - expects.modelled_ms, digits)
    named |= {"other work": longer_ms - sum(named.values()) - unknown_ms, RESIDUAL: unknown_ms}
    told, fp8, bf16 = _told(named, digits), f"{fp8_ms:,.{digits}f} ms/step", f"{bf16_ms:,.{digits}f}"
    both = _in_bf16_too(expects, unknown_ms, digits)
    if expects.modelled_ms:
        return f"FP8 takes {fp8}, {parts.bf16} would take about {bf16} (estimated): {told}.{both}"
    takes = f"FP8 {'would take' if expects.recipes or expects.after else 'takes'} about {fp8}"
    return f"{_once_changed(expects, report)}{takes}, {parts.bf16} {bf16} (estimated): {told}.{both}"


def _in_bf16_too(expects: ModelledSpeedup, shown_ms: float, digits: int) -> str:
    """Say how much of a watched step is in no estimate, unless that is a part that is shown."""
    if not (expects.left_out_ms and (expects.describes_no_watched_step or expects.is_of_another_step)):
        return ""
    left_out_ms = f"{expects.left_out_ms:,.{digits}f} ms"
    if left_out_ms == f"{shown_ms:,.{digits}f} ms":
        return f" BF16 may take those {left_out_ms} too."
    return f" {left_out_ms} of the step as it ran are in no estimate: BF16 may take them too."


def _told(parts_ms: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {signed(ms, digits)}" for name, ms in parts_ms.items() if round(ms, digits))


def _measured_apart(report: Document) -> float | None:
    """Return the measured FP8 step less the best BF16, in ms; None if one was not timed."""
    view = trial_view(report.facts)
    fp8 = view.as_is if view.uses_fp8 else view.fp8
    return minus(fp8.step_ms, view.bf16.step_ms) if fp8 and view.bf16 else None


def _once_changed(expects: ModelledSpeedup, report: Document) -> str:
    """Say what has to change before the step is the estimated one; empty if it is."""
    if expects.recipes or not expects.after:
        return ""
    if expects.after != FIXED:
        return f"{expects.after[:1].upper()}{expects.after[1:]}, "
    steps, doubts = report.prescription, {each.code for each in report.findings if invalidates(each)}
    fixing = [step.treatment.name for step in steps if doubts & {step.code, *step.mends}]
    if not fixing or STAY_IN_BF16 in fixing:
        return "Once this is fixed, "
    return f"With {counted_in_words(steps)}, "


def largest_cost(report: Document) -> str:
    """Say which part of an estimate costs most if FP8 is slower by it; else empty."""
    expects = estimate_told(report)
    if expects is None or expects.parts is None or expects.after or expects.gains_compiled:
        return ""
    if (expects.as_is or 1.0) >= 1 - EVEN:
        return ""
    casts_ms, exposed = expects.parts.casts_ms, if_recorded(exposed_of_ranks, report.facts) or (0.0,)
    paid = casts_ms <= expects.parts.saved_ms
    casts = "" if paid else "The casts cost more than the matmuls save."
    alone = f"Communication alone takes {min(exposed):,.1f} to {max(exposed):,.1f} ms/step on the ranks."
    return f"{casts} {alone}".strip() if max(exposed) >= max(casts_ms, NONE_MS) else casts


def summary_of_recipes(report: Document) -> str:
    """Return the verdict's summary with the recipes in place of the speed that the title gives."""
    expects, summary = estimate_told(report), report.verdict.summary
    if expects is None or not expects.recipes:
        return summary
    first, *others = expects.recipes
    slower = ", ".join(f"{each} {expects.recipes[each]:.2f}x" for each in others)
    recipes = f"The best recipe would be {first}, compiled{f' ({slower})' if slower else ''}."
    return summary.replace(expects.sentence, recipes)


def no_cause_known(report: Document) -> str:
    """Say why no finding explains the speed of FP8."""
    verdict = report.verdict
    if verdict.status == "fp8_slower":
        return f"{UNEXPLAINED}: no check found its cause."
    if modelled_loss(report):
        return (
            "No check found a mistake. In these layers the FP8 casts cost more than the matmuls save "
            "(estimated)."
        )
    if verdict.basis == "modelled":
        expects = estimate_told(report)
        if expects and expects.ran_ms and expects.other_work_leads and not is_profiled(report):
            return "The step was not profiled, so no check can tell more."
        if expects and expects.other_work_leads and not expects.after:
            return f"Other work costs most. No check knows why{_uncompiled(report)}."
        if cost := largest_cost(report):
            return cost
        if expects and expects.as_is_loses:
            how = "compiling it explains most of the gap" if expects.gains_compiled else UNEXPLAINED
            return f"No check found anything that slows FP8 down: {how} (estimated)."
        if expects and expects.after:
            return unknown_part(report.facts).of(" as it is")
        return "No check found anything that slows FP8 down."
    if verdict.status == "not_measured":
        in_layers = if_recorded(uses_fp8, report.facts)
        if not in_layers and (outside := if_recorded(fp8_outside_layers, report.facts)):
            return outside
        return "BF16 was not timed, so there is nothing to compare with."
    if timed_on_cpu(report.facts):
        return "Timed on a CPU, which does not predict a GPU."
    return "The step was not profiled."


def _uncompiled(report: Document) -> str:
    """Say that some of the blocks are not compiled, or none; else empty."""
    network = report.facts.network
    if blocks_are_compiled(network):
        return ""
    blocks = network.get("blocks", ())
    some = any(each.get("compiled") for each in blocks)
    return f", but {'not every block is' if some else 'no block is' if blocks else 'it is not'} compiled"


def modelled_loss(report: Document) -> bool:
    """Return whether only the cost model speaks about FP8's speed, and expects a loss."""
    return report.verdict.basis == "modelled" and bool(if_recorded(loses_as_modelled, report))
