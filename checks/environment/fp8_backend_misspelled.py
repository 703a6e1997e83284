"""An FP8 backend that Accelerate does not know

What it finds. ACCELERATE_FP8_BACKEND holds a value other than TE, AO, MSAMP or NO.

Why it matters. Accelerate compares the value exactly, since version 1.9. Anything else, including
`te` and an empty value, stops every `Accelerator()` with "ValueError: 'te' is not a valid
FP8BackendType", even in a run that never asked for FP8. The launcher causes this itself:
`accelerate launch --fp8_backend te` accepts only lower case, and passes it on unchanged.

Fix. Set the variable, or write the name into the configuration file, in capitals (`fp8_config:
{backend: TE}`). Accelerate 1.9 to 1.15 need this.

    # before: ValueError
    accelerate launch --mixed_precision fp8 --fp8_backend te train.py

    # after
    ACCELERATE_FP8_BACKEND=TE accelerate launch --mixed_precision fp8 train.py

When to ignore it. If you pass recipe arguments to every `Accelerator`: they override the variable.

How it is detected, and limits. fp8doctor reads the variable and Accelerate's version. An unknown
version counts as new. The check is silent if Accelerate has already prepared a model.

References. accelerate 1.15.0 was run (`te`, `torchao` and an empty value raise). 1.8.1 does not
read the variable, 1.9.0 does.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/launch.py
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from fp8doctor.analysis.fp8_request import launched_with_fp8, was_prepared
from fp8doctor.facts import Accelerate, Environment, Facts, Package, Software, Training
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

BACKENDS = ("TE", "AO", "MSAMP", "NO")
"""Source: ``FP8BackendType`` in accelerate 1.9 to 1.15."""

READ_SINCE = Version("1.9.0")
"""First accelerate whose ``Accelerator.fp8_backend`` reads the variable."""

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


@check("ENV003", "fp8-backend-misspelled", area="environment", severity="error")
def fp8_backend_misspelled(facts: Facts) -> Finding | NotApplicable | None:
    variables, packages = facts.environment.variables, facts.software.packages
    written = variables.get("ACCELERATE_FP8_BACKEND")
    if written is None:
        return NotApplicable(reason="ACCELERATE_FP8_BACKEND is not set")
    if "accelerate" not in packages:
        return NotApplicable(
            reason="Accelerate is not installed, and nothing else reads ACCELERATE_FP8_BACKEND"
        )
    version = packages["accelerate"].version
    if not reads_the_variable(version):
        return NotApplicable(
            reason=f"accelerate {version} does not read ACCELERATE_FP8_BACKEND; {READ_SINCE} and newer do"
        )
    if written in BACKENDS:
        return None
    if was_prepared(facts):
        return NotApplicable(
            reason="Accelerate has prepared a model: recipe arguments given to Accelerator override the "
            "variable"
        )
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
            code=f"export ACCELERATE_FP8_BACKEND={right or 'AO'}   # instead of --fp8_backend; or in YAML, "
            f"fp8_config: {{backend: {right or 'AO'}}}",
        ),
    )


def reads_the_variable(version: str | None) -> bool:
    """Whether this accelerate reads it. An unknown version is taken for a new one."""
    try:
        return version is None or Version(version) >= READ_SINCE
    except InvalidVersion:
        return True


def meant(written: str) -> str | None:
    """Find the backend that was meant; None if unclear."""
    name = written.strip().upper()
    return name if name in BACKENDS else MEANT.get(name)


def _named(backend: str) -> Facts:
    return Facts(
        software=Software(packages={"accelerate": Package(version="1.15.0", imported=True)}),
        environment=Environment(
            variables={"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": backend}
        ),
        training=Training(accelerate=Accelerate(mixed_precision="fp8", prepared=False)),
    )


SICK = _named("te")
HEALTHY = _named("TE")
