"""FP8 was asked for, but no layer has it

What it finds. Something asked for FP8, but no module and no parameter of the model is in FP8.

Why it matters. Asking for FP8 only sets a flag; FP8 layers compute in FP8, and a conversion must put them in
place. Without them, every matmul runs in BF16 and the step is as slow as before, while flags and logs
say fp8. Common reasons: nothing reads the flag. Accelerate converts `nn.Linear` only, and GPT-2's layers are
`Conv1D`. Under Accelerate, torchao skips sides not divisible by 16, and the first and last Linear. A
`module_filter_fn` compares names that this model does not have.

Fix. Train the model that was converted, and check it after the conversion (accelerate 1.15).

    accelerator = Accelerator(mixed_precision="fp8")          # before: only the flag

    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig
    recipe = AORecipeKwargs(config=Float8LinearConfig(pad_inner_dim=True))  # unless FSDP2 shards the model
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model, optimizer = accelerator.prepare(model, optimizer)  # after: train what it returns

When to ignore it. Before `Trainer.train()` or `prepare`: a sound model has no FP8 layer yet. Without proof
that the conversion should have happened, this is information.

How it is detected, and limits. fp8doctor reads who asked: a variable, the launcher, Accelerator,
TrainingArguments, a script's argument such as --fp8, or a call of `convert_to_float8_training`. It then looks
at every module, and whether another copy was converted. Proof is that the model went through
`prepare`, holds gradients, or trained a step. The named reason is the most likely one.

References. accelerate 1.15 and transformers 5.23, run on a CPU.
https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/ao.py
https://github.com/huggingface/transformers/issues/25333
https://github.com/axolotl-ai-cloud/axolotl/issues/2904
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import (
    asked_by_argument,
    converted_a_copy,
    converted_nothing,
    fp8_was_asked_for,
    of_converter,
)
from fp8doctor.analysis.layers import FP8_MULTIPLE, fits_fp8
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.diagnosis.treatments import convert_model, switched_on
from fp8doctor.facts import Accelerate, Facts, Linear, Use, if_recorded, recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

CONVERTER = "convert_to_float8_training"

ENDS_SKIPPED = 2
"""Linears that Accelerate's torchao path skips, the first and the last. Source: 1.15 ``utils/ao.py``."""

PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)"

LOOK_LATER = Treatment(
    name="look-after-prepare",
    summary="check the model after its conversion, or after one training step",
    code=f"{PREPARE}\nprint(inspect_model(model, optimizer=optimizer))",
)
"""Advice without proof that the conversion was due."""


@check(
    "MOD001",
    "no-fp8-modules",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
    explained_by=("ENV001", "ENV003", "ENV004", "ENV005", "ENV008", "GPU001", "MOD009"),
)
def no_fp8_modules(facts: Facts) -> Finding | NotApplicable | None:
    linears = facts.network.linears
    asked, argument = fp8_was_asked_for(facts), asked_by_argument(facts)
    if asked is None and argument is None:
        if not of_converter(facts):
            return NotApplicable(reason="nothing asks for FP8")
        if not converted_a_copy(facts) and (reason := not_due(facts)):
            return NotApplicable(reason=reason)
    if facts.network.float8_parameters or any(is_fp8(linear) for linear in linears):
        return None
    if facts.get("observed.fp8_gemms"):
        return None
    if asked is None and (copied := converted_a_copy(facts)):
        return of_a_copy(copied, facts)
    if asked is None:
        return of_the_call(facts) if argument is None else of_an_argument(argument, facts)
    proof = conversion_due(facts)
    if proof:
        others = sum(each.kind.endswith(".Conv1D") for each in linears)
        conv1d = f" ({others} are Conv1D, which no converter takes)" if others else ""
        title = f"FP8 was asked for, but none of {len(linears)} Linears has it{conv1d}"
        cause, treatment = why_none(facts)
        explanation = (
            f"{asked} asks for FP8 and {proof}, but no module and no parameter is in FP8: every matmul runs "
            f"in 16 or 32 bits. {cause}"
        )
    else:
        title = f"FP8 was asked for; none of {len(linears)} Linears has it yet"
        treatment = LOOK_LATER
        explanation = (
            f"{asked} asks for FP8. Nothing shows that the conversion should have happened by now: before "
            "Accelerator.prepare or Trainer.train() every model looks like this. To be sure, check again "
            "after the first step: 'fp8doctor run train.py' does that."
        )
    return Finding(
        severity=None if proof else "info",
        title=title,
        explanation=explanation,
        evidence={"asked_by": asked, "linears": len(linears), "fp8_layers": 0, "conversion_due": proof},
        treatment=treatment,
    )


