"""FP8 was asked for, but no layer has it

Asking for FP8 only sets a flag; a conversion must put FP8 layers in place. Without them every matmul runs in
BF16 and the step is as slow as before, while flags and logs say fp8. The usual reasons: nothing reads the
flag; Accelerate converts `nn.Linear` only, and GPT-2's layers are `Conv1D`. Its torchao path skips the first
and the last Linear and sides not divisible by 16. A `module_filter_fn` may compare names that this model does
not have. The finding names the most likely one.

    accelerator = Accelerator(mixed_precision="fp8")          # before: only the flag

    from accelerate import Accelerator                        # after (accelerate 1.15)
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig
    recipe = AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))  # unless FSDP2 shards the model
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)  # train what it returns

Ignore it before `prepare` or `Trainer.train()`: a sound model has no FP8 layer yet. Unless the model was
prepared, holds gradients or trained a step, this is information.
https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/ao.py
https://github.com/huggingface/transformers/issues/25333
"""

from __future__ import annotations

from fp8doctor import kit

CONVERTER = "convert_to_float8_training"

ENDS_SKIPPED = 2
"""Linears that Accelerate's torchao path skips, the first and the last. Source: 1.15 ``utils/ao.py``."""

PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)"

NOT_YET = (
    "Nothing shows that the conversion should have happened by now: before Accelerator.prepare or "
    "Trainer.train() every model looks like this. To be sure, check after the first step: 'fp8doctor run "
    "train.py' does that."
)

PAD = kit.Treatment(
    name="pad-dimensions",
    summary=f"make the widths multiples of {kit.FP8_MULTIPLE}",
    code=f"hidden_size = {kit.FP8_MULTIPLE} * math.ceil(hidden_size / {kit.FP8_MULTIPLE})",
)
STAY = kit.Treatment(
    name=kit.STAY_IN_BF16,
    summary="stay in BF16: a model this small has nothing to gain",
    code='accelerator = Accelerator(mixed_precision="bf16")',
)


