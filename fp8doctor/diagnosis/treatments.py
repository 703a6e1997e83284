"""Treatments that the trial proposes by itself, as lines that a user would write, and lines for checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec.structs import replace

from fp8doctor.analysis.compile_coverage import (
    cache_off,
    compile_treatment,
    compile_whole,
    compiles_each_block,
    covered_by_blocks,
    is_inside,
)
from fp8doctor.analysis.fp8_request import ALL_GATHER, in_script, may_have_converted
from fp8doctor.analysis.fp8_weights import is_mxfp8, mxfp8_lines, quantize_mxfp8
from fp8doctor.analysis.layer_gain import MOST_GROWTH, to_keep
from fp8doctor.analysis.layers import (
    fits_fp8,
    in_python,
    layer_label,
    may_be_taken,
    would_be_converted,
)
from fp8doctor.analysis.memory import samples
from fp8doctor.analysis.module_names import (
    MOST_LINES,
    before_wrapping,
    keep,
    kept_out,
    left_out_now,
    names_in_python,
)
from fp8doctor.analysis.treatment_table import (
    AUTOCAST_BF16,
    CHECKPOINTING_OFF,
    COMPILE_BLOCKS,
    COMPILE_MODEL,
    COMPILE_STORED,
    KEEP_IN_BF16,
    LARGER_BATCH,
    MORE_TOKENS,
    STAY_IN_BF16,
    TE_AUTOCAST,
    recipe_after,
    traits,
)
from fp8doctor.cost.matmul_counts import micro_batches
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.facts import Facts, Linear, if_recorded
from fp8doctor.facts.arm_names import keeps_users_compilation
from fp8doctor.facts.arm_names import recipe_of as converted_to
from fp8doctor.finding import Treatment
from fp8doctor.recipes import BY_TREATMENT, RECIPES, TORCHAO, default_of, recipe_of, stack_of
from fp8doctor.wording import plural

TAKES = '"lora_" not in name and not (layer.in_features % 16 or layer.out_features % 16)'
"""What a conversion takes, if few lines cannot name what it must leave out."""

NOT_THE_HEAD = "   # and not your head"

ORDINARY_WEIGHTS = Treatment(
    name="no-float8-all-gather",
    summary="switch FSDP's float8 all-gather off if you do not use FSDP: the layers then keep ordinary "
    "weights, which can be saved and which the optimizer holds",
    code=f"export {ALL_GATHER}=false   # for Accelerate and the Trainer\n"
    "# or: Float8LinearConfig(..., enable_fsdp_float8_all_gather=False)",
)
"""For torchao's converted weights, which Accelerate wraps for FSDP on one GPU too."""


CONV1D = Treatment(
    name="conv1d-to-linear",
    summary="replace each Conv1D by an nn.Linear with the transposed weight, before the conversion",
    code="linear = nn.Linear(*conv1d.weight.shape)\n"
    "linear.weight.data, linear.bias.data = conv1d.weight.data.T.contiguous(), conv1d.bias.data",
)
"""For GPT-2's layers, which no converter accepts as Linears."""


def keep_in_bf16(layers: Sequence[str], facts: Facts | None = None) -> Treatment:
    """Leave these layers out of the conversion, with those that are left out now.

    As far as the facts name them in few lines.
    """
    named = set(layers)
    linears = facts.linears() if facts else ()
    beside, note = left_out_now([linear for linear in linears if linear.name not in named])
    now = [f"{each}   # in BF16 already" for each in beside]
    sets = names_in_python(before_wrapping(layers, linears)) + now or ["set()"]
    return Treatment(
        name=KEEP_IN_BF16,
        summary=f"leave {plural(len(layers), 'layer')} out of the conversion",
        code=_as_now(sets, note, [linear for linear in linears if linear.name in named], facts),
        layers=tuple(layers),
    )


def converting(
    facts: Facts | None,
    sets: Sequence[str] = (),
    note: str = "",
    *,
    config: str = "",
    only: str = "",
    converter: str = TORCHAO.converter,
    by_accelerate: bool = False,
) -> str:
    """Write the lines that convert all but the names in these sets, by whoever converts the model now."""
    kept = kept_out(facts) if sets else ""
    takes = " and ".join(filter(None, ("" if only in kept else only, kept)))
    if facts and (by_accelerate or may_have_converted(facts)):
        return "\n".join((*keep(sets), in_script(facts, config=config, takes=takes) + note))
    arguments = ["model", *([f"config={config}"] if config else [])]
    arguments += [f"module_filter_fn=lambda layer, name: {takes}"] if takes else []
    return "\n".join((*keep(sets), f"{converter}({', '.join(arguments)}){note}"))


