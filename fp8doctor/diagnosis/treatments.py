"""Treatments that the trial proposes by itself, as lines that a user would write.

A check that names one of them takes its lines from here or writes better ones; `fp8doctor.trial.treatments`
carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from fp8doctor.analysis.by_accelerate import ALL_GATHER, in_script
from fp8doctor.analysis.compile_coverage import (
    cache_off,
    compile_treatment,
    compile_whole,
    compiles_each_block,
    covered_by_blocks,
)
from fp8doctor.analysis.fp8_request import may_have_converted
from fp8doctor.analysis.fp8_weights import is_mxfp8, lines_by_bias, mxfp8_treatment, quantize_mxfp8
from fp8doctor.analysis.layer_gain import to_keep
from fp8doctor.analysis.layers import (
    fits_fp8,
    in_python,
    is_nn_linear,
    layer_label,
    may_be_taken,
    would_be_converted,
)
from fp8doctor.analysis.module_names import before_wrapping, kept_out, names_in_python
from fp8doctor.analysis.treatment_table import (
    AUTOCAST_BF16,
    CHECKPOINTING_OFF,
    COMPILE_MODEL,
    KEEP_IN_BF16,
    LARGER_BATCH,
    TE_AUTOCAST,
    recipe_after,
    traits,
)
from fp8doctor.cost import micro_batches
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.facts.arm_names import keeps_users_compilation
from fp8doctor.facts.arm_names import recipe_of as converted_to
from fp8doctor.finding import Treatment
from fp8doctor.recipes import BY_TREATMENT, RECIPES, TORCHAO, default_of, recipe_of, stack_of
from fp8doctor.wording import plural

MOST_LINES = 3
"""Lines for layers that are in 16 bits anyway. A choice of length."""


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

ELSEWHERE = {each.__name__: each for each in (stay_in_bf16,)}
"""Treatments whose lines other modules write."""


def describe(name: str, facts: Facts) -> Treatment | None:
    """Describe a treatment; None if only checks propose it, or nothing would change."""
    treatment = traits(name)
    if not treatment.lines:
        return None
    write: Callable[..., Treatment | None] = ELSEWHERE.get(treatment.lines) or globals()[treatment.lines]
    return write(name, facts) if treatment.recipe else write(facts)


def keep_in_bf16(layers: Sequence[str], facts: Facts | None = None) -> Treatment:
    """Leave these layers out of the conversion, with those that are left out now.

    As far as the facts name them in few lines.
    """
    named = set(layers)
    linears = facts.linears() if facts else ()
    beside, note = _left_out_now([linear for linear in linears if linear.name not in named])
    now = [f"{each}   # in BF16 already" for each in beside]
    sets = names_in_python(before_wrapping(layers, linears)) + now or ["set()"]
    return Treatment(
        name=KEEP_IN_BF16,
        summary=f"leave {plural(len(layers), 'layer')} out of the conversion",
        code=_as_now(sets, note, [linear for linear in linears if linear.name in named], facts),
        layers=tuple(layers),
    )


def _left_out_now(linears: Sequence[Linear]) -> tuple[list[str], str]:
    """Name the layers that no conversion took, in sets; if those are long, note them."""
    taken = [linear.name for linear in linears if may_be_taken(linear)]
    now = names_in_python(before_wrapping(taken, linears))
    return (now, "") if len(now) <= MOST_LINES else ([], "   # with what your filter leaves out now")


def _left_out_by_default(linears: Sequence[Linear]) -> bool:
    """Return whether Accelerate's own filter leaves out what is left out now.

    Source: ``convert_model_to_fp8_ao``, accelerate 1.15.
    """
    modules = [each for each in linears if each.use != "none" or is_nn_linear(each)]
    ends = (*modules[:1], *modules[-1:])
    return all(each in ends or not fits_fp8(each) for each in linears if may_be_taken(each))


def keep(sets: Sequence[str]) -> list[str]:
    """Write the lines that collect the names of layers to leave out."""
    return [f"keep {'|=' if number else '='} {each}" for number, each in enumerate(sets)]


def converting(
    facts: Facts | None,
    sets: Sequence[str] = (),
    note: str = "",
    *,
    config: str = "",
    only: str = "",
    converter: str = TORCHAO.converter,
) -> str:
    """Write the lines that convert all but the names in these sets, by whoever converts the model now."""
    kept = kept_out(facts) if sets else ""
    takes = " and ".join(filter(None, ("" if only in kept else only, kept)))
    if facts and may_have_converted(facts):
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
    as_usual = may_have_converted(facts) and not only and if_recorded(_left_out_by_default, linears)
    sets, note = ([], "") if as_usual else if_recorded(_left_out_now, linears) or ([], "")
    return converting(facts, sets, note, config=config, only=only)


def convert_model(facts: Facts) -> str | None:
    """Return the lines that convert a model in 16 bits; None if it has no layer that they could convert."""
    linears = facts.network.linears
    taken = [linear for linear in linears if would_be_converted(linear)]
    sets, note = _left_out_now([linear for linear in linears if linear not in taken])
    if not taken:
        return None
    return f"{converting(facts, only=TAKES)}{NOT_THE_HEAD}" if note else converting(facts, sets)


def switched_on(facts: Facts) -> str:
    """Return the lines that switch FP8 on through Accelerate, whose own filter would take LoRA's matrices."""
    linears = facts.linears()
    if not any(each.get("adapter") == "adapter" and fits_fp8(each) for each in linears):
        return in_script(facts)
    sets, note = _left_out_now([linear for linear in linears if not would_be_converted(linear)])
    if note:
        return f"{in_script(facts, takes=TAKES)}{NOT_THE_HEAD}"
    return "\n".join((*keep(sets or ["set()"]), in_script(facts, takes=kept_out(facts))))


