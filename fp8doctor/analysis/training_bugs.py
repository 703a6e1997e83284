"""Releases that do not work with FP8: the table ``training_bugs.toml`` and the structures that it names."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from importlib import resources
from typing import Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet

from fp8doctor.analysis.compile_coverage import is_below
from fp8doctor.analysis.fp8_request import asked_by_environment, fp8_was_asked_for, was_prepared
from fp8doctor.analysis.recipe_support import parsed
from fp8doctor.facts import Checkpointing, Facts, Linear, Unrecorded, recorded

IN_WORDS = {"transformer_engine": "Transformer Engine", "megatron": "Megatron Core"}
"""Import name -> the library's own name."""

FIRST_BUCKET_BYTES = 2**20
"""DDP splits no graph with fewer bytes of trained parameters. Source:
``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``, torch 2.8 to 2.13; a graph of 0.25 MiB ran."""


class TrainingBug(NamedTuple):
    """A structure of the job, and the releases of a library that it does not work with."""

    name: str
    library: str
    versions: str
    """As in pip: ``>=1.6,<1.12``."""
    effect: str
    lines: str
    """The fix, as lines to write; ``{cuda}`` is the major version of torch's CUDA."""
    sources: tuple[str, ...]
    kind: Literal["incorrect", "raises", "fails", "later"] = "incorrect"
    when: Mapping[str, Any] = {}
    """Conditions of `layers_of`."""
    structure: str = ""
    """A key of `STRUCTURES` in the place of conditions."""
    certain: bool = True
    """False if the effect depends on settings that the facts do not show."""
    partner: str | None = None
    """A second library, whose versions also matter."""
    partner_versions: str = ""
    probed: str = ""
    """Code that the affected releases contain (``in: ...``) or the first fixed one (``fixed: ...``), else
    ``no: why`` none does; `tests.versions.probed` asks the releases."""

    def release(self, facts: Facts) -> str:
        """Name the libraries with their installed versions."""
        names = filter(None, (self.library, self.partner))
        return " with ".join(f"{IN_WORDS.get(name, name)} {version_of(facts, name)}" for name in names)

    def concerns(self, facts: Facts) -> bool:
        """Whether the installed releases have this bug. One that cannot be read has not."""
        wanted = {self.library: self.versions} | (
            {self.partner: self.partner_versions} if self.partner else {}
        )
        return all(
            (found := parsed(version_of(facts, name))) is not None
            and SpecifierSet(versions).contains(found, prereleases=True)
            for name, versions in wanted.items()
        )


def version_of(facts: Facts, library: str) -> str | None:
    if library in ("torch", "cudnn"):
        version: str | None = facts.get(f"software.{library}")
        return version
    found = facts.packages().get(library)
    return found.get("version") if found else None


@functools.cache
def training_bugs() -> tuple[TrainingBug, ...]:
    """Read the table, in its order."""
    table = tomllib.loads(resources.files("fp8doctor").joinpath("training_bugs.toml").read_text("utf-8"))
    return tuple(TrainingBug(**{**each, "sources": tuple(each["sources"])}) for each in table["bug"])


def bugs_of(facts: Facts, kinds: Collection[str]) -> list[tuple[TrainingBug, list[Linear]]]:
    """List the bugs of this job and the layers that they concern, certain ones first.

    Raises `Unrecorded` if none is found and a fact that decides about one is missing.
    """
    found, missing = [], None
    for bug in training_bugs():
        if bug.kind not in kinds or not bug.concerns(facts):
            continue
        try:
            met = STRUCTURES[bug.structure](facts) if bug.structure else layers_of(bug.when, facts)
        except Unrecorded as error:
            missing = error
        else:
            found += [(bug, met if isinstance(met, list) else [])] if met else []
    if missing is not None and not found:
        raise missing
    return sorted(found, key=lambda each: (not each[0].certain, each[0].kind == "later"))


def layers_of(when: Mapping[str, Any], facts: Facts) -> list[Linear]:
    """List the FP8 layers that meet the conditions of a row, if the job meets its own.

    Of a layer: ``stack``, ``kind`` (a pattern for its class), ``role``, ``features``, ``trained``,
    ``compiled``, ``checkpoint`` (whose region covers it) and ``recipe`` (how its name begins). Of the job:
    ``accumulates``, ``variable`` (is set) and ``optimizer`` (a pattern for its class; it holds all
    parameters). Raises `Unrecorded` if only a forward in FP8 would show the recipe.
    """
    found = [each for each in facts.network.fp8 if _meets(each, when, facts)]
    if not found or (when.get("accumulates") and facts.workload.accumulate <= 1):
        return []
    if "variable" in when and facts.environment.variables.get(when["variable"], "0") == "0":
        return []
    if "optimizer" in when and not (
        re.search(when["optimizer"], facts.training.optimizer or "")
        and not facts.training.parameters_outside_optimizer  # it may hold masters instead
    ):
        return []
    if "recipe" in when and any(each.recipe is None for each in found):
        raise Unrecorded(Linear, "recipe", "only a forward in FP8 shows the recipe")
    return [each for each in found if (each.recipe or "").startswith(when.get("recipe", ""))]


