"""fp8doctor in the script's process before torch is there: it waits for the import, and for the end."""

from __future__ import annotations

import atexit
import importlib.util
import os
import select
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from fp8doctor.running.messages import Channel, Ended, Imported, Note
from fp8doctor.running.settings import Settings
from fp8doctor.running.traceback_frames import without_own_frame

REPORT_TAKES_S = 120.0
"""The longest that the end of the script waits for its report to be written. A choice: an 8B Llama's report
takes seconds on a busy host."""


LONGEST_ERROR = 300
"""Characters of a message that are told."""

ALONE = ("statistics",)
"""Modules of Python's own that we import with torch and that torch does not import itself: a file of the
script's folder may have such a name."""


NAMESAKE = (
    "the script was run and not watched: its folder has a package or file of its own that is called "
    "fp8doctor. To watch it, rename that, or start the script from another folder with -m"
)


def attach(request: dict[str, Any], before: Collection[str]) -> None:
    """Wait for the import of torch and for the end of the process.

    ``before`` names the modules that were there before any of ours.
    """
    attached = _Attached(Channel(request["channel"]), request["reported"], Settings(**request["settings"]))
    atexit.register(attached.ended)  # the first to be registered is the last to be called
    shadowed = _shadowed(request["folder"], before)
    attached.pythons.hide(shadowed)
    if "fp8doctor" in shadowed:
        attached.channel.send(Note(NAMESAKE))
    else:
        sys.meta_path.insert(0, _TorchFinder(attached.torch_imported))


def _shadowed(folder: str | None, before: Collection[str]) -> list[str]:
    """Name the modules that we have imported and that a file or package in the script's folder is called as:
    under plain Python the script finds its own."""
    if folder is None:
        return []
    known = folder in sys.path_importer_cache
    new = {name.partition(".")[0] for name in sys.modules} - {*before, *sys.builtin_module_names}
    found = []
    for name in sorted(new):
        spec = PathFinder.find_spec(name, [folder])
        ours = getattr(sys.modules.get(name), "__file__", None)
        if spec and spec.origin and not (ours and os.path.realpath(spec.origin) == os.path.realpath(ours)):
            found.append(name)
    if not known:
        sys.path_importer_cache.pop(folder, None)
    return found


class _Attached:
    """What is known of the script until torch is imported, and where its observer is afterwards."""

    def __init__(self, channel: Channel, reported: int, settings: Settings) -> None:
        os.set_inheritable(reported, False)
        self.channel, self.reported, self.settings = channel, reported, settings
        self.pipe = os.fstat(reported).st_ino
        self.observer: Any = None
        self.pythons = PythonsOwn(ALONE)

    def torch_imported(self) -> None:
        """Watch from now on. The script's import goes on, whatever happens here."""
        if self.channel.forked:
            return
        self.channel.send(Imported())
        try:
            with self.pythons:
                from fp8doctor.running.observer import Observer

            self.observer = Observer(self.channel, self.settings)
            self.observer.install()
        except Exception as error:
            self.channel.send(Note(f"fp8doctor could not watch: {type(error).__name__}: {error}"))

    def ended(self) -> None:
        """Say that the process ends, and let the report be written before whoever started it goes on."""
        if self.channel.forked:
            return
        try:
            if self.observer is not None and isinstance(getattr(sys, "last_value", None), Exception):
                self.observer.guarded(self.observer.failed)
            steps = self.observer.closed() if self.observer is not None else 0
            taken = self.observer.taken if self.observer is not None else None
            self.channel.send(Ended(steps, taken, _uncaught()))
            if os.fstat(self.reported).st_ino == self.pipe:
                select.select([self.reported], [], [], REPORT_TAKES_S)
        except (KeyboardInterrupt, SystemExit):
            pass  # of an impatient user, or a handler of the script's: the report is written all the same
        except OSError:  # the script has closed all files
            pass


def _uncaught() -> str | None:
    """The exception that ends the script, in a line; None where none does."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return None
    try:
        text = str(error).strip().partition("\n")[0][:LONGEST_ERROR]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class PythonsOwn:
    """Modules that were imported before there is a script's folder, which may have its own of that name.
    Found within ``with`` alone."""

    def __init__(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in sys.modules]
        for name in new:
            importlib.import_module(name)
        self._own = {name: sys.modules.pop(name) for name in new}

    def hide(self, names: Collection[str]) -> None:
        """Leave these names, and what is within them, to the script."""
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            self._own[name] = sys.modules.pop(name)

    def __enter__(self) -> None:
        self._scripts = {name: sys.modules.get(name) for name in self._own}
        sys.modules.update(self._own)

    def __exit__(self, *raised: object) -> None:
        for name, module in self._scripts.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


class _TorchFinder:
    """Calls a function when torch has been imported, and is gone then. Others do the import itself."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then, self.looking = then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch as it would be found, and have its loader say when it is done."""
        if sys.modules.get("sitecustomize") is not None:
            _forget_startup()
        if name != "torch" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            self._tell(spec.loader)
        return spec

    def _tell(self, loader: Loader) -> None:
        """Have the loader say when it is done. Its own frame does not stay in the traceback of a failure."""
        executes = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            try:
                executes(module)
            except BaseException as error:
                without_own_frame(error)
                raise
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _forget_startup() -> None:
    """Take the module of ours that nobody asked for out of ``sys.modules``."""
    module = sys.modules["sitecustomize"]
    if getattr(module, "__file__", None) == os.path.join(
        os.path.dirname(__file__), "startup", "sitecustomize.py"
    ):
        del sys.modules["sitecustomize"]
