"""Releases that train incorrectly: the table ``training_bugs.toml`` and the structures that it names."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterable
from importlib import resources
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from fp8doctor.analysis.fp8_weights import is_mxfp8
from fp8doctor.analysis.recipe_support import installed, parsed
from fp8doctor.facts import Checkpointing, Facts, Linear, Unrecorded, recorded

IN_WORDS = {"transformer_engine": "Transformer Engine", "megatron": "Megatron Core"}
"""Import name -> the library's own name."""

LAYER_WISE = "LayerWiseDistributedOptimizer"
"""Class that steps whole parameters with Muon (Megatron Core 0.16 and newer)."""

OPERATIONS = ".pytorch.ops."
"""Part of the class names of ``te.ops`` (1.9 to 2.20)."""


class TrainingBug(NamedTuple):
    """A structure, and the releases of a library that train it incorrectly."""

    name: str
    library: str
    versions: str
    """As in pip: ``>=1.6,<1.12``."""
    structure: str
    """A key of `STRUCTURES`."""
    effect: str
    lines: str
    """The fix, as lines to write."""
    sources: tuple[str, ...]
    certain: bool = True
    """False if the effect depends on settings that the facts do not show."""
    check: str | None = None
    """Code of another check that reports it."""
    partner: str | None = None
    """A second library, whose versions also matter."""
    partner_versions: str = ""
    probed: str = ""
    """Code that the affected releases contain (``in: ...``) or the first fixed one (``fixed: ...``), else
    ``no: why`` none does; `research.versions.probed` asks the releases."""

    def release(self, facts: Facts) -> str:
        """Name the library with its installed version."""
        name = IN_WORDS.get(self.library, self.library)
        return f"{name} {facts.software.packages[self.library].version}"

    def concerns(self, facts: Facts) -> bool:
        """Whether the installed releases have this bug. One that cannot be read has not."""
        return has_version(facts, self.library, self.versions) and (
            self.partner is None or has_version(facts, self.partner, self.partner_versions)
        )


@functools.cache
def training_bugs() -> tuple[TrainingBug, ...]:
    """Read the table, in its order."""
    table = tomllib.loads(resources.files("fp8doctor").joinpath("training_bugs.toml").read_text("utf-8"))
    return tuple(TrainingBug(**{**each, "sources": tuple(each["sources"])}) for each in table["bug"])


def has_version(facts: Facts, library: str, versions: str) -> bool:
    """Whether a release is installed that these versions contain."""
    found = parsed(facts.software.torch) if library == "torch" else installed(facts, library)
    return found is not None and SpecifierSet(versions).contains(found, prereleases=True)


def region_of(linear: Linear, facts: Facts, library: str) -> Checkpointing | None:
    """Find a library's region that covers a layer, or the forward above it that may call ``checkpoint``."""
    regions = [
        each for each in facts.training.checkpointing if each.library == library and each.active is not False
    ]
    calling = (
        each
        for each in regions
        if each.form == "called_in_forward" and linear.name.startswith(f"{each.name}." if each.name else "")
    )
    kept = recorded(linear, "checkpointed") and linear.checkpointed is None
    if not kept and (found := next(calling, None)):
        return found
    return next((each for each in regions if each.active and each.name == linear.checkpointed), None)


def in_te(facts: Facts) -> list[Linear]:
    return [each for each in facts.network.fp8 if each.stack == "transformer_engine"]


def delayed(layers: Iterable[Linear]) -> list[Linear]:
    """Select layers with delayed scaling. Raises `Unrecorded` before their first FP8 forward."""
    found = list(layers)
    if any(each.recipe is None for each in found):
        raise Unrecorded(Linear, "recipe", "only a forward in FP8 shows the recipe")
    return [each for each in found if each.recipe == "delayed"]


def te_checkpoint(facts: Facts) -> list[Linear]:
    return [each for each in in_te(facts) if region_of(each, facts, "transformer_engine")]


def te_checkpoint_accumulated(facts: Facts) -> list[Linear]:
    inside = te_checkpoint(facts)
    return inside if inside and facts.workload.accumulate > 1 else []


