"""Trainable parameters that no optimizer holds

What it finds. The model has trainable parameters that are in no group of the optimizer.

Why it matters. PyTorch computes and keeps a gradient for them, but nothing ever updates them. FP8 conversions
cause this in two ways. Accelerate's Transformer Engine path creates new layers without copying
`requires_grad`, so a frozen LoRA base trains: two matmuls per layer become three. And a conversion may create
new Parameters after the optimizer took the old ones. Accelerate's torchao path does this when it wraps
weights for FSDP's float8 all-gather, even on one GPU. The optimizer then updates weights that the model no
longer has, and the converted layers do not learn.

Fix. After `prepare`, freeze what the optimizer does not hold. For torchao under Accelerate without FSDP,
`export ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false`. Otherwise create the optimizer last.

    # before: the LoRA base is trainable again
    model, optimizer = accelerator.prepare(model, optimizer)

    # after (accelerate 1.15)
    model, optimizer = accelerator.prepare(model, optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for p in model.parameters():
        p.requires_grad_(id(p) in held)

When to ignore it. If another optimizer, which fp8doctor does not see, updates these parameters.

How it is detected, and limits. fp8doctor compares every trainable parameter with the groups of one optimizer.
It names the cause from trainable LoRA bases, layers that a conversion unfroze, and wrapped weights.

References. With TE 2.20 on an H200, a LoRA model went from 9 to 31 trainable tensors. With accelerate 1.15
and torchao 0.18, one SGD step changed no converted weight; with the variable above it changed all.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/ao.py
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.analysis.treatment_table import OPTIMIZER_LAST
from fp8doctor.diagnosis.treatments import ORDINARY_WEIGHTS
from fp8doctor.facts import NOT_RECORDED, Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

FREEZE = (
    'held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}\n'
    "for parameter in model.parameters():   # after accelerator.prepare\n"
    "    parameter.requires_grad_(id(parameter) in held)"
)
DDP_AGAIN = "model = accelerator.prepare_model(accelerator.unwrap_model(model))   # DDP waits for what it saw"
"""DistributedDataParallel expects a gradient of every parameter that was trainable when it was made."""

DDP = "DistributedDataParallel"


def late_optimizer(name: str) -> Treatment:
    return Treatment(
        name=name,
        summary="create the optimizer after every conversion, from the model that trains",
        code="optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if "
        "parameter.requires_grad)",
    )


LATE_OPTIMIZER = late_optimizer("optimizer-after-conversion")


@check(
    "MOD007",
    "parameters-without-optimizer",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def parameters_without_optimizer(facts: Facts) -> Finding | NotApplicable | None:
    training, linears = facts.training, facts.network.linears
    count = training.parameters_outside_optimizer
    if count is None:
        return NotApplicable(reason="no optimizer was given")
    if not count:
        return None
    names = training.get("first_outside_optimizer", ())
    bases = [linear for linear in linears if linear.adapter == "base" and linear.requires_grad]
    bases = (
        bases
        if not names or any(name.startswith(f"{linear.name}.") for name in names for linear in bases)
        else []
    )
    unfrozen = conversion.unfrozen if (conversion := training.get("conversion")) else ()
    wrappers = facts.get("network.wrappers", ())
    sharded = any("FSDP" in each or "FullySharded" in each for each in wrappers)
    wrapped = [each for each in linears if not sharded and each.features.get("float8_all_gather_weight")]
    cause, treatment = cause_of(len(bases), len(unfrozen), len(wrapped), DDP in wrappers)
    converted = tuple(f"{each.name}." for each in linears if each.use == "training")
    if treatment is LATE_OPTIMIZER and not all(name.startswith(converted) for name in names):
        treatment = late_optimizer(OPTIMIZER_LAST)  # also without FP8
    in_fp8 = any(linear.use == "training" for linear in linears) or fp8_was_asked_for(facts) is not None
    return Finding(
        severity=None if in_fp8 else "info",
        title=f"{count} trainable parameter tensors are in no optimizer group, so no step updates them",
        explanation=f"{cause} fp8doctor compared the model's parameters with the groups of "
        f"{training.optimizer}.",
        evidence={
            "outside_optimizer": count,
            "trainable_lora_bases": len(bases),
            "wrapped_weights": len(wrapped),
            "first": names,
        },
        treatment=treatment,
        breaks="layers_do_not_learn" if in_fp8 and not (bases or unfrozen) else NOT_RECORDED,
    )


def cause_of(bases: int, unfrozen: int, wrapped: int, by_ddp: bool) -> tuple[str, Treatment]:
    """Name cause and fix, from LoRA's bases, layers frozen before, and wrapped weights."""
    if bases or unfrozen:
        base, frozen = plural(bases, "LoRA layer"), plural(unfrozen, "layer")
        what = f"The base of {base}" if bases else f"What was frozen in {frozen}"
        return (
            f"{what} is trainable: the conversion did not keep requires_grad=False, and each layer computes "
            "a third matmul."
        ), Treatment(
            name="freeze-again",
            summary="after prepare, freeze what the optimizer does not hold; or convert before you add LoRA",
            code=f"{FREEZE}\n{DDP_AGAIN}" if by_ddp else FREEZE,
        )
    if wrapped:
        return (
            f"{wrapped} converted weights became new Parameters after the optimizer had taken the old ones: "
            "these layers do not learn."
        ), ORDINARY_WEIGHTS
    return (
        "They get gradients but are never updated: the optimizer was created before them, before they became "
        "trainable, or for a part of the model."
    ), LATE_OPTIMIZER


def _lora(outside: int) -> Facts:
    base = float8("up.base_layer", adapter="base", requires_grad=outside > 0)
    optimizer = {"optimizer": "torch.optim.adamw.AdamW", "parameters_outside_optimizer": outside}
    return example(variables={}, linears=(base,), **optimizer, accelerate=None, trainer=None)


FIRES = _lora(outside=1)
SILENT = _lora(outside=0)
