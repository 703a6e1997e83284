"""One line on stderr with the current activity and the elapsed time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from fp8doctor.stages import Course, Doing

REFRESHED_S = 0.5
"""Seconds between updates of the clock."""


@contextmanager
def progress_line(*, ascii: bool = False) -> Iterator[Callable[[Doing], None]]:
    """Yield a function that overwrites the progress line; remove the line at the end."""
    from tqdm import tqdm

    class Line(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # otherwise tqdm's monitor thread stays

    course, dot = Course(), "-" if ascii else "·"
    with Line(bar_format="{desc}", leave=False, file=sys.stderr) as line:
        ended = Event()

        def show() -> None:
            line.set_description_str(course.fitted(shutil.get_terminal_size().columns - 1, dot))

        def tick() -> None:
            while not ended.wait(REFRESHED_S):
                show()

        def tell(doing: Doing) -> None:
            course.take(doing)
            show()

        thread = Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield tell
        finally:
            ended.set()
            thread.join()


def someone_watches() -> bool:
    """Check whether stderr is a terminal or a notebook cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" or (sys.stderr is not None and sys.stderr.isatty())
