"""What a class alone says of its modules: a model has thousands of modules, of a few classes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar, cast

from fp8doctor.stacks.looking import lineage

Answer = TypeVar("Answer")


class Kind:
    """One class of a module tree. It lives as long as one walk, since users patch classes between two."""

    def __init__(self, of: type) -> None:
        self.of = of
        self.lineage = lineage(of)
        self._answers: dict[Hashable, object] = {}

    def once(self, ask: Callable[[type], Answer]) -> Answer:
        """What ``ask`` says of the class, asked the first time only."""
        if ask not in self._answers:
            self._answers[ask] = ask(self.of)
        return cast(Answer, self._answers[ask])

    def descends_from(self, module_prefix: str, *names: str) -> bool:
        """Whether the class is one of ``names`` of a library, or derived from one."""
        return any(name in names and module.startswith(module_prefix) for module, name in self.lineage)
