"""Lists of repeated blocks, such as decoder layers: units that are compiled, checkpointed and cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from fp8doctor.examine.compile_marks import forward_of_torch, is_called
from fp8doctor.examine.linears import Found
from fp8doctor.examine.walk import Place, Tree, experts_of
from fp8doctor.facts import Blocks
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks.lineage import class_name
from fp8doctor.stacks.looking import is_a


def find_blocks(tree: Tree, found_layers: Sequence[Found]) -> tuple[Blocks, ...]:
    """Find the outermost lists of at least two modules of one kind with linear-like layers inside."""
    inside: Counter[int] = Counter()
    widths: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for owner, layer in found_layers:
        above = owner.parent
        while above:
            inside[id(above)] += 1
            widths[id(above)][0].add(layer.in_features)
            widths[id(above)][1].add(layer.out_features)
            above = above.parent
    through = {key: into & out for key, (into, out) in widths.items()}
    layers = {id(owner) for owner, _ in found_layers}
    found, chosen = [], set()
    for place in tree.places:
        if place.parent and id(place.parent) in chosen:
            chosen.add(id(place))
        elif is_blocks(place, inside, through):
            chosen.add(id(place))
            found.append(_blocks(place, inside, layers))
    return tuple(found)


def is_blocks(place: Place, inside: Counter[int], through: Mapping[int, set[int]]) -> bool:
    """Whether the children of this list are repeated blocks; a list of bare Linears or of experts is none.

    Blocks of several classes that take turns, such as self- and cross-attention or attention and Mamba, have
    one width that goes ``through`` each of them.
    """
    if not any(
        is_a(place.module, kind) for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    ) or experts_of(place):
        return False
    if len(place.children) < 2 or not all(inside[id(child)] for child in place.children):
        return False
    classes = {class_name(type(child.module)) for child in place.children}
    take_turns = 2 * len(classes) <= len(place.children)
    return len(classes) == 1 or (
        take_turns and bool(set.intersection(*(through[id(child)] for child in place.children)))
    )


def called_parts(
    block: Place, inside: Counter[int], layers: set[int], level: int = 0
) -> list[tuple[int, Place]]:
    """Find what is called of a block and holds layers, with its level: the block itself at 0, or what lies in
    it where it has no forward of its own, as a ModuleList has none."""
    if is_called(block.module):
        return [(level, block)]
    return [
        part
        for child in block.children
        if inside[id(child)] or id(child) in layers
        for part in called_parts(child, inside, layers, level + 1)
    ]


def _level(parts: list[tuple[int, Place]], layers: set[int]) -> int | None:
    levels = {level for level, _ in parts}
    if len(levels) != 1 or any(id(part) in layers for _, part in parts):
        return None
    (level,) = levels
    wrapped = level > 0 and any(forward_of_torch(part.module) for _, part in parts)
    beside = (child for _, part in parts if part.parent for child in part.parent.children)
    return None if wrapped and (level > 1 or not all(is_called(each.module) for each in beside)) else level


def _blocks(place: Place, inside: Counter[int], layers: set[int]) -> Blocks:
    parts = [called_parts(child, inside, layers) for child in place.children]
    together = [part for each in parts for part in each]
    checkpointed = [child.checkpointed for child in place.children]
    return Blocks(
        name=place.name,
        kind=Counter(class_name(type(child.module)) for child in place.children).most_common(1)[0][0],
        container="ModuleDict" if is_a(place.module, nn.ModuleDict) else "list",
        forward_of_torch=any(forward_of_torch(part.module) for _, part in together),
        level=_level(together, layers),
        count=len(place.children),
        compiled=sum(bool(each) and all(part.compiled is not None for _, part in each) for each in parts),
        checkpointed=NOT_RECORDED
        if NOT_RECORDED in checkpointed
        else sum(each is not None for each in checkpointed),
    )
