"""Exceptions of the user's that pass through a function of ours: it does not stay in their tracebacks."""

from __future__ import annotations

import contextlib
import os

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def without_own_frame(error: BaseException) -> None:
    """Take the frame that handles ``error`` out of its traceback; a bare ``raise`` puts none back."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def without_own_frames(error: BaseException) -> None:
    """Take all frames of ours out of the front of its traceback; a handler of the script's raised below."""
    while error.__traceback__ is not None and _is_ours(error.__traceback__.tb_frame.f_code.co_filename):
        error.__traceback__ = error.__traceback__.tb_next


def _is_ours(file: str) -> bool:
    return file.startswith((_FOLDER, contextlib.__file__))
