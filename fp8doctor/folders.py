"""Folders for a while, which whoever kills the process can find and remove."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import tempfile
from pathlib import Path


def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder of this process, which is removed at the end of a ``with``."""
    return tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()))


def remove_folders_of(process: int) -> None:
    """Remove what a process that was killed left of its own folders."""
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(_prefix(process))}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(process: int) -> str:
    """Name a process among those of all machines and containers that may share the folder."""
    try:
        numbered_by = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no Linux: numbers of processes are the machine's
        numbered_by = 0
    return f"fp8doctor-{platform.node()}-{numbered_by}-{process}-"
