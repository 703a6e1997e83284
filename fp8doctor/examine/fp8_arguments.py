"""Find a script's arguments that ask for FP8, by an allow-list."""

from __future__ import annotations

import re
from collections.abc import Sequence

SWITCHES = frozenset(
    f"{before}{fp8}{after}"
    for fp8 in ("fp8", "float8")
    for before in ("", "use-", "enable-", "with-")
    for after in ("", "-training", "-linear")
)
"""Options that enable FP8 training, alone or with a value."""

FORMATS = frozenset(("fp8-format", "fp8-recipe-name", "float8-recipe-name"))
"""Options whose value is an FP8 format or recipe (Megatron's ``--fp8-format hybrid``)."""

PRECISIONS = frozenset(
    """
    precision mixed-precision train-precision training-precision compute-precision converters
    """.split()
)
"""Options that take a precision; ``dtype`` may be a checkpoint's or a KV cache's."""

FP8_WORDS = frozenset(
    """
    fp8 float8 e4m3 hybrid mxfp8 tensorwise rowwise blockwise delayed tensorwise-fp8
    """.split()
)
FP8_PRECISIONS = frozenset(
    ("fp8", "float8", "mxfp8", "fp8-hybrid", "fp8-delayed", "transformer-engine", "ao-fp8")
)
YES = frozenset(("true", "1", "yes", "on", "y", "t"))

ASSIGNMENT = re.compile(r"^(?P<dashes>-{0,2})(?P<name>[A-Za-z][\w.\-]*)(?:=(?P<value>.*))?$", re.DOTALL)


def fp8_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return arguments that ask for FP8, as listed; a name's last one counts."""
    found: dict[str, str | None] = {}
    for at, argument in enumerate(arguments):
        match = ASSIGNMENT.match(argument)
        if match is None or not (match["dashes"] or match["value"] is not None):
            continue
        name = match["name"].rpartition(".")[2].lower().replace("_", "-")
        value, dashes = match["value"], match["dashes"]
        following = arguments[at + 1] if at + 1 < len(arguments) else ""
        if value is None and following and not following.startswith("-"):
            value = following
        word = None if value is None else value.strip("\"'").lower().replace("_", "-")
        if name.removeprefix("no-") in SWITCHES and name.startswith("no-"):
            found[name.removeprefix("no-")] = None
        elif name in SWITCHES:
            asks = word is None or word in YES | FP8_WORDS or not _is_a_value(word)
            given = f" {word}" if word in YES | FP8_WORDS else ""
            found[name] = f"{dashes}{name}{given}" if asks else None
        elif name in FORMATS or name in PRECISIONS:
            words = FP8_WORDS if name in FORMATS else FP8_PRECISIONS
            found[name] = f"{dashes}{name} {word}" if word in words else None
    return tuple(each for each in found.values() if each is not None)


def _is_a_value(word: str) -> bool:
    """Tell if this is a switch's value, not a file or another argument."""
    return word in ("false", "0", "no", "off", "n", "f", "none", "null", "bf16", "fp16", "fp32", "")
