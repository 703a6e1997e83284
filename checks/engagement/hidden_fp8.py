"""FP8 runs although every flag says it does not

What it finds. Accelerate converted the model to Transformer Engine and runs it in FP8, against its own
precision.

Why it matters. With ACCELERATE_FP8_BACKEND=TE, `prepare` converts the model for any precision. On an H200, a
Trainer with bf16=True trained 15 te.Linear in FP8 while `accelerator.mixed_precision` said bf16. If you keep
this run as your BF16 baseline, FP8 seems to bring nothing. Its memory and numerics are mistaken for BF16's,
and its checkpoints contain FP8 state.

Fix. Remove the backend from the environment of the BF16 run, or ask for fp8. If the launcher says fp8 and
TrainingArguments say bf16, FP8 runs as you asked, with the default DelayedScaling(); leave the flags off.

    # before: bf16=True, but FP8 runs
    ACCELERATE_FP8_BACKEND=TE python train.py

    # after
    python train.py

When to ignore it. If you know that this run is FP8 and do not use it as a baseline.

How it is detected, and limits. fp8doctor looks for Accelerate's FP8 autocast around the forward and for
Transformer Engine layers that did not note a BF16 forward, and compares Accelerate's precision. FP8 layers
that your script created itself are not reported.

References. Measured with transformers 5.17, accelerate 1.15 and Transformer Engine 2.20. In accelerate 1.9.0
to 1.15.0, `prepare` looks at `fp8_backend` alone:
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import asked_by_environment
from fp8doctor.analysis.layers import flops_share_pct
from fp8doctor.diagnosis.treatments import switched_on
from fp8doctor.facts import Accelerate, Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check


@check(
    "MOD006",
    "hidden-fp8",
    area="engagement",
    severity="warning",
    changes_fp8=True,
    invalidates_model=True,
    explained_by=("ENV008",),
)
def hidden_fp8(facts: Facts) -> Finding | NotApplicable | None:
    accelerate = facts.training.accelerate
    if accelerate is None or not accelerate.te_autocast:
        return NotApplicable(reason="Accelerate did not put this model under Transformer Engine's autocast")
    hidden = [
        each for each in facts.network.fp8 if stack_of(each).under_autocast and each.engaged is not False
    ]
    if not hidden:
        return NotApplicable(reason="no layer runs in Transformer Engine's FP8")
    said = (
        "bf16"
        if accelerate.distributed == "DEEPSPEED" and accelerate.mixed_precision == "no"
        else accelerate.mixed_precision
    )
    if said == "fp8":
        return None
    by_variable = facts.variables().get("ACCELERATE_FP8_BACKEND") == "TE"
    asked = asked_by_environment(facts.variables())
    summary, code = way_out(facts, by_variable, asked)
    return Finding(
        title=f"{len(hidden)} of {len(facts.network.linears)} Linears run in FP8 although Accelerate's "
        f"precision is {said}",
        explanation="Accelerate converted the model to Transformer Engine and put its forward under FP8 "
        "autocast"
        + (
            ", because ACCELERATE_FP8_BACKEND=TE names a backend. "
            if by_variable
            else "; its state was reset since. "
        )
        + (f"{asked} asked for that, and only the flags say {said}. " if asked and by_variable else "")
        + "If you measure this as a baseline, it is an FP8 run.",
        evidence={
            "fp8_layers": len(hidden),
            "linears": len(facts.network.linears),
            "flops_share_pct": flops_share_pct(hidden, facts),
            "precision": said,
        },
        treatment=Treatment(
            name="name-backend-and-precision",
            summary=summary,
            code=code,
        ),
    )


def way_out(facts: Facts, by_variable: bool, asked: str | None) -> tuple[str, str]:
    """Say and write how settings and layers agree: in FP8, which runs, if the environment asks for it."""
    trainer = facts.trainer()
    if asked and trainer and (trainer.bf16 or trainer.fp16):
        name = trainer.kind.rpartition(".")[2]
        in_bf16 = "# for BF16: unset ACCELERATE_FP8_BACKEND ACCELERATE_MIXED_PRECISION"
        code = f"args = {name}(..., bf16=False, fp16=False)   # for FP8\n{in_bf16}"
        return "leave the precision to the environment, which asks for FP8", code
    if by_variable and not asked:
        return "unset the backend, or ask for FP8", "unset ACCELERATE_FP8_BACKEND   # for BF16"
    ask = "ask for FP8 in the script too" if asked else "unset the backend, or ask for FP8"
    return ask, f"{switched_on(facts)}   # for FP8"


def _prepared(precision: str) -> Facts:
    accelerate = Accelerate(mixed_precision=precision, distributed="NO", prepared=True, te_autocast=True)
    layer = float8(stack="transformer_engine", engaged=True)
    return example(variables={"ACCELERATE_FP8_BACKEND": "TE"}, linears=(layer,), accelerate=accelerate)


FIRES = _prepared("bf16")
SILENT = _prepared("fp8")
