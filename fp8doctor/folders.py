"""Temporary folders that whoever kills the process can find and remove."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import tempfile
from pathlib import Path


def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder of this process that is removed at the end of a ``with``."""
    return tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()))


def remove_folders_of(process: int) -> None:
    """Remove the temporary folders of a killed process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(_prefix(process))}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(process: int) -> str:
    """Name a process uniquely among the machines and containers that share the folder."""
    try:
        numbered_by = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux: process ids are unique on the machine
        numbered_by = 0
    return f"fp8doctor-{platform.node()}-{numbered_by}-{process}-"
