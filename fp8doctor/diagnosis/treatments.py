"""Treatments as lines that a user would write: what the trial proposes by itself, and some of checks."""

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from fp8doctor.analysis.compile_coverage import (
    cache_off,
    compile_all,
    compile_model,
    compile_treatment,
    compile_whole,
    covered_by_blocks,
    is_inside,
    marks_without_kernels,
    outermost,
    own_compile,
    with_kernels,
)
from fp8doctor.analysis.conversion import convert, keep_in_bf16, with_recipe
from fp8doctor.analysis.fp8_request import (
    ALL_GATHER,
    BACKEND,
    asked_by_environment,
    fp8_was_asked_for,
    may_have_converted,
    opens_te_autocast,
    with_handler,
)
from fp8doctor.analysis.layer_gain import MOST_GROWTH, to_keep
from fp8doctor.analysis.layers import converted, in_python, layer_label, wrapped_in_python
from fp8doctor.analysis.memory import samples
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
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost.matmuls import micro_batches
from fp8doctor.facts import Facts, Linear
from fp8doctor.facts.arm_names import ArmName, keeps_users_compilation
from fp8doctor.facts.arm_names import recipe_of as converted_to
from fp8doctor.finding import Treatment
from fp8doctor.recipes import BY_TREATMENT, TORCHAO, stack_of

ORDINARY_WEIGHTS = Treatment(
    name="no-float8-all-gather",
    summary="switch FSDP's float8 all-gather off if you do not use FSDP: the layers then keep ordinary "
    "weights, which can be saved and which the optimizer holds",
    code=f"export {ALL_GATHER}=false   # for Accelerate and the Trainer\n"
    "# but accelerate launch sets it: --fp8_enable_fsdp_float8_all_gather false\n"
    "# or: Float8LinearConfig(..., enable_fsdp_float8_all_gather=False)",
)
"""For torchao's converted weights, which Accelerate wraps for FSDP on one GPU too."""

CONV1D = Treatment(
    name="conv1d-to-linear",
    summary="replace each Conv1D by an nn.Linear with the transposed weight, before conversion and optimizer",
    code="""\
for parent in list(model.modules()):
    for name, conv1d in list(parent.named_children()):
        if type(conv1d).__name__ == "Conv1D":
            weight = conv1d.weight
            linear = nn.Linear(*weight.shape, device="meta")
            linear.weight = nn.Parameter(weight.detach().T.contiguous(), weight.requires_grad)
            linear.bias = conv1d.bias
            setattr(parent, name, linear)""",
)
"""For GPT-2's layers, which no converter accepts as Linears."""


def checkpointing_off(facts: Facts) -> Treatment:
    """Switch off the form of checkpointing that was found."""
    found = (each for each in facts.get("training.checkpointing", ()) if each.active is not False)
    first, trainer = next(found, None), facts.trainer()
    code = "# leave out apply_activation_checkpointing() or checkpoint_wrapper(), or give it fewer blocks"
    if first and first.form == "huggingface":
        of_a_decoder = facts.get("training.use_cache", True) is not None
        code = f"{in_python('gradient_checkpointing_disable', facts.network)}()"
        if trainer and trainer.checkpointing:
            code = trainer.call("gradient_checkpointing=False")
        elif not of_a_decoder:  # diffusers has another method, and kohya's models have none
            code = f"for module in {in_python('modules', facts.network)}():\n"
            code += '    if hasattr(module, "gradient_checkpointing"):\n'
            code += "        module.gradient_checkpointing = False"
        if of_a_decoder and facts.get("training.cache_switch", "") is not None:
            code += f"\n{cache_off(facts)}   # checkpointing had kept the KV cache off"
    elif first and first.form == "called_in_forward":
        called = f"# in {in_python(first.name, facts.network)}.forward: call the function itself, not "
        code = f"{called}checkpoint(function, ...)"
    return Treatment(name=CHECKPOINTING_OFF, summary="keep the activations", code=code)


