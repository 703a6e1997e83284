"""One line on stderr that says what is done, and for how long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

REFRESHED_S = 0.5
"""Seconds between two looks of the clock."""


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Give a function that writes what is done over what was done before; the line goes away at the end."""
    from tqdm import tqdm

    class Line(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # tqdm's own thread would stay for ever

    with Line(bar_format="{desc} {elapsed}", leave=False, file=sys.stderr) as line:
        ended = Event()

        def tick() -> None:
            while not ended.wait(REFRESHED_S):
                line.refresh()

        thread = Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield line.set_description_str
        finally:
            ended.set()
            thread.join()


def someone_watches() -> bool:
    """Whether stderr is a terminal, or the output of a notebook's cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" or (sys.stderr is not None and sys.stderr.isatty())
