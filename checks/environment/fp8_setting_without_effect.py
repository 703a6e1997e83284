"""FP8 settings that nothing reads

What it finds. An FP8 variable or configuration entry is set, but nothing in this job reads it.

Why it matters. The run keeps another backend or recipe than the one you tuned, without a warning. Accelerate
reads only ACCELERATE_FP8_*, and of those only the ones for the backend in use. Under DeepSpeed it drops the
recipe variables and passes DelayedScaling() with defaults. It also omits whatever equals its own defaults, so
`most_recent` never arrives and Transformer Engine computes `max`. Transformer Engine ignores
`override_linear_precision` since 2.0 and `interval` since 2.2. DeepSpeed itself has no FP8 training.

Fix. Use the name that Accelerate reads (1.9 or newer for the backend), or delete the setting.

    export FP8_BACKEND=te             # before: nothing reads this

    export ACCELERATE_FP8_BACKEND=TE  # after

When to ignore it. If a tool outside this process reads the variable.

How it is detected, and limits. fp8doctor compares the environment and DeepSpeed's "fp8" section with what the
backend in use reads. It reports nothing about recipe variables if it cannot tell the backend. Values that
`accelerate launch` writes by itself are not reported: the launcher sets every variable of every backend.

References. accelerate 1.4.0 to 1.15.0 (`utils/dataclasses.py`, `_prepare_deepspeed`), torchao 0.18,
transformers 5.23, `DelayedScaling` of Transformer Engine 1.13 to 2.20.2. LLaMA-Factory sets FP8_BACKEND:
https://github.com/hiyouga/LlamaFactory/issues/9500
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py
"""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import Version

from fp8doctor.analysis.fp8_request import launched_with_fp8
from fp8doctor.analysis.recipe_support import installed
from fp8doctor.facts import Facts
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

PREFIX = "ACCELERATE_FP8_"

UNREAD = {
    "FP8_BACKEND": PREFIX + "BACKEND",
    "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": PREFIX + "ENABLE_FSDP_FLOAT8_ALL_GATHER",
}
"""Names that nothing reads -> the ones that Accelerate reads."""

DEFAULTS = {
    "TE": {
        "USE_AUTOCAST_DURING_EVAL": "false",
        "MARGIN": "0",
        "INTERVAL": "1",
        "FORMAT": "hybrid",
        "AMAX_COMPUTE_ALGO": "most_recent",
        "AMAX_HISTORY_LEN": "1024",
        "OVERRIDE_FPROP": "false",
        "OVERRIDE_DGRAD": "false",
        "OVERRIDE_WGRAD": "false",
        "USE_MXFP8_BLOCK_SCALING": "false",
    },
    "AO": {"PAD_INNER_DIM": "true", "ENABLE_FSDP_FLOAT8_ALL_GATHER": "true"},
    "MSAMP": {"OPT_LEVEL": "o2"},
}
"""Backend -> what follows the prefix in its variables -> the value that changes nothing. Source: the recipe
classes in accelerate 1.15 ``utils/dataclasses.py``; the launcher writes the same values."""

DROPPED = {
    "OVERRIDE_FPROP": ("2.0", "override_linear_precision"),
    "OVERRIDE_DGRAD": ("2.0", "override_linear_precision"),
    "OVERRIDE_WGRAD": ("2.0", "override_linear_precision"),
    "INTERVAL": ("2.2", "interval"),
}
"""What follows the prefix -> the first Transformer Engine whose recipe does not have it, and its name there.
Source: ``common/recipe/__init__.py`` of 1.13, 2.0, 2.1 and 2.2."""

E4M3_UNTIL = Version("1.8.0")
"""First accelerate with FORMAT=HYBRID as default, not E4M3. Source: ``commands/launch.py``, 1.7.0, 1.8.1."""

STACKS = {"torchao": "AO", "transformer_engine": "TE"}
"""Packages, and stacks of layers, -> the backend's name."""


class Idle(NamedTuple):
    """A setting that has no effect."""

    name: str
    value: str
    why: str
    instead: str


@check(
    "ENV002",
    "fp8-setting-without-effect",
    area="environment",
    severity="warning",
    explained_by=("ENV003",),
    changes_fp8=True,
)
def fp8_setting_without_effect(facts: Facts) -> Finding | NotApplicable | None:
    section = facts.get("environment.deepspeed_fp8_section")
    if not section and not any(
        name in UNREAD or name.startswith(PREFIX) for name in facts.environment.variables
    ):
        return NotApplicable(reason="no FP8 setting in the environment or in a DeepSpeed configuration")
    backend = backend_in_use(facts)
    idle = [
        *unread_names(facts.environment.variables, backend),
        *(deepspeed_section() if section else ()),
        *recipe_settings(facts, backend),
    ]
    if not idle:
        return None
    listed = ", ".join(f"{each.name}={each.value}" if each.value else each.name for each in idle)
    return Finding(
        title=f"{len(idle)} FP8 {'setting has' if len(idle) == 1 else 'settings have'} no effect: {listed}",
        explanation=" ".join(dict.fromkeys(each.why for each in idle)),
        evidence={
            "settings": tuple(each.name for each in idle),
            "values": tuple(each.value for each in idle),
            "backend": backend,
        },
        treatment=Treatment(
            name="use-settings-that-are-read",
            summary="use the name that Accelerate reads, or delete the setting",
            code="\n".join(dict.fromkeys(each.instead for each in idle)),
        ),
    )


