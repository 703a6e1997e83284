"""Installed versions that do not work together

What it finds. This job uses a pair of versions that is known to fail together, among Accelerate, PEFT,
torchao, Transformer Engine and cuDNN.

Why it matters. Most pairs fail with a message that names neither version. Examples: "Passing in an FP8
configuration requires setting `mixed_precision='fp8'`" although you set it, "module
'transformer_engine.pytorch' has no attribute 'fp8'", "Target module Linear() is not supported". Accelerate
1.4 to 1.7 say nothing: they report fp8 and convert no layer, unless you pass a recipe.

Fix. Install a version that works with the other.

    pip install "accelerate==1.8.1"  # before: Accelerator() raises if the environment asks for fp8

    pip install "accelerate>=1.9.0"  # after

When to ignore it. If your script never uses the two together.

How it is detected, and limits. fp8doctor compares the installed versions with a table of known pairs, and
reports one only if this job brings the two together. A pair that is not in the table is not found. A version
that cannot be parsed matches nothing.

References. Each pair was run with the released wheels on a CPU (`research/versions/known_versions.md`; a
stand-in for Transformer Engine). The cuDNN pair was read: Transformer Engine 2.20.2 requires cuDNN 9.12 at
import, 2.19.0 does not, and torch 2.8 to 2.10 pin 9.10.2.21.
https://github.com/NVIDIA/TransformerEngine/pull/3236 https://github.com/huggingface/accelerate/pull/3677
https://github.com/huggingface/accelerate/pull/3852 https://github.com/huggingface/peft/pull/3048
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from packaging.version import Version

from fp8doctor.analysis.fp8_request import asked_by_environment, fp8_was_asked_for, was_prepared
from fp8doctor.analysis.recipe_support import CUDNN_FLOOR, TE_WITH_CUDNN_FLOOR, parsed
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check


def asked_by_variable(facts: Facts) -> bool:
    """Whether the environment asks for FP8 and `prepare` is yet to come."""
    return asked_by_environment(facts.environment.variables) is not None and not was_prepared(facts)


def asked_in_vain(facts: Facts) -> bool:
    """Whether FP8 was asked for and `prepare` converted nothing."""
    return fp8_was_asked_for(facts) is not None and was_prepared(facts) and not fp8_stacks(facts)


def about_to_ask(facts: Facts) -> bool:
    """Whether FP8 was asked for and `prepare` is yet to come."""
    return fp8_was_asked_for(facts) is not None and not was_prepared(facts) and not fp8_stacks(facts)


def asked_by_argument_for_torchao(facts: Facts) -> bool:
    """Whether ``Accelerator(mixed_precision="fp8")`` was called with torchao and without FSDP."""
    accelerate = facts.accelerate()
    variables = facts.environment.variables
    by_argument = (
        accelerate is not None
        and accelerate.mixed_precision == "fp8"
        and asked_by_environment(variables) is None
        and not was_prepared(facts)
    )
    return (
        by_argument
        and backend_to_come(facts) == "AO"
        and variables.get("ACCELERATE_USE_FSDP", "false").lower() != "true"
    )


def takes_te(facts: Facts) -> bool:
    """Whether Accelerate has yet to convert this model to Transformer Engine."""
    return backend_to_come(facts) == "TE" and not was_prepared(facts)


def adapters_may_come(facts: Facts) -> bool:
    """Whether FP8 is wanted, PEFT is loaded, and the model has no adapters yet."""
    loaded = facts.software.packages["peft"].imported is True
    without = facts.get("network.adapter_parameters") == 0
    return loaded and without and (fp8_was_asked_for(facts) is not None or bool(fp8_stacks(facts)))


def adapters_may_come_onto_te(facts: Facts) -> bool:
    return adapters_may_come(facts) and (takes_te(facts) or "transformer_engine" in fp8_stacks(facts))


def te_may_come(facts: Facts) -> bool:
    """Whether nothing has imported Transformer Engine with success yet."""
    imported = facts.software.packages["transformer_engine"].imported is True
    tries = facts.environment.backend_imports
    return not imported and tries.get("TE", "not tried") is not None


class Versions(NamedTuple):
    """Versions of a package from the first one up to, and without, the end."""

    package: str
    first: str = "0"
    end: str | None = None


class VersionPair(NamedTuple):
    """Versions that fail, alone or with those of another package, and when they meet."""

    one: Versions
    other: Versions | None
    meet: Callable[[Facts], bool]
    what_happens: str
    fixed_by: str
    later: bool = False
    """Whether only a later step of the script would bring them together."""


CUDNN = "cudnn"
"""No package of Python's own: torch's, by the metadata of pip's."""

CUDNN_OF_PIP = "nvidia-cudnn-cu12"
"""Its distribution with CUDA 12; the name ends in CUDA's major version."""

UNCONVERTED = (
    "unless you pass a recipe (kwargs_handlers), mixed_precision says fp8 but prepare() converts nothing."
)

