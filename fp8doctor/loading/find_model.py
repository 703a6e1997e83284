"""Find or build the model among the names of a user's file."""

import inspect
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import fp8doctor
from fp8doctor.errors import UserError
from fp8doctor.loading.job import is_optimizer
from fp8doctor.loading.target import BUILDERS
from fp8doctor.stacks.looking import modules_of, tensors_of
from fp8doctor.wording import did_you_mean, error_in_words, escaped

LONGEST_DETAIL = 20_000
"""Characters of a traceback to show. A choice."""

_MACHINERY = (
    os.path.join(Path(fp8doctor.__file__).resolve().parent, ""),
    "<frozen importlib",
    "<frozen runpy",
    inspect.getfile(__import__("importlib")),
)

Found = tuple[str, Any]
"""A name of the file, and what it gives the model with: instance, class or function."""


def find(module: ModuleType, attribute: str | None, file: str) -> Found:
    """Find the name that gives the model. Raises `UserError` for none or several."""
    if attribute is None:
        return _discovered(module, file)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [name for name in dir(value) if not name.startswith("__")]
            raise UserError(f"{file} has no {attribute}{did_you_mean(part, names)}")
        value = getattr(value, part)
    if not callable(value):
        raise UserError(
            f"{attribute} in {file} is {_kind(value)}; it has to be a model, its class, or a function that "
            "builds it"
        )
    return attribute, value


def build(found: Found, file: str, layers: int | None = None) -> tuple[Any, Any]:
    """Build the model, and its optimizer, if any. Raises `UserError`."""
    from torch.nn import Module

    (name, result), call = found, f"{found[0]}() in {file}"
    what = f"{name} in {file}" if isinstance(result, Module) else f"the model of {call}"
    if layers is not None and not sizable(result):
        why = f"{what} is already built" if isinstance(result, Module) else f"{call} does not take it"
        raise UserError(f"--layers needs 'def build_model(layers=...)': {why}")
    if not isinstance(result, Module):
        arguments = {} if layers is None else {"layers": layers}
        if missing := [each for each in _required(result) if each not in arguments]:
            raise UserError(
                f"{call} needs arguments ({', '.join(missing)}): give them defaults, or write 'def "
                "build_model()' that calls it"
            )
        with blamed(call):
            result = result(**arguments)
    model, optimizer = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, Module) or not (optimizer is None or is_optimizer(optimizer)):
        hint = "it has to return the model, or (model, optimizer)"
        hint = "is 'return model' missing?" if result is None else hint
        raise UserError(f"{call} returned {_kind(result)}; {hint}")
    if not has_parameters(model):
        raise UserError(f"{what} has no parameters, so there is nothing to train")
    return model, optimizer


@contextmanager
def blamed(doing: str) -> Iterator[None]:
    """Turn user code's exceptions into a `UserError` that begins with ``doing``.

    A KeyboardInterrupt is the file's own: Ctrl-C goes to the parent.
    """
    try:
        yield
    except UserError:
        raise
    except SystemExit as error:
        call = f"sys.exit({error_in_words(error).partition(': ')[2]})"
        raise UserError(
            f"{doing} called {call}; what only a script should do belongs under if __name__ == '__main__'",
            user_frames(error),
        ) from error
    except BaseException as error:
        raise UserError(f"{doing} raised {error_in_words(error)}", user_frames(error)) from error


def user_frames(error: BaseException) -> str:
    """Return the traceback without our frames, shortened in the middle."""
    formatted = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [formatted]
    while pending:
        if one := pending.pop():
            one.stack = traceback.StackSummary.from_list(
                [frame for frame in one.stack if not frame.filename.startswith(_MACHINERY)]
            )
            pending += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    text = "".join(formatted.format()).rstrip()
    if len(text) > LONGEST_DETAIL:
        text = f"{text[: LONGEST_DETAIL // 2]}\n...\n{text[-LONGEST_DETAIL // 2 :]}"
    return escaped(text, keep="\n\t")


def _discovered(module: ModuleType, file: str) -> Found:
    from torch.nn import Module

    names = vars(module)
    for name in (*BUILDERS, "model"):
        value = names.get(name)
        if callable(value) and (name != "model" or isinstance(value, (Module, FunctionType, type))):
            return name, value
    instances = {name: value for name, value in names.items() if isinstance(value, Module)}
    trained = {name: value for name, value in instances.items() if has_parameters(value)}
    inside = {id(part) for value in trained.values() for _, part in modules_of(value) if part is not value}
    roots = {name: value for name, value in trained.items() if id(value) not in inside}
    classes = {
        name: value
        for name, value in names.items()
        if isinstance(value, type) and issubclass(value, Module) and value.__module__ == module.__name__
    }
    buildable = {
        name: value
        for name, value in classes.items()
        if not inspect.isabstract(value) and not _required(value)
    }
    for what, candidates in (("models", roots), ("model classes", buildable)):
        distinct = list({id(value): name for name, value in reversed(candidates.items())}.values())[::-1]
        if len(distinct) > 1:
            raise UserError(
                f"{file} holds several {what}: {', '.join(distinct)}; name one, such as "
                f"{file}:{distinct[0]}, or write 'def build_model()'"
            )
        if distinct:
            return distinct[0], candidates[distinct[0]]
    if instances:
        raise UserError(f"{file}: {', '.join(instances)} has no parameters, so there is nothing to train")
    needy = [f"{name}({', '.join(_required(value))})" for name, value in classes.items()]
    hint = f" ({', '.join(needy)} cannot be built without arguments)" if needy else ""
    raise UserError(
        f"found no model in {file}{hint}: write 'def build_model()' that returns it, keep it in a "
        f"global 'model', or name it, as in {file}:name. To watch a training script: fp8doctor run {file}"
    )


def arguments_of(function: Any) -> dict[str, bool]:
    """Map a function's named arguments to whether it requires them; empty if nobody can tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return {}
    named = (each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    return {each.name: each.default is each.empty for each in named}


def _required(value: Any) -> list[str]:
    return [name for name, needed in arguments_of(value).items() if needed]


def sizable(value: Any) -> bool:
    """Tell if this builds a model, with as many layers as asked for."""
    from torch.nn import Module

    try:
        inspect.signature(value).bind_partial(layers=None)
    except (ValueError, TypeError):
        return False
    return not isinstance(value, Module)


def has_parameters(module: Any) -> bool:
    return any(True for _ in tensors_of(module, "_parameters"))


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
