"""Objects of the script that are alive, those included that ``gc.freeze()`` hides from a search.

Long trainings freeze what exists before they fork workers or after their first step.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any


class Living:
    """What is alive. It keeps nothing alive itself."""

    def __init__(self) -> None:
        self._noted: dict[int, weakref.ref[Any]] = {}

    def note(self, objects: Iterable[Any]) -> None:
        """Remember objects as long as others hold them; a class may forbid it."""
        for each in objects:
            with contextlib.suppress(TypeError):
                self._noted[id(each)] = weakref.ref(each)

    def __iter__(self) -> Iterator[Any]:
        """All that the garbage collector lists and all that were noted, which may come twice."""
        yield from gc.get_objects()
        for reference in list(self._noted.values()):
            if (each := reference()) is not None:
                yield each

    def forget(self) -> None:
        """Remember nothing any more."""
        self._noted.clear()
