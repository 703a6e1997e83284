"""What a helper imports before it loads the target, while the trial's own process does.

Only what the target will import anyway, as it will import it: the environment that a file sets before its
imports is read by them, and what lies beside it comes before what is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from fp8doctor.loading.target import Source

SLOW = {"torch": "torch._inductor.compile_fx", "transformers": "transformers.modeling_utils"}
"""Package that a file names -> the module whose import takes the most of it: 4 of the 6 s that it takes to
import what compiles a Llama are torch's, and 1.5 to 2.5 transformers' (two cores, torch 2.13)."""

PATCHES = "unsloth"
"""Package that has to be imported before those that it patches."""


def early_imports(source: Source) -> tuple[str, ...]:
    """Name the modules; none where the file's text does not tell that they are the same."""
    if source.path is None:
        return ()
    folder = source.path.resolve().parent
    try:
        named = set(_imported(ast.parse(source.path.read_bytes()), folder))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # whoever loads it says so
        return ()
    if PATCHES in named:
        return ()
    return tuple(module for package, module in SLOW.items() if package in named)


def _imported(tree: ast.Module, folder: Path) -> Iterator[str]:
    """Yield the packages that the file imports before it runs anything: a call may set variables or the path
    of imports, and so may a module that lies beside it."""
    for node in tree.body[ast.get_docstring(tree) is not None :]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        else:
            return
        for name in names:
            package = name.partition(".")[0]
            if (folder / package).exists() or (folder / f"{package}.py").exists():
                return
            yield package
