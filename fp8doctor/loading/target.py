"""A target of the command line: what it names, and that it is Python. Nothing of the user's is run."""

from __future__ import annotations

import ast
import difflib
import io
import os
import tokenize
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from fp8doctor.errors import UserError
from fp8doctor.facts import Target
from fp8doctor.wording import error_in_words, escaped

OTHER_FILES = {
    ".ipynb": "is a notebook; call fp8doctor.inspect_model(model) in one of its cells",
    ".json": "is JSON; a saved report is shown by 'fp8doctor report'",
}
"""What to do with files that are not Python, by suffix."""


@dataclass(frozen=True)
class Source:
    """What a target names; nothing of it was run."""

    path: Path | None
    """The file, or None for a module."""
    module: str | None
    """The module's dotted name, or None for a file."""
    attribute: str | None

    @property
    def name(self) -> str:
        """What the user would recognise in a message, escaped for a terminal."""
        return escaped(self.path.name if self.path else self.module or "")

    def target(self) -> Target:
        """Record the target as the facts record it."""
        return Target(kind="file" if self.path else "module", name=self.name, attribute=self.attribute)


def locate(target: str) -> Source:
    """Find what ``target`` (``model.py[:attr]``, ``pkg.module[:attr]``, ``./list``) names. Raises `UserError`
    for a missing file."""
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
        raise UserError(f"{escaped(name)} is a folder; name the file in it that holds the model")
    if os.path.exists(path) and not is_package:
        raise UserError(f"{escaped(name)} is not a regular file")
    if is_module and not name.endswith(".py"):
        return Source(None, name, attribute)
    raise UserError(f"no such file: {escaped(name)}{_near(path)}")


def _near(path: Path) -> str:
    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix == ".py"]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {escaped(str(path.parent / near[0]))}?" if near else ""


def compiled(path: Path) -> CodeType:
    """Compile the code of a file, not run. Raises `UserError` for one that is empty or not Python."""
    name = escaped(path.name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror or error}") from None
    if b"\0" in data:
        raise UserError(f"{name} is not a Python file: it holds null bytes")
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(
            f"{name} cannot be decoded ({error_in_words(error)}): save it as UTF-8, or declare its encoding "
            "in the first line (PEP 263)"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data, str(path))
            code = compile(tree, str(path), "exec", dont_inherit=True)
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
    return code
