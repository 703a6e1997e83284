"""Attach fp8doctor to a script before it runs, and leave no trace.

Restores the environment, imports the ``sitecustomize`` that this one hides, and waits for the import of torch
and for the end. Until then it imports built-in modules alone, which hide no file in the script's folder.
"""

from __future__ import annotations

import atexit
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

READER_TAKES_S = 10.0
"""Seconds that a script waits at most for the reader of a message. A choice: the reader only reads."""

REPORT_TAKES_S = 120.0
"""Seconds that the script's end waits for the report. A choice: the report of an 8B Llama takes seconds on a
busy host."""

LOOKS_EVERY_S = 0.02
"""Seconds between looks at a pipe."""

LONGEST_ERROR = 300
"""Characters of an exception's message."""

HERE = os.path.dirname(os.path.abspath(__file__))
HOME = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
"""The folder of the fp8doctor that was started, wherever it is."""


class Attached:
    """Waits for torch and for the end; finds modules only to leave them to the other finders."""

    def __init__(self, channel: int, reported: int, settings: str) -> None:
        """Take the pipe for messages, the one that closes when the report is written, and `WatchOptions`."""
        for each in (channel, reported):
            os.set_inheritable(each, False)
            os.set_blocking(each, False)
        self.channel, self.reported, self.settings = channel, reported, settings
        self.pipes = {each: os.fstat(each).st_ino for each in (channel, reported)}
        self.process = os.getpid()
        self.observer: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch with the other finders, and wrap its loader."""
        if getattr(sys.modules.get("sitecustomize"), "__file__", None) == __file__:
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
        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            try:
                loader.exec_module(module)
            except BaseException as error:
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # no frame of ours
                raise
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.torch_imported()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def torch_imported(self) -> None:
        """Start the observer. Its failure never stops the script's import."""
        if os.getpid() != self.process:
            return
        self.tell(torch=True)
        sys.path.insert(0, HOME)
        try:
            from fp8doctor.running.observer import observe

            self.observer = observe(self.channel, self.settings)
        except Exception as error:
            self.tell(note=f"fp8doctor could not watch: {in_a_line(error)}")
        finally:
            if HOME in sys.path:
                sys.path.remove(HOME)

    def ended(self) -> None:
        """Report the end, and wait for the report to be written."""
        if os.getpid() != self.process:
            return
        try:
            steps = self.observer.script_ended() if self.observer is not None else 0
            error = getattr(sys, "last_value", None)
            self.tell(ended=True, steps=steps, error=None if error is None else in_a_line(error))
            self._waits(self.reported, REPORT_TAKES_S, lambda: os.read(self.reported, 1))
        except (KeyboardInterrupt, SystemExit):
            pass  # the report is written all the same

    def tell(self, **fields: Any) -> None:
        """Send a `Message`, on a line of its own even if an interrupt broke the last one off."""
        members = ",".join(f'"{name}":{_json(value)}' for name, value in fields.items() if value is not None)
        line = f"\n{{{members}}}\n".encode()
        self._waits(self.channel, READER_TAKES_S, lambda: os.write(self.channel, line))

    def _waits(self, number: int, seconds: float, part: Callable[[], object]) -> None:
        """Read or write when a pipe is ready, unless the script has closed it or put another file there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if os.fstat(number).st_ino == self.pipes[number]:
                    part()
                return
            except BlockingIOError:
                time.sleep(LOOKS_EVERY_S)
            except OSError:
                return


def _json(value: Any) -> str:
    if isinstance(value, str):
        return '"' + "".join(f"\\u{min(ord(each), 0xFFFD):04x}" for each in value) + '"'
    return str(value).lower()


def in_a_line(error: BaseException) -> str:
    try:
        text = str(error).strip().partition("\n")[0][:LONGEST_ERROR]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def attach() -> None:
    """Read the request from the environment, restore the environment, and wait."""
    channel, reported, had_path, settings = os.environ.pop("FP8DOCTOR_RUN").split(" ", 3)
    python_path = os.environ.pop("PYTHONPATH").partition(os.pathsep)[2]
    if int(had_path):
        os.environ["PYTHONPATH"] = python_path
    if HERE in sys.path:
        sys.path.remove(HERE)
    sys.path_importer_cache.pop(HERE, None)
    attached = Attached(int(channel), int(reported), settings)
    atexit.register(attached.ended)  # the first to be registered is the last to be called
    sys.meta_path.insert(0, attached)


def import_hidden() -> None:
    """Import the ``sitecustomize`` that this one hides."""
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if "FP8DOCTOR_RUN" in os.environ:
    attach()
    import_hidden()
