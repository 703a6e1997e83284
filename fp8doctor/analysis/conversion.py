"""Lines that convert a model to FP8, and name the layers that they leave out."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from fp8doctor.analysis.fp8_request import in_script, may_have_converted
from fp8doctor.analysis.layers import (
    KEEP_IT_IN_MODULE,
    fits_fp8,
    layer_label,
    may_be_taken,
    would_be_converted,
)
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16
from fp8doctor.cost.matmuls import is_grouped
from fp8doctor.facts import Facts, Linear, if_recorded
from fp8doctor.finding import Treatment
from fp8doctor.recipes import RECIPES, TORCHAO, default_of, recipe_of, stack_of
from fp8doctor.wording import plural

OF_LORA = "lora_"
"""Part of the names of LoRA's matrices, in PEFT and torchtune."""

NO_ADAPTER = f'"{OF_LORA}" not in name'


def conversion(
    facts: Facts,
    out: Collection[str] = (),
    *,
    beside: Iterable[str] | None = None,
    config: str = "",
    mxfp8: bool = False,
    by_accelerate: bool = False,
) -> str:
    """Write the lines that convert all layers but ``out``, by whoever converts the model now.

    ``beside`` stays out too; by default what is left out now. ``config`` is of torchao, by default the one of
    now.
    """
    linears = facts.linears()
    fp8 = [each for each in linears if each.get("use") == "training"]
    fp8 = [each for each in fp8 if each.name in out] or fp8
    if beside is None:
        stays = (each for each in linears if each.get("adapter") == "adapter" or may_be_taken(each))
        beside = if_recorded(lambda: [each.name for each in stays]) or ()
    names = [*before_wrapping(out, linears), *before_wrapping(beside, linears)]
    sets = names_in_python([*dict.fromkeys(names)])
    keep = [f"keep {'|=' if number else '='} {each}" for number, each in enumerate(sets)]
    not_kept = f"name{''.join(_without_wrappers(facts, linears))} not in keep" if sets else ""
    takes = [each for each in (NO_ADAPTER if has_lora(linears) else "", not_kept) if each]
    stack = TORCHAO if config or not fp8 else stack_of(fp8[0])
    config = config or if_recorded(_config, fp8) or ""
    prepared = by_accelerate or may_have_converted(facts)
    if mxfp8 or (any(map(is_mxfp8, fp8)) and not config and not prepared):
        in_mxfp8 = [each for each in fp8 if is_mxfp8(each)] or fp8
        biased = [each for each in in_mxfp8 if each.bias and not is_grouped(each)]  # these stay Float8Linear
        if biased:
            keep.append(f"convert_to_float8_training(model{_filter(['layer.bias is not None', *takes])})")
        more = len(biased) < len(in_mxfp8) or not in_mxfp8
        return "\n".join([*keep, *([quantize_mxfp8(in_mxfp8, takes)] if more else [])])
    if not stack.converter:
        instead = f"# build these as torch.nn.Linear, not as {stack.layer or layer_label(fp8[0])}"
        return "\n".join((*keep, instead))
    if prepared:
        return "\n".join((*keep, in_script(facts, config=config, takes=" and ".join(takes))))
    first = [stack.converter_import] if stack.converter_import else []
    if any(each.get("adapts") and not each.name.startswith(f"{each.adapts}.") for each in linears):
        first.append("# before LoRA, which takes its layers' forwards")  # kohya's: a conversion drops them
    given = f", config={config}" * bool(config)
    root = "model = " * any(each.get("name") == "" for each in linears)  # which is no child to be replaced
    return "\n".join((*first, *keep, f"{root}{stack.converter}(model{given}{_filter(takes)})"))


def _filter(takes: Collection[str]) -> str:
    return f", module_filter_fn=lambda layer, name: {' and '.join(takes)}" if takes else ""


def _config(linears: Sequence[Linear]) -> str:
    """Write the config that converted all of these; empty for torchao's default."""
    used = {(linear.stack, linear.recipe): linear for linear in linears}
    found = recipe_of(linears[0]) if len(used) == 1 else default_of(TORCHAO.name)
    return found.config if found.stack == TORCHAO.name and found != default_of(TORCHAO.name) else ""


def keep_in_bf16(layers: Sequence[str], facts: Facts | None = None) -> Treatment:
    """Leave these layers out of the conversion, with those that are left out now."""
    return Treatment(
        name=KEEP_IN_BF16,
        summary=f"leave {plural(len(layers), 'layer')} out of the conversion",
        code=conversion(facts or Facts(), layers),
        layers=tuple(layers),
    )


