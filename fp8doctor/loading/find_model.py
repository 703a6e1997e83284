"""Find or build the model among the names of a user's file."""

import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

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


class ModelCandidate(NamedTuple):
    """A name of the file that gives the model: instance, class or function."""

    attribute: str
    value: Any


def find(module: ModuleType, attribute: str | None, file: str) -> ModelCandidate:
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
    return ModelCandidate(attribute, value)


def build(found: ModelCandidate, file: str, layers: int | None = None) -> tuple[Any, Any]:
    """Build the model, and its optimizer, if any. Raises `UserError`."""
    import torch

    value, call = found.value, f"{found.attribute}() in {file}"
    is_built = isinstance(value, torch.nn.Module)
    arguments = {} if layers is None else {"layers": layers}
    if arguments and (is_built or not takes_layers(value)):
        what = f"{found.attribute} in {file} is already built" if is_built else f"{call} does not take it"
        raise UserError(f"--layers needs 'def build_model(layers=...)': {what}")
    if is_built:
        return _checked(value, f"{found.attribute} in {file}"), None
    if missing := [name for name in _required(value) if name not in arguments]:
        raise UserError(
            f"{call} needs arguments ({', '.join(missing)}): give them defaults, or write 'def "
            "build_model()' that calls it"
        )
    with blamed(call):
        result = value(**arguments)
    model, optimizer = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(model, torch.nn.Module) and (optimizer is None or is_optimizer(optimizer)):
        return _checked(model, f"the model of {call}"), optimizer
    hint = "it has to return the model, or (model, optimizer)"
    hint = "is 'return model' missing?" if result is None else hint
    raise UserError(f"{call} returned {_kind(result)}; {hint}")


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


def _discovered(module: ModuleType, file: str) -> ModelCandidate:
    from torch.nn import Module

    names = vars(module)
    for name in (*BUILDERS, "model"):
        value = names.get(name)
        if callable(value) and (name != "model" or isinstance(value, (Module, FunctionType, type))):
            return ModelCandidate(name, value)
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
            return ModelCandidate(distinct[0], candidates[distinct[0]])
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


def takes_layers(value: Callable[..., Any]) -> bool:
    try:
        inspect.signature(value).bind_partial(layers=None)
    except (ValueError, TypeError):
        return False
    return True


def _checked(model: Any, what: str) -> Any:
    if not has_parameters(model):
        raise UserError(f"{what} has no parameters, so there is nothing to train")
    return model


def has_parameters(module: Any) -> bool:
    return any(True for _ in tensors_of(module, "_parameters"))


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