def mxfp8_without_biases(name: str, facts: Facts) -> Treatment:
    """Convert layers without a bias to MXFP8 by a real kernel, others to Float8Linear."""
    sets, note = _left_out_now(facts.linears())
    kept = kept_out(facts) if sets else ""
    return mxfp8_treatment(name, facts.linears(), keep(sets), kept, note)


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
        return _in_mxfp8(facts)
    config = f"config = {RECIPES['torchao', word].config}"
    return f"{config}\n{convert_again(facts, config='config')}"


def _in_mxfp8(facts: Facts) -> str:
    """Return the lines that convert to MXFP8, and with a bias to Float8Linear."""
    linears = facts.linears()
    fp8 = [linear for linear in linears if linear.use == "training"]
    sets, note = _left_out_now(linears)
    kept = kept_out(facts) if sets else ""
    return "\n".join((*keep(sets), *lines_by_bias(fp8, [each for each in fp8 if each.bias], kept, note)))


def compile_blocks(facts: Facts) -> Treatment:
    return compile_treatment(facts, covered_by_blocks(facts))


def compile_model(facts: Facts) -> Treatment:
    return Treatment(
        name=COMPILE_MODEL, summary="compile the model", code="\n".join(compile_whole(facts.network))
    )


def checkpointing_off(facts: Facts) -> Treatment:
    """Switch off the form of checkpointing that was found."""
    return Treatment(name=CHECKPOINTING_OFF, summary="keep the activations", code=_switch_off(facts))


