"""An FP8 backend that Accelerate does not know

What it finds. ACCELERATE_FP8_BACKEND holds a value other than TE, AO, MSAMP or NO.

Why it matters. Accelerate compares the value exactly, since version 1.9. Anything else, including `te` and an
empty value, stops every `Accelerator()` with "ValueError: 'te' is not a valid FP8BackendType". This happens
even in a run that never asked for FP8. The launcher causes this itself: `accelerate launch --fp8_backend te`
accepts only lower case, and passes it on unchanged.

Fix. Set the variable, or write the name into the configuration file, in capitals (`fp8_config: {backend:
TE}`). Accelerate 1.9 to 1.15 need this.

    # before: ValueError
    accelerate launch --mixed_precision fp8 --fp8_backend te train.py

    # after
    ACCELERATE_FP8_BACKEND=TE accelerate launch --mixed_precision fp8 train.py

When to ignore it. If you pass recipe arguments to every `Accelerator`: they override the variable.

How it is detected, and limits. fp8doctor reads the variable and Accelerate's version. An unknown version
counts as new. The check is silent if Accelerate has already prepared a model.

References. accelerate 1.15.0 was run (`te`, `torchao` and an empty value raise). 1.8.1 does not read the
variable, 1.9.0 does.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/launch.py
"""

from __future__ import annotations

from fp8doctor.analysis.by_accelerate import exported
from fp8doctor.analysis.fp8_request import launched_with_fp8, was_prepared
from fp8doctor.analysis.recipe_support import READS_BACKEND_SINCE, at_least
from fp8doctor.facts import Accelerate, Facts
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

BACKENDS = ("TE", "AO", "MSAMP", "NO")
"""Source: ``FP8BackendType`` in accelerate 1.9 to 1.15."""

MEANT = {
    "TORCHAO": "AO",
    "FLOAT8": "AO",
    "TRANSFORMER_ENGINE": "TE",
    "TRANSFORMER-ENGINE": "TE",
    "TRANSFORMERENGINE": "TE",
    "MS-AMP": "MSAMP",
    "NONE": "NO",
}
"""Other names that people give the backends."""


@check(
    "ENV003",
    "fp8-backend-misspelled",
    area="environment",
    severity="error",
    changes_fp8=True,
)
def fp8_backend_misspelled(facts: Facts) -> Finding | NotApplicable | None:
    variables, packages = facts.environment.variables, facts.software.packages
    written = variables.get("ACCELERATE_FP8_BACKEND")
    if written is None:
        return NotApplicable(reason="ACCELERATE_FP8_BACKEND is not set")
    if "accelerate" not in packages:
        return NotApplicable(reason="Accelerate is not installed, and nothing else reads the variable")
    version = packages["accelerate"].version
    if not at_least(facts, "accelerate", READS_BACKEND_SINCE):
        return NotApplicable(reason=f"accelerate {version} does not read it; {READS_BACKEND_SINCE} does")
    if written in BACKENDS:
        return None
    if was_prepared(facts):
        return NotApplicable(reason="a model was prepared: recipe arguments override the variable")
    right = meant(written)
    by_launcher = launched_with_fp8(variables) and written in ("te", "ao", "msamp")
    return Finding(
        title=f"ACCELERATE_FP8_BACKEND={written} is not one of {', '.join(BACKENDS)}",
        explanation=f"Accelerator() raises \"ValueError: '{written}' is not a valid FP8BackendType\" "
        f"(accelerate {version})."
        + (f" accelerate launch --fp8_backend {written} sets this value." if by_launcher else ""),
        evidence={"ACCELERATE_FP8_BACKEND": written, "known": BACKENDS, "accelerate": version},
        treatment=Treatment(
            name="spell-backend",
            summary="write the backend in capitals" if right else f"name one of {', '.join(BACKENDS)}",
            code=exported(facts, ACCELERATE_FP8_BACKEND=right or "AO")
            + f"   # instead of --fp8_backend; or in YAML, fp8_config: {{backend: {right or 'AO'}}}",
        ),
    )


def meant(written: str) -> str | None:
    """Find the backend that was meant; None if unclear."""
    name = written.strip().upper()
    return name if name in BACKENDS else MEANT.get(name)


def _named(backend: str) -> Facts:
    return example(
        packages={"accelerate": "1.15.0"},
        variables={"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": backend},
        accelerate=Accelerate(mixed_precision="fp8", prepared=False),
    )


FIRES = _named("te")
SILENT = _named("TE")
