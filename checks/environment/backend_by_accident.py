"""An FP8 backend without a choice, or without FP8

What it finds. FP8 is on and you named no backend, or you named a backend for a job that is not FP8.

Why it matters. Without a name, Accelerate takes torchao if it is installed, and compiles nothing. On an H200
that ran at 0.50x of compiled BF16; with compiled blocks the same job ran at 1.24x. With a backend but without
FP8, `prepare` looks at the backend alone. AO then stops the job with "'NoneType' object has no attribute
'config'". TE converts the model and trains in FP8, while the flags and logs say bf16.

Fix. Name both, the precision and the backend, or neither (Accelerate 1.9 or newer).

    # before: torchao, because its name comes first
    accelerate launch --mixed_precision fp8 train.py

    # after; and unset the variable for a BF16 run
    export ACCELERATE_FP8_BACKEND=TE
    accelerate launch --mixed_precision fp8 train.py

When to ignore it. If you chose torchao by passing a recipe (`kwargs_handlers=[AORecipeKwargs()]`). A recipe
names the backend too, but leaves no trace that fp8doctor could read.

How it is detected, and limits. fp8doctor reads ACCELERATE_FP8_BACKEND, the precision, the installed backends
and the FP8 layers. For the same reason, uncompiled torchao in its default configuration is an error only
under a Trainer, which passes no recipe.

References. `h200-accelerate_torchao_eager`. `prepare` was run with accelerate 1.15.0 and read in 1.9.0 to
1.15.0: https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor.analysis.by_accelerate import exported
from fp8doctor.analysis.fp8_request import asked_by_environment, fp8_was_asked_for, precision_of, was_prepared
from fp8doctor.analysis.recipe_support import READS_BACKEND_SINCE, at_least
from fp8doctor.facts import Accelerate, Facts
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Severity, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

AO_SINCE = Version("1.4.0")
"""First accelerate that knows torchao, and takes it before Transformer Engine."""


@check(
    "ENV008",
    "backend-by-accident",
    area="environment",
    severity="error",
    explained_by=("ENV001", "ENV003", "ENV004", "ENV005", "GPU001"),
    changes_fp8=True,
)
def backend_by_accident(facts: Facts) -> Finding | NotApplicable | None:
    if not at_least(facts, "accelerate", AO_SINCE):
        return NotApplicable(reason="Accelerate is not installed, or is older than 1.4")
    named = facts.environment.variables.get("ACCELERATE_FP8_BACKEND", "NO")
    if named in ("TE", "AO"):
        return (
            without_fp8(facts, named)
            if at_least(facts, "accelerate", READS_BACKEND_SINCE)
            else NotApplicable(reason="Accelerate before 1.9 does not read ACCELERATE_FP8_BACKEND")
        )
    if named != "NO" or fp8_was_asked_for(facts) is None or precision(facts) not in ("fp8", None):
        return NotApplicable(reason="nothing asks for FP8, or another backend is named")
    return by_order(facts)


def without_fp8(facts: Facts, named: str) -> Finding | NotApplicable | None:
    """Report a named backend in a job that never asked for FP8; if it did, ENV001 covers it."""
    asked = asked_by_environment(facts.environment.variables)
    decided = precision(facts)
    if asked is not None or decided == "fp8":
        return None
    if decided is None:
        return NotApplicable(reason="nothing has decided the precision yet")
    happens = {
        "AO": "stops with \"'NoneType' object has no attribute 'config'\"",
        "TE": "still trains the model in FP8, although every flag says otherwise",
    }
    return Finding(
        severity=None if uses_accelerate(facts) else "warning",
        title=f"ACCELERATE_FP8_BACKEND={named} is set, but the precision is {decided}{_in_fp8(facts)}",
        explanation=f"Accelerator.prepare() looks at the backend alone, and {happens[named]}.",
        evidence={
            "backend": named,
            "precision": decided,
            "accelerate": facts.software.packages["accelerate"].version,
        },
        treatment=_agreeing(decided, named, in_fp8=named == "TE"),
    )


def _agreeing(decided: str, named: str, *, in_fp8: bool) -> Treatment:
    """Unset the backend of a job that runs in FP8 unasked; ask for FP8 if the job does not start."""
    unset, launch = "unset ACCELERATE_FP8_BACKEND", "accelerate launch --mixed_precision fp8"
    if in_fp8:
        summary = f"{unset}: the job then trains in {decided}, as its precision says"
        code = f"{unset}   # or, for FP8: {launch} with ACCELERATE_FP8_BACKEND={named}"
    else:
        summary = "set the precision to fp8 too"
        code = f"ACCELERATE_FP8_BACKEND={named} {launch} train.py\n# or, for {decided}: {unset}"
    return Treatment(name="name-backend-and-precision", summary=summary, code=code, kind="shell")


def _in_fp8(facts: Facts) -> str:
    """Say how many layers run in FP8 in spite of that; empty if that is not known."""
    linears = facts.get("network.linears", ())
    some = sum(each.get("use") == "training" for each in linears)
    return f": {some or 'none'} of {plural(len(linears), 'Linear')} in FP8" if linears else ""


def by_order(facts: Facts) -> Finding | NotApplicable | None:
    """Report FP8 without a named backend where two are installed."""
    packages = facts.software.packages
    if "torchao" not in packages or "transformer_engine" not in packages:
        return None
    linears = facts.linears()
    eager = [
        each
        for each in linears
        if each.stack == "torchao"
        and each.use == "training"
        and each.compiled is None
        and each.recipe == "tensorwise"
    ]
    if linears and not eager and any(each.use == "training" for each in linears):
        # Transformer Engine was chosen by a recipe, or torchao is configured or compiled: somebody decided.
        return None
    converted = bool(eager) and was_prepared(facts)
    trainer = facts.get("training.trainer") is not None
    severity: Severity = ("error" if trainer else "warning") if converted else "info"
    return Finding(
        severity=severity,
        title="Accelerate takes torchao by default: Transformer Engine is installed too, and no FP8 backend "
        "is named",
        explanation=(
            f"{plural(len(eager), 'Linear')} became Float8Linear in torchao's default configuration, not "
            "compiled. "
            if converted
            else ""
        )
        + "Only the order of names decides. torchao without compilation is slower than BF16.",
        evidence={
            "installed": ("torchao", "transformer_engine"),
            "eager_float8_linears": len(eager),
            "trainer": trainer,
        },
        treatment=Treatment(
            name="name-backend-and-precision",
            summary="name the backend, and compile if it is torchao",
            code=exported(facts, ACCELERATE_FP8_BACKEND="AO")
            + "   # keeps torchao; or TE, which needs no compilation\n"
            "accelerate launch --dynamo_backend inductor --dynamo_use_regional_compilation train.py",
        ),
    )


def precision(facts: Facts) -> str | None:
    """Find the precision that Accelerate works with, or will read; None before anything has decided it."""
    asked = facts.environment.variables.get("ACCELERATE_MIXED_PRECISION")
    return precision_of(facts.accelerate(), facts.trainer()) or asked


def uses_accelerate(facts: Facts) -> bool:
    """Whether an Accelerator or a Trainer exists, so `prepare` has been or will be called."""
    accelerate = facts.accelerate()
    return bool((accelerate and accelerate.mixed_precision) or facts.trainer())


def _precision(mixed_precision: str) -> Facts:
    packages = {"accelerate": "1.15.0", "transformer_engine": "2.20.2"}
    accelerate = Accelerate(mixed_precision=mixed_precision, distributed="NO", prepared=False)
    named = {"ACCELERATE_FP8_BACKEND": "TE"}
    return example(packages=packages, variables=named, linears=(), accelerate=accelerate, trainer=None)


FIRES = _precision("bf16")
SILENT = _precision("fp8")