def _switch_off(facts: Facts) -> str:
    found = facts.get("training.checkpointing", ())
    first = next((each for each in found if each.active is not False), None)
    if first is None:
        return WITHOUT_CHECKPOINTING["wrapper"]
    if first.form == "huggingface":
        trainer = facts.trainer()
        off = f"{in_python('gradient_checkpointing_disable', facts.network)}()"
        if trainer and trainer.checkpointing:
            off = f"{trainer.kind.rpartition('.')[2]}(..., gradient_checkpointing=False)"
        return f"{off}\n{cache_off(facts)}   # checkpointing had kept the KV cache off"
    if recorded(first, "flag"):
        return (
            f"for module in {in_python('modules', facts.network)}():\n"
            f'    if hasattr(module, "{first.flag}"):\n'
            f"        module.{first.flag} = False"
        )
    return WITHOUT_CHECKPOINTING.get(
        first.form,
        f"# in {in_python(first.name, facts.network)}.forward: call the function itself, not "
        "checkpoint(function, ...)",
    )


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
        code = f"batch_size = {samples}   # samples in a micro-batch, {size or 'BATCH'} now"
        code += f"\naccumulate = {then}   # micro-batches in a step, {now} now" if now > 1 else ""
    summary = (
        "put more tokens into a micro-batch, and accumulate over fewer"
        if now > 1
        else "put more tokens into a step, which changes the batch that the optimizer sees"
    )
    return Treatment(name=LARGER_BATCH, summary=summary, code=code)


def no_cache(facts: Facts) -> Treatment:
    """Build no KV cache in training."""
    return Treatment(name="cache-off", summary="train without a KV cache", code=cache_off(facts))


def autocast_bf16(facts: Facts) -> Treatment:
    """Run forward and loss under BF16 autocast."""
    code = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = compute_loss(model, batch)'
    return Treatment(name=AUTOCAST_BF16, summary="run forward and loss under BF16 autocast", code=code)


def bf16_parameters(facts: Facts) -> Treatment:
    """Keep the weights in BF16."""
    return Treatment(
        name="bf16-parameters",
        summary="keep the weights in BF16",
        code="model.to(torch.bfloat16)   # before the optimizer is made",
    )


def te_autocast(facts: Facts) -> Treatment:
    """Open Transformer Engine's FP8 autocast."""
    code = (
        "# and no te.autocast(enabled=False) inside the model\n"
        "with te.autocast(enabled=True):   # te.fp8_autocast before Transformer Engine 2.9\n"
        "    output = model(batch)"
    )
    return Treatment(name=TE_AUTOCAST, summary="run the training forward inside the FP8 autocast", code=code)


def te_recipe(name: str, facts: Facts) -> Treatment:
    """Another recipe of Transformer Engine, by the name of its treatment."""
    config, words = BY_TREATMENT[name].config, BY_TREATMENT[name].words
    code = (
        "# in the place of the autocast that is there now; before Transformer Engine 2.9 "
        f"te.fp8_autocast(fp8_recipe=...)\n{_under_te_autocast(config, 'batch')}"
    )
    if may_have_converted(facts):
        code = _by_accelerate(name, config)
    return Treatment(name=name, summary=f"run Transformer Engine with {words}", code=code)


def _under_te_autocast(config: str, batch: str) -> str:
    return f"with te.autocast(enabled=True, recipe={config}):\n    output = model({batch})"


BY_ACCELERATE = {"te-delayed": "False", "te-mxfp8": "True"}
"""Recipes that ``TERecipeKwargs`` can ask for -> its ``use_mxfp8_block_scaling``. Source: accelerate 1.15,
``apply_fp8_autowrap``."""


def _by_accelerate(name: str, config: str) -> str:
    """Return the lines for a model that Accelerate converts and puts under autocast."""
    if name in BY_ACCELERATE:
        return (
            'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs('
            f"use_mxfp8_block_scaling={BY_ACCELERATE[name]})])"
        )
    return (
        "# TERecipeKwargs knows delayed scaling and MXFP8 only, so the autocast is yours\n"
        'accelerator = Accelerator(mixed_precision="bf16")\n'
        "with torch.no_grad():\n    convert_model(model)   # before the optimizer is made\n"
        f"{_under_te_autocast(config, '**batch')}"
    )


def keep_losing_in_bf16(facts: Facts) -> Treatment | None:
    """Keep the layers in BF16 that lose by FP8."""
    layers = to_keep(facts)
    return keep_in_bf16(layers, facts) if layers else None


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
    note = "# leave out your own torch.compile\n" if otherwise else ""
    return Treatment(name=found.name, summary=found.summary, code=note + found.code)
