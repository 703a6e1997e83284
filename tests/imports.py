"""What a source file imports, read without running it."""

from __future__ import annotations

import ast
from pathlib import Path


def imports(path: Path) -> list[str]:
    """Names that a file imports, wherever in the file; ``from a import b`` counts as ``a.b``."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return names
