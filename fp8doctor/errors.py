"""The only exceptions that users see, as a sentence; and the sentence for a Python without torch."""

import functools
import importlib.util
import shlex
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OLDEST_TORCH = "2.6"
"""As in setup.cfg, whose extra does not apply to a torch that is already installed."""


class UserError(ValueError):
    """A problem that the user can solve, as a sentence; ``detail`` holds the user's own stack frames."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class WrongType(UserError, TypeError):
    """An argument is of a type that cannot be used."""


def require(holds: bool, name: str, wanted: str, value: object) -> None:
    """Raise `WrongType` for an argument unless it is what is wanted."""
    if not holds:
        raise WrongType(f"{name} has to be {wanted}, not {type(value).__name__}")


def in_one_sentence(function: Callable[P, R]) -> Callable[P, R]:
    """Raise a function's `UserError` without the frames that led to it: the caller's line is the last."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        __tracebackhide__ = True  # IPython and pytest leave this frame out
        try:
            return function(*args, **options)
        except UserError as error:
            raise error.with_traceback(None) from None

    return call


def has_torch() -> bool:
    """Tell if this Python has torch, which is an extra. Imports nothing."""
    if sys.modules.get("torch") is not None:
        return True
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None  # a folder that an uninstall left has none


def require_torch(wanted: str, *others: str) -> None:
    """Raise `UserError` with what to type if torch is missing or too old; ``others`` are installed too."""
    lacks = "none"
    if has_torch():
        from importlib import metadata

        from packaging.version import Version

        try:
            lacks = metadata.version("torch")
        except metadata.PackageNotFoundError:  # built from source, or a stand-in
            return
        if Version(lacks).release >= Version(OLDEST_TORCH).release:
            return
    enough = " (a CPU build is enough)" if others else ""
    raise UserError(
        f"{wanted} needs torch {OLDEST_TORCH} or newer{enough}, and the Python that runs fp8doctor has "
        f"{lacks}. Install fp8doctor in the environment you train in, or type: {torch_line(*others)}"
    )


def torch_line(*others: str) -> str:
    """Return the line that installs torch and others next to fp8doctor."""
    return " ".join((shlex.quote(sys.executable), f"-m pip install 'torch>={OLDEST_TORCH}'", *others))
