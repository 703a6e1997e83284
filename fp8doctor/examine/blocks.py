"""Lists of repeated blocks, such as decoder layers: units that are compiled, checkpointed and cut."""

from __future__ import annotations

from collections import Counter

from torch import nn

from fp8doctor.examine.compile_marks import forward_of_torch
from fp8doctor.examine.walk import Place, Tree, is_expert_list
from fp8doctor.facts import Blocks
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks.lineage import class_name
from fp8doctor.stacks.looking import is_a


def find_blocks(tree: Tree, owners: list[Place]) -> tuple[Blocks, ...]:
    """The outermost lists of at least two modules of one class with linear-like layers inside. ``owners``: a
    place per layer."""
    inside: Counter[int] = Counter()
    for owner in owners:
        above = owner.parent
        while above:
            inside[id(above)] += 1
            above = above.parent
    found, chosen = [], set()
    for place in tree.places:
        if place.parent and id(place.parent) in chosen:
            chosen.add(id(place))
        elif is_blocks(place, inside):
            chosen.add(id(place))
            found.append(_blocks(place, inside))
    return tuple(found)


def is_blocks(place: Place, inside: Counter[int]) -> bool:
    """Whether the children of this list are repeated blocks; a list of bare Linears or of experts is none."""
    if not any(
        is_a(place.module, kind) for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    ) or is_expert_list(place):
        return False
    classes = {class_name(type(child.module)) for child in place.children}
    return (
        len(place.children) > 1 and len(classes) == 1 and all(inside[id(child)] for child in place.children)
    )


def _blocks(place: Place, inside: Counter[int]) -> Blocks:
    checkpointed = [child.checkpointed for child in place.children]
    return Blocks(
        name=place.name,
        kind=class_name(type(place.children[0].module)),
        container="ModuleDict" if is_a(place.module, nn.ModuleDict) else "list",
        forward_of_torch=forward_of_torch(place.children[0].module),
        count=len(place.children),
        compiled=sum(child.compiled is not None for child in place.children),
        checkpointed=NOT_RECORDED
        if NOT_RECORDED in checkpointed
        else sum(each is not None for each in checkpointed),
        linears=inside[id(place)],
    )