def backend_in_use(facts: Facts) -> str | None:
    """Find the backend by the FP8 layers, its name, or as the only one installed; None if unsure."""
    linears = facts.linears()
    seen = {STACKS[linear.stack] for linear in linears if linear.use == "training" and linear.stack in STACKS}
    named = facts.environment.variables.get(PREFIX + "BACKEND")
    if not seen and named in DEFAULTS:
        return named
    seen = seen or {backend for package, backend in STACKS.items() if package in facts.software.packages}
    return seen.pop() if len(seen) == 1 else None


def unread_names(variables: dict[str, str], backend: str | None) -> list[Idle]:
    """List variables without Accelerate's prefix, unless the one with it says the same."""
    return [
        Idle(
            name,
            value,
            f"Neither Accelerate, torchao, Transformer Engine nor transformers reads {name}; Accelerate "
            f"reads {read}.",
            instead_of(name, read, in_accelerates_words(value), backend),
        )
        for name, read in UNREAD.items()
        if (value := variables.get(name)) is not None
        and variables.get(read, "").lower() != in_accelerates_words(value).lower()
    ]


def instead_of(name: str, read: str, value: str, backend: str | None) -> str:
    """Write the lines for a name that is not read: the right name only if it keeps the backend in use."""
    sets_backend = read == PREFIX + "BACKEND"
    if sets_backend and value not in DEFAULTS:
        return f"unset {name}"
    if sets_backend and value != backend:
        return f"unset {name}   # or, to train with {value}: export {read}={value}"
    if not sets_backend and (backend != "AO" or changes_nothing(value, "true")):
        return f"unset {name}"
    return f"unset {name}\nexport {read}={value}"


def in_accelerates_words(value: str) -> str:
    """Spell ``te`` and ``torchao`` as Accelerate does, anything else as it is."""
    return {"te": "TE", "transformer_engine": "TE", "ao": "AO", "torchao": "AO", "msamp": "MSAMP"}.get(
        value.lower(), value
    )


def deepspeed_section() -> tuple[Idle, ...]:
    return (
        Idle(
            'deepspeed "fp8" section',
            "",
            'DeepSpeed has no FP8 training and ignores an "fp8" section; Accelerate and the backend decide.',
            'accelerate launch --use_deepspeed --mixed_precision fp8 train.py   # and delete "fp8" from '
            "the DeepSpeed configuration",
        ),
    )


def recipe_settings(facts: Facts, backend: str | None) -> list[Idle]:
    """List recipe variables that were changed from the default and do not reach the recipe."""
    if backend is None:
        return []
    variables, launched = facts.environment.variables, launched_with_fp8(facts.environment.variables)
    idle = []
    for owner, defaults in DEFAULTS.items():
        for suffix, default in defaults.items():
            name, value = PREFIX + suffix, variables.get(PREFIX + suffix)
            if (
                value is None
                or changes_nothing(value, default)
                or (suffix == "FORMAT" and launched and value == "E4M3" and old_launcher(facts))
            ):
                continue
            if owner != backend:
                idle.append(
                    Idle(
                        name,
                        value,
                        f"{name} belongs to the backend {owner}, but {backend} is in use.",
                        f"unset {name}",
                    )
                )
            elif owner == "TE" and (why := unread_by_transformer_engine(facts, suffix)):
                idle.append(Idle(name, value, why, f"unset {name}"))
    algorithm = PREFIX + "AMAX_COMPUTE_ALGO"
    if backend == "TE" and not launched and variables.get(algorithm, "").lower() == "most_recent":
        why = (
            "most_recent is Accelerate's own default, so Accelerate does not pass it on: Transformer Engine "
            "uses its default, max."
        )
        idle.append(
            Idle(algorithm, "most_recent", why, f"unset {algorithm}   # Transformer Engine computes max")
        )
    return idle


def unread_by_transformer_engine(facts: Facts, suffix: str) -> str | None:
    """Tell why a variable of Transformer Engine's own does not reach its recipe; None when it does."""
    if under_deepspeed(facts):
        return "Under DeepSpeed, Accelerate drops these variables and passes DelayedScaling() with defaults."
    since, setting = DROPPED.get(suffix, ("", ""))
    version = installed(facts, "transformer_engine")
    if not since or version is None or version < Version(since):
        return None
    return f"Transformer Engine dropped {setting} in {since}, and ignores it without a warning."


def changes_nothing(value: str, default: str) -> bool:
    """Whether the value is the default, in any spelling that Accelerate's ``str_to_bool`` knows."""
    spellings = {"true": ("1", "true", "yes", "y", "t", "on"), "false": ("0", "false", "no", "n", "f", "off")}
    return value.lower() in spellings.get(default, (default,))


def old_launcher(facts: Facts) -> bool:
    version = installed(facts, "accelerate")
    return version is not None and version < E4M3_UNTIL


def under_deepspeed(facts: Facts) -> bool:
    """Whether Accelerate runs on DeepSpeed, by its state or by what its launcher wrote."""
    accelerate = facts.accelerate()
    return (
        bool(accelerate and accelerate.distributed == "DEEPSPEED")
        or facts.environment.variables.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    )


def _environment(**variables: str) -> Facts:
    packages = {"accelerate": "1.15.0", "transformer_engine": "2.20.2"}
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8", **variables}
    return example(packages=packages, variables=variables, deepspeed_fp8_section=None)


FIRES = _environment(FP8_BACKEND="te")
SILENT = _environment(ACCELERATE_FP8_BACKEND="TE")