def convert(facts: Facts, recipe: str, layers: Collection[str], *, before_own: bool) -> Treatment:
    """Convert these layers with a recipe of torchao, before the job wraps them and compiles them itself."""
    left = [each.name for each in facts.linears() if may_be_taken(each) and each.name not in layers]
    made = RECIPES[TORCHAO.name, recipe]
    wrapper = facts.get("training.distributed.wrapper")
    later = [f"{wrapper} and the optimizer"] if wrapper else []
    later += ["your own torch.compile, which stays as it is"] if before_own else []
    own = [f"# before {', and before '.join(later)}"] if later else []
    config = "" if made is default_of(TORCHAO.name) else made.config
    of = len(facts.linears())
    few = f"{len(layers)} of {of} Linears " if 2 * len(layers) < of else ""  # most stay, as experts do
    return Treatment(
        name=f"convert-{recipe}",
        summary=f"convert {few}to FP8 ({recipe})",
        code="\n".join([*own, conversion(facts, left, beside=(), config=config)]),
    )


def convert_all_that_fit(facts: Facts, *, by_accelerate: bool = False) -> str:
    """Write the lines that convert a model in 16 bits."""
    left = (each.name for each in facts.linears() if may_be_taken(each) and not would_be_converted(each))
    return conversion(facts, beside=left, by_accelerate=by_accelerate)


def switched_on(facts: Facts) -> str:
    """Return the lines that switch FP8 on through Accelerate, whose own filter would take LoRA's matrices."""
    adapters = any(each.get("adapter") == "adapter" and fits_fp8(each) for each in facts.linears())
    return convert_all_that_fit(facts, by_accelerate=True) if adapters else in_script(facts)


def with_recipe(word: str, facts: Facts, out: Collection[str] = ()) -> str:
    """Return the lines that convert with a recipe of torchao, without the layers ``out``."""
    made = RECIPES[TORCHAO.name, word]
    if made.drops_bias:
        return conversion(facts, out, mxfp8=True)
    return f"config = {made.config}\n{conversion(facts, out, config='config')}"


WRAPPER = "MXFP8TrainingWeightWrapperTensor"
"""torchao's class around the weight since 0.17; the layer itself stays an nn.Linear, which loses its bias."""


def is_mxfp8(linear: Linear) -> bool:
    return (linear.get("weight_class") or "").endswith(f".{WRAPPER}")


def mxfp8_without_biases(name: str, facts: Facts) -> Treatment:
    """Convert what is in MXFP8 by a real kernel, but a layer with a bias to Float8Linear.

    If MXFP8 is emulated now, the treatment is that of emulation, so a plan converts once.
    """
    in_mxfp8 = [linear for linear in facts.linears() if is_mxfp8(linear) and linear.use == "training"]
    emulated, summary = any(linear.features.get("emulate") for linear in in_mxfp8), []
    if any(each.bias and not is_grouped(each) for each in in_mxfp8):
        summary.append("convert layers with a bias to Float8Linear, which adds it")
    if emulated:
        summary.append(
            "take a recipe with a real kernel; on a GPU without MX train in BF16 or in tensorwise FP8"
        )
    name = "real-mx-kernel" if emulated else name
    return Treatment(name=name, summary="; ".join(summary), code=conversion(facts, mxfp8=True))


def quantize_mxfp8(linears: Sequence[Linear], takes: Sequence[str] = ()) -> str:
    """Write the lines that convert these layers to MXFP8, by real kernels and without losing a bias."""
    in_high_precision = any(linear.get("features", {}).get("wgrad_with_hp") for linear in linears)
    recipe = f"MXFP8_RCEIL{'_WGRAD_WITH_HP' if in_high_precision else ''}"
    wanted = "isinstance(layer, nn.Linear) and layer.bias is None"
    experts = dict.fromkeys(linear.kind.rpartition(".")[2] for linear in filter(is_grouped, linears))
    if experts:
        wanted = f"({wanted} or type(layer).__name__ in {tuple(experts)})"
    return (
        f"config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.{recipe})\n"
        f"quantize_(model, config, filter_fn=lambda layer, name: {' and '.join((wanted, *takes))})"
    )


