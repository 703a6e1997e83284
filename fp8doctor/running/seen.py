"""What was heard of a script."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8doctor.facts import Facts, Ranks


@dataclass
class Seen:
    """What was heard of a script so far."""

    facts: Facts | None = None
    complete: bool = False
    """Whether its window was watched to the end."""
    torch: bool = False
    """Whether it imported torch."""
    stepped: bool = False
    """Whether an optimizer stepped in its process."""
    stepped_in_fork: bool = False
    running: bool = False
    """Whether it is still being listened to."""
    ended: bool = False
    """Whether Python ended its process in the ordinary way."""
    error: str | None = None
    """The exception that ended it, in a line; None where none did."""
    steps: int | None = None
    """Steps that were counted of the optimizer that holds most; None where it could not say."""
    all_steps: int | None = None
    """Steps of all its optimizers, to its end; None where it could not say."""
    notes: list[str] = field(default_factory=list)
    ranks: Ranks | None = None
    """All processes of its job; None where it is the only one."""
