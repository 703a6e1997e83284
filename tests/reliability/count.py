"""What a part of the kit has tried, and what of it failed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Count:
    """Attempts of one part; each has failed or passed."""

    part: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> int:
        return self.tried - len(self.failures)

    @contextmanager
    def attempt(self, name: str) -> Iterator[list[str]]:
        """One attempt. What is put into the list, or raised, is why it failed."""
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
