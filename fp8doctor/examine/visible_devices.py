"""Which GPUs a process sees: NVML's, chosen by ``CUDA_VISIBLE_DEVICES`` or by the UUIDs that torch sees."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slice:
    """A MIG instance."""

    handle: Any
    uuid: str


@dataclass(frozen=True)
class Card:
    """One GPU that NVML lists."""

    handle: Any
    uuid: str
    name: str
    slices: tuple[Slice, ...]


Sight = tuple[int, int | None]
"""One device that the process sees: index of the card, and of its MIG slice if it is one."""


def read_visible_devices(variable: str | None, cards: Sequence[Card]) -> list[Sight]:
    """Tell what ``CUDA_VISIBLE_DEVICES`` leaves: a list of indices, of GPU UUIDs or of MIG UUIDs, the latter
    perhaps cut short.

    As the driver reads it (580, tried on an H200): the first entry that fits nothing ends the list, an entry
    that stands twice before that empties it.
    """
    everything: list[Sight] = [_whole(i, card) for i, card in enumerate(cards)]
    if variable is None:
        return everything
    sights: list[Sight] = []
    kind = variable[:4] if variable.startswith(("GPU-", "MIG-")) else "index"
    for entry in variable.split(","):
        sight = _by_index(entry, everything) if kind == "index" else _by_uuid(entry, kind, cards)
        if sight is None:
            break
        if sight in sights:
            return []
        sights.append(sight)
    return sights


def _whole(index: int, card: Card) -> Sight:
    """Describe a card as CUDA shows it: in MIG mode its first slice."""
    return index, 0 if card.slices else None


def _by_index(entry: str, everything: list[Sight]) -> Sight | None:
    """Return the entry as C's ``strtoul`` reads it: ``1gpu`` is 1, anything that is no number is none."""
    number = re.match(r"[+-]?\d+", entry.strip(), re.ASCII)
    index = int(number.group()) if number else -1
    return everything[index] if 0 <= index < len(everything) else None


def _by_uuid(entry: str, kind: str, cards: Sequence[Card]) -> Sight | None:
    """Find the only card or slice whose UUID begins with the entry."""
    if not entry.startswith(kind) or entry == kind:
        return None
    if kind == "GPU-":
        found = [_whole(i, card) for i, card in enumerate(cards) if card.uuid.startswith(entry)]
    else:
        found = [
            (i, j)
            for i, card in enumerate(cards)
            for j, part in enumerate(card.slices)
            if part.uuid.startswith(entry)
        ]
    return found[0] if len(found) == 1 else None


def order_is_unknown(variable: str | None, sights: list[Sight], cards: Sequence[Card]) -> bool:
    """Whether indices choose among different models in an order that only CUDA knows."""
    by_index = variable is not None and not variable.startswith(("GPU-", "MIG-"))
    mixed = len({card.name for card in cards}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    return by_index and mixed and 0 < len(sights) < len(cards)


def match_uuids(uuids: Sequence[str], cards: Sequence[Card]) -> list[Sight] | None:
    """List the cards and slices that bear these UUIDs; None when one of them is unknown to NVML."""
    known: dict[str, Sight] = {
        card.uuid.removeprefix("GPU-"): _whole(i, card) for i, card in enumerate(cards)
    }
    known |= {
        part.uuid.removeprefix("MIG-"): (i, j)
        for i, card in enumerate(cards)
        for j, part in enumerate(card.slices)
    }
    sights = [known.get(uuid.removeprefix("GPU-").removeprefix("MIG-")) for uuid in uuids]
    return None if None in sights else [sight for sight in sights if sight is not None]
