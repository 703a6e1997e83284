"""Resolve a command line's target by name and text, without running it."""

import ast
import os
import re
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from fp8doctor.errors import UserError
from fp8doctor.facts import Target
from fp8doctor.wording import did_you_mean, error_in_words, escaped

OTHER_FILES = {
    ".ipynb": "is a notebook; call fp8doctor.inspect_model(model) in one of its cells",
    ".json": "is JSON: 'fp8doctor plan' reads a configuration, 'fp8doctor report' a saved report",
}
"""Suffix of files that are not Python -> what to do."""


@dataclass(frozen=True)
class Source:
    """The file or module of a target."""

    path: Path | None
    """None for a module."""
    module: str | None
    """Dotted name; None for a file."""
    attribute: str | None

    @property
    def name(self) -> str:
        """Return the name that a user knows, escaped for a terminal."""
        return escaped(self.path.name if self.path else self.module or "")

    def target(self) -> Target:
        return Target(kind="file" if self.path else "module", name=self.name, attribute=self.attribute)


def locate(target: str) -> Source:
    """Resolve ``model.py[:attr]`` or ``pkg.module[:attr]``. Raises `UserError`."""
    name, attribute = target, None
    if not os.path.exists(target) and os.sep not in target.rpartition(":")[2]:
        name, colon, attribute = target.rpartition(":") if ":" in target else (target, "", None)
        if colon and not attribute:
            raise UserError(
                f"nothing stands behind the colon of {target!r}; name the model, as in {name + ':model'!r}"
            )
        if attribute and not all(part.isidentifier() for part in attribute.split(".")):
            raise UserError(f"{attribute!r} is no name in Python; name the model, as in {name + ':model'!r}")
    if not name:
        raise UserError("no model was named; name a file, as in model.py, or a module")
    path = Path(name)
    is_module = all(part.isidentifier() for part in name.split("."))
    is_package = is_module and os.path.isfile(path / "__init__.py")
    if os.path.isfile(path):
        if path.suffix in OTHER_FILES:
            raise UserError(f"{escaped(path.name)} {OTHER_FILES[path.suffix]}")
        if path.suffix not in (".py", ""):
            raise UserError(
                f"{escaped(path.name)} is not a Python file, so it was not run; name a model file that ends "
                "in .py, as in model.py or model.py:build_model"
            )
        return Source(Path(os.path.abspath(path)), None, attribute)
    if os.path.isdir(path) and not is_package:
        raise UserError(
            f"{escaped(name)} is a folder; name the file in it that holds the model. "
            "'fp8doctor plan' reads the folder of a checkpoint"
        )
    if os.path.exists(path) and not is_package:
        raise UserError(f"{escaped(name)} is not a regular file")
    if is_module and not name.endswith(".py"):
        return Source(None, name, attribute)
    others = path.parent.glob("*.py") if path.parent.is_dir() else ()
    raise UserError(f"no such file: {escaped(name)}{did_you_mean(str(path), map(str, others))}")


def compiled(path: Path) -> tuple[ast.Module, CodeType]:
    """Parse and compile a file without running it. Raises `UserError` if it is not Python."""
    name = escaped(path.name)
    try:
        data = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data, str(path))
            code = compile(tree, str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror or error}") from None
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise UserError(
            f"{name}{line}: {escaped(error.msg)}",
            escaped("".join(traceback.format_exception_only(error)).rstrip(), keep="\n\t"),
        ) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise UserError(f"{name} cannot be compiled ({error_in_words(error)})") from None
    if not tree.body:
        raise UserError(f"{name} is empty; it has to hold the model, for instance as 'def build_model()'")
    return tree, code


BUILDERS = ("build_model", "get_model", "create_model", "make_model")
"""Functions that make a file a model file, in order of preference."""

TRAINING_FUNCTIONS = ("train", "train_model", "train_epoch", "train_one_epoch", "training_loop", "finetune")
"""Names of functions that train; the file's own are searched too."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
NOT_RUN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
"""What is defined now and runs later."""


def refuse_script(source: Source) -> None:
    """Raise `UserError` if a file is not Python, or with the line to type if loading it would train.

    A function that builds the model, or a named model, makes it a model file.
    """
    if source.path is None:
        return
    tree, _ = compiled(source.path)
    if source.attribute:
        return
    functions = {each.name: each for each in tree.body if isinstance(each, Function)}
    bound = {
        node.asname or node.name if isinstance(node, ast.alias) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.alias) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    training = _training(tree.body, functions)
    if training is None or not (bound | functions.keys()).isdisjoint(BUILDERS):
        return
    path = escaped(os.path.relpath(source.path))
    model = f"name its model: '{path}:model'" if "model" in bound else "write a build_model()"
    raise UserError(
        f"{source.name} is a training script: it trains as soon as it is loaded (line {training.lineno}), "
        f"and has no build_model(). To watch it train, as it is: 'fp8doctor run {path} ARGS...'. To have it "
        f"loaded all the same, {model}"
    )


def _training(statements: Iterable[ast.stmt], functions: dict[str, Function]) -> ast.stmt | ast.expr | None:
    """Find a loop with backward and step, or a call that trains, in what these statements run."""
    pending, seen = list[ast.AST](statements), set[str]()
    while pending:
        node = pending.pop(0)
        if isinstance(node, NOT_RUN) or (isinstance(node, ast.If) and "__main__" in ast.dump(node.test)):
            continue
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            methods = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            if {"backward", "step"} <= methods:
                return node
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in TRAINING_FUNCTIONS or TRAINERS.search(name):
                return node
            if name in functions.keys() - seen:
                seen.add(name)
                pending += functions[name].body
        pending += ast.iter_child_nodes(node)
    return None


TRAINERS = re.compile(r"trainer(\(.*\))?\.(train|fit)$", re.IGNORECASE | re.DOTALL)
"""``trainer.train`` or ``Trainer(...).fit``, not ``model.train``."""
