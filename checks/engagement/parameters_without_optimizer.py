"""The conversion to FP8 broke the job

A converter makes a new layer with the old weight and leaves the rest behind, without a warning. The optimizer
holds the old Parameters, so layers do not learn. A LoRA base loses `requires_grad=False`, a head its tie to
the embedding, a layer its hooks, `compile()` or a subclass's own forward. MXFP8 wrappers of torchao 0.17 and
0.18 lose biases, and safetensors cannot write wrapped weights. Accelerate wraps torchao's weights for FSDP's
float8 all-gather even on one GPU: one SGD step then changed no converted weight.

    model, optimizer = accelerator.prepare(model, optimizer)  # before

    from accelerate import Accelerator                        # after (accelerate 1.15)
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig
    recipe = AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)

In your own code convert first; then tie weights, add hooks, compile, and create the optimizer last. Ignore it
if another optimizer updates these parameters, if you want untied weights, or never save the model. Lost hooks
and forwards are seen only if fp8doctor loads your model file.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/ao.py
https://github.com/pytorch/ao/issues/4846
"""

from __future__ import annotations

from typing import Any

from fp8doctor import kit

BROKEN: dict[str, Any] = {"changes_fp8": True, "invalidates_model": True}

FREEZE = (
    'held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}\n'
    "for parameter in model.parameters():   # after accelerator.prepare\n"
    "    parameter.requires_grad_(id(parameter) in held)"
)

DDP_AGAIN = (
    "\nmodel = accelerator.prepare_model(accelerator.unwrap_model(model))   # DDP waits for what it saw"
)
"""DistributedDataParallel expects a gradient of every parameter that was trainable when it was made."""

ALL_GATHER_WEIGHT = "WeightWithDynamicFloat8CastTensor"
"""torchao's wrapper for FSDP's float8 all-gather. Source: ``torchao/float8/fsdp_utils.py``, 0.10 to 0.18."""

DROPS_BIAS = kit.Version("0.17"), kit.Version("0.19.dev0")
"""First torchao whose MXFP8 wrapper omits the bias, and the first that may not. Run in 0.18, read in 0.17;
ao#4846."""

CANNOT_TELL = "nothing shows whether torchao's MXFP8 wrapper or the layer's own forward adds the bias"

UNWRAP = kit.Treatment(
    name="save-unwrapped",
    summary="save the tensors inside the wrappers",
    code="# torchao 0.17 and 0.18\n"
    'plain = {name: getattr(tensor, "_data", tensor) for name, tensor in model.state_dict().items()}\n'
    "model.save_pretrained(folder, state_dict=plain)",
)

CONVERT_FIRST = kit.Treatment(
    name="convert-first",
    summary="convert first, then add hooks and compile",
    code="convert_to_float8_training(model)\nmodel.up.register_forward_hook(hook)\nmodel.up.compile()",
)


