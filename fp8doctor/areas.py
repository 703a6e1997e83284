"""The areas of the checks, and the severities of findings."""

from __future__ import annotations

from typing import Literal

Severity = Literal["info", "warning", "error"]

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""Ascending."""

AREAS = (
    "environment",
    "device",
    "engagement",
    "shapes",
    "compilation",
    "checkpointing",
    "memory",
    "numerics",
    "distributed",
    "step",
)
"""Folders of ``checks/``, in the order in which the report shows them."""
