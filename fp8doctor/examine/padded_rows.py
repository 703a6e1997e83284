"""Whether a user's code may pad the rows of routed experts, read from the names that it uses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

from fp8doctor.examine import compile_marks
from fp8doctor.examine.walk import Place
from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import forward_of, read, read_class, state_of

PADS = re.compile(r"pad|align|permute_indices", re.IGNORECASE)
"""In the names of functions that pad token groups: ``indices_padding_wrapper``, ``TOKEN_GROUP_ALIGN_SIZE_M``,
``generate_permute_indices`` (torchtitan), ``pad_token_groups`` (torchao), ``Fp8Padding`` (TE)."""

NOT_PADDING = re.compile(r"padding_(idx|mask|side)|pad_token_id")
"""Names that speak of a batch's padding."""

LEVELS_UP = 3
"""From the module that holds the expert weights up to the one that routes. A choice: experts, MoE, block."""


def may_pad_rows(place: Place) -> bool:
    """Whether the module of these experts, or one that calls it, names a function that pads.

    A dispatcher (torchtitan's, with its ``pad_multiple``) or a hook before the experts may pad as well.
    """
    at: Place | None = place
    for _ in range(LEVELS_UP):
        if at is None:
            break
        if any(map(_pads, _names(at.module))):
            return True
        at = at.parent
    return bool(state_of(place.module).get("_forward_pre_hooks"))


def _pads(name: str) -> bool:
    return bool(PADS.search(name)) and not NOT_PADDING.search(name)


def _names(module: Any) -> Iterator[str]:
    """Yield the names that the module's code uses, and the attributes of the objects among them."""
    for name in chain.from_iterable(map(names_in, _codes(module))):
        yield name
        yield from state_of(read(module, name))


def _codes(module: Any) -> Iterator[CodeType]:
    """Yield the code of a forward and its wrappers, of the methods, and of the functions that they name."""
    for link in compile_marks.chain(forward_of(module)):
        function = read(link, "__func__", link)
        code = read(function, "__code__")
        if not isinstance(code, CodeType):
            continue
        yield code
        for name in set(names_in(code)):
            named = read(function, "__globals__", {}).get(name)
            for each in (named, read_class(type(module), name)):
                each = read(each, "__func__", each)
                if isinstance(each, FunctionType):
                    yield each.__code__
