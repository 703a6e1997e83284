"""FP8's backend is misspelled, or cannot be imported."""

import re

from fp8doctor import kit

from . import BACKEND

BACKENDS = kit.fp8_request.BACKENDS

MEANT = {"TRANSFORMER": "TE", "MS-AMP": "MSAMP", "NONE": "NO"}
"""Beginnings of other names that people give the backends; else torchao is meant."""

NOT_BY_FLAG = "instead of --fp8_backend; or in YAML, fp8_config: "


@kit.check("ENV001", "fp8-backend-misspelled", severity="error", was="ENV003", changes_fp8=True)
def fp8_backend_misspelled(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    written = facts.environment.variables.get(BACKEND)
    if written is None or not kit.recipe_support.reads_backend(facts):
        return kit.NotApplicable(reason=f"{BACKEND} is not set, or no Accelerate reads it")
    if written in BACKENDS:
        return None
    if kit.fp8_request.was_prepared(facts):
        return kit.NotApplicable(reason="a model was prepared: recipe arguments override the variable")
    version, known = facts.software.packages["accelerate"].version, ", ".join(BACKENDS)
    name = written.strip().upper()
    meant = (backend for start, backend in MEANT.items() if name.startswith(start))
    right = name if name in BACKENDS else next(meant, "AO")
    return kit.Finding(
        title=f"{BACKEND}={written} is not one of {known}",
        explanation=f"Accelerator() raises \"ValueError: '{written}' is not a valid FP8BackendType\" "
        f"(accelerate {version}). 'accelerate launch --fp8_backend' sets it in lower case.",
        evidence={BACKEND: written, "known": tuple(BACKENDS), "accelerate": version},
        treatment=kit.Treatment(
            name="spell-backend",
            summary=f"write one of {known}, in capitals",
            code=kit.exported(facts, note=f"{NOT_BY_FLAG}{{backend: {right}}}", **{BACKEND: right}),
        ),
    )


@kit.check("ENV001", "fp8-backend-missing", severity="error", was="ENV004", changes_fp8=True)
def fp8_backend_missing(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    imports = facts.environment.backend_imports
    if not imports:
        return kit.NotApplicable(reason="nothing asks Accelerate for an FP8 backend that is installed")
    raised = [(backend, error) for backend, error in imports.items() if error is not None]
    if not raised:
        return None
    backend, error = raised[0]
    package, known = BACKENDS[backend], next(iter(kit.known_errors.recognise(error)), None)
    absent = re.fullmatch(rf"ModuleNotFoundError: No module named '?{package}'?", error) is not None
    elsewhere = absent and backend != "AO" and facts.get("gpus") == ()
    meaning = f" {known.cause}" if known else " It is not installed." * absent
    meaning += " It needs a GPU, which this machine lacks: check again where the job trains." * elsewhere
    installed = facts.packages().get(package)
    version = installed.version if installed else None
    named = facts.environment.variables.get(BACKEND) == backend
    why = f"{BACKEND}={backend} names it" if named else "Accelerate takes the first backend that is installed"
    code = {
        "AO": "pip install --upgrade torchao",
        "TE": kit.recipe_support.transformer_engine_line(facts),
        "MSAMP": kit.exported(facts, note="MS-AMP is no longer maintained", **{BACKEND: "AO"}),
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
