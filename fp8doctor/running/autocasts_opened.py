"""See whether a step opens an autocast that is not around the model's call."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch


class AutocastsOpened:
    """Notes the autocasts that this thread opens from `begin` to `end` while gradients are computed.

    Meanwhile the class's ``__enter__`` is patched, so contexts and decorators that exist are seen too. Dynamo
    never traces into it.
    """

    def __init__(self) -> None:
        self.seen = False
        """An enabled one was opened."""
        self._thread = get_ident()

    def begin(self) -> None:
        """Patch ``__enter__``."""
        own: Any = torch.autocast.__enter__
        opened = self

        def enter(context: Any) -> Any:
            if get_ident() == opened._thread and torch.is_grad_enabled() and context._enabled:
                opened.seen = True
            return own(context)

        self._own, self._placed = own, enter
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]

    def end(self) -> None:
        """Restore it, unless other code has patched it meanwhile."""
        if torch.autocast.__enter__ is self._placed:
            torch.autocast.__enter__ = self._own  # type: ignore[method-assign]
