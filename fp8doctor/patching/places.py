"""Place the lines of a fix in a script, if there is one certain place for them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8doctor.analysis.treatment_table import KEEP_IN_BF16, changes_recipe
from fp8doctor.code_snippets import settings
from fp8doctor.diagnosis.document import Step
from fp8doctor.finding import Treatment
from fp8doctor.patching.source import Edit, NotPlacedError, Source
from fp8doctor.recipes import BY_TREATMENT

BY_THE_FILTER = (KEEP_IN_BF16, "convert-base-first")
"""Fixes that change which layers are converted. All others keep the script's own filter."""

KEYWORDS = (*BY_THE_FILTER, "recipe-that-fits", "safe-recipe", "real-fp8-kernel", "let-fp8-through")
"""Fixes whose lines change keyword arguments of a call; so do those that change a recipe."""

FILTERS = ("module_filter_fn", "module_filter_func")
HANDLERS = ("TERecipeKwargs", "AORecipeKwargs")

MORE_TO_DO = re.compile(r"# *(leave out|and |in the shell|build |or[:,] ).*")
"""Comments of a fix that ask for more than its lines, or for a choice."""

COMPILES = re.compile(r"(?<!\bre)\.compile\b|\btorch_compile\b")
"""Words of a script that may compile its model."""

OPTIMIZER = re.compile(r"optim|adam|sgd|adagrad|lion|muon|shampoo", re.IGNORECASE)
"""Names of what makes an optimizer."""

WRAPPERS = ("prepare", "prepare_model", "setup", "DDP", "DistributedDataParallel", "FSDP", "get_peft_model")
"""Functions that give the model back wrapped, so its layers have other names."""


class Placed(NamedTuple):
    """A fix with its edits, or with the reason why it has none."""

    step: Step
    edits: tuple[Edit, ...] = ()
    reason: str = ""


def placed(steps: Sequence[Step], script: Source) -> list[Placed]:
    """Place each fix of a plan in turn, next to those before it."""
    found: list[Placed] = []
    for step in steps:
        try:
            edits = tuple(_edits(step.treatment, script))
            if not edits:
                raise NotPlacedError("the script already says so")
            script.edited([*(edit for each in found for edit in each.edits), *edits])
        except NotPlacedError as error:
            found.append(Placed(step, reason=str(error)))
        else:
            found.append(Placed(step, edits))
    return found


def _edits(treatment: Treatment, script: Source) -> Iterator[Edit]:
    name, code = treatment.name, treatment.code
    if more := MORE_TO_DO.search(code):
        raise NotPlacedError(f"its comment asks for more: {more[0].lstrip('# ')}")
    if treatment.kind == "yaml":
        raise NotPlacedError("it belongs in the job's YAML file")
    if treatment.kind == "shell":
        yield from _environment(code, script)
        return
    lines = _Lines(Source(code.encode()), script)
    if name in KEYWORDS or changes_recipe(name) or name in BY_TREATMENT:
        edits = [*lines.set_keywords(name in BY_THE_FILTER)]
    elif name.startswith(("compile-", "convert-")):
        if found := COMPILES.search(script.text):
            line = script.text.count("\n", 0, found.start()) + 1
            raise NotPlacedError(f"line {line} compiles already, perhaps not always")
        edits = [lines.insert()]
    else:
        raise NotPlacedError("fp8doctor does not place a fix of this kind")
    yield from (*edits, *lines.imports(edits))


def _environment(code: str, script: Source) -> Iterator[Edit]:
    """Set variables before the script imports anything that may read them."""
    variables = {name: value for line in code.splitlines() for name, value in settings(line).items()}
    if not all(map(settings, code.splitlines())) or any(name.startswith("LD_") for name in variables):
        raise NotPlacedError("it is a command, or has to come before Python starts")
    for each in ast.walk(script.tree):
        if isinstance(each, ast.Constant) and each.value in variables:
            raise NotPlacedError(f"line {each.lineno} uses this variable")
    lines = [
        f'os.environ.pop("{name}", None)' if value is None else f'os.environ["{name}"] = {json.dumps(value)}'
        for name, value in variables.items()
    ]
    for each in script.tree.body:
        is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
        if not is_text and not (isinstance(each, ast.ImportFrom) and each.module == "__future__"):
            yield script.insert(each, ["import os", "", *lines, ""])
            return


