"""When the training thread waits inside torch's DataLoader, for a while."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from fp8doctor.running.clock import Moment
from fp8doctor.running.traceback_frames import without_own_frame
from fp8doctor.stacks.torch_private import loader_iterator


class LoaderWaits:
    """Calls ``waited(begin, end)`` after every batch that this thread takes from a DataLoader of torch.

    The iterator's class is changed from `begin` to `end`, so that iterators that exist are seen too.
    """

    def __init__(self, now: Callable[[], Moment], waited: Callable[[Moment, Moment], None]) -> None:
        self._now, self._waited, self._thread = now, waited, get_ident()
        self._kind = loader_iterator()
        self._own: Callable[[Any], Any] | None = getattr(self._kind, "__next__", None)
        self._depth = 0

    def begin(self) -> None:
        """Stand before the iterator's ``__next__``; nowhere if this torch has no such iterator."""
        own, waits = self._own, self
        if own is None:
            return

        def next_batch(iterator: Any) -> Any:
            if get_ident() != waits._thread:
                return own(iterator)
            began = waits._now()
            waits._depth += 1
            try:
                batch = own(iterator)
            except BaseException as error:
                without_own_frame(error)
                raise
            finally:
                waits._depth -= 1
                if not waits._depth:  # a DataLoader may read from another
                    waits._waited(began, waits._now())
            return batch

        self._placed = next_batch
        self._kind.__next__ = next_batch

    def end(self) -> None:
        """Put the iterator's own back, unless someone else has changed it meanwhile."""
        if self._own is not None and self._kind.__next__ is self._placed:
            self._kind.__next__ = self._own
