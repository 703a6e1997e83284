"""Replace functions of libraries for a while, and keep our failures and frames out of the script."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class Patch:
    """Replaces an attribute from `begin` to `end`, unless other code has replaced it meanwhile."""

    def __init__(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """``around`` makes the replacement from the original."""
        self._owner, self._name, self._around = owner, name, around
        self.active = False

    def begin(self) -> None:
        """Replace it, if the owner has it."""
        own = getattr(self._owner, self._name, None)
        if own is not None and not self.active:
            self._own, self._placed, self.active = own, self._around(own), True
            setattr(self._owner, self._name, self._placed)

    def end(self) -> None:
        if self.active and getattr(self._owner, self._name) is self._placed:
            setattr(self._owner, self._name, self._own)
        self.active = False


@contextlib.contextmanager
def unnoticed(failed: Callable[[Exception], object] = lambda error: None) -> Iterator[None]:
    """Let no mode of the script's see our work, and no failure of ours leave it."""
    from fp8doctor.stacks.torch_private import without_modes  # our modules before torch are few

    try:
        with without_modes():
            yield
    except Exception as error:
        logging.getLogger("fp8doctor").debug("fp8doctor failed in the script's process", exc_info=True)
        failed(error)


def without_own_frame(error: BaseException) -> None:
    """Drop the frame that handles ``error``; a bare ``raise`` adds none."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def without_own_frames(error: BaseException) -> None:
    """Drop our leading frames; a handler of the script's raised below them."""
    ours = (_FOLDER, contextlib.__file__)
    while error.__traceback__ is not None:
        if not error.__traceback__.tb_frame.f_code.co_filename.startswith(ours):
            return
        error.__traceback__ = error.__traceback__.tb_next
