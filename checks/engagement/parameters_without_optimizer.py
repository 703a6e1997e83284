"""Trainable parameters that no optimizer holds

Looks at: every trainable parameter of the model, and the groups of the optimizer that goes with
it.

Why it costs time. A gradient is computed and kept for a parameter that nothing ever updates: a
weight gradient GEMM per layer, its memory, and a model that does not learn there. In FP8 training
it is the conversion that does it, in one of two ways. Accelerate's Transformer Engine path makes
new layers without copying `requires_grad`, so that a frozen LoRA base trains: two GEMMs per layer
become three. And a conversion may make new Parameters after the optimizer took the old ones:
Accelerate's torchao path wraps every converted weight for FSDP's float8 all-gather, on one GPU
too, so the optimizer steps weights that the model no longer has, and the converted layers stay as
they were.

What to do. Freeze again after `prepare` what the optimizer does not hold (or convert before LoRA is
added); and build the optimizer after the conversion, or leave the wrapping out.

    model, optimizer = accelerator.prepare(model, optimizer)       # before: LoRA base un-frozen
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}           # after
    for p in model.parameters(): p.requires_grad_(id(p) in held)
    accelerate launch --mixed_precision fp8 train.py               # before: weights wrapped
    export ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false      # after, and launch as before

Evidence: with real TE 2.20 on an H200 the trainable tensors of a LoRA model went from 9 to 31.
With accelerate 1.15 and torchao 0.18, run on a CPU: after one SGD step no converted weight had
changed; with the variable above all had; a Trainer does the same.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/transformer_engine.py
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.facts import NOT_RECORDED, Environment, Facts, Linear, Network, Training, recorded
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

KEEP_WEIGHTS = Treatment(
    name="no-float8-all-gather",
    summary="leave FSDP's float8 all-gather off where there is no FSDP: the converted layers then keep the "
    "weights that the optimizer holds",
    code="export ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false   # read by Accelerate, and so by a "
    "Trainer\n"
    "# or: AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))",
)
OPTIMIZER_LAST = Treatment(
    name="optimizer-last",
    summary="build the optimizer from the model that trains, after every conversion",
    code="optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if "
    "parameter.requires_grad)",
)


def freeze_again(by_ddp: bool) -> Treatment:
    """Freeze what the optimizer does not hold, whatever the names behind its wrappers are."""
    return Treatment(
        name="freeze-again",
        summary="freeze again after prepare what the optimizer does not hold; or convert before LoRA is "
        "added",
        code=f"{FREEZE}\n{DDP_AGAIN}" if by_ddp else FREEZE,
    )


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
    names = training.first_outside_optimizer if recorded(training, "first_outside_optimizer") else ()
    bases = [linear for linear in linears if linear.adapter == "base" and linear.requires_grad]
    bases = (
        bases
        if not names or any(name.startswith(f"{linear.name}.") for name in names for linear in bases)
        else []
    )
    unfrozen = (
        training.conversion.unfrozen if recorded(training, "conversion") and training.conversion else ()
    )
    sharded = recorded(facts, "network.wrappers") and any(
        "FSDP" in each or "FullySharded" in each for each in facts.network.wrappers
    )
    wrapped = [
        linear for linear in linears if not sharded and linear.features.get("float8_all_gather_weight")
    ]
    by_ddp = recorded(facts, "network.wrappers") and DDP in facts.network.wrappers
    cause, treatment = cause_of(len(bases), len(unfrozen), len(wrapped), by_ddp)
    in_fp8 = any(linear.use == "training" for linear in linears) or fp8_was_asked_for(facts) is not None
    return Finding(
        severity=None if in_fp8 else "info",
        title=f"{count} trainable parameter tensors are in no optimizer group",
        explanation=f"{cause} Found by comparing the model's parameters with the groups of "
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
    """Tell why they are in no group and what to do, by LoRA's bases, once frozen layers and wrapped
    weights."""
    if bases or unfrozen:
        base, frozen = plural(bases, "LoRA layer"), plural(unfrozen, "layer")
        what = f"The base of {base}" if bases else f"What was frozen in {frozen}"
        return (
            f"{what} is trainable: the conversion did not keep requires_grad=False, and each layer computes "
            "a third GEMM."
        ), freeze_again(by_ddp)
    if wrapped:
        return (
            f"{wrapped} converted weights were wrapped into new Parameters after the optimizer had taken the "
            "old ones: these layers do not learn."
        ), KEEP_WEIGHTS
    return (
        "They get gradients and are never updated: the optimizer was built before they were made or made "
        "trainable, or on a part of the model."
    ), OPTIMIZER_LAST


def _lora(outside: int) -> Facts:
    base = Linear(
        name="up.base_layer", use="training", features={}, adapter="base", requires_grad=outside > 0
    )
    training = Training(
        optimizer="torch.optim.adamw.AdamW",
        parameters_outside_optimizer=outside,
        accelerate=None,
        trainer=None,
    )
    return Facts(environment=Environment(variables={}), network=Network(linears=(base,)), training=training)


SICK = _lora(outside=1)
HEALTHY = _lora(outside=0)
