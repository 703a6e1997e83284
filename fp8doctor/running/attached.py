"""Wait in the script's process for the import of torch, and for the end.

Runs before torch is imported.
"""

import atexit
import os
import select
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from fp8doctor.pipes import Channel
from fp8doctor.running.patches import without_own_frames
from fp8doctor.running.script_messages import Message, WatchOptions

READER_TAKES_S = 10.0
"""Seconds that a script waits at most for the reader of its messages. A choice: the reader only reads."""

REPORT_TAKES_S = 120.0
"""Seconds that the script's end waits for the report. A choice: the report of an 8B Llama takes seconds on a
busy host."""

LONGEST_ERROR = 300
"""Characters of an exception's message."""

STARTUP = os.path.join(os.path.dirname(__file__), "startup", "sitecustomize.py")


def attach(request: dict[str, Any], before: Collection[str]) -> None:
    """Wait for torch and for the end; ``before`` has the modules before ours."""
    channel, settings = Channel(request["channel"], READER_TAKES_S), WatchOptions(**request["settings"])
    attached = Attached(channel, request["reported"], settings)
    atexit.register(attached.ended)  # the first to be registered is the last to be called
    shadowed = _shadowed(request["folder"], before)
    for name in [name for name in sys.modules if name.partition(".")[0] in shadowed]:
        attached.hidden[name] = sys.modules.pop(name)
    sys.meta_path.insert(0, attached)


def _shadowed(folder: str | None, before: Collection[str]) -> list[str]:
    """Name our imported modules that the script's folder has its own version of."""
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


class Attached:
    """Finds torch for the script, and starts the observer after its import."""

    def __init__(self, channel: Channel, reported: int, settings: WatchOptions) -> None:
        os.set_inheritable(reported, False)
        self.channel, self.reported, self.settings = channel, reported, settings
        self.pipe = os.fstat(reported).st_ino
        self.observer: Any = None
        self.hidden: dict[str, ModuleType] = {}
        """Modules of ours that the script's folder has its own version of."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch with the other finders, and wrap its loader."""
        if getattr(sys.modules.get("sitecustomize"), "__file__", None) == STARTUP:
            del sys.modules["sitecustomize"]
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None and spec.loader is not None:
                    self._wrap(spec.loader)
                    return spec
        return None

    def _wrap(self, loader: Loader) -> None:
        """Watch after the module ran; leave no frame in a traceback."""
        executes = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            try:
                executes(module)
            except BaseException as error:
                without_own_frames(error)
                raise
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.watch()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def watch(self) -> None:
        """Start the observer. Its failure never stops the script's import."""
        if self.channel.forked:
            return
        self.channel.send(Message(torch=True))
        scripts = {name: sys.modules.pop(name) for name in self.hidden if name in sys.modules}
        sys.modules.update(self.hidden)
        try:
            from fp8doctor.running.observer import ScriptObserver

            self.observer = ScriptObserver(self.channel.send, self.settings)
            self.observer.install()
        except Exception as error:
            said = f"fp8doctor could not watch: {type(error).__name__}: {error}"
            self.channel.send(Message(note=said))
        finally:
            for name in self.hidden:
                sys.modules.pop(name, None)
            sys.modules.update(scripts)

    def ended(self) -> None:
        """Report the end, and wait for the report to be written."""
        if self.channel.forked:
            return
        error = getattr(sys, "last_value", None)
        try:
            if self.observer is not None and isinstance(error, Exception):
                self.observer.guarded(self.observer.failed)
            end = Message(ended=True, steps=0, error=None if error is None else _in_a_line(error))
            if self.observer is not None:
                end.steps = self.observer.closed()
            self.channel.send(end)
            if os.fstat(self.reported).st_ino == self.pipe:
                select.select([self.reported], [], [], REPORT_TAKES_S)
        except (KeyboardInterrupt, SystemExit, OSError):
            pass  # the report is written all the same; or the script has closed all files


def _in_a_line(error: BaseException) -> str:
    with suppress(Exception):
        if text := str(error).strip().partition("\n")[0][:LONGEST_ERROR]:
            return f"{type(error).__name__}: {text}"
    return type(error).__name__