def autocast_bf16(facts: Facts, instead: str = "keep the weights in BF16") -> Treatment:
    """Multiply in BF16 where weights or operands are in fp32."""
    model, trainer = wrapped_in_python(facts.network), facts.trainer()
    code = "autocast = torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)\n"
    code += f'{model}.forward = autocast({model}.forward)   # or "with autocast:" around forward and loss'
    return Treatment(
        name=AUTOCAST_BF16,
        summary=f"run forward and loss under BF16 autocast, or {instead}",
        code=trainer.call("bf16=True") if trainer else code,
    )


def fused_optimizer(facts: Facts) -> Treatment:
    code = f"{optimizer_class(facts)}(parameters, ..., fused=True)"
    return Treatment(name="fused-optimizer", summary="use a fused optimizer", code=code)


def optimizer_in_8_bits(facts: Facts) -> Treatment | None:
    """Keep both moments of Adam in 8 bits; None for another optimizer."""
    name = (facts.get("training.optimizer") or "AdamW").rpartition(".")[2]
    code, summary = f"optimizer = {name}8bit(parameters, lr=...)", "keep the optimizer's state in 8 bits"
    known = name in ("Adam", "AdamW")
    return Treatment(name="optimizer-in-8-bits", summary=summary, code=code) if known else None


def optimizer_class(facts: Facts) -> str:
    """Name the class of the job's optimizer as a script that imported it does."""
    module, _, name = (facts.get("training.optimizer") or "torch.optim.AdamW").rpartition(".")
    return f"torch.optim.{name}" if module.startswith("torch.optim") else name


def larger_batch(facts: Facts) -> Treatment:
    """Put the samples of several micro-batches into one, or two times as many if there is only one."""
    now = micro_batches(facts)
    times = next((each for each in range(2, now) if now % each == 0), max(now, 2))
    summary = (
        "put more tokens into a micro-batch, and accumulate over fewer"
        if now > 1
        else "put more tokens into a step, which changes the batch that the optimizer sees"
    )
    return Treatment(name=LARGER_BATCH, summary=summary, code=_times_the_batch(times, facts))


