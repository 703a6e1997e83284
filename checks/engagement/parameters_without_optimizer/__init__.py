"""The conversion to FP8 broke the job

A conversion makes new layers, which lose hooks, `compile()` or a subclass's own forward without a warning.
Weights become new Parameters if Accelerate takes Transformer Engine, or torchao wraps them for FSDP's float8
all-gather. Then the optimizer holds the old ones, so layers do not learn. A LoRA base loses
`requires_grad=False`, a head its tie to the embedding. Accelerate wraps torchao's weights even on one GPU:
one SGD step changed no converted weight. MXFP8 wrappers of torchao 0.17 and 0.18 lose biases, and safetensors
cannot write wrapped weights.

    accelerator = Accelerator(mixed_precision="fp8")   # before

    recipe = AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))   # after (accelerate 1.15)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])

In your own code convert first; then tie weights, add hooks, compile, and create the optimizer last. Ignore it
if another optimizer updates these parameters, if you want untied weights, or never save the model. Lost hooks
and forwards are seen only if fp8doctor loads your model file.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/ao.py
https://github.com/pytorch/ao/issues/4846
"""

from typing import Any

from fp8doctor import kit

FREEZE = (
    'held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}\n'
    "for parameter in model.parameters():   # after accelerator.prepare\n"
    "    parameter.requires_grad_(id(parameter) in held)"
)

DDP_AGAIN = (
    "\nmodel = accelerator.prepare_model(accelerator.unwrap_model(model))   # DDP waits for what it saw"
)
"""DistributedDataParallel expects a gradient of every parameter that was trainable when it was made."""


@kit.check("MOD007", "parameters-without-optimizer", severity="error", **kit.NO_FP8_STEP)
def parameters_without_optimizer(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    training, linears, wrappers = facts.training, facts.network.linears, facts.get("network.wrappers", ())
    count = training.parameters_outside_optimizer
    if not count:
        return kit.NotApplicable(reason="no optimizer was given") if count is None else None
    names = training.get("first_outside_optimizer", ())
    bases = [each for each in linears if each.adapter == "base" and each.requires_grad]
    if names and not any(name.startswith(f"{each.name}.") for name in names for each in bases):
        bases = []
    seen = training.get("conversion")
    unfrozen = seen.unfrozen if seen else ()
    sharded = any("FSDP" in each or "FullySharded" in each for each in wrappers)
    wrapped = [each for each in linears if not sharded and each.features.get("float8_all_gather_weight")]
    fp8 = [f"{each.name}." for each in linears if each.use == "training"]
    if bases or unfrozen:
        base, frozen = kit.plural(len(bases), "LoRA layer"), kit.plural(len(unfrozen), "layer")
        cause = (
            f"{f'The base of {base}' if bases else f'What was frozen in {frozen}'} is trainable: the "
            "conversion did not keep requires_grad=False, and each layer computes a third matmul."
        )
        fix = kit.Treatment(
            name="freeze-again",
            summary="after prepare, freeze what the optimizer does not hold; or convert before you add LoRA",
            code=FREEZE + DDP_AGAIN * ("DistributedDataParallel" in wrappers),
        )
    elif wrapped:
        fix = kit.treatments.ORDINARY_WEIGHTS
        cause = (
            f"{len(wrapped)} converted weights became new Parameters after the optimizer had taken the old "
            "ones: these layers do not learn."
        )
    else:
        converted = all(name.startswith(tuple(fp8)) for name in names)
        cause = (
            "They get gradients but are never updated: the optimizer was created before them, before they "
            "became trainable, or for a part of the model."
        )
        fix = kit.Treatment(
            name="optimizer-after-conversion"
            if converted
            else kit.treatment_table.OPTIMIZER_LAST,  # also without FP8
            summary="create the optimizer after every conversion, from the model that trains",
            code="parameters = (each for each in model.parameters() if each.requires_grad)\n"
            f"optimizer = {kit.treatments.optimizer_class(facts)}(parameters, ...)   # with your arguments",
        )
    in_fp8 = bool(fp8) or kit.fp8_was_asked_for(facts) is not None
    return kit.Finding(
        severity=None if in_fp8 else "info",
        title=f"{count} trainable parameter tensors are in no optimizer group",
        explanation=f"{cause} fp8doctor compared them with the groups of {training.optimizer}.",
        evidence={
            "outside_optimizer": count,
            "trainable_lora_bases": len(bases),
            "wrapped_weights": len(wrapped),
            "first": names,
        },
        treatment=fix,
        breaks="layers_do_not_learn" if in_fp8 and not (bases or unfrozen) else kit.NOT_RECORDED,
    )


def _converted(layer: kit.Linear, *, outside: int = 0, **seen: Any) -> kit.Facts:
    lost = "without_hooks without_forward bypassed unfrozen untied"
    return kit.example(
        packages={"torchao": "0.18.0"},
        linears=(layer,),
        broken_ties=(),
        save_pretrained=layer.weight_class == ALL_GATHER,
        conversion=kit.facts.Conversion(linears=8, **dict.fromkeys(lost.split(), ()) | seen),
        optimizer="torch.optim.adamw.AdamW",
        parameters_outside_optimizer=outside,
        trainer=None,
    )


ALL_GATHER = "WeightWithDynamicFloat8CastTensor"
MXFP8 = kit.float8(
    kind="torch.nn.modules.linear.Linear",
    recipe="mxfp8",
    weight_class="torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor",
    bias=True,
)

FIRES = (
    _converted(kit.float8("up.base_layer", adapter="base"), outside=1),
    _converted(kit.float8(), untied=(("lm_head.weight", "embed.weight"),)),
    _converted(kit.float8(weight_class=ALL_GATHER)),
    _converted(kit.float8(), without_hooks=("up",)),
    _converted(MXFP8),
)
SILENT = _converted(kit.float8())