@kit.check(
    "MOD001",
    "no-fp8-modules",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
    explained_by=(
        *("fp8-request-overridden", "fp8-backend-misspelled", "fp8-backend-missing", "backend-by-accident"),
        *("incompatible-versions", "no-fp8-tensor-cores", "quantized-base"),
    ),
)
def no_fp8_modules(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears, flag, called = facts.network.linears, kit.fp8_was_asked_for(facts), kit.converted_nothing(facts)
    copied = 0 if flag else kit.converted_a_copy(facts)
    argument = None if flag or copied else kit.asked_by_argument(facts)
    asked = flag or argument or CONVERTER
    if asked == CONVERTER and not copied and (reason := not_due(facts)):
        return kit.NotApplicable(reason=reason)
    if facts.network.float8_parameters or facts.get("observed.fp8_gemms"):
        return None
    if any(each.use == "training" or kit.stores_fp8(each) for each in linears):
        return None
    proof = conversion_due(facts) if flag or argument or copied else "it was called" if called else None
    fix: kit.Treatment | None
    conv1d = sum(each.kind.endswith(".Conv1D") for each in linears)
    if flag and not proof:
        cause, fix = NOT_YET, look_later(facts)
    elif conv1d and not argument and not copied:
        cause, fix = f"{conv1d} of them are Conv1D, which no converter accepts as a Linear.", kit.CONV1D
    elif flag:
        cause, fix = why_none(facts)
    elif argument:
        cause = (
            "The script ignores it here, as some do on a GPU without FP8: look for a warning in its output."
        )
        fix = conversion("convert the model that trains, or find out why the script ignores it", facts)
    elif copied:
        cause = (
            f"{kit.plural(copied, 'FP8 layer')} with the shapes of this model's Linears belong to a copy, "
        )
        cause += "which no optimizer updates: the converter changes the model you pass, in place."
        fix = conversion("convert the model that trains, before you create its optimizer", facts)
    else:
        cause, fix = why_replaced_none(facts)
    none = f"none of {kit.plural(len(linears), 'Linear')} has it"
    return kit.Finding(
        severity=None if proof else "info",
        title=f"FP8 was asked for ({asked}), but {none}" if proof else f"FP8 was asked for; {none} yet",
        explanation=f"{asked} asks for FP8{f', and {proof}' if proof else ''}. {cause}",
        evidence={"asked_by": asked, "linears": len(linears), "fp8_layers": 0, "conversion_due": proof},
        treatment=fix,
    )


def not_due(facts: kit.Facts) -> str | None:
    """Say why a converter does not concern this model; None if it may have replaced nothing."""
    converter = kit.of_converter(facts)
    if converter is None or not (converter.called or converter.named):
        return "nothing asks for FP8"
    if converter.called is False:
        return f"the code's call of {CONVERTER} has not run"
    return "the conversion replaced Linears as asked" if converter.called and converter.replaced else None


def conversion_due(facts: kit.Facts) -> str | None:
    """Say what proves that the conversion should have happened; None without proof."""
    if kit.was_prepared(facts):
        return "the model went through Accelerator.prepare"
    seen = kit.recorded(facts, "observed") or facts.training.gradients_seen
    return "a training step has run" if seen else None


def conversion(summary: str, facts: kit.Facts, code: str | None = None) -> kit.Treatment | None:
    """Describe converting the model; None if it has nothing to convert."""
    code = code or kit.if_recorded(kit.convert_model, facts)
    return kit.Treatment(name="convert", summary=summary, code=code) if code else None


def look_later(facts: kit.Facts) -> kit.Treatment:
    """Convert by a recipe whose layers learn, and look again; a Trainer converts by itself."""
    trainer = facts.trainer() is not None
    look = "print(inspect_model(model, trial=False))   # once trainer.train() has run a step"
    return kit.Treatment(
        name="look-after-prepare",
        summary="check the model after its conversion, or after one training step",
        code=look if trainer else f"{kit.switched_on(facts)}\n{PREPARE}\nprint(inspect_model(model))",
        kind="sketch" if trainer else "python",
    )


def why_none(facts: kit.Facts) -> tuple[str, kit.Treatment | None]:
    """Find the most likely reason why nothing converted the layers, and its fix."""
    linears, convert = facts.network.linears, f"{kit.switched_on(facts)}\n{PREPARE}"
    if not kit.was_prepared(facts):
        cause = "The model never went through Accelerator.prepare, and nothing else reads the request."
        return cause, conversion("convert the model before it trains", facts, convert)
    if not any(map(kit.fits_fp8, linears)):
        return f"No Linear has both sides divisible by {kit.FP8_MULTIPLE}, so the converter skipped all.", PAD
    if len(linears) <= ENDS_SKIPPED:
        return "Accelerate's torchao path skips the first and the last Linear, and there are no others.", STAY
    cause = "The layers fit: another precision prepared the model, or it was replaced after prepare."
    return cause, conversion("convert the model that trains", facts, convert)


def why_replaced_none(facts: kit.Facts) -> tuple[str, kit.Treatment | None]:
    """Find the most likely reason why a converter replaced nothing, and its fix."""
    linears = facts.network.linears
    such_as = f", such as {linears[-1].name!r}" if linears and linears[-1].name else ""
    cause = (
        "It takes every nn.Linear that its filter accepts. Either the filter compares names that this model "
        f"does not have{such_as}, or its layers were created after the call."
    )
    return cause, conversion("let the filter accept the layers, and convert the model that trains", facts)


def _prepared(use: kit.Use) -> kit.Facts:
    layer = kit.float8("h.0.up", kind="torch.nn.modules.linear.Linear", stack="torch", use=use)
    accelerate = kit.Accelerate(mixed_precision="fp8", prepared=True)
    return kit.example(
        variables={"ACCELERATE_MIXED_PRECISION": "fp8"},
        linears=(layer,) * 3,
        float8_parameters=0,
        gradients_seen=False,
        trainer=None,
        accelerate=accelerate,
    )


FIRES = _prepared(use="none")
SILENT = _prepared(use="training")