def of_a_copy(copied: int, facts: Facts) -> Finding:
    """Report that a copy was converted, and not the model that trains."""
    linears = facts.network.linears
    return Finding(
        title="A copy of the model was converted; the model that trains has no FP8 in "
        f"{plural(len(linears), 'Linear')}",
        explanation=f"{plural(copied, 'FP8 layer')} with the shapes of this model's Linears belong to "
        "another model, which no optimizer updates. The converter changes the model you pass, in place.",
        evidence={"fp8_layers_of_the_copy": copied, "linears": len(linears), "fp8_layers": 0},
        treatment=conversion("convert the model that trains, before you create its optimizer", facts),
    )


def of_an_argument(argument: str, facts: Facts) -> Finding:
    """Report a script that was asked for FP8 and trains without it."""
    linears = facts.network.linears
    return Finding(
        title=f"FP8 was asked for, but none of {len(linears)} Linears has it",
        explanation=f"{argument} asks for FP8. A training step has run, no layer is in FP8, and the "
        "profiled step ran no FP8 matmul. The script ignores its argument here: look for a warning in its "
        "output. Some scripts do this on a GPU without FP8.",
        evidence={"asked_by": argument, "linears": len(linears), "fp8_layers": 0},
        treatment=conversion(
            "convert the model that trains before you create the optimizer, or find out why the script "
            "ignores its argument",
            facts,
        ),
    )


def not_due(facts: Facts) -> str | None:
    """Say why a converter does not concern this model; None if it may have replaced nothing."""
    converter = of_converter(facts)
    if converter is None or not (converter.called or converter.named):
        return "nothing asks for FP8"
    if converter.called is False:
        return f"the code's call of {CONVERTER} has not run"
    return "the conversion replaced Linears as asked" if converter.called and converter.replaced else None


def of_the_call(facts: Facts) -> Finding:
    """Report a converter that was called, or is named in the code, for a model without FP8 layers."""
    linears = facts.network.linears
    cause, treatment = why_replaced_none(facts)
    certain = converted_nothing(facts)
    happened = (
        f"{CONVERTER} was called, but replaced no Linear by an FP8 layer"
        if certain
        else f"The code calls {CONVERTER}; fp8doctor could not see whether that call has run"
    )
    return Finding(
        severity=None if certain else "info",
        title=f"{CONVERTER} was called but replaced none of {len(linears)} Linears"
        if certain
        else f"The code calls {CONVERTER}, but none of {len(linears)} Linears is in FP8",
        explanation=f"{happened}. It converts every nn.Linear that its module_filter_fn accepts, and "
        f"changes the model in place. {cause}",
        evidence={"called": certain or None, "linears": len(linears), "fp8_layers": 0},
        treatment=treatment,
    )


def conversion(summary: str, facts: Facts) -> Treatment | None:
    """Describe converting the model; None if it has nothing to convert."""
    code = if_recorded(convert_model, facts)
    return Treatment(name="convert", summary=summary, code=code) if code else None


