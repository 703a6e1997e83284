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
from fp8doctor.stacks.torchao_private import CONVERTER_HOME, CONVERTER_TRACE

CONVERTER = "convert_to_float8_training"


def has_run() -> bool | None:
    """Whether the converter was called in this process; None where this torchao leaves no trace of it."""
    home = sys.modules.get(CONVERTER_HOME)
    if home is None:
        return False
    code = read(vars(home).get(CONVERTER), "__code__")
    return CONVERTER_TRACE in sys.modules if code is not None and CONVERTER_TRACE in names_in(code) else None


def calls_by_name(module: ModuleType) -> bool:
    """Whether a module's file calls the converter somewhere, by its text; False without a file."""
    try:
        with open(vars(module)["__file__"], "rb") as file:
            words = [token.string for token in tokenize.tokenize(file.readline)]
    except (KeyError, TypeError, OSError, SyntaxError, ValueError, tokenize.TokenError):
        return False
    return (CONVERTER, "(") in pairwise(words)
