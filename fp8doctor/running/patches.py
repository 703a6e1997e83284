"""Replace functions of libraries for a while, and keep our failures and frames out of the script."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


class Patch:
    """Calls ``before`` and ``after`` around a library's function from `begin` to `end`.

    ``before`` gets the call's arguments, and ``after`` what it returned, unless that is None. If other code
    replaces the function meanwhile, it is left alone.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        before: Callable[..., Any],
        after: Callable[[Any], object] = lambda noted: None,
    ) -> None:
        self._owner, self._name, self._before, self._after = owner, name, before, after
        self.active = False

    def begin(self) -> None:
        """Replace it, if the owner has it."""
        own = getattr(self._owner, self._name, None)
        if own is None or self.active:
            return

        @functools.wraps(own)  # so that it pickles
        def replacement(*arguments: Any, **named: Any) -> Any:
            noted = None
            if self.active:
                with unnoticed():
                    noted = self._before(*arguments, **named)
            try:
                return own(*arguments, **named)
            except BaseException as error:
                without_own_frames(error)
                raise
            finally:
                if noted is not None:
                    with unnoticed():
                        self._after(noted)

        self._own, self._placed, self.active = own, replacement, True
        setattr(self._owner, self._name, replacement)

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


def without_own_frames(error: BaseException) -> None:
    """Drop our leading frames; the script's or a library's code raised below them."""
    ours = (_FOLDER, contextlib.__file__)
    while error.__traceback__ is not None:
        if not error.__traceback__.tb_frame.f_code.co_filename.startswith(ours):
            return
        error.__traceback__ = error.__traceback__.tb_next
