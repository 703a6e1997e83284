"""Environment variables that looking and timing leave as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def variables_put_back() -> Iterator[None]:
    """Put the variables back: torch's compiler sets one when it is imported."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
