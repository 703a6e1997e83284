"""What Unsloth does to a job, which no mark of its modules tells."""

from __future__ import annotations

from fp8doctor.facts import Facts, recorded


def under_unsloth(facts: Facts) -> bool:
    """Whether Unsloth is loaded. It gives layers a forward and a backward of its own, and since 2026.10
    compiles every block of a decoder by itself (``models/_block_compile.py``)."""
    unsloth = facts.packages().get("unsloth")
    return unsloth is not None and recorded(unsloth, "imported") and unsloth.imported
