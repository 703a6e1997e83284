"""Words that no user reads, and what to say instead: the test of every text that a user can see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

NOT_SAID = {
    r"\b[Dd]iseases?\b": "finding, problem",
    r"\b[Ss]ick\b": "affected",
    r"\b[Mm]end(s|ed|ing)?\b": "fix, solve",
    r"\b[Cc]ure[sd]?\b": "fix, solve",
    r"\b[Ll]edger\b": "table, breakdown",
    r"(?<![.\w])[Aa]rms?\b": "variant",
    r"\b[Rr]ooms?\b": "memory, time, space",
    r"\b[Tt]old\b": "said, shown",
    r"\b[Dd]ear(er|est)?\b": "slower, more expensive",
    r"\b[Mm]ade[- ]up\b": "random, synthetic",
    r"\bheld to\b": "checked against",
    r"\b[Ee]agerly\b": "not compiled",
    r"\b[Bb]eside\b": "next to, with",
    r"\b[Aa]new\b": "again",
    r"\b[Hh]angs? on\b": "depends on",
    r"\bGEMMs?\b": "matmul",
    r"×": "x",
    r"(?<=[\d}]) %": "93%, without a space",
}
"""Pattern -> what to say instead."""


def not_said(text: str) -> list[str]:
    """Give each word of a text that no user should read, with what to say instead."""
    return [
        f"{found[0]!r} in {text[max(0, found.start() - 30) : found.end() + 30]!r}: say {instead}"
        for pattern, instead in NOT_SAID.items()
        if (found := re.search(pattern, text))
    ]


def phrases(path: Path) -> Iterator[str]:
    """Give every string of a file that is a phrase: docstrings, and texts with a hole for each value."""
    tree = ast.parse(path.read_text("utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and id(node) not in parts and " " in str(node.value):
            yield str(node.value)
