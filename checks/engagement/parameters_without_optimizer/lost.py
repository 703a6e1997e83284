"""What the new layers of a conversion do not have any more: ties, hooks, forwards and biases."""

from __future__ import annotations

from packaging.version import Version

from fp8doctor import kit

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
    model, here, there = (kit.in_python(each, facts.network, either=True) for each in ("", *pairs[0]))
    return kit.Finding(
        title=f"{one} is no longer tied to {other}{f', nor {len(pairs) - 1} more' * (len(pairs) > 1)}",
        explanation="The conversion made two parameters of one: they train independently, and a checkpoint "
        "keeps only one.",
        evidence={"untied": len(pairs), "first": one, "was": other, "seen_during_conversion": len(seen)},
        treatment=kit.Treatment(
            name="tie-again",
            summary="tie the weights again after the conversion",
            code=(f"{model}.tie_weights()" if declared else f"{here} = {there}")
            + "   # right after the conversion",
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
        "the conversion dropped the compile of {}": seen.without_compile,
        "a compiled wrapper keeps calling the old Linear of {}, in 16 bits": seen.bypassed,
    }
    names = [name for each in lost.values() for name in each]
    if not names:
        return None
    some = len(seen.without_forward) < len(facts.network.fp8)
    return kit.Finding(
        severity="error" if seen.bypassed else "warning",
        title="; ".join(
            words.format(kit.plural(len(each), "Linear")) for words, each in lost.items() if each
        ),
        explanation=f"{kit.plural(seen.linears, 'Linear')} became FP8 layers while the model file was "
        f"loaded. {len(set(names))} of them lost something that nobody put back.",
        evidence={"converted": seen.linears, "lost": len(names), "first": names[0]},
        treatment=CONVERT_FIRST
        if not seen.without_forward
        else kit.keep_in_bf16(seen.without_forward, facts)
        if some
        else kit.stay_in_bf16(facts, "a conversion drops the forward of all of these classes"),
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
    adds = [(each, adds_bias(each, facts)) for each in wrapped if each.bias]
    dropped = [each for each, added in adds if added is False]
    if not dropped:
        if any(added is None for _, added in adds):
            raise kit.Unrecorded(kit.Linear, "features", "nothing shows whether the wrapper adds the bias")
        return None
    return kit.Finding(
        title=f"{kit.plural(len(dropped), 'MXFP8 layer')} "
        f"{'loses its' if len(dropped) == 1 else 'lose their'} bias{kit.named(dropped, len(wrapped))}",
        explanation=f"torchao {kit.installed(facts, 'torchao') or ''} multiplies input and weight and omits "
        "the bias. The output is wrong, and the bias gets no gradient.",
        evidence={"layers": len(dropped), "mxfp8_layers": len(wrapped), "first": dropped[0].name},
        breaks="layers_do_not_learn",
        treatment=kit.conversion.mxfp8_without_biases("biases-in-float8", facts),
    )


def adds_bias(linear: kit.Linear, facts: kit.Facts) -> bool | None:
    """Whether the wrapper adds the bias, by torchao's version; None if that does not show it."""
    found, (first, end) = kit.installed(facts, "torchao"), DROPS_BIAS
    drops = found is not None and first <= found < end and not linear.features.get("own_forward")
    return False if drops else None
