"""See a step's backward passes, which are its micro-batches.

A model may be called several times for one: a query and its document, a generator and its critic.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from fp8doctor.running.traceback_frames import without_own_frame
from fp8doctor.stacks.torch_private import in_backward


class Backwards:
    """Calls ``ran(roots)`` for each backward pass of this thread from `begin` to `end`.

    ``Tensor.backward`` reads the patched function. The passes inside of a recomputed region are none. ``ran``
    may return a function to call after the pass.
    """

    def __init__(self, ran: Callable[[Any], Callable[[], None] | None]) -> None:
        self._ran, self._thread = ran, get_ident()

    def begin(self) -> None:
        """Patch ``torch.autograd.backward``."""
        own: Any = torch.autograd.backward
        watch = self

        def backward(*arguments: Any, **settings: Any) -> Any:
            then = None
            if get_ident() == watch._thread and in_backward() is False:
                then = watch._ran(arguments[0] if arguments else settings.get("tensors"))
            try:
                result = own(*arguments, **settings)
            except BaseException as error:
                without_own_frame(error)
                raise
            if then is not None:
                then()
            return result

        self._own, self._placed = own, backward
        torch.autograd.backward = backward

    def end(self) -> None:
        """Restore it, unless other code has patched it meanwhile."""
        if torch.autograd.backward is self._placed:
            torch.autograd.backward = self._own
