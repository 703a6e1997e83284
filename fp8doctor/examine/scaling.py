"""How the FP8 layers scale: dtypes of the forward, and the history of delayed scaling."""

from __future__ import annotations

import msgspec

from fp8doctor.examine.walk import Tree
from fp8doctor.facts import Scaling
from fp8doctor.stacks import scaling


def examine_scaling(tree: Tree) -> tuple[Scaling, ...]:
    """List every way of scaling in the model, with the number of its layers and the first of them."""
    found: dict[Scaling, list[str]] = {}
    for place in tree.places:
        each = scaling(place.module)
        if each is not None:
            found.setdefault(each, []).append(place.name)
    return tuple(
        msgspec.structs.replace(each, layers=len(names), first=names[0]) for each, names in found.items()
    )