PAIRS = (
    VersionPair(
        Versions("accelerate", "1.4.0", "1.8.0"), None, asked_in_vain, UNCONVERTED, "accelerate>=1.9.0"
    ),
    VersionPair(
        Versions("accelerate", "1.4.0", "1.8.0"),
        None,
        about_to_ask,
        UNCONVERTED,
        "accelerate>=1.9.0",
        later=True,
    ),
    VersionPair(
        Versions("accelerate", "1.8.0", "1.9.0"),
        None,
        asked_by_variable,
        'Accelerator() compares its argument, not the environment, and raises "Passing in an FP8 '
        "configuration requires setting `mixed_precision='fp8'`\".",
        "accelerate>=1.9.0",
    ),
    VersionPair(
        Versions("accelerate", "1.8.0", "1.9.0"),
        None,
        asked_by_argument_for_torchao,
        'With torchao and without FSDP Accelerator() raises "`AcceleratorState` object has '
        "no attribute "
        '`fsdp_plugin`".',
        "accelerate>=1.9.0",
    ),
    VersionPair(
        Versions("accelerate", "1.11.0", "1.13.0"),
        Versions("transformer_engine", "2.9"),
        takes_te,
        "prepare() raises \"module 'transformer_engine.pytorch' has no attribute 'fp8'\": Transformer "
        "Engine 2.9 renamed this module.",
        "accelerate>=1.13.0",
    ),
    VersionPair(
        Versions("peft", end="0.19.0"),
        Versions("transformer_engine"),
        adapters_may_come_onto_te,
        'get_peft_model on a converted model raises "Target module Linear() is not supported".',
        "peft>=0.19.0",
        later=True,
    ),
    VersionPair(
        Versions("peft", end="0.19.0"),
        Versions("torchao", "0.18.0"),
        adapters_may_come,
        'get_peft_model raises "cannot import name '
        "'LinearActivationQuantizedTensor' from 'torchao.quantization'\", on any model.",
        "peft>=0.19.0",
        later=True,
    ),
    VersionPair(
        Versions("transformer_engine", str(TE_WITH_CUDNN_FLOOR)),
        Versions(CUDNN, end=str(CUDNN_FLOOR)),
        te_may_come,
        f'importing it raises "Transformer Engine requires cuDNN {CUDNN_FLOOR}.0 or later", unless the '
        f"system has a newer cuDNN than pip. Transformer Engine before {TE_WITH_CUDNN_FLOOR} does not check.",
        f"{CUDNN_OF_PIP}>={CUDNN_FLOOR}",
        later=True,
    ),
)
"""Run with the released wheels: ``research/versions/known_versions.py``. Block scaling without CUDA 12.9 is
GPU002's, a backend that does not import ENV004's, torchao with a newer Inductor NUM004's."""


@check(
    "ENV005",
    "incompatible-versions",
    area="environment",
    severity="warning",
    explained_by=("ENV001", "ENV004"),
    changes_fp8=True,
)
def incompatible_versions(facts: Facts) -> Finding | NotApplicable | None:
    if not any(pair.one.package in facts.software.packages for pair in PAIRS):
        return NotApplicable(reason="neither Accelerate, PEFT nor Transformer Engine is installed")
    found = tuple(met(facts))
    if not found:
        return None
    named = [
        " with ".join(
            f"{each.package} {version(facts, each.package)}" for each in (pair.one, pair.other) if each
        )
        for pair in found
    ]
    wanted = tuple(dict.fromkeys(for_cuda_of(facts, pair.fixed_by) for pair in found))
    return Finding(
        severity="info" if all(pair.later for pair in found) else None,
        title=f"{named[0]} does not work with FP8 here"
        + (f", nor {len(named) - 1} more" if len(named) > 1 else ""),
        explanation=" ".join(f"{name}: {pair.what_happens}" for name, pair in zip(named, found, strict=True)),
        evidence={"pairs": tuple(named), "mended_by": wanted},
        treatment=Treatment(
            name="upgrade-" + "-and-".join(dict.fromkeys(each.partition(">=")[0] for each in wanted)),
            summary=f"install {' and '.join(wanted)}",
            code="pip install " + " ".join(f'"{each}"' for each in wanted),
        ),
    )


def for_cuda_of(facts: Facts, requirement: str) -> str:
    """Name the distribution of cuDNN that belongs to torch's CUDA; any other requirement stays."""
    cuda = facts.get("software.cuda")
    major = (cuda or "12").partition(".")[0]
    return requirement.replace(CUDNN_OF_PIP, f"{CUDNN_OF_PIP[:-2]}{major}")


def met(facts: Facts) -> Iterator[VersionPair]:
    for pair in PAIRS:
        if within(facts, pair.one) and (pair.other is None or within(facts, pair.other)) and pair.meet(facts):
            yield pair


def within(facts: Facts, versions: Versions) -> bool:
    """Whether the installed version is one of these. One that cannot be read is not."""
    found = parsed(version(facts, versions.package))
    before = versions.end is None or (found is not None and found < Version(versions.end))
    return found is not None and Version(versions.first) <= found and before


def version(facts: Facts, package: str) -> str | None:
    if package == CUDNN:
        return facts.software.cudnn if recorded(facts, "software.cudnn") else None
    return facts.software.packages[package].version if package in facts.software.packages else None


def backend_to_come(facts: Facts) -> str | None:
    return next(iter(facts.environment.backend_imports), None)


def fp8_stacks(facts: Facts) -> set[str]:
    linears = facts.linears()
    return {linear.stack for linear in linears if linear.use == "training"}


def _accelerate(version: str) -> Facts:
    asked = {"variables": {"ACCELERATE_MIXED_PRECISION": "fp8"}, "backend_imports": {"AO": None}}
    packages = {"accelerate": version, "torchao": "0.17.0"}
    return example(packages=packages, **asked, linears=(), adapter_parameters=0, accelerate=None)


SICK = _accelerate("1.8.1")
HEALTHY = _accelerate("1.9.0")
