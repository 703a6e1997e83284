"""Keep our frames out of the tracebacks of the script's exceptions."""

from __future__ import annotations

import contextlib
import os

_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def without_own_frame(error: BaseException) -> None:
    """Drop the frame that handles ``error``; a bare ``raise`` adds none."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def without_own_frames(error: BaseException) -> None:
    """Drop our leading frames; a handler of the script's raised below them."""
    while error.__traceback__ is not None and _is_ours(error.__traceback__.tb_frame.f_code.co_filename):
        error.__traceback__ = error.__traceback__.tb_next


def _is_ours(file: str) -> bool:
    return file.startswith((_FOLDER, contextlib.__file__))
