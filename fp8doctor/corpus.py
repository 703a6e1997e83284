"""Counts of how often a check fired on public recipes, written by `tests/recipes`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def counts() -> dict[str, Any]:
    """Read the counts that ship with the package."""
    import json

    found: dict[str, Any] = json.loads(Path(__file__).with_name("corpus.json").read_text("utf-8"))
    return found


def fired(code: str) -> str:
    """Write a sentence on how often a check raised a warning or error on the corpus.

    Empty for a check that raises neither, or is not part of this package.
    """
    of = counts()
    if code not in of["checks"]:
        return ""
    check = of["checks"][code]
    judged = f"rightly: {check['rightly']}, false alarms: {check['false_alarm']}"
    open_ones = f", not judged: {check['not_judged']}" if check["not_judged"] else ""
    waits = f"; {check['unknown']} of them it cannot judge without a trial" if check["unknown"] else ""
    return (
        f"Fired on {check['fired'] or 'none'} of {of['recipes']} public recipes"
        f"{f' ({judged}{open_ones})' if check['fired'] else ''}{waits}, and on none of "
        f"{of['untouched_models']} untouched models."
    )