def why_replaced_none(facts: Facts) -> tuple[str, Treatment | None]:
    """Find the most likely reason why a converter replaced nothing."""
    linears = facts.network.linears
    if of_conv1d := for_conv1d(linears):
        return of_conv1d
    such_as = f", such as {linears[-1].name!r}" if linears and linears[-1].name else ""
    return (
        "Either the filter accepted none, because it compares names that this model does not "
        f"have{such_as}, or the layers of this model were created after the call.",
        conversion("let the filter accept the layers, and convert the model that trains", facts),
    )


def is_fp8(linear: Linear) -> bool:
    """Whether this layer computes or at least stores in FP8; the 4 and 8 bits of bitsandbytes are not FP8."""
    return linear.use == "training" or (linear.use == "storage" and linear.dtype.startswith("float8"))


def conversion_due(facts: Facts) -> str | None:
    """Say what proves that the conversion should have happened; None without proof."""
    training = facts.training
    if training.accelerate and training.accelerate.prepared:
        return "the model went through Accelerator.prepare"
    if training.gradients_seen or recorded(facts, "observed"):
        return "a training step has run"
    return None


def why_none(facts: Facts) -> tuple[str, Treatment | None]:
    """Find the most likely reason and its fix, from the layers' kinds."""
    linears = facts.network.linears
    aligned = [linear for linear in linears if fits_fp8(linear)]
    if of_conv1d := for_conv1d(linears):
        return of_conv1d
    if not (facts.training.accelerate and facts.training.accelerate.prepared):
        return (
            "The model never went through Accelerator.prepare, and nothing else reads the request.",
            Treatment(
                name="convert",
                summary="convert the model before it trains",
                code=f"{switched_on(facts)}\n{PREPARE}",
            ),
        )
    if not aligned:
        return (
            f"No Linear has both sides divisible by {FP8_MULTIPLE}, so the converter skipped all.",
            Treatment(
                name="pad-dimensions",
                summary=f"make the widths multiples of {FP8_MULTIPLE}",
                code=f"hidden_size = {FP8_MULTIPLE} * math.ceil(hidden_size / {FP8_MULTIPLE})",
            ),
        )
    if len(linears) <= ENDS_SKIPPED:
        return (
            "Accelerate's torchao path skips the first and the last Linear, and there are no others.",
            Treatment(
                name=STAY_IN_BF16,
                summary="stay in BF16: a model this small has nothing to gain",
                code='accelerator = Accelerator(mixed_precision="bf16")',
            ),
        )
    return (
        "The layers could have been converted: the model was prepared under another precision, or replaced "
        "afterwards.",
        Treatment(
            name="convert",
            summary="convert the model that trains",
            code=f"{switched_on(facts)}\n{PREPARE}",
        ),
    )


def for_conv1d(linears: tuple[Linear, ...]) -> tuple[str, Treatment] | None:
    """Describe GPT-2's layers, which no converter accepts as Linears; None without any."""
    conv1d = [linear for linear in linears if linear.kind.endswith(".Conv1D")]
    if not conv1d:
        return None
    return f"{len(conv1d)} of them are Conv1D, which no converter accepts as a Linear.", Treatment(
        name="conv1d-to-linear",
        summary="replace each Conv1D by an nn.Linear with the transposed weight, before the conversion",
        code="linear = nn.Linear(*conv1d.weight.shape)\nlinear.weight.data, linear.bias.data = "
        "conv1d.weight.data.T.contiguous(), conv1d.bias.data",
    )


def _prepared(use: Use) -> Facts:
    layer = float8("h.0.up", kind="torch.nn.modules.linear.Linear", stack="torch", use=use)
    accelerate = Accelerate(mixed_precision="fp8", prepared=True)
    return example(
        variables={"ACCELERATE_MIXED_PRECISION": "fp8"},
        linears=(layer,) * 3,
        float8_parameters=0,
        gradients_seen=False,
        trainer=None,
        accelerate=accelerate,
    )


FIRES = _prepared(use="none")
SILENT = _prepared(use="training")
