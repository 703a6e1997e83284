"""What a class is called and descends from, told by names so that nothing has to be imported."""

from __future__ import annotations

from weakref import WeakKeyDictionary

Ancestor = tuple[str, str]
"""Module and qualified name of a class, such as ``("torch.nn.modules.linear", "Linear")``."""

_KNOWN: WeakKeyDictionary[type, tuple[Ancestor, ...]] = WeakKeyDictionary()
"""The lineages that were asked for; a user's class is not kept alive by it."""


def lineage(kind: type) -> tuple[Ancestor, ...]:
    """List module and qualified name of every class in the method resolution order, the class itself first.

    The class that FSDP2 puts in front (``FSDPLinear``) and its mixin are left out: the layer is still what it
    was. A class that says it is of no module has an empty one.
    """
    known = _KNOWN.get(kind)
    if known is None:
        mro = kind.__mro__
        if len(mro) > 2 and mro[1].__name__ == "FSDPModule":
            mro = mro[2:]
        known = tuple((str(each.__module__ or ""), each.__qualname__) for each in mro)
        _KNOWN[kind] = known
    return known


def ancestor(kind: type, module_prefix: str, names: tuple[str, ...]) -> str | None:
    """Name the first class of the lineage that is one of ``names`` under ``module_prefix``."""
    for module, name in lineage(kind):
        if name in names and module.startswith(module_prefix):
            return f"{module}.{name}"
    return None


def home(kind: type) -> str:
    """Name the Python module that a class is from, the one that FSDP2 puts in front taken off."""
    return lineage(kind)[0][0]


def class_name(kind: type) -> str:
    """Qualified name of a class, the one that FSDP2 puts in front taken off."""
    module, name = lineage(kind)[0]
    return f"{module}.{name}"
