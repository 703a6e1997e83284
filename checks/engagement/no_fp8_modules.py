"""FP8 was asked for, but no layer has it

Asking for FP8 only sets a flag; a conversion must put FP8 layers in place. Without them every matmul runs in
BF16, while flags and logs say fp8. The usual reasons: nothing reads the flag; Accelerate converts `nn.Linear`
only, and GPT-2's layers are `Conv1D`. Its torchao path skips the first and the last Linear and sides not
divisible by 16. A `module_filter_fn` may compare names that this model does not have. Of transformers, only
`from_pretrained` reads a `quantization_config`, and its layers are for inference.

    accelerator = Accelerator(mixed_precision="fp8")          # before: only the flag

    from accelerate import Accelerator                        # after (accelerate 1.15)
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig
    recipe = AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))  # unless FSDP2 shards the model
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)  # train what it returns

Ignore it before `prepare` or `Trainer.train()`: a sound model has no FP8 layer yet, and this is information.
https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/ao.py
https://github.com/huggingface/transformers/issues/42865
"""

from typing import Literal

from fp8doctor import kit

MULTIPLE = kit.layers.FP8_MULTIPLE
CONVERTER = "convert_to_float8_training"
CONFIGURATION = "quantization_config"
PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)"

NOT_YET = (
    "Before Accelerator.prepare or Trainer.train() every model looks like this. To be sure, check after the "
    "first step: 'fp8doctor run train.py' does that."
)


@kit.check(
    "MOD001",
    "no-fp8-modules",
    severity="error",
    **kit.NO_FP8_STEP,
    explained_by=(
        *("fp8-request-overridden", "fp8-backend-misspelled", "fp8-backend-missing", "backend-by-accident"),
        *("incompatible-versions", "no-fp8-tensor-cores", "quantized-base"),
    ),
)
def no_fp8_modules(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears = facts.network.linears
    if any(each.use == "training" or kit.stores_fp8(each) for each in linears):
        return None
    flag = kit.fp8_was_asked_for(facts)
    asked = flag or (CONFIGURATION if kit.fp8_request.configured(facts) else CONVERTER)
    if asked == CONVERTER and not kit.fp8_request.converted_nothing(facts):
        return kit.NotApplicable(reason="nothing asks for FP8 in this model")
    if facts.network.float8_parameters or facts.get("observed.fp8_gemms"):
        return None
    proof: str | None = None
    if asked == CONVERTER:
        proof = "it was called"
    elif asked == CONFIGURATION:
        proof = "the model is made of it"
    elif kit.fp8_request.was_prepared(facts):
        proof = "the model went through Accelerator.prepare"
    elif kit.recorded(facts, "observed") or facts.training.gradients_seen:
        proof = "a training step has run"
    cause, fix = why_none(facts, asked, proof)
    none = f"none of {kit.plural(len(linears), 'Linear')} has it"
    return kit.Finding(
        severity=None if proof else "info",
        title=f"FP8 was asked for ({asked}), but {none}" if proof else f"FP8 was asked for; {none} yet",
        explanation=f"{asked} asks for FP8{f', and {proof}' if proof else ''}. {cause}",
        evidence={"asked_by": asked, "linears": len(linears), "fp8_layers": 0, "conversion_due": proof},
        treatment=fix,
    )


def why_none(facts: kit.Facts, asked: str, proof: str | None) -> tuple[str, kit.Treatment | None]:
    """Find the most likely reason why no layer of this model was converted, and its fix."""
    linears, flag = facts.network.linears, kit.fp8_was_asked_for(facts)
    if flag and not proof:
        return NOT_YET, look_later(facts)
    conv1d = sum(each.kind.endswith(".Conv1D") for each in linears)
    if conv1d and asked != CONFIGURATION:
        return f"{conv1d} of them are Conv1D, which no converter accepts as a Linear.", kit.treatments.CONV1D
    if flag and kit.fp8_request.was_prepared(facts) and not any(map(kit.layers.fits_fp8, linears)):
        cause = f"No Linear has both sides divisible by {MULTIPLE}, so the converter skipped all."
        return cause, kit.padding.pad_sides(linears)
    own = facts.trainer() and kit.fp8_request.may_have_converted(facts)  # it prepares by itself
    code: str | None = kit.conversion.switched_on(facts) + ("" if own else f"\n{PREPARE}")
    if flag and kit.fp8_request.was_prepared(facts):
        cause = "Another precision prepared the model, it was replaced later, or only its ends are Linears."
    elif flag:
        cause = "The model never went through Accelerator.prepare, and nothing else reads the request."
    else:
        named = f", such as {linears[-1].name!r}" if linears and linears[-1].name else ""
        cause = (
            "The converter changes only the model that you pass, in place, and every nn.Linear that its "
            f"filter accepts. It was not called on this model, or the filter lacks its names{named}."
        )
        if asked == CONFIGURATION:
            cause = "from_config ignores it, and what from_pretrained makes of it does not train in FP8."
        takes = kit.if_recorded(lambda: any(map(kit.layers.would_be_converted, linears)))
        code = kit.conversion.convert_all_that_fit(facts) if takes else None
    summary = "convert the model that trains, before you create its optimizer"
    return cause, kit.Treatment(name="convert", summary=summary, code=code) if code else None


def look_later(facts: kit.Facts) -> kit.Treatment:
    """Convert by a recipe whose layers learn, and look again; a Trainer converts by itself."""
    kind: Literal["python", "sketch"] = "python"
    code = f"{kit.conversion.switched_on(facts)}\n{PREPARE}\nprint(inspect_model(model))"
    if facts.trainer() is not None:
        kind, code = "sketch", "print(inspect_model(model, trial=False))   # once trainer.train() ran a step"
    summary = "check the model after its conversion, or after one training step"
    return kit.Treatment(name="look-after-prepare", summary=summary, code=code, kind=kind)


def _prepared(use: kit.facts.Use) -> kit.Facts:
    layer = kit.float8("h.0.up", kind="torch.nn.modules.linear.Linear", stack="torch", use=use)
    return kit.example(
        variables={"ACCELERATE_MIXED_PRECISION": "fp8"},
        linears=(layer,) * 3,
        float8_parameters=0,
        gradients_seen=False,
        trainer=None,
        accelerate=kit.facts.Accelerate(mixed_precision="fp8", prepared=True),
    )


FIRES = _prepared(use="none")
SILENT = _prepared(use="training")
