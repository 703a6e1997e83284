"""Files that fp8doctor writes."""

from __future__ import annotations

from pathlib import Path

from fp8doctor.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write a file in one go. Raises `UserError` naming the reason."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
