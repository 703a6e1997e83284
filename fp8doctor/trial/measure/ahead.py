"""What a trial asks of who compiles its arms beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.facts.no_number import NoNumber

Work = tuple[str, int]
"""The name of an arm, and the number of the cut at which it is compiled."""

PATIENCE = 0.5
"""Share of the time that is left for a build in which another process is waited for that compiles it already.
A choice: what waits does not compile the same beside it, and a process that hangs does not cost the arm."""


class Ahead(Protocol):
    """Compiles arms beside the trial, before it comes to them."""

    def know(self, facts: Facts, changed: Collection[str] = ()) -> None:
        """Take the facts that the arms are planned with from now on. What was done for the ``changed`` ones,
        or is being done, counts no more."""

    def begin(
        self, work: Sequence[Work], cuts: Sequence[Mapping[str, int] | None], *, more: bool = False
    ) -> bool:
        """Have this compiled, the first of it first, and tell whether anyone is there to do it.

        ``cuts`` tells by number how many blocks each list keeps; None is the smallest of all cuts. ``more``
        says that it is called again: then all of the work is told anew in its order, what was begun before
        included, and a number means the same cut.
        """

    def paused(self) -> AbstractContextManager[None]:
        """Keep the GPU free of what is done beside the trial, as far as that can be. Nothing may be compiled
        meanwhile."""

    def take(self, work: Work, patience_s: float | None) -> float | None:
        """Learn that the trial itself comes to it now, and return the seconds that it took to compile ahead.

        What is being compiled is waited for, so long at most. None where it was not compiled.
        """

    def pass_by(self, arm: str, least_s: float) -> None:
        """Wait no more for an arm that was begun less than so many seconds ago."""

    def took_s(self, arm: str) -> float | None:
        """Return the seconds that an arm took to compile ahead at every cut that was asked for; None where it
        is not compiled at all of them."""

    def lost(self, arm: str) -> str | None:
        """Tell how an arm took the GPU from who compiled it; None where it did not."""

    def outcomes(self) -> dict[str, float | None]:
        """Tell `took_s` of every arm that was asked for."""

    def under_way(self) -> frozenset[str]:
        """Name the arms that are compiled now, or will be."""

    def begun(self) -> frozenset[str]:
        """Name the arms that are compiled now."""

    def wait_for_one(self, arms: Collection[str], timeout_s: float) -> frozenset[str]:
        """Wait, so long at most, until nobody compiles one of these arms any more, and name those that nobody
        does."""

    def give_way(self) -> bool:
        """End the last that was begun beside the trial, which others take up again, for its memory; tell
        whether there was any."""

    def end(self) -> bool:
        """End all that is done beside the trial, and tell whether there was any."""


class Nobody:
    """Compiles nothing."""

    def know(self, facts: Facts, changed: Collection[str] = ()) -> None:
        pass

    def begin(
        self, work: Sequence[Work], cuts: Sequence[Mapping[str, int] | None], *, more: bool = False
    ) -> bool:
        return False

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def take(self, work: Work, patience_s: float | None) -> float | None:
        return None

    def pass_by(self, arm: str, least_s: float) -> None:
        pass

    def took_s(self, arm: str) -> float | None:
        return None

    def lost(self, arm: str) -> str | None:
        return None

    def outcomes(self) -> dict[str, float | None]:
        return {}

    def under_way(self) -> frozenset[str]:
        return frozenset()

    def begun(self) -> frozenset[str]:
        return frozenset()

    def wait_for_one(self, arms: Collection[str], timeout_s: float) -> frozenset[str]:
        return frozenset(arms)

    def give_way(self) -> bool:
        return False

    def end(self) -> bool:
        return False


def patience_s(until: float) -> float | None:
    """Return how long another process is waited for; None without an end."""
    return None if math.isinf(until) else PATIENCE * max(0.0, until - time.monotonic())


def lost_beside(ahead: Ahead, arm: str) -> NoNumber | None:
    """Tell that an arm cost a process beside the trial its GPU. The step as it is is tried all the same."""
    lost = ahead.lost(arm)
    return NoNumber(Reason.TOOK_PROCESS_DOWN, lost) if lost and arm != ArmName.AS_IS else None
