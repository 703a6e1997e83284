"""What the new layers of a conversion do not have any more: ties, hooks, forwards, biases, a storage."""

from packaging.version import Version

from fp8doctor import kit

ALL_GATHER_WEIGHT = "WeightWithDynamicFloat8CastTensor"
"""torchao's wrapper for FSDP's float8 all-gather, without the storage for which safetensors asks. Source:
``torchao/float8/fsdp_utils.py``, 0.10 to 0.18."""

DROPS_BIAS = Version("0.17"), Version("0.19.dev0")
"""First torchao whose MXFP8 wrapper omits the bias, and the first that may not. Run in 0.18, read in 0.17;
ao#4846."""

CONVERT_FIRST = kit.Treatment(
    name="convert-first",
    summary="convert first, then add hooks and compile",
    code="convert_to_float8_training(model)\nmodel.up.register_forward_hook(hook)\nmodel.up.compile()",
)


@kit.check("MOD007", "tied-weights-untied", severity="error", was="MOD008", **kit.WRONG_FP8_STEP)
def tied_weights_untied(facts: kit.Facts) -> kit.Finding | None:
    declared, conversion = facts.network.broken_ties, facts.get("training.conversion")
    seen = conversion.untied if conversion else ()
    pairs = tuple({frozenset(pair): pair for pair in (*seen, *declared)}.values())
    if not pairs:
        return None
    one, other = pairs[0]
    model, here, there = (kit.in_python(each, facts.network) for each in ("", *pairs[0]))
    code = f"{model}.tie_weights()" if declared else f"{here} = {there}"
    if model != "model":  # right after the conversion it may not be wrapped yet
        code = f'inner = getattr(model, "module", model)\n{code.replace(model, "inner")}'
    return kit.Finding(
        title=f"{one} is no longer tied to {other}{f', nor {len(pairs) - 1} more' * (len(pairs) > 1)}",
        explanation="The conversion made two parameters of one: they train independently, and a checkpoint "
        "keeps only one.",
        evidence={"untied": len(pairs), "first": one, "was": other, "seen_during_conversion": len(seen)},
        treatment=kit.Treatment(
            name="tie-again",
            summary="tie the weights again after the conversion",
            code=f"{code}   # right after the conversion",
        ),
    )


@kit.check("MOD007", "hooks-or-subclass-lost", severity="error", was="MOD011", **kit.NO_FP8_STEP)
def hooks_or_subclass_lost(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    seen = facts.training.conversion
    if seen is None or not seen.linears:
        return kit.NotApplicable(reason="no Linear was replaced while fp8doctor loaded a model file")
    lost = {
        "the conversion dropped the hooks of {}": seen.without_hooks,
        "the conversion dropped the own forward of {}": seen.without_forward,
        "a compiled wrapper keeps calling the old Linear of {}, in 16 bits": seen.bypassed,
    }
    names = [name for each in lost.values() for name in each]
    if not names:
        return None
    return kit.Finding(
        severity="error" if seen.bypassed else "warning",
        title="; ".join(
            words.format(kit.plural(len(each), "Linear")) for words, each in lost.items() if each
        ),
        explanation=f"{kit.plural(seen.linears, 'Linear')} became FP8 layers while the model file was "
        f"loaded. {len(set(names))} of them lost something that nobody put back.",
        evidence={"converted": seen.linears, "lost": len(names), "first": names[0]},
        treatment=kit.keep_in_bf16(seen.without_forward, facts) if seen.without_forward else CONVERT_FIRST,
    )


@kit.check(
    "MOD007",
    "bias-dropped",
    severity="error",
    was="MOD013",
    explained_by=("no-fp8-tensor-cores", "recipe-unsupported"),
    **kit.NO_FP8_STEP,
)
def bias_dropped(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    mxfp8 = [each for each in facts.network.fp8 if kit.conversion.is_mxfp8(each)]
    wrapped = [each for each in mxfp8 if not kit.cost.is_grouped(each)]
    if not wrapped:
        return kit.NotApplicable(reason="no Linear has a weight in torchao's MXFP8 wrapper")
    biased, found = [each for each in wrapped if each.bias], kit.installed(facts, "torchao")
    drops = found is not None and DROPS_BIAS[0] <= found < DROPS_BIAS[1]
    dropped = [each for each in biased if drops and not each.features.get("own_forward")]
    if not biased:
        return None
    if not dropped:
        raise kit.Unrecorded(kit.Linear, "features", "nothing shows whether the wrapper adds the bias")
    return kit.Finding(
        title=f"{kit.plural(len(dropped), 'MXFP8 layer')} "
        f"{'loses its' if len(dropped) == 1 else 'lose their'} bias{kit.named(dropped, len(wrapped))}",
        explanation=f"torchao {found} multiplies input and weight and omits "
        "the bias. The output is wrong, and the bias gets no gradient.",
        evidence={"layers": len(dropped), "mxfp8_layers": len(wrapped), "first": dropped[0].name},
        breaks="layers_do_not_learn",
        treatment=kit.conversion.mxfp8_without_biases("biases-in-float8", facts),
    )


@kit.check("MOD007", "cannot-be-saved", severity="error", was="MOD010", **kit.WRONG_FP8_STEP)
def cannot_be_saved(facts: kit.Facts) -> kit.Finding | None:
    if any("FSDP" in each or "FullySharded" in each for each in facts.get("network.wrappers", ())):
        return None  # FSDP gathers weights into ordinary tensors first
    trained = [each for each in facts.network.fp8 if each.adapter != "base"]
    layers = [each for each in trained if (each.weight_class or "").endswith(ALL_GATHER_WEIGHT)]
    writer = writer_of(facts) if layers else None
    if writer is None:
        return None
    return kit.Finding(
        severity="warning" if writer.startswith("Accelerate") else None,
        title=f"{kit.plural(len(layers), 'FP8 layer')} cannot be saved: their weights are {ALL_GATHER_WEIGHT}"
        f"{kit.named(layers, len(trained))}",
        explanation=f"{writer} fails on them: they have no storage of their own.",
        evidence={"layers": len(layers), "weight_class": layers[0].weight_class, "writer": writer},
        treatment=kit.treatments.ORDINARY_WEIGHTS,
    )


def writer_of(facts: kit.Facts) -> str | None:
    """Name what writes this job's checkpoints with safetensors; None if nothing shows it."""
    if facts.training.trainer:
        return "A Trainer's checkpoint, which uses safetensors,"
    if facts.network.save_pretrained:
        return "save_pretrained, which writes safetensors,"
    prepared = kit.fp8_request.was_prepared(facts)
    return "Accelerate's save_state, which writes safetensors by default," if prepared else None
