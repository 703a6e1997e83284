"""Folders for a while, which whoever kills the process can find and remove."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder of this process, which is removed at the end of a ``with``."""
    return tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()))


def remove_folders_of(process: int) -> None:
    """Remove what a process that was killed left of its own folders."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(process)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(process: int) -> str:
    return f"fp8doctor-{process}-"
