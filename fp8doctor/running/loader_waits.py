"""When the training thread waits inside torch's DataLoader, for a while."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from fp8doctor.running.clock import Moment
from fp8doctor.running.traceback_frames import without_own_frame


class LoaderWaits:
    """Calls ``waited(begin, end)`` after every batch that this thread takes from a DataLoader of torch.

    The iterator's class is changed from `begin` to `end`, so that iterators that exist are seen too.
    """

    def __init__(self, now: Callable[[], Moment], waited: Callable[[Moment, Moment], None]) -> None:
        self._now, self._waited, self._thread = now, waited, get_ident()
        self._own: Callable[[Any], Any] = _BaseDataLoaderIter.__next__
        self._depth = 0

    def begin(self) -> None:
        """Stand before the iterator's ``__next__``."""
        own, waits = self._own, self

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
        _BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        """Put the iterator's own back, unless someone else has changed it meanwhile."""
        if _BaseDataLoaderIter.__next__ is self._placed:
            _BaseDataLoaderIter.__next__ = self._own  # type: ignore[method-assign, assignment]