class _Lines:
    """The lines of one fix, and the script that they go into."""

    def __init__(self, fix: Source, script: Source) -> None:
        self.fix, self.script = fix, script
        self.bound: dict[str, list[ast.stmt]] = {}
        for each in fix.tree.body:
            target = each.targets[0] if isinstance(each, ast.Assign) else getattr(each, "target", None)
            if isinstance(target, ast.Name):
                self.bound.setdefault(target.id, []).append(each)
        taken = {each.id for each in script.names} | {*script.imported}
        self.renamed = {name: f"fp8_{name}" for name in self.bound if name in taken}

    def set_keywords(self, by_the_filter: bool) -> Iterator[Edit]:
        """Give calls of the script the keywords that the fix gives them."""
        for statement in self.fix.tree.body:
            made = statement in self.bound.get("keep", ()) or statement in self.bound.get("config", ())
            if made or isinstance(statement, (ast.Import, ast.ImportFrom)):
                continue
            calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call)]
            call = next((each for each in calls if _name(each) in HANDLERS), calls[0] if calls else None)
            if call is None or not all(map(_stands_for_own, call.args)) or not self.fix.qualified(call.func):
                raise NotPlacedError("it changes more than keywords of a call")
            own = self.the_call(self.fix.qualified(call.func))
            changed = [each for each in call.keywords if (each.arg in FILTERS) == by_the_filter]
            used = {name.id for each in changed for name in ast.walk(each) if isinstance(name, ast.Name)}
            if "keep" in used:
                lines = [self.fix.of(each, self.renamed) for each in self.bound["keep"]]
                yield self.script.insert(next(self.script.around(own)), lines)
            yield from self.set_on(own, changed)

    def the_call(self, qualified: str) -> ast.Call:
        """Find the script's only call of a function. Raises `NotPlacedError` without exactly one."""
        package, name = qualified.partition(".")[0], qualified.rpartition(".")[2]
        names = (name, "fp8_autocast") if package == "transformer_engine" else (name,)
        found = [
            each
            for each in self.script.calls
            if _name(each) in names and self.script.qualified(each.func).partition(".")[0] == package
        ]
        if len(found) != 1:
            lines = ", ".join(str(each.lineno) for each in found)
            raise NotPlacedError(f"several lines call {name}: {lines}" if found else f"no line calls {name}")
        return found[0]

    def set_on(self, call: ast.Call, keywords: Sequence[ast.keyword]) -> Iterator[Edit]:
        """Set keyword arguments of a call in the script."""
        added = []
        for keyword in keywords:
            name, value = keyword.arg or "", keyword.value
            if isinstance(value, ast.Name) and value.id in self.bound:
                value = self.bound[value.id][0].value  # type: ignore[attr-defined]
            name = "fp8_recipe" if name == "recipe" and _name(call) == "fp8_autocast" else name
            old = next((each.value for each in call.keywords if each.arg == name), None)
            if isinstance(old, ast.Constant) and isinstance(value, ast.Constant):
                yield Edit(*self.script.span(old), repr(value.value))
            elif old is not None:
                raise NotPlacedError(f"line {old.lineno} gives {name} already")
            elif len(call.args) > 1 or any(each.arg is None for each in call.keywords):
                raise NotPlacedError(f"line {call.lineno} passes arguments that may set {name} already")
            else:
                added.append(f"{name}={self.fix.of(value, self.renamed)}")
        given = [*call.args, *(each.value for each in call.keywords)]
        at = self.script.span(given[-1])[1] if given else self.script.span(call)[1] - 1
        if added:
            yield Edit(at, at, ", ".join(["", *added] if given else added))

    def insert(self) -> Edit:
        """Insert the lines where the script's only model is built and wrapped, and not yet trained."""
        found: dict[tuple[ast.AST, str], list[ast.expr]] = {}
        for call in self.script.calls:
            for name, use in self.trained_by(call):
                found.setdefault((self.script.scope(call), name), []).append(use)
        if len(found) != 1:
            names = ", ".join(f"{name} (line {uses[0].lineno})" for (_, name), uses in found.items())
            raise NotPlacedError(
                f"several models are trained: {names}" if found else "no line trains a model"
            )
        ((_, model), uses) = next(iter(found.items()))
        anchor, after = self.place_of(model, uses)
        renamed = {**self.renamed, "model": model}
        body = [each for each in self.fix.tree.body if not isinstance(each, (ast.Import, ast.ImportFrom))]
        lines = [line for each in body for line in self.fix.of(each, renamed).splitlines()]
        return self.script.insert(anchor, lines, after=after)

    def trained_by(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Name the variables whose parameters an optimizer gets, or that a Trainer gets as its model."""
        keywords = {each.arg: each.value for each in call.keywords}
        if _name(call).endswith("Trainer"):
            given = [keywords["model"]] if "model" in keywords else call.args[:1]
            yield from ((each.id, call) for each in given if isinstance(each, ast.Name))
        elif _name(call) == "configure_optimizers" and isinstance(call.func, ast.Attribute):
            yield _name(call.func.value), call
        elif OPTIMIZER.search(self.script.of(call.func)):
            for argument in (*call.args, *keywords.values()):
                yield from self.parameters_of(argument, set())

    def parameters_of(self, value: ast.expr, seen: set[str]) -> Iterator[tuple[str, ast.expr]]:
        """Name the variables whose parameters are in a value, also through other variables."""
        for each in ast.walk(value):
            if isinstance(each, ast.Attribute) and each.attr in ("parameters", "named_parameters"):
                yield from ((name.id, value) for name in (each.value,) if isinstance(name, ast.Name))
            elif isinstance(each, ast.Name) and each.id not in seen:
                seen.add(each.id)
                for name in self.script.names:
                    made = self.script.parents[name]
                    same = name.id == each.id and self.script.scope(name) is self.script.scope(value)
                    if same and isinstance(made, ast.Assign) and name in made.targets:
                        yield from self.parameters_of(made.value, seen)

    def place_of(self, model: str, uses: Sequence[ast.expr]) -> tuple[ast.stmt, bool]:
        """Return the statement to insert at, and whether after it."""
        chains = [[*self.script.around(each)] for each in uses]
        if any(isinstance(each, (ast.For, ast.While)) for chain in chains for each in chain):
            raise NotPlacedError(f"line {uses[0].lineno} is in a loop")
        blocks = (self.script.block(each) for each in chains[0])
        block = next(each for each in blocks if all(set(each).intersection(chain) for chain in chains))
        found = min(block.index(each) for chain in chains for each in chain if each in block)
        place = block[found], False
        for each in block[found:]:
            if isinstance(each, (ast.For, ast.While)):
                break
            names = [name for name in ast.walk(each) if isinstance(name, ast.Name) and name.id == model]
            if {type(name.ctx) for name in names} >= {ast.Load, ast.Store}:
                if not any(_name(call) in WRAPPERS for call in ast.walk(each) if isinstance(call, ast.Call)):
                    raise NotPlacedError(f"line {each.lineno} may wrap {model}")
                place = each, True
        return place

    def imports(self, edits: Sequence[Edit]) -> Iterator[Edit]:
        """Import what the inserted text uses, after the script's other imports."""
        words = {word for edit in edits for word in re.findall(r"\w+", edit.text)} - {*self.script.imported}
        lines = ["import torch"] if "torch" in words else []
        for node in self.fix.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                needed = [each for each in node.names if (each.asname or each.name) in words]
                lines += [f"{start}import {', '.join(map(ast.unparse, needed))}"] if needed else []
        imports = [each for each in self.script.tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
        if lines and imports:
            yield self.script.insert(imports[-1], lines, after=True)
        elif lines:
            raise NotPlacedError("the script imports nothing, so its imports have no place")


def _name(node: ast.expr) -> str:
    """Return the last name of a call, attribute or variable; empty for others."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _stands_for_own(argument: ast.expr) -> bool:
    """Return whether an argument in a fix stands for what the script passes now."""
    return (isinstance(argument, ast.Constant) and argument.value is ...) or _name(argument) == "model"
