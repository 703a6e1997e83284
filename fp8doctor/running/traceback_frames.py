"""Exceptions of the user's that pass through a function of ours: it does not stay in their tracebacks."""

from __future__ import annotations


def without_own_frame(error: BaseException) -> None:
    """Take the frame that handles ``error`` out of its traceback; a bare ``raise`` puts none back."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
