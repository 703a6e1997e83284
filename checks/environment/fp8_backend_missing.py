"""The FP8 backend cannot be imported

What it finds. The FP8 backend that Accelerate will use cannot be imported, or torchao lacks the compiled
kernels or packages that your MX layers need.

Why it matters. Accelerate checks only that a package's folder and version exist. A half-installed backend
therefore passes `Accelerator()` and fails in `prepare`. Transformer Engine hides the reason: its `__init__`
swallows an ImportError of the torch part. You see "module 'transformer_engine' has no attribute 'pytorch'".

Fix. Install what the real error names. For a missing cuBLAS symbol:

    # before: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal
    pip install "transformer-engine[pytorch]==2.14.1"

    # after
    pip install --no-build-isolation "transformer-engine[pytorch]>=2.17,<2.20"

When to ignore it. On a machine without a GPU: a missing Transformer Engine is only a warning there. Run
`fp8doctor env` on the machine that trains.

How it is detected, and limits. A separate process imports the backend that ACCELERATE_FP8_BACKEND names, or
the first installed of torchao, Transformer Engine and MS-AMP. For MX layers, fp8doctor also checks whether
torchao loaded its compiled kernels. For MXFP8 experts on a GPU with compute capability 10.x, it checks for
the packages of torchao's CuTe DSL casts (0.17 and newer). Installing torchao does not install them.

References. Wheels 2.13.0 to 2.16.1 lack the symbol with torch 2.11's cuBLAS 13.1.0.3.
https://github.com/NVIDIA/TransformerEngine/issues/2504 (cuBLAS symbol)
https://github.com/NVIDIA/TransformerEngine/issues/1684 (extension built for another torch)
https://github.com/NVIDIA/TransformerEngine/issues/1853 (cuDNN not found)
https://github.com/pytorch/pytorch/issues/119989 (two copies of cuDNN)
https://github.com/pytorch/ao/blob/v0.18.0/torchao/__init__.py (skipped kernels)
"""

from __future__ import annotations

import re

from packaging.version import Version

from fp8doctor.analysis.by_accelerate import exported
from fp8doctor.analysis.fp8_request import asked_by_environment
from fp8doctor.analysis.recipe_support import installed, transformer_engine_line
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.facts import NOT_RECORDED, Facts, Linear
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.known_errors import CUTEDSL, recognise
from fp8doctor.registry import check
from fp8doctor.wording import plural

PACKAGES = {"AO": "torchao", "TE": "transformer_engine", "MSAMP": "msamp"}
"""Accelerate's name of a backend -> its package."""

INSTALL = {
    "AO": "pip install --upgrade torchao",
    "MSAMP": "{}   # MS-AMP is no longer maintained",
}
"""What to run when nothing more is known; for Transformer Engine the versions depend on cuDNN's."""


NOT_INSTALLED = re.compile(r"^ModuleNotFoundError: No module named '?(torchao|transformer_engine|msamp)'?$")

NEED_A_GPU = ("transformer_engine", "msamp")
"""Packages that no machine without a GPU has a use for: that one lacks them says nothing of the job's."""

BLOCK_RECIPES = ("mx",)
"""Beginnings of the recipes whose casts are compiled kernels of torchao; its Float8Linear needs none, and its
NVFP4Linear is Triton's. Source: torchao 0.18."""


FIRST_IN_CUTEDSL = Version("0.17.0")
"""torchao whose casts of MXFP8 experts are written in CuTe DSL alone, by the wheel; 0.16 was not read."""


@check(
    "ENV004",
    "fp8-backend-missing",
    area="environment",
    severity="error",
    changes_fp8=True,
)
def fp8_backend_missing(facts: Facts) -> Finding | NotApplicable | None:
    packages, imports = facts.software.packages, facts.environment.backend_imports
    for backend, error in imports.items():
        if error is not None:
            return cannot_be_imported(facts, backend, error)
    skipped = without_cutedsl(facts) or without_kernels(facts)
    if skipped:
        return skipped
    if imports:
        return None
    asked = asked_by_environment(facts.environment.variables)
    if (
        asked is None
        or "accelerate" not in packages
        or any(package in packages for package in PACKAGES.values())
        or ((accelerate := facts.accelerate()) and accelerate.mixed_precision)
    ):
        return NotApplicable(reason="nothing asks Accelerate for an FP8 backend")
    return Finding(
        title="FP8 was asked for, but no FP8 backend is installed",
        explanation=f"{asked} asks for FP8. torchao, Transformer Engine and MS-AMP are all missing, so "
        "Accelerator() raises.",
        evidence={"asked_by": asked, "installed": ()},
        treatment=Treatment(
            name="install-fp8-backend",
            summary="install torchao, which needs no build",
            code="pip install torchao",
        ),
    )


