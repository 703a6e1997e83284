"""What a benchmark ran on, for the line above its table."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def machine(packages: Iterable[str] = ()) -> str:
    """Processor, cores that this process may use, and versions: no number without them."""
    versions = [f"{package} {metadata.version(package)}" for package in packages]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return " · ".join((processor(), f"{cores} cores", f"Python {platform.python_version()}", *versions))


def processor() -> str:
    """The processor by its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name), "") or platform.processor() or platform.machine()
