"""The whole model is compiled as one

What it finds. One compile mark covers the whole model, and compiling by block would save 10 s or more per
start.

Why it matters. Compiled as one, a model with N equal blocks is compiled N times over; block by block, the
first one serves all. The step is equally fast, because little can be fused across blocks. Only a head with
its loss inside the forward gains from one graph. You pay the seconds at every start, on every rank, and after
every change of shape. For 24 FP8 layers it is 72 to 93 s on one H200, instead of 8 s block by block.

Fix. Compile the blocks.

    model.compile()             # before

    for block in model.layers:  # after
        block.compile()

When to ignore it. If start-up time does not matter, or one graph makes your step faster.

How it is detected, and limits. The trial times how long each way takes until nothing is compiled any more,
and both steps. If it had no time for the blocks, the line through two shortened models estimates the seconds
for one block. If the step is slower block by block, nothing is reported.

References. Measured on one H200 (torch 2.11, torchao 0.18); BF16 as one took 19 s.
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, base_of, ratio
from fp8doctor.analysis.compile_coverage import compile_treatment, is_inside
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS
from fp8doctor.facts import Arm, ArmCut, ArmName, Blocks, CompileMark, Facts, Trial, recorded
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.facts.no_number import sentence_of
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check

WORTH_SAVING_S = 10.0
"""Seconds per start below which nobody changes a script. A convention."""


@check(
    "CMP006",
    "whole-model-compile",
    area="compilation",
    severity="info",
    changes_fp8=True,
    invalidates_model=True,
)
def whole_model_compile(facts: Facts) -> Finding | NotApplicable | None:
    if not any(not mark.name for mark in facts.training.compile_marks):
        return NotApplicable(reason="the model is not compiled as a whole")
    if facts.trial.device == "cpu":
        return NotApplicable(reason="the trial did not time compilation for a GPU")
    blocks = arm(facts.trial, COMPILE_BLOCKS)
    whole = base_of(facts.trial, blocks) if blocks else arm(facts.trial, ArmName.AS_IS)
    if whole is None:
        return NotApplicable(reason="the trial did not time your step")
    blocks_s = of_blocks(blocks) if blocks else of_one(whole)
    if blocks is None and blocks_s is None:
        return NotApplicable(reason="the trial did not time compiling block by block")
    whole_s = full_warm_up(facts, whole)
    slower = blocks is not None and is_slower(blocks, whole)
    if whole_s is None or blocks_s is None or whole_s - blocks_s < WORTH_SAVING_S or slower:
        return None
    inside = [
        linear
        for linear in facts.network.linears
        if any(is_inside(linear, each) for each in facts.network.blocks)
    ]
    cut = " The seconds are extrapolated from shortened models." if whole.cuts[-1].blocks else ""
    return Finding(
        title=f"Compiling the model as one takes {whole_s:.0f} s; block by block it takes "
        f"{'' if blocks else 'about '}{blocks_s:.0f} s",
        explanation=f"{both_steps(facts, whole, blocks)}{cut}",
        evidence={
            "warm_up_s": whole_s,
            "warm_up_of_blocks_s": blocks_s,
            "blocks": sum(each.count for each in facts.network.blocks),
            "step_ms": whole.step_ms,
            "step_of_blocks_ms": blocks.step_ms if blocks else None,
        },
        treatment=compile_treatment(facts, inside),
    )


def is_slower(blocks: Arm, whole: Arm) -> bool:
    """Whether the step is slower block by block, beyond what counts as even."""
    speed = ratio(whole, blocks)
    return speed.high < 1 or speed.median < 1 - EVEN


def both_steps(facts: Facts, whole: Arm, blocks: Arm | None) -> str:
    """Compare the step as one graph and block by block, or say that the latter was not timed."""
    if blocks:
        return (
            f"Timed in turn, the step takes {blocks.step_ms:,.1f} ms block by block and {whole.step_ms:,.1f} "
            "ms as it is."
        )
    left_out = (sentence_of(each) for each in facts.trial.arms if each.name == COMPILE_BLOCKS and each.reason)
    return (
        f"As it is, the step takes {whole.step_ms:,.1f} ms; the trial did not time it block by "
        f"block{''.join(f' ({each})' for each in left_out)}. The seconds for one block are estimated."
    )


def of_one(whole: Arm) -> float | None:
    """Extrapolate the line through the cuts to a single block; None without such a line."""
    cuts = whole.cuts if recorded(whole, "cuts") else ()
    if len(cuts) < 2:
        return None
    first, last = cuts[0].warm_up_s, cuts[-1].warm_up_s
    kept = [sum(cut.blocks.values()) for cut in cuts]
    if first is None or last is None or kept[-1] == kept[0] or last <= first:
        return None
    return max(0.0, first - (last - first) / (kept[-1] - kept[0]) * (kept[0] - 1))


def of_blocks(blocks: Arm) -> float | None:
    """Return the seconds that compiled the blocks: they are the same at every depth."""
    return max((cut.warm_up_s for cut in blocks.cuts if cut.warm_up_s is not None), default=None)


def full_warm_up(facts: Facts, timed: Arm) -> float | None:
    """Extrapolate the seconds for the full model along the line through the cuts."""
    seconds = [cut.warm_up_s for cut in timed.cuts]
    kept = [sum(cut.blocks.values()) for cut in timed.cuts]
    last = seconds[-1]
    if last is None or not kept[-1] or kept[-1] == kept[0] or seconds[0] is None:
        return last
    slope = max(0.0, (last - seconds[0]) / (kept[-1] - kept[0]))
    return last + slope * (sum(facts.trial.blocks.values()) - kept[-1])


def _compiled(*whole_s: float) -> Facts:
    def timed(name: str, *seconds: float) -> Arm:
        both = zip((4, 12), seconds, strict=True)
        cuts = tuple(ArmCut(blocks={"blocks": kept}, warm_up_s=each) for kept, each in both)
        return variant(name, 88.3, base=ArmName.AS_IS, cuts=cuts)

    arms = (timed(ArmName.AS_IS, *whole_s), timed(COMPILE_BLOCKS, 8.0, 3.0))
    return example(
        linears=(float8(compiled=""),),
        blocks=(Blocks(name="blocks", container="list", count=24),),
        wrappers=(),
        compile_marks=(CompileMark(name="", form="in_place"),),
        trial=Trial(device="cuda", blocks={"blocks": 24}, arms=arms),
    )


FIRES = _compiled(15.0, 38.0)
SILENT = _compiled(8.0, 4.0)