def more_tokens(facts: Facts, tokens: int) -> Treatment | None:
    """Put so many tokens into a micro-batch; None if the batch of a step would grow too much."""
    now, times = micro_batches(facts), tokens // (facts.workload.tokens or 1)
    growth = times * max(1, now // times) / now
    if growth > MOST_GROWTH:
        return None
    summary = f"use {tokens:,} tokens per micro-batch"
    if growth != 1:
        summary += f"; the global batch has {round(growth, 2):g} times its size, which changes the training"
    code = _times_the_batch(times, facts)
    return Treatment(name=MORE_TOKENS, summary=summary, code=code, tokens=tokens)


def _times_the_batch(times: int, facts: Facts) -> str:
    """Write so many times the samples, and fewer micro-batches, for the Trainer if there is one."""
    trainer, now = facts.trainer(), micro_batches(facts)
    size = facts.get("workload.batch_size") if facts.get("workload.batch_source") == "given" else None
    more, then = str(times * size) if size else f"{times} * BATCH", max(now // times, 1)
    if trainer:
        steps = f", gradient_accumulation_steps={then}" if now > 1 else ""
        return trainer.call(f"per_device_train_batch_size={more}{steps}")
    are_rows = facts.get("workload.batch_size") and samples(facts) is None
    lines = [
        f"batch_size = {more}   # {'rows' if are_rows else 'samples'} in a micro-batch, {size or 'BATCH'} now"
    ]
    lines += [f"accumulate = {then}   # micro-batches in a step, {now} now"] if now > 1 else []
    return "\n".join(lines)


def te_recipe(name: str, facts: Facts) -> Treatment:
    """Another recipe of Transformer Engine, by the name of its treatment.

    Accelerate's ``TERecipeKwargs`` knows two of them. Another one is opened inside of its autocast, where it
    counts. Source: ``apply_fp8_autowrap``, accelerate 1.15.
    """
    made = BY_TREATMENT[name]
    if may_have_converted(facts) and made.name in ("delayed", "mxfp8"):
        code = with_handler(facts, f"TERecipeKwargs(use_mxfp8_block_scaling={made.name == 'mxfp8'})")
    else:
        code = INSIDE_ACCELERATE if opens_te_autocast(facts) else IN_PLACE_OF_AUTOCAST
        code = code.replace("RECIPE", made.config)
    return Treatment(name=name, summary=f"run Transformer Engine with {made.words}", code=code)


IN_PLACE_OF_AUTOCAST = """\
# in the place of the autocast that is there now
with te.autocast(enabled=True, recipe=RECIPE):   # te.fp8_autocast(fp8_recipe=...) before 2.9
    output = model(batch)"""

INSIDE_ACCELERATE = """\
# before prepare() or trainer.train(): inside of Accelerate's own autocast, this recipe counts
own_forward = model.forward


@functools.wraps(type(model).forward)
def with_recipe(self, *args, **kwargs):
    with te.autocast(enabled=self.training, recipe=RECIPE):   # te.fp8_autocast(fp8_recipe=...) before 2.9
        return own_forward(*args, **kwargs)


model.forward = types.MethodType(with_recipe, model)"""
"""``prepare`` wraps a bound method alone, and a Trainer reads the names of its arguments."""


def treatments_of(facts: Facts, fp8: str, names: tuple[str, ...]) -> Iterator[Treatment]:
    """Describe the steps of the variant ``fp8``, the conversion first."""
    taken = converted(facts)
    for name in sorted(names, key=lambda each: traits(each).family != "convert"):
        if traits(name).family == "convert":
            own = keeps_users_compilation(fp8) or own_compile(facts) == "blocks"
            yield convert(facts, converted_to(fp8), {each.name for each in taken}, before_own=own)
        elif traits(name).compiles:
            found = compile_treatment(facts, taken)
            otherwise = any(keeps_users_compilation(each.name) for each in facts.trial.arms)
            otherwise = otherwise and not marks_without_kernels(facts)
            yield replace(found, code=f"{LEAVE_OUT_OWN_COMPILE}\n{found.code}") if otherwise else found
        elif described := describe(name, facts):
            yield described


def compile_stored(facts: Facts, stored: Sequence[Linear]) -> Treatment | None:
    """Compile the blocks that cast stored weights; None if they are compiled, or there are none.

    An RTX 5090 took 4.65 instead of 5.39 s/step. Source: kohya-ss/musubi-tuner#722.
    """
    inside = [each for each in stored if any(is_inside(each, blocks) for blocks in facts.network.blocks)]
    if not any(each.compiled is None for each in inside):
        return None
    summary = "keep the stored weights, and compile the blocks, which fuses the casts"
    return replace(compile_treatment(facts, inside), name=COMPILE_STORED, summary=summary)


LEAVE_OUT_OWN_COMPILE = "# leave out your own torch.compile"
KEEP_OWN_COMPILE = "# leave your own torch.compile as it is"

BF16_FORMS: dict[str, str] = {
    ArmName.AS_IS: "",
    ArmName.BF16: "",
    ArmName.BF16_AS_COMPILED: ", under your own torch.compile",
    ArmName.BF16_WHOLE: ", compiled as one graph",
}
"""Baseline -> how it is compiled, unless by torch.compile alone."""


def stay_in_bf16(facts: Facts, why: str = "", *, for_now: bool = False) -> Treatment:
    """Write how to train without FP8: as the user compiles, unless another BF16 was faster.

    ``for_now`` says that FP8 may turn out to be faster.
    """
    view = TrialView(facts)
    bf16 = view.own_bf16_left_out or view.bf16_of_the_plan
    form = bf16.name if bf16 else ""
    how = BF16_FORMS.get(form, ", compiled")
    runs = any(each.get("use") == "training" and each.get("engaged") is not False for each in facts.linears())
    begin = "go back to" if runs else "train in" if fp8_was_asked_for(facts) else "stay in"
    return Treatment(
        name=STAY_IN_BF16,
        summary=f"{begin} BF16{' for now' if for_now else ''}{how}{why and f': {why}'}",
        code="\n".join([*filter(None, [leave_fp8_out(facts)]), *compiled_as(form, facts)]),
    )


def replaces_own_compile(form: str, facts: Facts) -> bool:
    """Return whether this baseline beat the one compiled the user's way, or that one did not run."""
    own = any(each.name == ArmName.BF16_AS_COMPILED for each in facts.trial.arms)
    own = own and not marks_without_kernels(facts)
    return own and form != ArmName.BF16_AS_COMPILED and TrialView(facts).own_bf16_left_out is None


def compiled_as(form: str, facts: Facts) -> list[str]:
    """Write the lines that compile BF16 as in this variant, or as the user does if none was timed."""
    mine, leave = bool(own_compile(facts)), bool(form) and replaces_own_compile(form, facts)
    if form == ArmName.BF16_AS_COMPILED or (mine and not leave and form not in BF16_FORMS):
        return [KEEP_OWN_COMPILE]
    if form in (ArmName.AS_IS, ArmName.BF16):
        out = form == ArmName.BF16 and (leave or marks_without_kernels(facts))
        return [LEAVE_OUT_OWN_COMPILE] if out else []
    by_block = form != ArmName.BF16_WHOLE and bool(facts.network.get("blocks"))
    lines = [f"# after {each}:" for each in outermost(facts.network) if by_block]
    lines += with_kernels((compile_all if by_block else compile_whole)(facts.network), facts)
    if by_block and facts.get("training.use_cache"):
        lines.append(f"{cache_off(facts)}   # a KV cache slows the compiled blocks down")
    return [*([LEAVE_OUT_OWN_COMPILE] if leave or mine else []), *lines]


def leave_fp8_out(facts: Facts) -> str:
    """Write what leaves FP8 out, if it is asked for."""
    variables = facts.variables()
    if BACKEND in variables or asked_by_environment(variables) or may_have_converted(facts):
        return (
            '# leave FP8 out: Accelerator(mixed_precision="bf16"), or accelerate launch --mixed_precision '
            "bf16" + (f",\n# without {BACKEND} in the environment" if BACKEND in variables else "")
        )
    in_fp8 = [each for each in facts.linears() if each.get("use") == "training"]
    built = next((each for each in in_fp8 if not stack_of(each).converter), None)
    if built is None:
        return "# leave out the conversion to FP8" * bool(in_fp8)
    stack = stack_of(built)
    autocast = "no te.autocast, and " if stack.under_autocast else ""
    return f"# leave FP8 out: {autocast}torch.nn.Linear in place of {stack.layer or layer_label(built)}"


WRITTEN: dict[str, Callable[[Facts], Treatment | None]] = {
    AUTOCAST_BF16: autocast_bf16,
    TE_AUTOCAST: lambda facts: Treatment(
        name=TE_AUTOCAST,
        summary="run the training forward inside the FP8 autocast",
        code="# and no te.autocast(enabled=False) inside the model\n"
        "with te.autocast(enabled=True):   # te.fp8_autocast before Transformer Engine 2.9\n"
        "    output = model(batch)",
    ),
    "cache-off": lambda facts: Treatment(
        name="cache-off", summary="train without a KV cache", code=cache_off(facts)
    ),
    CHECKPOINTING_OFF: checkpointing_off,
    KEEP_IN_BF16: lambda facts: keep_in_bf16(to_keep(facts), facts) if to_keep(facts) else None,
    "fused-optimizer": fused_optimizer,
    COMPILE_BLOCKS: lambda facts: compile_treatment(facts, covered_by_blocks(facts)),
    COMPILE_MODEL: compile_model,
    STAY_IN_BF16: stay_in_bf16,
    LARGER_BATCH: larger_batch,
}
"""Treatment -> what writes it; changes of the recipe aside. Checks write all others."""


def describe(name: str, facts: Facts) -> Treatment | None:
    """Describe a treatment; None if only checks propose it, or nothing would change."""
    if name not in BY_TREATMENT:
        return WRITTEN[name](facts) if name in WRITTEN else None
    if BY_TREATMENT[name].stack != TORCHAO.name:
        return te_recipe(name, facts)
    word = recipe_after(name)
    return Treatment(name=name, summary=f"convert with the recipe {word}", code=with_recipe(word, facts))
