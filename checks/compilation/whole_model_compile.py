"""The whole model is compiled as one

Looks at: a compile mark on the whole model, and how long its step took from the first one until
nothing was compiled any more; the same of the trial's arm that compiles block by block, and both
step times. Where that arm was not timed, the line through two cuts tells what one block takes.

Why it matters. Compiled as one, a model of N equal blocks is compiled N times over; block by block
the first one serves all. The step is as fast, because little can be fused from one block into the
next; only a head with its loss inside the forward gains from one graph. The seconds are paid at
every start, on every rank, after every change of shape, and a short benchmark that includes them
measures the compiler: for 24 FP8 layers 72 to 93 s, against 19 s in BF16 and 8 s block by block.

What to do. Compile the blocks.

    model.compile()                    # before
    for block in model.layers:         # after
        block.compile()

Evidence: measured on one H200 (torch 2.11, torchao 0.18).
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, base_of, ratio
from fp8doctor.analysis.compile_coverage import compile_treatment, is_inside
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS
from fp8doctor.facts import (
    Arm,
    ArmCut,
    Blocks,
    CompileMark,
    Facts,
    Linear,
    Network,
    Training,
    Trial,
    recorded,
)
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check

WORTH_SAVING_S = 10.0
"""Seconds of every start below which nobody changes a script. A convention of this tool."""


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
        return NotApplicable(reason="what compiling takes for a GPU was not timed")
    blocks = arm(facts.trial, COMPILE_BLOCKS)
    whole = base_of(facts.trial, blocks) if blocks else arm(facts.trial, ArmName.AS_IS)
    if whole is None:
        return NotApplicable(reason="the step as it is was not timed")
    blocks_s = of_blocks(blocks) if blocks else of_one(whole)
    if blocks is None and blocks_s is None:
        return NotApplicable(reason="compiling block by block was not timed beside it")
    whole_s = full_warm_up(facts, whole)
    slower = blocks is not None and is_slower(blocks, whole)
    if whole_s is None or blocks_s is None or whole_s - blocks_s < WORTH_SAVING_S or slower:
        return None
    inside = [
        linear
        for linear in facts.network.linears
        if any(is_inside(linear, each) for each in facts.network.blocks)
    ]
    cut = " The seconds are those of the cuts, carried on to the full depth." if whole.cuts[-1].blocks else ""
    return Finding(
        title=f"The model is compiled as one: {whole_s:.0f} s to compile, {'' if blocks else 'about '}"
        f"{blocks_s:.0f} s block by block",
        explanation=f"{beside_it(facts, whole, blocks)}{cut}",
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


def beside_it(facts: Facts, whole: Arm, blocks: Arm | None) -> str:
    """Tell the step as one graph and block by block, or that the latter was not timed."""
    if blocks:
        return (
            f"Block by block the step takes {blocks.step_ms:,.1f} ms and as it is {whole.step_ms:,.1f} ms, "
            "timed in turn."
        )
    left_out = (each.reason for each in facts.trial.arms if each.name == COMPILE_BLOCKS and each.reason)
    return (
        f"As it is the step takes {whole.step_ms:,.1f} ms; block by block it was not timed"
        f"{''.join(f' ({each})' for each in left_out)}. The seconds of one block are modelled, from the "
        "two cuts."
    )


def of_one(whole: Arm) -> float | None:
    """Carry the line through the cuts on to a single block; None where there is no such line."""
    cuts = whole.cuts if recorded(whole, "cuts") else ()
    if len(cuts) < 2:
        return None
    first, last = cuts[0].warm_up_s, cuts[-1].warm_up_s
    kept = [sum(cut.blocks.values()) for cut in cuts]
    if first is None or last is None or kept[-1] == kept[0] or last <= first:
        return None
    return max(0.0, first - (last - first) / (kept[-1] - kept[0]) * (kept[0] - 1))


def of_blocks(blocks: Arm) -> float | None:
    """Return the seconds of the cut that compiled the blocks: they are the same at every depth."""
    return max((cut.warm_up_s for cut in blocks.cuts if cut.warm_up_s is not None), default=None)


def full_warm_up(facts: Facts, timed: Arm) -> float | None:
    """Extrapolate the seconds until the full model is compiled: a graph of all blocks follows a line through
    the cuts."""
    seconds = [cut.warm_up_s for cut in timed.cuts]
    kept = [sum(cut.blocks.values()) for cut in timed.cuts]
    last = seconds[-1]
    if last is None or not kept[-1] or kept[-1] == kept[0] or seconds[0] is None:
        return last
    slope = max(0.0, (last - seconds[0]) / (kept[-1] - kept[0]))
    return last + slope * (sum(facts.trial.blocks.values()) - kept[-1])


def _compiled(whole_s: tuple[float, float]) -> Facts:
    def timed(name: str, seconds: tuple[float, float]) -> Arm:
        cuts = tuple(
            ArmCut(blocks={"blocks": kept}, warm_up_s=each)
            for kept, each in zip((4, 12), seconds, strict=True)
        )
        return Arm(
            name=name,
            tried=True,
            base=ArmName.AS_IS,
            step_ms=88.3,
            rounds_ms=(88.2, 88.3, 88.3, 88.4),
            cuts=cuts,
        )

    layer = Linear(name="blocks.0.up", compiled="")
    return Facts(
        network=Network(
            linears=(layer,), blocks=(Blocks(name="blocks", container="list", count=24),), wrappers=()
        ),
        training=Training(compile_marks=(CompileMark(name="", form="in_place"),)),
        trial=Trial(
            device="cuda",
            blocks={"blocks": 24},
            arms=(timed(ArmName.AS_IS, whole_s), timed(COMPILE_BLOCKS, (8.0, 3.0))),
        ),
    )


SICK = _compiled(whole_s=(15.0, 38.0))
HEALTHY = _compiled(whole_s=(8.0, 4.0))
