"""What a part of the kit has tried, and what of it failed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar


class Enough(Exception):
    """The time of a part is over; what it has tried so far counts."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count


@dataclass
class Count:
    """Attempts of one part; each has failed or passed."""

    part: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    deadline: ClassVar[float] = math.inf
    """When no further attempt begins, as `time.monotonic` has it."""

    @property
    def passed(self) -> int:
        return self.tried - len(self.failures)

    @contextmanager
    def attempt(self, name: str) -> Iterator[list[str]]:
        """One attempt. What is put into the list, or raised, is why it failed. Raises `Enough`."""
        if time.monotonic() > Count.deadline:
            raise Enough(self)
        self.tried += 1
        began, why = time.process_time(), list[str]()
        try:
            yield why
        except Exception as error:
            why.append(f"{type(error).__name__}: {error}")
        finally:
            self.seconds += time.process_time() - began
            if why:
                self.failures.append(f"{name}: {'; '.join(why)[:300]}")