def _meets(linear: Linear, when: Mapping[str, Any], facts: Facts) -> bool:
    features = {
        name: bool(linear.features.get(name)) if value is True else linear.features.get(name)
        for name, value in when.get("features", {}).items()
    }
    return (
        linear.stack == when["stack"]
        and when.get("role") in (None, linear.role)
        and re.search(when.get("kind", ""), linear.kind) is not None
        and features == when.get("features", {})
        and not (when.get("trained") and not linear.requires_grad)
        and not (when.get("compiled") and linear.compiled is None)
        and ("checkpoint" not in when or region_of(linear, facts, when["checkpoint"]) is not None)
    )


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


def te_ops_frozen_first(facts: Facts) -> list[Linear]:
    """Return the first FP8 layer if it is a frozen operation before layers that train."""
    when = {"stack": "transformer_engine", "kind": r"\.pytorch\.ops\.", "recipe": "delayed"}
    layers = [each for each in facts.network.fp8 if each.stack == when["stack"]]
    if not layers or layers[0].requires_grad or not any(each.requires_grad for each in layers):
        return []
    return [each for each in layers_of(when, facts) if each is layers[0]]


def ddp_splits(facts: Facts) -> list[Linear]:
    """List the trained Float8Linears in graphs that Dynamo splits at DDP's buckets.

    Run: ``tests/versions/ddp_and_compile.md``. The backend "eager" runs the graph as it is.
    """
    distributed, dynamo = facts.training.distributed, facts.training.dynamo
    if distributed is None or distributed.wrapper != "DDP" or not distributed.optimize_ddp:
        return []
    if dynamo.disabled or dynamo.stance == "force_eager" or facts.get("observed.steps_ms"):
        return []
    split: dict[str, Linear] = {}
    for mark in facts.training.compile_marks:
        graph = [
            each
            for each in facts.network.fp8
            if mark.backend != "eager" and is_below(each, mark.name) and each.compiled is not None
            if each.kind.startswith("torchao.") and each.kind.endswith(".Float8Linear") and each.requires_grad
        ]
        if (
            sum(each.parameters * (4 if each.dtype == "float32" else 2) for each in graph)
            > FIRST_BUCKET_BYTES
        ):
            split |= {
                each.name: each for each in graph if is_below(each, distributed.get("wrapper_at") or "")
            }
    return list(split.values())


def fp8_stacks(facts: Facts) -> set[str]:
    return {each.stack for each in facts.linears() if each.use == "training"}


def about_to_ask(facts: Facts) -> bool:
    """Whether FP8 was asked for and ``prepare`` is yet to come."""
    return fp8_was_asked_for(facts) is not None and not was_prepared(facts) and not fp8_stacks(facts)


def asked_by_argument_for_torchao(facts: Facts) -> bool:
    """Whether ``Accelerator(mixed_precision="fp8")`` was called with torchao and without FSDP."""
    accelerate, variables = facts.accelerate(), facts.environment.variables
    asked = accelerate is not None and accelerate.mixed_precision == "fp8" and not was_prepared(facts)
    sharded = variables.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    by_variable = asked_by_environment(variables) is not None
    return (
        asked
        and not by_variable
        and next(iter(facts.environment.backend_imports), None) == "AO"
        and not sharded
    )


def takes_te(facts: Facts) -> bool:
    """Whether Accelerate has yet to convert this model to Transformer Engine."""
    return next(iter(facts.environment.backend_imports), None) == "TE" and not was_prepared(facts)


def adapters_may_come(facts: Facts) -> bool:
    """Whether FP8 is wanted, PEFT is loaded, and the model has no adapters yet."""
    loaded = facts.software.packages["peft"].imported is True
    without = facts.get("network.adapter_parameters") == 0
    return loaded and without and (fp8_was_asked_for(facts) is not None or bool(fp8_stacks(facts)))


def te_may_come(facts: Facts) -> bool:
    """Whether nothing has imported Transformer Engine with success yet."""
    imported = facts.software.packages["transformer_engine"].imported is True
    return not imported and facts.environment.backend_imports.get("TE", "not tried") is not None


STRUCTURES: dict[str, Callable[[Facts], list[Linear] | bool]] = {
    "te_ops_frozen_first": te_ops_frozen_first,
    "ddp_splits": ddp_splits,
    "about_to_ask": about_to_ask,
    "asked_in_vain": lambda facts: (
        fp8_was_asked_for(facts) is not None and was_prepared(facts) and not fp8_stacks(facts)
    ),
    "asked_by_variable": lambda facts: (
        asked_by_environment(facts.environment.variables) is not None and not was_prepared(facts)
    ),
    "asked_by_argument_for_torchao": asked_by_argument_for_torchao,
    "takes_te": takes_te,
    "adapters_may_come": adapters_may_come,
    "adapters_may_come_onto_te": lambda facts: (
        adapters_may_come(facts) and (takes_te(facts) or "transformer_engine" in fp8_stacks(facts))
    ),
    "te_may_come": te_may_come,
}
"""Structure of the table -> function that lists its layers, or says whether the job has it."""