def convert_again(facts: Facts, *, config: str = "", only: str = "") -> str:
    """Return the lines that convert with this config and these names only.

    A default is the config of today. Layers that are left out now stay out.
    """
    linears = facts.linears()
    config = config or if_recorded(_config, linears) or ""
    sets, note = if_recorded(left_out_now, linears) or ([], "")
    return converting(facts, sets, note, config=config, only=only)


def convert_model(facts: Facts) -> str | None:
    """Return the lines that convert a model in 16 bits; None if it has no layer that they could convert."""
    return _all_that_fit(facts) if any(map(would_be_converted, facts.network.linears)) else None


def switched_on(facts: Facts) -> str:
    """Return the lines that switch FP8 on through Accelerate, whose own filter would take LoRA's matrices."""
    adapters = any(each.get("adapter") == "adapter" and fits_fp8(each) for each in facts.linears())
    return _all_that_fit(facts, by_accelerate=True) if adapters else in_script(facts)


def _all_that_fit(facts: Facts, *, by_accelerate: bool = False) -> str:
    """Return the lines that convert every layer that fits."""
    sets, note = left_out_now([each for each in facts.linears() if not would_be_converted(each)])
    if note:
        return f"{converting(facts, only=TAKES, by_accelerate=by_accelerate)}{NOT_THE_HEAD}"
    return converting(facts, sets or (["set()"] if by_accelerate else []), by_accelerate=by_accelerate)


def convert_all_but(layers: Sequence[str], facts: Facts) -> str | None:
    """Return the lines that convert every Linear but these, as FP8 layers are now.

    None if no few lines name them.
    """
    sets = names_in_python(before_wrapping(layers, facts.network.linears)) or ["set()"]
    return None if len(sets) > MOST_LINES else _as_now(sets, "", facts.network.fp8, facts)


def _as_now(sets: Sequence[str], note: str, converted: Sequence[Linear], facts: Facts | None) -> str:
    """Return the lines that convert all but these names, by the stack of the converted layers."""
    built = next((each for each in map(stack_of, converted) if not each.converter), None)
    if built:
        instead = f"# build these as torch.nn.Linear, not as {built.layer or layer_label(converted[0])}"
        return "\n".join((*keep(sets), instead + note))
    if any(map(is_mxfp8, converted)) and not (facts and may_have_converted(facts)):
        return "\n".join((*keep(sets), quantize_mxfp8(converted, kept_out(facts)) + note))
    stack = stack_of(converted[0]) if converted else TORCHAO
    lines = converting(facts, sets, note, config=_config(converted), converter=stack.converter)
    return "\n".join(filter(None, (stack.converter_import, lines)))


def _config(linears: Sequence[Linear]) -> str:
    """Write the config that converted all FP8 layers; empty for torchao's default."""
    used = {(linear.stack, linear.recipe): linear for linear in linears if linear.use == "training"}
    if len(used) != 1:
        return ""
    (found,) = map(recipe_of, used.values())
    return found.config if found.stack == TORCHAO.name and found != default_of(TORCHAO.name) else ""


def recipe(name: str, facts: Facts) -> Treatment:
    """Another recipe of torchao, by the name of its treatment."""
    word = recipe_after(name)
    code = with_recipe(word, facts)
    return Treatment(name=name, summary=f"convert with the recipe {word}", code=code)


def with_recipe(word: str, facts: Facts) -> str:
    """Return the lines that convert with a recipe of torchao."""
    if RECIPES[TORCHAO.name, word].drops_bias:
        return mxfp8_lines(facts, [each for each in facts.linears() if each.use == "training"])
    return f"config = {RECIPES[TORCHAO.name, word].config}\n{convert_again(facts, config='config')}"


def checkpointing_off(facts: Facts) -> Treatment:
    """Switch off the form of checkpointing that was found."""
    found = facts.get("training.checkpointing", ())
    first = next((each for each in found if each.active is not False), None)
    if first is None:
        code = WITHOUT_CHECKPOINTING["wrapper"]
    elif first.form == "huggingface":
        trainer, of_a_decoder = facts.trainer(), facts.get("training.use_cache", True) is not None
        off = f"{in_python('gradient_checkpointing_disable', facts.network)}()"
        if trainer and trainer.checkpointing:
            off = f"{trainer.kind.rpartition('.')[2]}(..., gradient_checkpointing=False)"
        elif not of_a_decoder:  # diffusers has another method, and kohya's models have none
            modules = in_python("modules", facts.network)
            off = f'for module in {modules}():\n    if hasattr(module, "gradient_checkpointing"):\n'
            off += "        module.gradient_checkpointing = False"
        note = f"\n{cache_off(facts)}   # checkpointing had kept the KV cache off" if of_a_decoder else ""
        code = f"{off}{note}"
    else:
        called = f"# in {in_python(first.name, facts.network)}.forward: call the function itself, not "
        code = WITHOUT_CHECKPOINTING.get(first.form, f"{called}checkpoint(function, ...)")
    return Treatment(name=CHECKPOINTING_OFF, summary="keep the activations", code=code)


