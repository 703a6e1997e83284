"""The one exception that is shown to a user as a sentence."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The message is a sentence that says what; ``detail`` holds the user's own
    frames."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail
