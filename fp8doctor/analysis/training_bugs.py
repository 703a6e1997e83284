"""Releases that do not work with FP8: the table ``training_bugs.toml`` and its conditions."""

import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fp8doctor.analysis.compile_coverage import is_below
from fp8doctor.analysis.fp8_request import asked_by_environment, fp8_was_asked_for, was_prepared
from fp8doctor.analysis.recipe_support import capability, cudnn_line, gpus_of, parsed, transformer_engine_line
from fp8doctor.cost.matmuls import covers
from fp8doctor.facts import Checkpointing, Facts, Linear, Unrecorded, recorded
from fp8doctor.recipes import STACKS

TE_PLACE = re.compile(r"\{transformer_engine>=([\d.]+)\}")


class TrainingBug(NamedTuple):
    """A structure of the job, and the releases of a library that it does not work with."""

    name: str
    library: str
    versions: str
    """As in pip: ``>=1.6,<1.12``."""
    effect: str
    lines: str
    """The fix, as lines to write, with places of `written`."""
    sources: Sequence[str]
    kind: Literal["incorrect", "raises", "fails", "later"] = "incorrect"
    when: Mapping[str, Any] = {}
    """Conditions of `LAYER`."""
    job: Sequence[str] = ()
    """Conditions of `JOB`."""
    certain: bool = True
    """False if the effect depends on settings that the facts do not show."""
    partner: str | None = None
    """A second library, whose versions also matter."""
    partner_versions: str = ""
    probed: str = ""
    """Code that the affected releases contain (``in: ...``) or the first fixed one (``fixed: ...``), else
    ``no: why`` none does; `research.versions.probed` asks the releases."""

    def release(self, facts: Facts) -> str:
        words = {name: stack.in_words for name, stack in STACKS.items()} | {"megatron": "Megatron Core"}
        names = filter(None, (self.library, self.partner))
        return " with ".join(f"{words.get(name, name)} {_version(facts, name)}" for name in names)

    def written(self, facts: Facts) -> str:
        """Write the fix, with pip lines for the places ``{transformer_engine>=2.4}`` and ``{cudnn}``."""
        lines = self.lines.strip().replace("{cudnn}", cudnn_line(facts))
        return TE_PLACE.sub(lambda found: transformer_engine_line(facts, Version(found[1])), lines)

    def concerns(self, facts: Facts) -> bool:
        """Whether the installed releases have this bug. One that cannot be read has not."""
        wanted = {self.library: self.versions} | (
            {self.partner: self.partner_versions} if self.partner else {}
        )
        return all(
            (found := parsed(_version(facts, name))) is not None
            and SpecifierSet(versions).contains(found, prereleases=True)
            for name, versions in wanted.items()
        )


def _version(facts: Facts, library: str) -> str | None:
    if library in ("torch", "cudnn"):
        version: str | None = facts.software.get(library)
        return version
    found = facts.software.packages.get(library)
    return found.get("version") if found else None


@functools.cache
def training_bugs() -> tuple[TrainingBug, ...]:
    table = tomllib.loads(resources.files("fp8doctor").joinpath("training_bugs.toml").read_text("utf-8"))
    return tuple(TrainingBug(**each) for each in table["bug"])


def bugs_of(facts: Facts) -> list[tuple[TrainingBug, list[Linear]]]:
    """List the bugs of this job and the layers that they concern, certain ones first.

    Raises `Unrecorded` if none is found and a fact that decides about one is missing.
    """
    found, missing = [], None
    for bug in training_bugs():
        if not bug.concerns(facts):
            continue
        try:
            met = not bug.job or meets(bug.job, facts)
            layers = layers_of(bug.when, facts) if bug.when and met else []
        except Unrecorded as error:
            missing = error
        else:
            found += [(bug, layers)] if layers or (met and not bug.when) else []
    if missing is not None and not found:
        raise missing
    return sorted(found, key=lambda each: not each[0].certain)


def layers_of(when: Mapping[str, Any], facts: Facts) -> list[Linear]:
    """List the FP8 layers that meet these conditions of `LAYER`. Raises `Unrecorded`."""
    last = sorted(when, key="recipe".__eq__)  # which is unknown before a forward
    return [each for each in facts.network.fp8 if all(LAYER[name](each, when[name], facts) for name in last)]


def _begins(recipe: str | None, with_: str) -> bool:
    if recipe is None:
        raise Unrecorded(Linear, "recipe", "only a forward in FP8 shows the recipe")
    return recipe.startswith(with_)


def _is_frozen_first(linear: Linear, fp8: Sequence[Linear]) -> bool:
    """Return whether a layer is its stack's first FP8 layer, frozen before layers that train."""
    alike = [each for each in fp8 if each.stack == linear.stack]
    return alike[0] is linear and not linear.requires_grad and any(each.requires_grad for each in alike)


def region_of(linear: Linear, facts: Facts, library: str) -> Checkpointing | None:
    """Find a library's region that covers a layer, or the forward above it that may call ``checkpoint``."""
    regions = [
        each for each in facts.training.checkpointing if each.library == library and each.active is not False
    ]
    calling = (each for each in regions if each.form == "called_in_forward" and covers(each, linear))
    kept = recorded(linear, "checkpointed") and linear.checkpointed is None
    if not kept and (found := next(calling, None)):
        return found
    return next((each for each in regions if each.active and each.name == linear.checkpointed), None)


def is_split_by_ddp(linear: Linear, facts: Facts) -> bool:
    """Return whether Dynamo splits the graph of a layer at DDP's buckets.

    Run: ``research/versions/ddp_and_compile.md``. The backend "eager" runs the graph as it is.
    """
    distributed, dynamo = facts.training.distributed, facts.training.dynamo
    if distributed is None or distributed.wrapper != "DDP" or not distributed.optimize_ddp:
        return False
    if dynamo.disabled or facts.get("observed.steps_ms"):
        return False
    marks = (mark.name for mark in facts.training.compile_marks if mark.backend != "eager")
    name = linear.name
    return is_below(name, distributed.get("wrapper_at") or "") and any(is_below(name, at) for at in marks)


LAYER: dict[str, Callable[[Linear, Any, Facts], bool]] = {
    "stack": lambda linear, name, facts: linear.stack == name,
    "kind": lambda linear, pattern, facts: re.search(pattern, linear.kind) is not None,
    "role": lambda linear, role, facts: linear.role == role,
    "features": lambda linear, features, facts: all(
        (bool(linear.features.get(name)) if value is True else linear.features.get(name)) == value
        for name, value in features.items()
    ),
    "trained": lambda linear, yes, facts: linear.requires_grad == yes,
    "compiled": lambda linear, yes, facts: linear.compiled is not None,
    "frozen_first": lambda linear, yes, facts: _is_frozen_first(linear, facts.network.fp8),
    "split_by_ddp": lambda linear, yes, facts: is_split_by_ddp(linear, facts),
    "checkpoint": lambda linear, library, facts: region_of(linear, facts, library) is not None,
    "accumulates": lambda linear, yes, facts: facts.workload.accumulate > 1,
    "variable": lambda linear, name, facts: facts.environment.variables.get(name, "0") != "0",
    # The class of the optimizer, which may hold masters if it does not hold all parameters.
    "optimizer": lambda linear, pattern, facts: bool(
        re.search(pattern, facts.training.optimizer or "") and not facts.training.parameters_outside_optimizer
    ),
    "recipe": lambda linear, begin, facts: _begins(linear.recipe, begin),
}
"""Condition of an FP8 layer, and of its job, in the table -> whether it holds with the table's value."""

JOB: dict[str, Callable[[Facts], bool]] = {
    "asks for FP8": lambda facts: fp8_was_asked_for(facts) is not None,
    "asks by a variable": lambda facts: asked_by_environment(facts.environment.variables) is not None,
    "asks by an argument": lambda facts: facts.get("training.accelerate.mixed_precision") == "fp8",
    "is prepared": was_prepared,
    "is on 12.x": lambda facts: any(capability(each) >= (12, 0) for each in gpus_of(facts)),
    "has FP8 layers": lambda facts: any(each.use == "training" for each in facts.linears()),
    "has te layers": lambda facts: any(
        each.use == "training" and each.stack == "transformer_engine" for each in facts.linears()
    ),
    "takes torchao": lambda facts: [*facts.environment.backend_imports][:1] == ["AO"],
    "takes te": lambda facts: [*facts.environment.backend_imports][:1] == ["TE"],
    "is in FSDP1": lambda facts: facts.get("training.distributed.wrapper") == "FSDP1",
    "is in FSDP2": lambda facts: facts.get("training.distributed.wrapper") == "FSDP2",
    "uses FSDP": lambda facts: facts.environment.variables.get("ACCELERATE_USE_FSDP", "").lower() == "true",
    "has peft": lambda facts: facts.software.packages["peft"].imported is True,
    "has no adapters": lambda facts: facts.get("network.adapter_parameters") == 0,
    "has te": lambda facts: (
        facts.software.packages["transformer_engine"].imported is True
        or facts.environment.backend_imports.get("TE", "not tried") is None
    ),
}
"""Condition of a job in the table, which "not " before it turns round -> whether the facts meet it."""


def meets(conditions: Iterable[str], facts: Facts) -> bool:
    """Return whether a job meets all of these; alternatives stand with " or " between them."""
    return all(
        any(JOB[each.removeprefix("not ")](facts) != each.startswith("not ") for each in either.split(" or "))
        for either in conditions
    )
