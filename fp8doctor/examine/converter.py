"""Whether the user's code calls a converter to FP8, told without patching one.

A converter that refuses every Linear registers no module, so that watching modules does not show its call.
"""

from __future__ import annotations

import sys
import tokenize
from itertools import pairwise
from types import ModuleType

from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import read

CONVERTER = "convert_to_float8_training"
HOME = "torchao.float8.float8_linear_utils"
"""The module that holds it."""
TRACE = "torchao.float8._inductor_patch"
"""What it imports when it is called; nothing else of torchao does (0.18)."""


def has_run() -> bool | None:
    """Whether the converter was called in this process; None where this torchao leaves no trace of it."""
    home = sys.modules.get(HOME)
    if home is None:
        return False
    code = read(vars(home).get(CONVERTER), "__code__")
    return TRACE in sys.modules if code is not None and TRACE in names_in(code) else None


def calls_by_name(module: ModuleType) -> bool:
    """Whether a module's file calls the converter somewhere, by its text; False without a file."""
    try:
        with open(vars(module)["__file__"], "rb") as file:
            words = [token.string for token in tokenize.tokenize(file.readline)]
    except (KeyError, TypeError, OSError, SyntaxError, ValueError, tokenize.TokenError):
        return False
    return (CONVERTER, "(") in pairwise(words)
