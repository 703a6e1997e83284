"""You asked for FP8, and something loses it

Many settings decide about FP8, and each has one reader. The last one that decides the precision wins without
a warning. `TrainingArguments(bf16=True)` beats the environment, TRL's configs set bf16=True by default, and
Unsloth's trainers overwrite the variable. Accelerate compares a backend's name exactly: "te" stops every
`Accelerator()`. It takes the first installed backend if none is named, and converts for any precision if TE
is named. It checks only that a package's folder exists: a backend that cannot be imported fails in `prepare`.
It reads ACCELERATE_FP8_* of the backend in use and nothing else, and Transformer Engine dropped some of them.

    args = SFTConfig(output_dir="out")                          # before: TRL turns bf16 on

    from trl import SFTConfig
    args = SFTConfig(output_dir="out", bf16=False, fp16=False)  # after: the launcher's fp8 stands

On an H200, torchao taken by its name and not compiled ran at 0.50x of compiled BF16
(`h200-accelerate_torchao_eager`). Ignore it if you want BF16 in this run (then unset the variables), pass
recipes in `kwargs_handlers`, or have no GPU here. Run `fp8doctor env` where the job trains.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py
https://github.com/huggingface/transformers/issues/25333
https://github.com/NVIDIA/TransformerEngine/issues/2504
"""

from __future__ import annotations

import re

from fp8doctor import kit

PREFIX = "ACCELERATE_FP8_"
BACKEND = PREFIX + "BACKEND"

BACKENDS = {"TE": "transformer_engine", "AO": "torchao", "MSAMP": "msamp", "NO": ""}
"""Accelerate's name of a backend -> its package. Source: ``FP8BackendType`` in accelerate 1.9 to 1.15."""

MEANT = {
    **dict.fromkeys(("TORCHAO", "FLOAT8"), "AO"),
    **dict.fromkeys(("TRANSFORMER_ENGINE", "TRANSFORMER-ENGINE", "TRANSFORMERENGINE"), "TE"),
    "MS-AMP": "MSAMP",
    "NONE": "NO",
}
"""Other names that people give the backends."""

AO_SINCE = kit.Version("1.4.0")
"""First accelerate that knows torchao, and takes it before Transformer Engine."""

PREPARES = {
    "AO": "stops with \"'NoneType' object has no attribute 'config'\"",
    "TE": "still converts the model to Transformer Engine and trains it in FP8; only the flags say otherwise",
}
"""What ``Accelerator.prepare`` does with a backend but without fp8. Source: accelerate 1.9 to 1.15."""

LATE_SINCE = kit.Version("5.dev0")
"""First transformers whose TrainingArguments read the variable once, when they are made."""

ALL_GATHER = "ENABLE_FSDP_FLOAT8_ALL_GATHER"

DEFAULTS = {
    "TE": {
        **dict.fromkeys(("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD"), "false"),
        **dict.fromkeys(("USE_AUTOCAST_DURING_EVAL", "USE_MXFP8_BLOCK_SCALING"), "false"),
        "MARGIN": "0",
        "INTERVAL": "1",
        "FORMAT": "hybrid",
        "AMAX_COMPUTE_ALGO": "most_recent",
        "AMAX_HISTORY_LEN": "1024",
    },
    "AO": {"PAD_INNER_DIM": "true", ALL_GATHER: "true"},
    "MSAMP": {"OPT_LEVEL": "o2"},
}
"""Backend -> what follows the prefix in its variables -> the value that changes nothing. Source: the recipe
classes in accelerate 1.15 ``utils/dataclasses.py``; the launcher writes the same values."""

DROPPED = {
    **dict.fromkeys(
        ("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD"), ("2.0", "override_linear_precision")
    ),
    "INTERVAL": ("2.2", "interval"),
}
"""What follows the prefix -> the first Transformer Engine whose recipe does not have it, and its name there.
Source: ``common/recipe/__init__.py`` of 1.13, 2.0, 2.1 and 2.2."""

E4M3_UNTIL = kit.Version("1.8.0")
"""First accelerate with FORMAT=HYBRID as default, not E4M3. Source: ``commands/launch.py``, 1.7.0, 1.8.1."""

FIRST_IN_CUTEDSL = kit.Version("0.17.0")
"""torchao whose casts of MXFP8 experts are written in CuTe DSL alone, by the wheel; 0.16 was not read."""


