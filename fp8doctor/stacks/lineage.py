"""What a class is called and descends from, told by names so that nothing has to be imported."""

from __future__ import annotations

import functools
from collections.abc import Callable

Ancestor = tuple[str, str]
"""Module and qualified name of a class, such as ``("torch.nn.modules.linear", "Linear")``."""


def _lineage(kind: type) -> tuple[Ancestor, ...]:
    mro = kind.__mro__
    if len(mro) > 2 and mro[1].__name__ == "FSDPModule":
        mro = mro[2:]
    return tuple((each.__module__, each.__qualname__) for each in mro)


lineage: Callable[[type], tuple[Ancestor, ...]] = functools.lru_cache(maxsize=1024)(_lineage)
"""Module and qualified name of every class in the method resolution order, the class itself first.

FSDP2's own class (``FSDPLinear``) and its mixin are left out: the layer is still what it was.
"""


def ancestor(kind: type, module_prefix: str, names: tuple[str, ...]) -> str | None:
    """Name the first class of the lineage that is one of ``names`` under ``module_prefix``."""
    for module, name in lineage(kind):
        if name in names and module.startswith(module_prefix):
            return f"{module}.{name}"
    return None


def class_name(kind: type) -> str:
    """Qualified name of a class, the one that FSDP2 puts in front taken off."""
    module, name = lineage(kind)[0]
    return f"{module}.{name}"
