"""The name that the model's own configuration gives it."""

from __future__ import annotations

from fp8doctor.examine.network import CONFIGS
from fp8doctor.examine.walk import Tree
from fp8doctor.facts.scrub import scrub
from fp8doctor.stacks.looking import state_of

NAMES = ("_name_or_path", "name_or_path", "name")
"""Where a configuration keeps it: transformers, others, litgpt."""


def configured_name(tree: Tree) -> str | None:
    """Give the last part of the first name or path in the tree, without folders; None without one."""
    seen: set[int] = set()
    for place in tree.places:
        state = state_of(place.module)
        for attribute in CONFIGS:
            config = state.get(attribute)
            if config is None or id(config) in seen:
                continue
            seen.add(id(config))
            settings = config if type(config) is dict else state_of(config)
            for name in NAMES:
                if isinstance(value := settings.get(name), str) and value:
                    return scrub(value.replace("\\", "/").rstrip("/").rpartition("/")[2]) or None
    return None