@kit.check(
    "ENV001",
    "fp8-request-overridden",
    area="environment",
    severity="error",
    explained_by=("no-fp8-tensor-cores",),
    changes_fp8=True,
)
def fp8_request_overridden(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables, trainer = facts.environment.variables, facts.training.trainer
    asked = kit.asked_by_environment(variables)
    precision = kit.precision_of(facts.training.accelerate, trainer)
    if asked is None or precision is None:
        return kit.NotApplicable(
            reason="no variable or launcher asks for FP8, or nothing has set the precision yet"
        )
    if precision == "fp8":
        return None
    old = any(
        each.compute_capability and kit.capability(each) < kit.FIRST_WITH_FP8
        for each in facts.get("gpus", ())
    )
    if precision == "fp16" and old and not (trainer and trainer.fp16):
        return kit.NotApplicable(reason="Accelerate fell back to fp16: this GPU has no FP8 tensor cores")
    if any(each.use == "training" for each in facts.linears()):
        return kit.NotApplicable(reason=f"the model holds FP8 layers although the precision is {precision}")
    who, why, summary, code = culprit(facts, precision, trainer)
    named = variables.get(BACKEND, "")
    deciders = ("accelerate", "transformers", "trl", "unsloth")
    return kit.Finding(
        severity="warning" if named == "TE" else None,
        title=f"FP8 was asked for ({asked}), but {who} made it {precision}",
        explanation=f"{why} Because {BACKEND}={named} is set too, prepare() {PREPARES[named]}."
        if named in PREPARES
        else why,
        evidence={
            "asked_by": asked,
            "precision": precision,
            "overridden_by": who,
            **{each: facts.packages()[each].version for each in deciders if each in facts.packages()},
        },
        treatment=kit.Treatment(name="let-fp8-through", summary=summary, code=code),
    )


def culprit(
    facts: kit.Facts, precision: str, trainer: kit.TrainerArguments | None
) -> tuple[str, str, str, str]:
    """Tell who overrode the request, how, and what to write instead, in words and code."""
    variables, packages = facts.environment.variables, facts.software.packages
    transformers = packages["transformers"].version if "transformers" in packages else None
    if precision.lower() == "fp8":
        why = "Accelerate accepts fp8 in lower case only: Accelerator trains without mixed precision, and a "
        why += "Trainer of transformers 5 fails."
        right = kit.exported(facts, ACCELERATE_MIXED_PRECISION="fp8")
        return "the spelling", why, "spell the precision in lower case", right
    if "unsloth" in packages and packages["unsloth"].imported:
        return (
            f"Unsloth {packages['unsloth'].version}",
            "Its patched trainers set bf16 and ACCELERATE_MIXED_PRECISION themselves when you create them.",
            "ask Unsloth for FP8 (full fine-tuning, 2026.10 or newer): its trainers accept no other way",
            "FastLanguageModel.from_pretrained(name, full_finetuning=True, "
            "float8_training=Float8LinearConfig())",
        )
    kind = trainer.kind.rpartition(".")[2] if trainer else ""
    if trainer and (trainer.bf16 or trainer.fp16):
        trl = f" TRL's configs, such as {kind}, turn bf16 on unless you write bf16=False."
        rewritten = " It also rewrote ACCELERATE_MIXED_PRECISION."
        return (
            f"{kind}({'fp16' if trainer.fp16 else 'bf16'}=True)",
            f"In transformers {transformers} the flags beat the environment, without a warning."
            + rewritten * (variables.get("ACCELERATE_MIXED_PRECISION") != "fp8")
            + trl * trainer.kind.startswith("trl."),
            "switch both flags off, so the launcher decides",
            arguments(kind, facts),
        )
    if trainer and trainer.mixed_precision == "no" and since(facts, "transformers", LATE_SINCE):
        return (
            f"{kind}, created before the variable was set,",
            f"transformers {transformers} reads ACCELERATE_MIXED_PRECISION once, when you create {kind}.",
            "set the variable first",
            arguments(kind, facts, ACCELERATE_MIXED_PRECISION="fp8"),
        )
    return (
        "Accelerator()",
        f"Its argument mixed_precision={precision!r} beats the environment, or you created it before you "
        "set the variable.",
        "let the Accelerator read the environment, or pass it fp8",
        kit.switched_on(facts),
    )


def arguments(kind: str, facts: kit.Facts, **variables: str) -> str:
    """Write a Trainer's arguments that leave the precision to the variables, set before them."""
    lines = [f'os.environ["{name}"] = "{value}"' for name, value in kit.settings(facts, **variables).items()]
    return "\n".join([*lines, f"args = {kind}(..., bf16=False, fp16=False)"])


@kit.check(
    "ENV001",
    "fp8-setting-without-effect",
    area="environment",
    severity="warning",
    was="ENV002",
    explained_by=("fp8-backend-misspelled",),
    changes_fp8=True,
)
def fp8_setting_without_effect(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables, section = facts.environment.variables, facts.get("environment.deepspeed_fp8_section")
    unread = ("FP8_BACKEND", f"FP8_{ALL_GATHER}")
    if not section and not any(name in unread or name.startswith(PREFIX) for name in variables):
        return kit.NotApplicable(reason="no FP8 setting in the environment or in a DeepSpeed configuration")
    backend = backend_in_use(facts)
    idle: dict[str, tuple[str, str]] = {}  # setting -> why, and the lines instead
    for name in unread:
        read, value = f"ACCELERATE_{name}", meant(variables.get(name, "")) or variables.get(name, "")
        if name not in variables or variables.get(read, "").lower() == value.lower():
            continue
        why = f"Nothing reads {name}; Accelerate reads {read}."
        lines = f"unset {name}"
        if value == backend or (read != BACKEND and backend == "AO" and not changes_nothing(value, "true")):
            lines += f"\nexport {read}={value}"
        elif value in DEFAULTS:
            lines += f"   # or, to train with {value}: export {read}={value}"
        idle[f"{name}={variables[name]}"] = why, lines
    if section:
        idle['deepspeed "fp8" section'] = (
            'DeepSpeed has no FP8 training and ignores an "fp8" section; Accelerate and the backend decide.',
            '# and delete "fp8" from the DeepSpeed configuration\n'
            "accelerate launch --use_deepspeed --mixed_precision fp8 train.py",
        )
    for owner, defaults in DEFAULTS.items() if backend else ():
        for suffix in defaults:
            name = PREFIX + suffix
            if name in variables and (why := why_idle(facts, owner, suffix, backend)):
                idle[f"{name}={variables[name]}"] = why, f"unset {name}"
    if not idle:
        return None
    return kit.Finding(
        title=f"{len(idle)} FP8 {'setting has' if len(idle) == 1 else 'settings have'} no effect: "
        f"{', '.join(idle)}",
        explanation=" ".join(dict.fromkeys(why for why, _ in idle.values())),
        evidence={"settings": tuple(idle), "backend": backend},
        treatment=kit.Treatment(
            name="use-settings-that-are-read",
            summary="use the name that Accelerate reads, or delete the setting",
            code="\n".join(dict.fromkeys(lines for _, lines in idle.values())),
        ),
    )


def backend_in_use(facts: kit.Facts) -> str | None:
    """Find the backend by the FP8 layers, its name, or as the only one installed; None if unsure."""
    stacks = {linear.stack for linear in facts.linears() if linear.use == "training"}
    named = facts.environment.variables.get(BACKEND)
    seen = [name for name in ("TE", "AO") if BACKENDS[name] in stacks]
    if not seen and named in DEFAULTS:
        return named
    seen = seen or [name for name in ("TE", "AO") if BACKENDS[name] in facts.software.packages]
    return seen[0] if len(seen) == 1 else None


def why_idle(facts: kit.Facts, owner: str, suffix: str, backend: str | None) -> str:
    """Tell why a variable of this backend does not reach the recipe; empty if it does, or changes nothing."""
    variables, accelerate = facts.environment.variables, facts.accelerate()
    name, value, launched = PREFIX + suffix, variables[PREFIX + suffix], kit.launched_with_fp8(variables)
    if changes_nothing(value, DEFAULTS[owner][suffix]):
        dropped = suffix == "AMAX_COMPUTE_ALGO" and backend == "TE" and not launched
        return (
            f"Accelerate does not pass on its own default, {value}: Transformer Engine computes max."
            * dropped
        )
    old = kit.installed(facts, "accelerate")
    if launched and (suffix, value) == ("FORMAT", "E4M3") and old and old < E4M3_UNTIL:
        return ""  # its launcher writes it
    if owner != backend:
        return f"{name} belongs to the backend {owner}, but {backend} is in use."
    by_deepspeed = variables.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if owner == "TE" and (by_deepspeed or (accelerate and accelerate.distributed == "DEEPSPEED")):
        return "Under DeepSpeed, Accelerate drops these variables and passes DelayedScaling() with defaults."
    first, setting = DROPPED.get(suffix, ("", "")) if owner == "TE" else ("", "")
    gone = bool(first) and since(facts, "transformer_engine", kit.Version(first))
    return f"Transformer Engine dropped {setting} in {first}, and ignores it without a warning." * gone


def since(facts: kit.Facts, package: str, version: kit.Version) -> bool:
    """Whether this version or a newer one is installed; one that cannot be read is not."""
    return (found := kit.installed(facts, package)) is not None and found >= version


def changes_nothing(value: str, default: str) -> bool:
    """Whether the value is the default, in any spelling that Accelerate's ``str_to_bool`` knows."""
    spellings = {"true": ("1", "true", "yes", "y", "t", "on"), "false": ("0", "false", "no", "n", "f", "off")}
    return value.lower() in spellings.get(default, (default,))


def meant(written: str) -> str | None:
    """Find the backend that was meant; None if unclear."""
    name = written.strip().upper()
    return name if name in BACKENDS else MEANT.get(name)


@kit.check(
    "ENV001", "fp8-backend-misspelled", area="environment", severity="error", was="ENV003", changes_fp8=True
)
def fp8_backend_misspelled(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables = facts.environment.variables
    written = variables.get(BACKEND)
    if written is None or not kit.at_least(facts, "accelerate", kit.READS_BACKEND_SINCE):
        return kit.NotApplicable(
            reason=f"{BACKEND} is not set, or no Accelerate reads it ({kit.READS_BACKEND_SINCE} does)"
        )
    if written in BACKENDS:
        return None
    if kit.was_prepared(facts):
        return kit.NotApplicable(reason="a model was prepared: recipe arguments override the variable")
    version, right = facts.software.packages["accelerate"].version, meant(written)
    by_launcher = kit.launched_with_fp8(variables) and written in ("te", "ao", "msamp")
    known = ", ".join(BACKENDS)
    return kit.Finding(
        title=f"{BACKEND}={written} is not one of {known}",
        explanation=f"Accelerator() raises \"ValueError: '{written}' is not a valid FP8BackendType\" "
        "(accelerate "
        f"{version}).{f' accelerate launch --fp8_backend {written} sets this value.' * by_launcher}",
        evidence={BACKEND: written, "known": tuple(BACKENDS), "accelerate": version},
        treatment=kit.Treatment(
            name="spell-backend",
            summary="write the backend in capitals" if right else f"name one of {known}",
            code=kit.exported(facts, **{BACKEND: right or "AO"})
            + f"   # instead of --fp8_backend; or in YAML, fp8_config: {{backend: {right or 'AO'}}}",
        ),
    )


@kit.check(
    "ENV001", "fp8-backend-missing", area="environment", severity="error", was="ENV004", changes_fp8=True
)
def fp8_backend_missing(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    packages, imports = facts.software.packages, facts.environment.backend_imports
    asked = kit.asked_by_environment(facts.environment.variables)
    for backend, error in imports.items():
        if error is not None:
            return cannot_be_imported(facts, backend, error)
    if found := kernels_missing(facts):
        return found
    accelerate = facts.accelerate()
    installed_one = any(package in packages for package in BACKENDS.values())
    if imports or asked is None or "accelerate" not in packages or installed_one:
        return None if imports else kit.NotApplicable(reason="nothing asks Accelerate for an FP8 backend")
    if accelerate and accelerate.mixed_precision:
        return kit.NotApplicable(reason="an Accelerator exists: it has found a backend")
    return kit.Finding(
        title="FP8 was asked for, but no FP8 backend is installed",
        explanation=f"{asked} asks for FP8. torchao, Transformer Engine and MS-AMP are all missing, so "
        "Accelerator() raises.",
        evidence={"asked_by": asked, "installed": ()},
        treatment=kit.Treatment(
            name="install-fp8-backend",
            summary="install torchao, which needs no build",
            code="pip install torchao",
        ),
    )


def cannot_be_imported(facts: kit.Facts, backend: str, error: str) -> kit.Finding:
    """Report a backend whose import raised in a fresh process."""
    package, known = BACKENDS[backend], next(iter(kit.recognise(error)), None)
    absent = re.fullmatch(rf"ModuleNotFoundError: No module named '?{package}'?", error) is not None
    elsewhere = absent and backend != "AO" and facts.get("gpus") == ()
    meaning = f" {known.cause}" if known else " It is not installed." * absent
    meaning += (
        " It needs a GPU, which this machine does not have: check again where the job trains." * elsewhere
    )
    version = facts.software.packages[package].version if package in facts.software.packages else None
    by_name = facts.environment.variables.get(BACKEND) == backend
    why = (
        f"{BACKEND}={backend} names it" if by_name else "Accelerate takes the first backend that is installed"
    )
    code = {
        "AO": "pip install --upgrade torchao",
        "TE": kit.transformer_engine_line(facts),
        "MSAMP": f"{kit.exported(facts, **{BACKEND: 'AO'})}   # MS-AMP is no longer maintained",
    }
    return kit.Finding(
        severity="warning" if elsewhere else None,
        title=f"The FP8 backend {package}{f' {version}' if version else ''} cannot be imported",
        explanation=f"{why}. In a fresh process, importing it raises {error.rstrip('.')}.{meaning}",
        evidence={
            "backend": backend,
            "error": error,
            "version": version,
            "torch": facts.get("software.torch"),
        },
        treatment=kit.Treatment(
            name="install-fp8-backend",
            summary=f"repair the import of {package}, which raises {error.partition(':')[0]}",
            code=known.lines if known else code[backend],
        ),
    )


def kernels_missing(facts: kit.Facts) -> kit.Finding | None:
    """Report MX layers whose torchao lacks compiled kernels, or the packages of its casts in CuTe DSL."""
    layers = [
        each
        for each in facts.linears()
        if each.stack == "torchao"
        and (each.recipe or "").startswith("mx")
        and not each.features.get("emulate")
    ]
    experts = [each for each in layers if each.role == "experts" and each.use == "training"]
    if not layers or not facts.software.cuda:
        return None
    blackwell = any(each.visible and (each.compute_capability or "").startswith("10.") for each in facts.gpus)
    in_cutedsl = experts and blackwell and since(facts, "torchao", FIRST_IN_CUTEDSL)
    missing = facts.software.cutedsl_missing if in_cutedsl else ()
    if not missing and facts.software.torchao_libraries != 0:
        return None
    concerned, torch = experts if missing else layers, facts.software.torch
    lacks = f"lacks {', '.join(missing)}" if missing else "loaded none of its compiled kernels"
    return kit.Finding(
        severity=None if missing else "warning",
        title=f"{kit.plural(len(concerned), 'MX layer')} cannot run: torchao "
        f"{kit.installed(facts, 'torchao')} {lacks}",
        explanation="It casts experts with CuTe DSL kernels, and does not install what these need. The first "
        "call raises NotImplementedError."
        if missing
        else f"It skips libraries that were built for another torch than {torch}, and only logs a line.",
        evidence={"layers": len(concerned), "first": concerned[0].name, "missing": missing},
        treatment=kit.Treatment(
            name="install-cutedsl" if missing else "install-fp8-backend",
            summary="install what torchao's kernels need",
            code=f"pip install {' '.join(kit.CUTEDSL.get(each, each) for each in missing)}"
            if missing
            else "# torchao 0.17 and newer: torch 2.11 or newer; no TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1\n"
            "pip install --upgrade torch torchao",
        ),
        breaks="step_raises" if missing and not kit.ran_on_a_gpu(facts) else kit.NOT_RECORDED,
    )


@kit.check(
    "ENV001",
    "hidden-fp8",
    area="environment",
    severity="error",
    was="MOD006",
    changes_fp8=True,
    invalidates_model=True,
)
def hidden_fp8(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    runs = any(each.use == "training" for each in facts.linears())
    named = facts.environment.variables.get(BACKEND) == "TE"
    if not (runs and named):
        return kit.NotApplicable(reason=f"no layer is in FP8, or no {BACKEND}=TE is set")
    return None if decided_precision(facts) in ("fp8", None) else named_without_fp8(facts)


def decided_precision(facts: kit.Facts) -> str | None:
    """Find the precision that Accelerate works with, or will read; None before anything has decided it."""
    asked = facts.environment.variables.get("ACCELERATE_MIXED_PRECISION")
    return kit.precision_of(facts.accelerate(), facts.trainer()) or asked


def named_without_fp8(facts: kit.Facts) -> kit.Finding:
    """Report a backend that is named in a job whose precision is not fp8."""
    variables, linears, accelerate = facts.environment.variables, facts.linears(), facts.accelerate()
    named, decided, asked = variables[BACKEND], decided_precision(facts), kit.asked_by_environment(variables)
    some = sum(each.use == "training" for each in linears)
    unset, ask = f"unset {BACKEND}", "accelerate launch --mixed_precision fp8"
    summary, code = (
        "set the precision to fp8 too",
        f"{BACKEND}={named} {ask} train.py\n# or, for {decided}: {unset}",
    )
    if asked:
        summary = "leave the precision to the environment, which asks for FP8"
        code = f"# for FP8: no bf16=True in the script\n# for {decided}: {unset} ACCELERATE_MIXED_PRECISION"
    elif named == "TE":
        summary = f"{unset}: the job then trains in {decided}, as its precision says"
        code = f"{unset}   # or, for FP8: {ask} with {BACKEND}={named}"
    prepares = facts.trainer() or (accelerate and accelerate.mixed_precision)
    return kit.Finding(
        severity=None if prepares and not asked else "warning",
        title=f"{BACKEND}={named} is set, but the precision is {decided}"
        + (f": {some or 'none'} of {kit.plural(len(linears), 'Linear')} in FP8" if linears else ""),
        explanation=f"Accelerator.prepare() looks at the backend alone, and {PREPARES[named]}. Measured as a "
        "baseline, such a run is mistaken for BF16.",
        evidence={"backend": named, "precision": decided, "fp8_layers": some},
        treatment=kit.Treatment(name="name-backend-and-precision", summary=summary, code=code, kind="shell"),
    )


@kit.check(
    "ENV001",
    "backend-by-accident",
    area="environment",
    severity="error",
    was="ENV008",
    explained_by=(
        *("fp8-request-overridden", "fp8-backend-misspelled", "fp8-backend-missing", "hidden-fp8"),
        *("incompatible-versions", "no-fp8-tensor-cores"),
    ),
    changes_fp8=True,
)
def backend_by_accident(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables, packages, linears = facts.environment.variables, facts.software.packages, facts.linears()
    named, decided = variables.get(BACKEND, "NO"), decided_precision(facts)
    if named in PREPARES and decided and kit.at_least(facts, "accelerate", kit.READS_BACKEND_SINCE):
        return None if kit.asked_by_environment(variables) or decided == "fp8" else named_without_fp8(facts)
    asks = kit.fp8_was_asked_for(facts) is not None and decided in ("fp8", None)
    if named != "NO" or not asks or not kit.at_least(facts, "accelerate", AO_SINCE):
        return kit.NotApplicable(reason="nothing asks Accelerate for FP8, or another backend is named")
    fp8 = [each for each in linears if each.use == "training"]
    eager = [
        each for each in fp8 if (each.stack, each.compiled, each.recipe) == ("torchao", None, "tensorwise")
    ]
    if not {"torchao", "transformer_engine"} <= packages.keys() or (fp8 and not eager):
        return None  # one backend, or a recipe or a compilation shows that somebody decided
    became = f"{kit.plural(len(eager), 'Linear')} became Float8Linear with torchao's defaults, not compiled. "
    converted = bool(eager) and kit.was_prepared(facts)
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
            code=kit.exported(facts, **{BACKEND: "AO"})
            + "   # keeps torchao; or TE, which needs no compilation\n"
            "accelerate launch --dynamo_backend inductor --dynamo_use_regional_compilation train.py",
        ),
    )


def _job(
    variables: dict[str, str], *, bf16: bool = False, fp8: bool = False, error: str | None = None
) -> kit.Facts:
    kind = "transformers.training_args.TrainingArguments"
    packages = ("transformers", "accelerate", "transformer_engine", "torchao")
    return kit.example(
        torch="2.11.0+cu130",
        packages=dict.fromkeys(packages, "1.9.0") | {"transformers": "5.23.0"},
        variables=variables,
        backend_imports={"TE": error},
        deepspeed_fp8_section=None,
        gpus=(kit.Gpu(name="NVIDIA H100 80GB HBM3", compute_capability="9.0"),),
        linears=(kit.float8(stack="transformer_engine"),) * fp8,
        accelerate=kit.Accelerate(mixed_precision="bf16" if bf16 else None, distributed="NO", prepared=False),
        trainer=kit.TrainerArguments(
            kind=kind, bf16=bf16, fp16=False, mixed_precision="no" if bf16 else "fp8"
        ),
    )


FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}

FIRES = (
    _job(FP8, bf16=True),
    _job(FP8 | {"FP8_BACKEND": "te"}),
    _job(FP8 | {BACKEND: "te"}),
    _job(FP8, error="OSError: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"),
    _job({BACKEND: "TE"}, bf16=True),
    _job({BACKEND: "TE"}, bf16=True, fp8=True),
)
SILENT = _job(FP8 | {BACKEND: "TE"})
