"""The whole model is compiled as one

Looks at: a compile mark on the whole model, and the trial's arm that compiles the same model block
by block instead: how long both took from the first step until nothing was compiled any more, and
their step times.

Why it matters. Compiled as one, a model of N equal blocks is compiled N times over; block by block
the first one serves all. The step is as fast, because little can be fused from one block into the
next. The seconds are paid at every start, on every rank, after every change of shape, and a short
benchmark that includes them measures the compiler: for 24 FP8 layers 72 to 93 s, against 19 s in
BF16 and 8 s block by block.

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
from fp8doctor.analysis.outcome import EVEN
from fp8doctor.facts import Arm, ArmCut, Blocks, CompileMark, Facts, Linear, Network, Training, Trial
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
    blocks = arm(facts.trial, "compile-blocks")
    whole = base_of(facts.trial, blocks) if blocks else None
    if whole is None or blocks is None:
        return NotApplicable(reason="compiling block by block was not timed beside it")
    whole_s, blocks_s = full_warm_up(facts, whole), full_warm_up(facts, blocks)
    speed = ratio(whole, blocks)
    slower = speed.high < 1 or speed.median < 1 - EVEN
    if whole_s is None or blocks_s is None or whole_s - blocks_s < WORTH_SAVING_S or slower:
        return None
    inside = [
        linear
        for linear in facts.network.linears
        if any(is_inside(linear, each) for each in facts.network.blocks)
    ]
    cut = " The seconds are those of the cuts, carried on to the full depth." if whole.cuts[-1].blocks else ""
    return Finding(
        title=f"The model is compiled as one: {whole_s:.0f} s to compile, {blocks_s:.0f} s block by block",
        explanation=f"Block by block the step takes {blocks.step_ms:.1f} ms and as it is {whole.step_ms:.1f} "
        f"ms, timed in turn.{cut}",
        evidence={
            "warm_up_s": whole_s,
            "warm_up_of_blocks_s": blocks_s,
            "blocks": sum(each.count for each in facts.network.blocks),
            "step_ms": whole.step_ms,
            "step_of_blocks_ms": blocks.step_ms,
        },
        treatment=compile_treatment(facts, inside),
    )


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
            arms=(timed(ArmName.AS_IS, whole_s), timed("compile-blocks", (8.0, 3.0))),
        ),
    )


SICK = _compiled(whole_s=(15.0, 38.0))
HEALTHY = _compiled(whole_s=(8.0, 4.0))
