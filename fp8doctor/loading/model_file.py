"""Run the user's model file, find or build the model among its names, and make a job by the contract.

Importing this module imports no torch.
"""

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import fp8doctor
from fp8doctor.errors import UserError
from fp8doctor.facts import Target
from fp8doctor.known_errors import recognise
from fp8doctor.loading.job import Job, checked_accumulate, checked_autocast, checked_batch, is_optimizer
from fp8doctor.loading.synthetic_batch import arguments_of, job_of
from fp8doctor.loading.target import BUILDERS, Source, compiled, locate
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


def load(
    target: str,
    *,
    layers: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    meta: bool = False,
) -> Job:
    """Load the job of ``target``. Raises `UserError` for all that the user can fix.

    With ``meta`` its model is built on the meta device if the file's code allows it.
    For a process of its own: runs user code and changes ``sys.path``, ``sys.argv`` and ``sys.modules``.
    """
    source = locate(target)
    file = source.name
    watching: Any = contextlib.nullcontext()
    if "torch" in sys.modules:
        from fp8doctor.examine.fp8_conversion import ConversionWatch

        watching = ConversionWatch()
    with watching as watch:
        module = _run(source)
        names = vars(module)
        with blamed(f"looking for the model in {file}"):
            found = find(module, source.attribute, file)
            make = partial(_made, found, names, file)
            most = 0.0 if meta else _most_weights() if sizable(found[1]) else math.inf
            built = None if most == math.inf else _without_weights(make, layers, most)
            model, optimizer = built or make(layers)
    import torch

    training_step, loss, given = _function(names, "training_step", file), names.get("loss"), None
    if isinstance(loss, (torch.Tensor, torch.nn.Module, int, float)):
        loss = None  # one that was computed, or a criterion: no loss(output, batch)
    if example_batch := _function(names, "example_batch", file):
        with blamed(call := f"example_batch() in {file}"):
            given = example_batch()
        given = checked_batch(given, f"what {call} returns", own_step=training_step is not None)
        if batch is not None or seq is not None:
            raise UserError(
                f"--batch and --seq size a synthetic batch; change example_batch() in {file}, which has one"
            )
    return job_of(
        model,
        Target(kind=source.target().kind, name=file, attribute=found[0], layers=layers),
        given,
        size=batch,
        sequence=seq,
        accumulate=_setting(names, "accumulate", checked_accumulate) or 1,
        loss=_function({"loss": loss}, "loss", file),
        optimizer=optimizer,
        training_step=training_step,
        autocast=_setting(names, "autocast", checked_autocast),
        rebuild=make if sizable(found[1]) else None,
        watched=watch,
    )


def _made(found: Found, names: dict[str, Any], file: str, layers: int | None) -> tuple[Any, Any]:
    """Build the model and its optimizer, or None. Raises `UserError`."""
    model, optimizer = build(found, file, layers)
    call = f"build_optimizer(model) in {file}"
    if optimizer is None and (make_optimizer := _function(names, "build_optimizer", file)):
        with blamed(call):
            optimizer = make_optimizer(model)
        if not is_optimizer(optimizer):
            raise UserError(f"{call} returned {type(optimizer).__name__}; it has to return an optimizer")
    return model, optimizer


def _without_weights(
    make: Callable[[int | None], tuple[Any, Any]], layers: int | None, most: float
) -> tuple[Any, Any] | None:
    """Build a model with more bytes of weights than ``most`` on the meta device.

    None if it has fewer or cannot be. It has the whole model's modules and shapes; the trial builds smaller
    ones.
    """
    import torch

    try:
        with torch.device("meta"):
            model, optimizer = make(layers)
    except UserError:
        return None
    weights = [*model.parameters()]
    fits = sum(each.numel() * each.element_size() for each in weights) <= most
    return None if fits or not all(each.is_meta for each in weights) else (model, optimizer)


def _most_weights() -> float:
    """Return the most bytes of weights to build: half the GPU's memory (a convention), or the host's."""
    import torch

    if torch.cuda.is_available():
        return 0.5 * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _run(source: Source) -> ModuleType:
    """Run the file or import the module as Python would, with its folder on the path."""
    path, name = source.path, source.module or ""
    code = None if path is None else compiled(path)[1]
    folder = os.getcwd() if path is None else os.path.dirname(os.path.realpath(path))
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    with blamed(source.name):
        try:
            if path is None or code is None:
                return importlib.import_module(name)
            name, sys.argv = _free_name(path), [str(path)]
            spec = importlib.util.spec_from_file_location(
                name, path, loader=SourceFileLoader(name, str(path))
            )
            assert spec is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            exec(code, vars(module))
        except ImportError as error:
            frames, missing = user_frames(error), error.name or ""
            if path is None and f"{name}.".startswith(f"{missing}.") and 'File "' not in frames:
                raise UserError(
                    f"no module called {name!r} here ({error_in_words(error)}); looked in the current "
                    "folder and on Python's path"
                ) from None
            raise UserError(_import_failed(error, source), frames) from error
    return module


def _import_failed(error: ImportError, source: Source) -> str:
    if "relative import" in str(error) and source.path:
        return (
            f"{source.name} uses relative imports, so name it as a module, from the folder above its "
            f"package: {source.path.parent.name}.{source.path.stem}"
        )
    if source.path and (error.name or "").partition(".")[0] == source.path.stem:
        return (
            f"{source.name} is imported by what it imports ({error_in_words(error)}); rename it if a package "
            "has its name, else move what both files need into a third"
        )
    if isinstance(error, ModuleNotFoundError) and error.name and not recognise(user_frames(error)):
        return (
            f"{source.name} imports {escaped(error.name)}, which this Python does not have; install it, or "
            "run fp8doctor with the Python that has it"
        )
    return f"{source.name} cannot be imported: {error_in_words(error)}"


def _free_name(path: Path) -> str:
    stem = re.sub(r"\W", "_", path.stem)
    names = (stem, *(f"fp8doctor_target_{stem}_{n}" for n in range(1 << 10)))
    return next(each for each in names if each not in {*sys.modules, *sys.stdlib_module_names})


def _function(names: dict[str, Any], name: str, file: str) -> Callable[..., Any] | None:
    """Return an optional function of the file, not a module of that name."""
    value = names.get(name)
    if value is None or isinstance(value, ModuleType):
        return None
    if callable(value):
        return value  # type: ignore[no-any-return]
    raise UserError(
        f"{name} in {file} is a value of type {type(value).__name__}; fp8doctor takes this name for a "
        "function, so rename yours"
    )


def _setting(names: dict[str, Any], name: str, check: Callable[[Any], Any]) -> Any:
    """Return an optional value of the file, not a function, class or module. Raises `UserError`."""
    value = names.get(name)
    return None if value is None or callable(value) or isinstance(value, ModuleType) else check(value)


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
