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
from fp8doctor.loading.find_model import ModelCandidate, blamed, build, find, takes_layers, user_frames
from fp8doctor.loading.job import (
    Job,
    checked_accumulate,
    checked_autocast,
    checked_batch,
    is_optimizer,
)
from fp8doctor.loading.synthetic_batch import job_of
from fp8doctor.loading.target import Source, compiled, locate
from fp8doctor.wording import error_in_words, escaped

WEIGHTS_SHARE = 0.5
"""Largest share of the GPU's memory for weights, next to the trial. A convention."""


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
    watching: Any = contextlib.nullcontext()
    if "torch" in sys.modules:
        from fp8doctor.examine.fp8_conversion import ConversionWatch

        watching = ConversionWatch()
    with watching as watch:
        module = _run(source)
        names, file = vars(module), source.name
        with blamed(f"looking for the model in {file}"):
            found = find(module, source.attribute, file)
            make = partial(_made, found, names, file)
            most = 0.0 if meta else _most_weights() if _sizable(found) else math.inf
            model, optimizer = (_without_weights(make, layers, most) if most < math.inf else None) or make(
                layers
            )
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
        Target(kind=source.target().kind, name=file, attribute=found.attribute, layers=layers),
        given,
        size=batch,
        sequence=seq,
        accumulate=_setting(names, "accumulate", checked_accumulate) or 1,
        loss=_function({"loss": loss}, "loss", file),
        optimizer=optimizer,
        training_step=training_step,
        autocast=_setting(names, "autocast", checked_autocast),
        rebuild=make if _sizable(found) else None,
        watched=watch,
    )


def _made(found: ModelCandidate, names: dict[str, Any], file: str, layers: int | None) -> tuple[Any, Any]:
    """Build the model and its optimizer, or None. Raises `UserError`."""
    model, optimizer = build(found, file, layers)
    call = f"build_optimizer(model) in {file}"
    if optimizer is None and (make_optimizer := _function(names, "build_optimizer", file)):
        with blamed(call):
            optimizer = make_optimizer(model)
        if not is_optimizer(optimizer):
            raise UserError(f"{call} returned {type(optimizer).__name__}; it has to return an optimizer")
    return model, optimizer


def _sizable(found: ModelCandidate) -> bool:
    import torch

    return not isinstance(found.value, torch.nn.Module) and takes_layers(found.value)


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
    if not all(parameter.is_meta for parameter in model.parameters()):
        return None
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return (model, optimizer) if weights > most else None


def _most_weights() -> float:
    """Return the most bytes of weights to build: half the GPU's memory, or the host's."""
    import torch

    if torch.cuda.is_available():
        return WEIGHTS_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _run(source: Source) -> ModuleType:
    """Run the file or import the module as Python would, with its folder on the path."""
    if source.path is None:
        return _import(source.module or "")
    _, code = compiled(source.path)
    name = _free_name(source.path)
    loader = SourceFileLoader(name, str(source.path))
    spec = importlib.util.spec_from_file_location(name, source.path, loader=loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _put_first(os.path.dirname(os.path.realpath(source.path)))
    sys.argv = [str(source.path)]
    try:
        with blamed(source.name):
            try:
                exec(code, vars(module))
            except ImportError as error:
                raise UserError(_import_failed(error, source), user_frames(error)) from error
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import(module: str) -> ModuleType:
    _put_first(os.getcwd())
    with blamed(module):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            ours = error.name and (module == error.name or module.startswith(error.name + "."))
            if ours and 'File "' not in user_frames(error):
                raise UserError(
                    f"no module called {module!r} here ({error_in_words(error)}); looked in the current "
                    "folder and on Python's path"
                ) from None
            raise UserError(_import_failed(error, Source(None, module, None)), user_frames(error)) from error


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
    if stem not in sys.modules and stem not in sys.stdlib_module_names and stem != "__main__":
        return stem
    return next(free for n in range(1 << 16) if (free := f"fp8doctor_target_{stem}_{n}") not in sys.modules)


def _put_first(folder: str) -> None:
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


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
