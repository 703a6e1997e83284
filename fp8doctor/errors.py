"""The only exception that users see, as a sentence."""

from __future__ import annotations


class UserError(Exception):
    """A problem that the user can solve.

    The message is a sentence that names it; ``detail`` holds the user's own stack frames.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail
