"""Run the user's model file and make a job by the model-file contract.

Importing this module imports no torch.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8doctor.errors import UserError
from fp8doctor.facts import Target
from fp8doctor.known_errors import recognise
from fp8doctor.loading.find_model import Found, blamed, build, find, sizable, user_frames
from fp8doctor.loading.job import Job, checked_accumulate, checked_autocast, checked_batch, is_optimizer
from fp8doctor.loading.synthetic_batch import job_of
from fp8doctor.loading.target import Source, compiled, locate
from fp8doctor.wording import error_in_words, escaped


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