def cannot_be_imported(facts: Facts, backend: str, error: str) -> Finding:
    package = PACKAGES[backend]
    known = next(iter(recognise(error)), None)
    absent = NOT_INSTALLED.search(error) is not None
    elsewhere = absent and package in NEED_A_GPU and facts.get("gpus") == ()
    meaning = known.cause if known else "It is not installed." if absent else ""
    if elsewhere:
        meaning += " It needs a GPU, which this machine does not have: check again where the job trains."
    version = facts.software.packages[package].version if package in facts.software.packages else None
    by_name = facts.environment.variables.get("ACCELERATE_FP8_BACKEND") == backend
    why = (
        f"ACCELERATE_FP8_BACKEND={backend} names it"
        if by_name
        else "Accelerate takes the first backend that is installed"
    )
    return Finding(
        severity="warning" if elsewhere else None,
        title=f"The FP8 backend {package}{f' {version}' if version else ''} cannot be imported",
        explanation=f"{why}. In a fresh process, importing it raises {error.rstrip('.')}."
        + (f" {meaning}" if meaning else ""),
        evidence={
            "backend": backend,
            "error": error,
            "version": version,
            "torch": facts.get("software.torch"),
        },
        treatment=Treatment(
            name="install-fp8-backend",
            summary=f"repair the import of {package}, which raises {error.partition(':')[0]}",
            code=known.lines
            if known
            else transformer_engine_line(facts)
            if backend == "TE"
            else INSTALL[backend].format(exported(facts, ACCELERATE_FP8_BACKEND="AO")),
        ),
    )


def block_scaled(facts: Facts) -> list[Linear]:
    """Find torchao's MX layers that run kernels of their own."""
    return [
        each
        for each in facts.linears()
        if each.stack == "torchao"
        and (each.recipe or "").startswith(BLOCK_RECIPES)
        and not each.features.get("emulate")
    ]


def without_cutedsl(facts: Facts) -> Finding | None:
    """Report MXFP8 experts on a GPU that would run them, without the packages of their casts."""
    experts = [each for each in block_scaled(facts) if each.role == "experts" and each.use == "training"]
    version = installed(facts, "torchao")
    if not experts or not facts.software.cuda or version is None or version < FIRST_IN_CUTEDSL:
        return None
    gpus = [each for each in facts.gpus if each.visible and (each.compute_capability or "").startswith("10.")]
    missing = facts.software.cutedsl_missing if gpus else ()
    if not missing:
        return None
    return Finding(
        title=f"{plural(len(experts), 'layer')} with MXFP8 experts cannot run: {', '.join(missing)} missing",
        explanation=f"torchao {version} casts their weights and activations with CuTe DSL kernels, but does "
        "not install what these need. The first call raises NotImplementedError.",
        evidence={
            "experts": len(experts),
            "first": experts[0].name,
            "torchao": str(version),
            "missing": missing,
            "gpu": gpus[0].name,
        },
        treatment=Treatment(
            name="install-cutedsl",
            summary="install the packages that torchao's casts of experts need",
            code=f"pip install {' '.join(CUTEDSL.get(each, each) for each in missing)}",
            kind="shell",
        ),
        breaks="step_raises" if not ran_on_a_gpu(facts) else NOT_RECORDED,
    )


def without_kernels(facts: Facts) -> Finding | None:
    """Report MX layers of a CUDA build whose torchao loaded none of its compiled kernels."""
    block = block_scaled(facts)
    if not block or facts.software.torchao_libraries != 0 or not facts.software.cuda:
        return None
    torch, version = (
        facts.software.torch,
        facts.software.packages["torchao"].version if "torchao" in facts.software.packages else None,
    )
    return Finding(
        severity="warning",
        title=f"torchao {version} loaded none of its compiled kernels, and {plural(len(block), 'layer')} "
        "need them",
        explanation=f"torchao skips its libraries if they were built for another torch than {torch}, and "
        "only logs a line.",
        evidence={"layers": len(block), "first": block[0].name, "torchao": version, "torch": torch},
        treatment=Treatment(
            name="install-fp8-backend",
            summary="install the torchao that was built for this torch",
            code="pip install --upgrade torch torchao   # torchao 0.17 and newer: torch 2.11 or newer; no "
            "TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1",
        ),
    )


def _tried(error: str | None) -> Facts:
    packages = {"accelerate": "1.15.0", "transformer_engine": "2.14.1"}
    asked = {"variables": {"ACCELERATE_FP8_BACKEND": "TE"}, "backend_imports": {"TE": error}}
    return example(torch="2.11.0+cu130", packages=packages, **asked)


FIRES = _tried(
    "OSError: libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"
)
SILENT = _tried(None)