FIRST_NUMBER = re.compile(r"((?:.*?\.)?)(0|[1-9][0-9]*)((?:\..+)?)")
LAST_NUMBER = re.compile(r"((?:.*\.)?)(0|[1-9][0-9]*)((?:\.[^\d].*?)?)")
"""Name of a layer: what stands before the number of its block, the number, and what stands behind. A model in
stages has a second number: blocks are numbered within their stage."""


def names_in_python(names: Sequence[str]) -> list[str]:
    """Write sets of these names, folded over the one number of each that makes them shorter."""
    ways = (_folded(names, pattern) for pattern in (FIRST_NUMBER, LAST_NUMBER))
    return min(ways, key=lambda sets: sum(map(len, sets)))


def _folded(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    found: dict[tuple[str, str], list[int]] = {}
    alone = []
    for name in names:
        parts = pattern.fullmatch(name)
        if parts and (parts[1] or parts[3]):
            found.setdefault((parts[1], parts[3]), []).append(int(parts[2]))
        else:
            alone.append(name)
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (blocks, layer), numbers in found.items():
        alike.setdefault((blocks, tuple(sorted(numbers))), []).append(layer)
    sets = []
    for (blocks, (first, *more)), members in alike.items():
        last = first + len(more)
        if more == list(range(first + 1, last + 1)) and more:
            span = f"range({last + 1})" if first == 0 else f"range({first}, {last + 1})"
            sets.append(_comprehension(blocks, span, members))
        else:
            alone += [f"{blocks}{number}{layer}" for layer in members for number in (first, *more)]
    return sets + ([f"{{{', '.join(map(_quoted, alone))}}}"] if alone else [])


def _comprehension(blocks: str, span: str, layers: Sequence[str]) -> str:
    if len(layers) == 1:
        return f'{{f"{_within(blocks)}{{i}}{_within(layers[0])}" for i in {span}}}'
    dotted = "." if all(layers) else ""  # an empty name is the block itself
    shown = ", ".join(_quoted(layer.removeprefix(dotted)) for layer in layers)
    return f'{{f"{_within(blocks)}{{i}}{dotted}{{layer}}" for i in {span} for layer in ({shown})}}'


def _quoted(name: str) -> str:
    """Write a name as a string; JSON's and Python's are written alike."""
    return json.dumps(name, ensure_ascii=False)


def _within(part: str) -> str:
    return _quoted(part)[1:-1].replace("{", "{{").replace("}", "}}")


BASE = ".base_layer"
"""Suffix that PEFT gives the name of a layer that it wraps."""
ROOT = "base_model.model."
"""Prefix that PEFT gives the name of every layer, in a model that it wraps whole."""
COPY = re.compile(r"\.modules_to_save\.[^.]+")
"""Suffix that PEFT gives the name of a layer that it trains whole, and keeps a copy of."""


def before_wrapping(names: Iterable[str], linears: Sequence[Linear]) -> list[str]:
    """Name layers as before LoRA, and those trained whole also as now; without LoRA's own matrices."""
    if has_lora(linears):
        names = [name for name in names if OF_LORA not in name]
    plain = [name.replace(BASE, "").removeprefix(ROOT) for name in names]
    return list(dict.fromkeys(each for name in plain for each in (COPY.sub("", name), name)))


def has_lora(linears: Iterable[Linear]) -> bool:
    """Return whether LoRA's matrices wrap layers under names that tell them apart."""
    return any(each.get("adapter") == "adapter" and OF_LORA in each.name for each in linears)


def _without_wrappers(facts: Facts, linears: Sequence[Linear]) -> Iterator[str]:
    """Write the calls that take the wrappers of this model out of a name, in an order that nests.

    A conversion sees the names of its moment, before the wrapping or after it.
    """
    around = facts.get("network.wrappers", ())
    marks, regions = facts.get("training.compile_marks", ()), facts.get("training.checkpointing", ())
    if "OptimizedModule" in around or any(mark.get("form") == "wrapped" for mark in marks):
        yield '.replace("_orig_mod.", "")'
    if any(each.get("form") == "wrapper" for each in regions):
        yield '.replace("_checkpoint_wrapped_module.", "")'
    if any(each in KEEP_IT_IN_MODULE for each in around):
        yield '.removeprefix("module.")'
    if any(BASE in each.name for each in linears):
        yield f'.replace("{BASE}", "")'
    if any(each.name.startswith(ROOT) for each in linears):
        yield f'.removeprefix("{ROOT}")'