def te_ops_frozen_first(facts: Facts) -> list[Linear]:
    """Return the first FP8 layer if it is a frozen operation before layers that train."""
    layers = in_te(facts)
    frozen = layers and OPERATIONS in layers[0].kind and not layers[0].requires_grad
    return delayed(layers[:1]) if frozen and any(each.requires_grad for each in layers) else []


def te_ops_hybrid_mxfp8_experts(facts: Facts) -> list[Linear]:
    if facts.environment.variables.get("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "0") == "0":
        return []
    return [
        each
        for each in in_te(facts)
        if OPERATIONS in each.kind
        and each.role == "experts"
        and (each.get("recipe"), each.features.get("fp8_format")) == ("mxfp8", "HYBRID")
    ]


def te_fp8_weights(facts: Facts) -> list[Linear]:
    return [
        each
        for each in in_te(facts)
        if each.requires_grad and each.features.get("primary_weights_in_fp8") is True
    ]


def te_fp8_weights_in_torch_optimizer(facts: Facts) -> list[Linear]:
    found = te_fp8_weights(facts)
    if not found or not (facts.training.optimizer or "").startswith("torch.optim."):
        return []
    return [] if facts.training.parameters_outside_optimizer else found  # it may hold masters instead


def torchao_compiled(facts: Facts) -> list[Linear]:
    return [each for each in facts.network.fp8 if each.stack == "torchao" and each.compiled is not None]


STRUCTURES: dict[str, Callable[[Facts], list[Linear]]] = {
    "te_checkpoint_delayed": lambda facts: delayed(te_checkpoint(facts)),
    "te_checkpoint_accumulated": te_checkpoint_accumulated,
    "te_ops_frozen_first": te_ops_frozen_first,
    "te_ops_hybrid_mxfp8_experts": te_ops_hybrid_mxfp8_experts,
    "te_sequence_parallel": lambda facts: [
        each for each in in_te(facts) if each.features.get("sequence_ranks")
    ],
    "te_fp8_weights": te_fp8_weights,
    "te_fp8_weights_in_torch_optimizer": te_fp8_weights_in_torch_optimizer,
    "te_grouped_delayed": lambda facts: delayed(
        each for each in in_te(facts) if each.kind.endswith(".GroupedLinear")
    ),
    "te_experts": lambda facts: [
        each
        for each in in_te(facts)
        if each.role == "experts" and each.kind.endswith(".Linear") and OPERATIONS not in each.kind
    ],
    "te_mxfp8_hybrid": lambda facts: [
        each
        for each in in_te(facts)
        if each.get("recipe") == "mxfp8" and each.features.get("fp8_format") == "HYBRID"
    ],
    "te_fp4_weights": lambda facts: [
        each for each in te_fp8_weights(facts) if str(each.get("recipe")).startswith("nvfp4")
    ],
    "megatron_quant_recipe_alone": lambda facts: [
        each for each in in_te(facts) if each.features.get("quant_recipe_alone")
    ],
    "te_delayed_accumulated": lambda facts: delayed(in_te(facts)) if facts.workload.accumulate > 1 else [],
    "megatron_recomputes_in_bf16": lambda facts: [
        each for each in in_te(facts) if each.features.get("recomputes_in_bf16")
    ],
    "megatron_layer_wise_fp8_weights": lambda facts: (
        te_fp8_weights(facts) if (facts.training.optimizer or "").endswith(LAYER_WISE) else []
    ),
    "megatron_mxfp8_weights": lambda facts: [
        each for each in te_fp8_weights(facts) if each.recipe == "mxfp8"
    ],
    "torchao_compiled": torchao_compiled,
    "torchao_mxfp8": lambda facts: [each for each in facts.network.fp8 if is_mxfp8(each)],
}
"""Structure of the table -> function that lists its layers; none if it is absent."""


def bugs_of(facts: Facts) -> list[tuple[TrainingBug, list[Linear]]]:
    """List the bugs of this job and their layers, certain ones first.

    Raises `Unrecorded` if none is found and a fact that decides about one is missing.
    """
    found, missing = [], None
    for bug in training_bugs():
        if bug.check is not None or not bug.concerns(facts):
            continue
        try:
            layers = STRUCTURES[bug.structure](facts)
        except Unrecorded as error:
            missing = error
        else:
            found += [(bug, layers)] if layers else []
    if missing is not None and not found:
        raise missing
    return sorted(found, key=lambda each: not each[0].certain)