@kit.check("MOD007", "parameters-without-optimizer", area="engagement", severity="error", **BROKEN)
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
        fix = kit.ORDINARY_WEIGHTS
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
            name="optimizer-after-conversion" if converted else kit.OPTIMIZER_LAST,  # also without FP8
            summary="create the optimizer after every conversion, from the model that trains",
            code="optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if "
            "parameter.requires_grad)",
        )
    in_fp8 = bool(fp8) or kit.fp8_was_asked_for(facts) is not None
    return kit.Finding(
        severity=None if in_fp8 else "info",
        title=f"{count} trainable parameter tensors are in no optimizer group, so no step updates them",
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


@kit.check("MOD007", "tied-weights-untied", area="engagement", severity="error", was="MOD008", **BROKEN)
def tied_weights_untied(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    if not facts.network.fp8:
        return kit.NotApplicable(reason="no FP8 layer in the model")
    declared, conversion = facts.network.broken_ties, facts.get("training.conversion")
    seen = conversion.untied if conversion else ()
    pairs = tuple({frozenset(pair): pair for pair in (*seen, *declared)}.values())
    if not pairs:
        return None
    one, other = pairs[0]
    here, there = (kit.in_python(each, facts.network, unwrapped=True) for each in pairs[0])
    return kit.Finding(
        title=f"{one} is no longer tied to {other}{f', nor {len(pairs) - 1} more' * (len(pairs) > 1)}",
        explanation="The conversion made two parameters of one: they train independently, and a checkpoint "
        "keeps only one.",
        evidence={"untied": len(pairs), "first": one, "was": other, "seen_during_conversion": len(seen)},
        treatment=kit.Treatment(
            name="tie-again",
            summary="tie the weights again after the conversion",
            code=("model.tie_weights()" if declared else f"{here} = {there}")
            + "   # right after the conversion",
        ),
    )


@kit.check("MOD007", "cannot-be-saved", area="engagement", severity="error", was="MOD010", **BROKEN)
def cannot_be_saved(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    trained = [each for each in facts.network.fp8 if each.adapter != "base"]
    for saved in facts.network.saving if trained else ():
        layers = [each for each in trained if each.weight_class == saved.weight_class]
        writer = failing_writer(saved, facts)
        if layers and writer:
            kind = saved.weight_class.rpartition(".")[2]
            fix = None if saved.pickle_error else UNWRAP
            error = saved.pickle_error or saved.storage_error or ""
            return kit.Finding(
                severity="warning" if writer.startswith("Accelerate") else None,
                title=f"{kit.plural(len(layers), 'FP8 layer')} cannot be saved: their weights are {kind}"
                f"{kit.named(layers, len(trained))}",
                explanation=f"{writer} fails on them (tried on {saved.tried}): {error.rstrip('.')}.",
                evidence={"layers": len(layers), "weight_class": saved.weight_class, "writer": writer},
                treatment=kit.ORDINARY_WEIGHTS if kind == ALL_GATHER_WEIGHT else fix,
            )
    return None if trained else kit.NotApplicable(reason="no layer is set up for FP8 training")


def failing_writer(saved: kit.SavedWeight, facts: kit.Facts) -> str | None:
    """Name the writer of this job's checkpoints that fails; None if it works or nothing shows which it is."""
    if saved.pickle_error or not saved.storage_error:
        return "torch.save" if saved.pickle_error else None
    if facts.training.trainer:
        return "A Trainer's checkpoint, which uses safetensors,"
    if facts.network.save_pretrained:
        return "save_pretrained, which writes safetensors,"
    prepared = facts.training.accelerate and facts.training.accelerate.prepared
    return "Accelerate's save_state, which writes safetensors by default," if prepared else None


@kit.check("MOD007", "hooks-or-subclass-lost", area="engagement", severity="error", was="MOD011", **BROKEN)
def hooks_or_subclass_lost(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    seen = facts.training.conversion
    if seen is None or not seen.linears:
        return kit.NotApplicable(reason="no Linear was replaced while fp8doctor loaded a model file")
    kinds = ", ".join(kind.rpartition(".")[2] for kind in seen.lost_forwards)
    lost = {
        "the conversion dropped the hooks of {}": seen.without_hooks,
        f"the conversion dropped the own forward of {{}} ({kinds})": seen.without_forward,
        "the conversion dropped the compile of {}": seen.without_compile,
        "a compiled wrapper keeps calling the old Linear of {}, in 16 bits": seen.bypassed,
    }
    names = [name for each in lost.values() for name in each]
    if not names:
        return None
    keep = kit.Treatment(
        name="keep-subclasses",
        summary="convert plain nn.Linear only, so a subclass keeps its forward",
        code=kit.convert_again(facts, only="type(layer) is nn.Linear"),
    )
    return kit.Finding(
        severity="error" if seen.bypassed else "warning",
        title="; ".join(
            words.format(kit.plural(len(each), "Linear")) for words, each in lost.items() if each
        ),
        explanation=f"{kit.plural(seen.linears, 'Linear')} became FP8 layers while the model file was "
        f"loaded. {len(set(names))} of them lost something that nobody put back.",
        evidence={
            "converted": seen.linears,
            "without_hooks": len(seen.without_hooks),
            "without_forward": len(seen.without_forward),
            "without_compile": len(seen.without_compile),
            "bypassed": len(seen.bypassed),
            "first": names[0],
        },
        treatment=keep if seen.without_forward else CONVERT_FIRST,
    )


@kit.check(
    "MOD007",
    "bias-dropped",
    area="engagement",
    severity="error",
    was="MOD013",
    explained_by=("no-fp8-tensor-cores", "recipe-unsupported"),
    **BROKEN,
)
def bias_dropped(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    wrapped = [
        each
        for each in facts.network.fp8
        if not kit.is_grouped(each) and (kit.is_mxfp8(each) or "adds_bias" in each.features)
    ]
    if not wrapped:
        return kit.NotApplicable(reason="no Linear has a weight in torchao's MXFP8 wrapper")
    adds = [(each, adds_bias(each, facts)) for each in wrapped if each.bias]
    dropped = [each for each, added in adds if added is False]
    if not dropped:
        if any(added is None for _, added in adds):
            raise kit.Unrecorded(kit.Linear, "features", CANNOT_TELL)
        return None
    return kit.Finding(
        title=f"{kit.plural(len(dropped), 'MXFP8 layer')} "
        f"{'loses its' if len(dropped) == 1 else 'lose their'} bias{kit.named(dropped, len(wrapped))}",
        explanation=f"torchao {kit.installed(facts, 'torchao') or ''} multiplies input and weight and omits "
        "the bias. The output is wrong, and the bias gets no gradient.",
        evidence={"layers": len(dropped), "mxfp8_layers": len(wrapped), "first": dropped[0].name},
        breaks="layers_do_not_learn",
        treatment=kit.mxfp8_without_biases("biases-in-float8", facts),
    )


def adds_bias(linear: kit.Linear, facts: kit.Facts) -> bool | None:
    """Whether the wrapper adds the bias: as tried, else by torchao's version; None if neither shows it."""
    if "adds_bias" in linear.features:
        return linear.features["adds_bias"] is True
    found, (first, end) = kit.installed(facts, "torchao"), DROPS_BIAS
    drops = found is not None and first <= found < end and not linear.features.get("own_forward")
    return False if drops else None


LOST = "without_hooks without_forward lost_forwards without_compile bypassed unfrozen untied"


def _converted(layer: kit.Linear, *, outside: int = 0, saved: str | None = None, **seen: Any) -> kit.Facts:
    wrapper: dict[str, Any] = {"weight_class": layer.weight_class or "", "tried": "up", "pickle_error": None}
    return kit.example(
        packages={"torchao": "0.18.0"},
        linears=(layer,),
        broken_ties=(),
        saving=(kit.SavedWeight(**wrapper, storage_error=saved),),
        save_pretrained=True,
        conversion=kit.Conversion(linears=8, **dict.fromkeys(LOST.split(), ()) | seen),
        optimizer="torch.optim.adamw.AdamW",
        parameters_outside_optimizer=outside,
        trainer=None,
    )


MXFP8 = kit.float8(
    kind="torch.nn.modules.linear.Linear",
    recipe="mxfp8",
    weight_class="torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor",
    bias=True,
)

FIRES = (
    _converted(kit.float8("up.base_layer", adapter="base"), outside=1),
    _converted(kit.float8(), untied=(("lm_head.weight", "embed.weight"),)),
    _converted(kit.float8(weight_class=ALL_GATHER_WEIGHT), saved="RuntimeError: invalid python storage"),
    _converted(kit.float8(), without_hooks=("up",)),
    _converted(MXFP8),
)
SILENT = _converted(kit.float8())
