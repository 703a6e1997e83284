"""An FP8 backend that Accelerate does not know

Looks at: ACCELERATE_FP8_BACKEND, which Accelerate reads from version 1.9 on.

Why it matters. The value is compared letter by letter with TE, AO, MSAMP and NO. Anything else,
`te` and the empty text included, stops every `Accelerator()` with "ValueError: 'te' is not a valid
FP8BackendType", also in a run that never asked for FP8. The launcher walks into this itself:
`accelerate launch --fp8_backend te` accepts only the lower-case spellings and hands them on as they
are.

What to do. Set the variable, or write the name into the configuration file, in capitals.

    accelerate launch --mixed_precision fp8 --fp8_backend te train.py           # before: ValueError
    ACCELERATE_FP8_BACKEND=TE accelerate launch --mixed_precision fp8 train.py  # after
    fp8_config: {backend: TE}                                                   # or so, in YAML

Evidence: run with accelerate 1.15.0 (`te`, `torchao` and the empty value raise; the launcher's own
environment holds `te`); read in 1.8.1, which does not look at the variable, and 1.9.0, which does.
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
            reason=f"accelerate {version} does not read ACCELERATE_FP8_BACKEND; {READ_SINCE} is the first to"
        )
    if written in BACKENDS:
        return None
    if was_prepared(facts):
        return NotApplicable(
            reason="a model was prepared all the same: recipe arguments given to Accelerator go before "
            "the variable"
        )
    right = meant(written)
    by_launcher = launched_with_fp8(variables) and written in ("te", "ao", "msamp")
    return Finding(
        title=f"ACCELERATE_FP8_BACKEND={written} is not one of {', '.join(BACKENDS)}",
        explanation=f"Accelerator() raises \"ValueError: '{written}' is not a valid FP8BackendType\" "
        "(accelerate "
        f"{version})." + (f" accelerate launch --fp8_backend {written} wrote it so." if by_launcher else ""),
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
    """Find the backend that was meant; None when that cannot be told."""
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
