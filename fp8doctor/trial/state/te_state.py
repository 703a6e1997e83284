"""Transformer Engine's process-wide FP8 state, kept from replicas.

Whenever an autocast closes, or its backward ends, the library updates the scales of every module that ever
registered in its global buffers. So each timed replica has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fp8doctor.stacks import te_private
from fp8doctor.stacks.te_private import autocast_is_open
from fp8doctor.stacks.transformer_engine import autocast_with

Buffers = dict[str, dict[str, Any]]
"""Name of a global buffer -> its replacement for some replicas."""


@contextmanager
def buffers_apart(own: Buffers | None = None) -> Iterator[None]:
    """Use the global buffers of ``own`` inside, which gets an empty one for each that it lacks."""
    state, own = te_private.state(), {} if own is None else own
    kept = {
        name: getattr(state, name)
        for name in te_private.BUFFERS
        if isinstance(getattr(state, name, None), dict)
    }
    for name in kept:
        setattr(state, name, own.setdefault(name, {}))
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(state, name, value)


def open_autocast() -> Callable[[], AbstractContextManager[object]]:
    """Return a context that opens the current autocast again, or an empty one if none is open."""
    return partial(autocast_with, te_private.open_recipe()) if autocast_is_open() else nullcontext