WITHOUT_CHECKPOINTING = {
    "wrapper": "# leave out apply_activation_checkpointing() or checkpoint_wrapper(), or give it "
    "fewer blocks",
    "composable": "# leave out torch.distributed._composable.checkpoint(), or give it fewer blocks",
    "whole_forward": "# leave out forward = partial(checkpoint, ...), or assign it to fewer blocks",
    "unsloth": "FastLanguageModel.get_peft_model(model, use_gradient_checkpointing=False)",
    "compiler_budget": "torch._functorch.config.activation_memory_budget = 1.0",
    "offload": "# leave out offload_wrapper()",
}
"""Form of checkpointing -> the line that leaves it out."""


def fused_optimizer(facts: Facts) -> Treatment:
    """Update many parameters by one kernel."""
    known = facts.get("training.optimizer")
    kind = known.rpartition(".")[2] if known else "AdamW"
    return Treatment(
        name="fused-optimizer",
        summary="use a fused optimizer",
        code=f"torch.optim.{kind}(parameters, ..., fused=True)",
    )


def larger_batch(facts: Facts) -> Treatment:
    """Write more samples per micro-batch and fewer micro-batches, for the Trainer if there is one."""
    trainer, now = facts.trainer(), micro_batches(facts)
    size = facts.get("workload.batch_size") if facts.get("workload.batch_source") == "given" else None
    times = next((each for each in range(2, now) if now % each == 0), max(now, 2))
    samples = str(times * size) if size else f"{times} * BATCH"
    then = max(now // times, 1)
    if trainer:
        kind = trainer.get("kind", "TrainingArguments").rpartition(".")[2]
        steps = f", gradient_accumulation_steps={then}" if now > 1 else ""
        code = f"{kind}(..., per_device_train_batch_size={samples}{steps})"
    else:
        code = f"batch_size = {samples}   # {_unit(facts)} in a micro-batch, {size or 'BATCH'} now"
        code += f"\naccumulate = {then}   # micro-batches in a step, {now} now" if now > 1 else ""
    summary = (
        "put more tokens into a micro-batch, and accumulate over fewer"
        if now > 1
        else "put more tokens into a step, which changes the batch that the optimizer sees"
    )
    return Treatment(name=LARGER_BATCH, summary=summary, code=code)


def _unit(facts: Facts) -> str:
    """Say what the batch counts: rows, if every row is a sample of its own."""
    return "rows" if facts.get("workload.batch_size") and samples(facts) is None else "samples"


def more_tokens(facts: Facts, tokens: int) -> Treatment | None:
    """Put so many tokens into a micro-batch; None if the batch of a step would grow too much."""
    workload = facts.workload
    now, times = workload.batch_size or 1, tokens // (workload.tokens or 1)
    fewer = max(1, workload.accumulate // times)
    growth = times * fewer / workload.accumulate
    if growth > MOST_GROWTH:
        return None
    longer = f", or longer sequences: {tokens:,} tokens" if _unit(facts) == "samples" else " rows"
    lines = [f"batch_size = {now * times}   # from {now}{longer}"]
    lines += [f"accumulate = {fewer}   # from {workload.accumulate}"] * (workload.accumulate > 1)
    changed = (
        f"; the global batch {'grows' if growth > 1 else 'shrinks'} to {round(growth, 2):g} times its size, "
        "which changes the training"
    )
    summary = f"use {tokens:,} tokens per micro-batch{changed if growth != 1 else ''}"
    return Treatment(name=MORE_TOKENS, summary=summary, code="\n".join(lines))


def te_recipe(name: str, facts: Facts) -> Treatment:
    """Another recipe of Transformer Engine, by the name of its treatment.

    Accelerate's ``TERecipeKwargs`` knows two of them. Source: ``apply_fp8_autowrap``, accelerate 1.15.
    """
    code = (
        "# in the place of the autocast that is there now; before Transformer Engine 2.9 "
        "te.fp8_autocast(fp8_recipe=...)\n"
        f"with te.autocast(enabled=True, recipe={BY_TREATMENT[name].config}):\n    output = model(batch)"
    )
    if may_have_converted(facts) and name in ("te-delayed", "te-mxfp8"):
        handler = f"TERecipeKwargs(use_mxfp8_block_scaling={name == 'te-mxfp8'})"
        code = f'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[{handler}])'
    elif may_have_converted(facts):
        code = f"{WITHOUT_ACCELERATE}\n{code}"
    words = BY_TREATMENT[name].words
    return Treatment(name=name, summary=f"run Transformer Engine with {words}", code=code)


WITHOUT_ACCELERATE = """\
# TERecipeKwargs knows delayed scaling and MXFP8 only, so the autocast is yours
accelerator = Accelerator(mixed_precision="bf16")
with torch.no_grad():
    convert_model(model)   # before the optimizer is made"""


def treatments_of(facts: Facts, fp8: str, names: tuple[str, ...]) -> Iterator[Treatment]:
    """Describe the steps of the variant ``fp8``, the conversion first."""
    for name in sorted(names, key=lambda each: traits(each).family != "convert"):
        if traits(name).family == "convert":
            layers = {each.name for each in facts.network.linears if would_be_converted(each)}
            own = keeps_users_compilation(fp8) or compiles_each_block(facts)
            yield convert(facts, converted_to(fp8), layers, before_own=own)
        elif traits(name).compiles:
            yield _compiled(facts)
        elif described := describe(name, facts):
            yield described


def convert(facts: Facts, recipe: str, layers: Collection[str], *, before_own: bool) -> Treatment:
    """Convert these layers with a recipe of torchao, before the job wraps them and compiles them itself."""
    left = [each.name for each in facts.linears() if may_be_taken(each) and each.name not in layers]
    sets = names_in_python(before_wrapping(left, facts.linears()))
    made = RECIPES[("torchao", recipe)]
    config = "" if made is default_of("torchao") else made.config
    distributed = facts.get("training.distributed")
    wrapper = distributed.get("wrapper") if distributed else None
    later = [f"{wrapper} and the optimizer"] if wrapper else []
    later += ["your own torch.compile, which stays as it is"] if before_own else []
    own = [f"# before {', and before '.join(later)}"] if later else []
    return Treatment(
        name=f"convert-{recipe}",
        summary=f"convert to FP8 ({recipe})",
        code="\n".join([*own, converting(facts, sets, config=config)]),
    )


def _compiled(facts: Facts) -> Treatment:
    """Compile what was converted, in place of what the user compiles himself."""
    found = compile_treatment(facts, [each for each in facts.network.linears if would_be_converted(each)])
    otherwise = any(keeps_users_compilation(each.name) for each in facts.trial.arms)
    return replace(found, code=f"# leave out your own torch.compile\n{found.code}") if otherwise else found


FIXED = {
    AUTOCAST_BF16: Treatment(
        name=AUTOCAST_BF16,
        summary="run forward and loss under BF16 autocast",
        code='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = compute_loss(model, batch)',
    ),
    TE_AUTOCAST: Treatment(
        name=TE_AUTOCAST,
        summary="run the training forward inside the FP8 autocast",
        code="# and no te.autocast(enabled=False) inside the model\n"
        "with te.autocast(enabled=True):   # te.fp8_autocast before Transformer Engine 2.9\n"
        "    output = model(batch)",
    ),
}
"""Treatments whose lines no fact changes."""

WRITTEN: dict[str, Callable[[Facts], Treatment | None]] = {
    "cache-off": lambda facts: Treatment(
        name="cache-off", summary="train without a KV cache", code=cache_off(facts)
    ),
    CHECKPOINTING_OFF: checkpointing_off,
    KEEP_IN_BF16: lambda facts: keep_in_bf16(to_keep(facts), facts) if to_keep(facts) else None,
    "fused-optimizer": fused_optimizer,
    COMPILE_BLOCKS: lambda facts: compile_treatment(facts, covered_by_blocks(facts)),
    COMPILE_MODEL: lambda facts: Treatment(
        name=COMPILE_MODEL, summary="compile the model", code="\n".join(compile_whole(facts.network))
    ),
    STAY_IN_BF16: stay_in_bf16,
    LARGER_BATCH: larger_batch,
}
"""Treatment -> what writes it; changes of the recipe and the fixed aside. Checks write all others."""


def compile_stored(facts: Facts, stored: Sequence[Linear]) -> Treatment | None:
    """Compile the blocks that cast stored weights; None if they are compiled, or there are none.

    An RTX 5090 took 4.65 instead of 5.39 s/step. Source: kohya-ss/musubi-tuner#722.
    """
    inside = [each for each in stored if any(is_inside(each, blocks) for blocks in facts.network.blocks)]
    if not any(each.compiled is None for each in inside):
        return None
    summary = "keep the stored weights, and compile the blocks, which fuses the casts"
    return replace(compile_treatment(facts, inside), name=COMPILE_STORED, summary=summary)


def describe(name: str, facts: Facts) -> Treatment | None:
    """Describe a treatment; None if only checks propose it, or nothing would change."""
    if name in BY_TREATMENT:
        return (recipe if BY_TREATMENT[name].stack == TORCHAO.name else te_recipe)(name, facts)
    write = WRITTEN.get(name)
    return write(facts) if write else FIXED.get(name)
