"""A backend is named without fp8, fp8 without a backend, or either under a name that nothing reads."""

from packaging.version import Version

from fp8doctor import kit

from . import BACKEND, PREPARES

AO_SINCE = Version("1.4.0")
"""First accelerate that knows torchao, and takes it before Transformer Engine."""

UNREAD = {"FP8_BACKEND": "TE, AO or MSAMP", "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "true or false"}
"""Names as LLaMA-Factory sets them -> values of those that Accelerate reads, with ACCELERATE_ in front."""


@kit.check("ENV001", "hidden-fp8", severity="error", was="MOD006", **kit.NO_FP8_STEP)
def hidden_fp8(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    runs = any(each.use == "training" for each in facts.linears())
    if not runs or facts.environment.variables.get(BACKEND) != "TE":
        return kit.NotApplicable(reason=f"no layer is in FP8, or no {BACKEND}=TE is set")
    return None if decided_precision(facts) in ("fp8", None) else named_without_fp8(facts)


def decided_precision(facts: kit.Facts) -> str | None:
    """Find the precision that Accelerate works with, or will read; None before anything has decided it."""
    asked = facts.environment.variables.get("ACCELERATE_MIXED_PRECISION")
    return kit.fp8_request.precision_of(facts.accelerate(), facts.trainer()) or asked


def named_without_fp8(facts: kit.Facts) -> kit.Finding:
    """Report a backend that is named in a job whose precision is not fp8."""
    variables, linears, accelerate = facts.environment.variables, facts.linears(), facts.accelerate()
    named, decided = variables[BACKEND], decided_precision(facts)
    asked = kit.fp8_request.asked_by_environment(variables)
    converted = sum(each.use == "training" for each in linears)
    ask = kit.exported(facts, "train.py", ACCELERATE_MIXED_PRECISION="fp8")
    summary, code = "set the precision to fp8 too", f"{ask}\n# or, for {decided}: unset {BACKEND}"
    if named == "TE":
        summary = f"unset {BACKEND}: the job then trains in {decided}, as its precision says"
        code = f"unset {BACKEND}   # or, for FP8 and with no bf16=True in the script: {ask}"
    prepares = facts.trainer() or (accelerate and accelerate.mixed_precision)
    where = f": {converted or 'none'} of {kit.plural(len(linears), 'Linear')} in FP8" if linears else ""
    return kit.Finding(
        severity=None if prepares and not asked else "warning",
        title=f"{BACKEND}={named} is set, but the precision is {decided}{where}",
        explanation=f"Accelerator.prepare() looks at the backend alone, and {PREPARES[named]}. Measured as a "
        "baseline, such a run is mistaken for BF16.",
        evidence={"backend": named, "precision": decided, "fp8_layers": converted},
        treatment=kit.Treatment(name="name-backend-and-precision", summary=summary, code=code, kind="shell"),
    )


@kit.check(
    "ENV001",
    "backend-by-accident",
    severity="error",
    was="ENV008",
    explained_by=(
        *("fp8-request-overridden", "fp8-backend-misspelled", "fp8-backend-missing", "hidden-fp8"),
        *("incompatible-versions", "no-fp8-tensor-cores"),
    ),
    changes_fp8=True,
)
def backend_by_accident(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables, packages = facts.environment.variables, facts.software.packages
    named, decided = variables.get(BACKEND, "NO"), decided_precision(facts)
    if named in PREPARES and decided and kit.recipe_support.reads_backend(facts):
        consistent = kit.fp8_request.asked_by_environment(variables) or decided == "fp8"
        return None if consistent else named_without_fp8(facts)
    asks = kit.fp8_was_asked_for(facts) is not None and decided in ("fp8", None)
    if named != "NO" or not asks or not kit.recipe_support.at_least(facts, "accelerate", AO_SINCE):
        return kit.NotApplicable(reason="nothing asks Accelerate for FP8, or another backend is named")
    fp8 = [each for each in facts.linears() if each.use == "training"]
    defaults = ("torchao", None, "tensorwise")
    eager = [each for each in fp8 if (each.stack, each.compiled, each.recipe) == defaults]
    if not {"torchao", "transformer_engine"} <= packages.keys() or (fp8 and not eager):
        return None  # one backend, or a recipe or a compilation shows that somebody decided
    converted = bool(eager) and kit.fp8_request.was_prepared(facts)
    compiled = "--dynamo_backend inductor --dynamo_use_regional_compilation train.py"
    asked = {BACKEND: "AO", "ACCELERATE_MIXED_PRECISION": "fp8"}
    became = f"{kit.plural(len(eager), 'Linear')} became Float8Linear with torchao's defaults, not compiled. "
    return kit.Finding(
        severity="info" if not converted else "error" if facts.trainer() else "warning",
        title="Accelerate takes torchao by default: Transformer Engine is installed too, and no FP8 backend "
        "is named",
        explanation=became * converted
        + "Only the order of names decides. torchao without compilation is slower than BF16.",
        evidence={"installed": ("torchao", "transformer_engine"), "eager_float8_linears": len(eager)},
        treatment=kit.Treatment(
            name="name-backend-and-precision",
            summary="name the backend, and compile if it is torchao",
            code=kit.exported(
                facts, compiled, note="keeps torchao; or TE, which needs no compilation", **asked
            ),
        ),
    )


@kit.check(
    "ENV001",
    "fp8-setting-without-effect",
    severity="warning",
    was="ENV002",
    explained_by=("fp8-backend-misspelled",),
    changes_fp8=True,
)
def fp8_setting_without_effect(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables = facts.environment.variables
    written = [name for name in UNREAD if name in variables]
    if not written:
        return kit.NotApplicable(reason="no FP8 setting that Accelerate reads by another name")
    idle = [name for name in written if f"ACCELERATE_{name}" not in variables]
    settings = [f"{name}={variables[name]}" for name in idle]
    if not settings:
        return None
    return kit.Finding(
        title=f"Nothing reads {' or '.join(settings)}",
        explanation=" ".join(f"Accelerate reads ACCELERATE_{name} instead." for name in idle),
        evidence={"settings": tuple(settings)},
        treatment=kit.Treatment(
            name="use-settings-that-are-read",
            summary="use the name that Accelerate reads, or delete the setting",
            code="\n".join(f"unset {name}   # or export ACCELERATE_{name}: {UNREAD[name]}" for name in idle),
        ),
    )
