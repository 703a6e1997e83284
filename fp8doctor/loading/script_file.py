"""A training script that was named as a model file: recognised by its text, before any of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8doctor.errors import UserError
from fp8doctor.loading.target import Source
from fp8doctor.wording import escaped

BUILDERS = ("build_model", "get_model", "create_model", "make_model")
"""Functions that make a file a model file, in the order in which they are looked for."""

MODELS = ("model", "net", "network")
"""Names outside of functions that hold a model, whoever made it."""

TRAINS = ("train", "fit")
"""Methods of trainers that train."""

TRAINING_FUNCTIONS = ("train", "train_model", "train_epoch", "train_one_epoch", "training_loop", "finetune")
"""Names of functions that train; one of the file's own is looked into as well."""


def refuse_script(source: Source) -> None:
    """Raise `UserError` with the line to type where the file is a training script and no model file.

    A function that builds the model, or a model that was named, makes it a model file. A file that trains
    under ``if __name__ == "__main__"`` only is one too where it makes its model outside of that.
    """
    if source.path is None or source.attribute:
        return
    try:
        script = _Script.of(ast.parse(source.path.read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # whoever loads it says so
    if script.builds_a_model or not (script.at_once or (script.guarded and not script.holds_a_model)):
        return
    name, path = escaped(source.path.name), escaped(_as_typed(source.path))
    how = "as soon as it is loaded" if script.at_once else "when it is run"
    raise UserError(
        f"{name} is a training script: it trains {how} (line {script.line}), and has no build_model(). To "
        f"watch it train, as it is: 'fp8doctor run {path} ARGS...'. To have it loaded all the same, "
        + (f"name its model: '{path}:{script.model}'" if script.model else "write a build_model()")
    )


def _as_typed(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass
class _Script:
    """What a file's text says of its training."""

    at_once: bool
    """Whether it trains when it is imported."""
    guarded: bool
    """Whether it trains when it is run as ``__main__``."""
    builds_a_model: bool
    """Whether a function of the contract is there."""
    holds_a_model: bool
    """Whether a name outside the guard holds one, as far as the text tells."""
    model: str | None
    """What names the model: a name outside of functions, else the last class of modules; None for neither."""
    line: int
    """Where the training is, in the file; 0 where there is none."""

    @classmethod
    def of(cls, tree: ast.Module) -> _Script:
        functions = {
            each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        guarded = [each for each in tree.body if isinstance(each, ast.If) and _asks_for_main(each.test)]
        plain = [each for each in tree.body if each not in guarded and not _defines(each)]
        under_guard = [statement for each in guarded for statement in each.body]
        at_once, as_main = _training(plain, functions), _training(under_guard, functions)
        found = at_once or as_main
        classes = {each.name for each in tree.body if isinstance(each, ast.ClassDef)}
        derived = {each.name for each in tree.body if isinstance(each, ast.ClassDef) and each.bases}
        bound = _bound(plain) | functions.keys() | classes
        return cls(
            at_once=at_once is not None,
            guarded=as_main is not None,
            builds_a_model=not bound.isdisjoint(BUILDERS),
            holds_a_model=not bound.isdisjoint(MODELS)
            or any(_holds_a_model(node, derived) for each in plain for node in _run_by(each)),
            model=next((each for each in MODELS if each in bound), _last_module_class(tree)),
            line=found.lineno if found is not None else 0,
        )


def _last_module_class(tree: ast.Module) -> str | None:
    """Find the class that is likeliest the model: it is written below its parts."""
    kinds = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    modules = [each.name for each in kinds if any("Module" in ast.unparse(base) for base in each.bases)]
    return modules[-1] if modules else None


def _bound(statements: Iterable[ast.stmt]) -> set[str]:
    """Names that statements bind when they run, by assigning or importing."""
    names = set()
    for statement in statements:
        for node in _run_by(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name)
    return names


def _holds_a_model(node: ast.AST, classes: set[str]) -> bool:
    """Whether this gives any name to an instance of one of the file's own classes, which derive from
    another, or of torch.nn's."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return False
    values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
    return any(_makes_a_model(value.func, classes) for value in values if isinstance(value, ast.Call))


def _makes_a_model(made: ast.expr, classes: set[str]) -> bool:
    """Whether this is one of the file's own classes, or of torch.nn's."""
    if isinstance(made, ast.Attribute):
        return ast.unparse(made.value) in ("nn", "torch.nn")
    return isinstance(made, ast.Name) and made.id in classes


def _defines(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _asks_for_main(test: ast.expr) -> bool:
    return "__name__" in ast.dump(test) and "__main__" in ast.dump(test)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _training(statements: Iterable[ast.stmt], functions: dict[str, Function]) -> ast.stmt | ast.expr | None:
    """Find the training in statements and in the file's own functions that they call."""
    pending, seen = list(statements), set[str]()
    while pending:
        statement = pending.pop(0)
        if (found := _trains(statement)) is not None:
            return found
        for call in _calls(statement):
            if isinstance(call.func, ast.Name) and call.func.id in functions.keys() - seen:
                seen.add(call.func.id)
                pending += functions[call.func.id].body
    return None


def _trains(statement: ast.stmt) -> ast.stmt | ast.expr | None:
    """Find a loop that goes backward and steps, or a call that trains; None where there is neither."""
    for node in _run_by(statement):
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            methods = {call.func.attr for call in _calls(node) if isinstance(call.func, ast.Attribute)}
            if {"backward", "step"} <= methods:
                return node
        elif isinstance(node, ast.Call) and (_is_trainers(node.func) or _is_named_training(node.func)):
            return node
    return None


def _is_named_training(function: ast.expr) -> bool:
    """Whether this is a function for training by its name, wherever it comes from."""
    return isinstance(function, ast.Name) and function.id in TRAINING_FUNCTIONS


def _is_trainers(function: ast.expr) -> bool:
    """Whether this is ``trainer.train`` or ``Trainer(...).fit``; ``model.train()`` only switches a mode."""
    if not isinstance(function, ast.Attribute) or function.attr not in TRAINS:
        return False
    owner = function.value.func if isinstance(function.value, ast.Call) else function.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name.lower().endswith("trainer")


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in _run_by(node) if isinstance(each, ast.Call))


def _run_by(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it that runs with it: bodies of functions and classes do not."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _run_by(child)
