"""A script as text and as a tree: names, places and edits. All else stays byte for byte."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fp8doctor.errors import UserError

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)


class NotPlacedError(Exception):
    """A fix has no certain place in the script. The message says why."""


class Edit(NamedTuple):
    """Text in place of the bytes (UTF-8) from ``start`` to ``end``; an insertion if they are equal."""

    start: int
    end: int
    text: str


class Source:
    """A parsed script. Raises `UserError` if it is not Python."""

    def __init__(self, content: bytes, name: str = "fix") -> None:
        try:
            self.data, self.text = content, content.decode()
            self.tree = parsed(self.text, name)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"cannot read {name} as Python in UTF-8: {error}") from None
        lines = re.findall(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", self.data)
        self.newline = "\r\n" if lines and lines[0].endswith(b"\r\n") else "\n"
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        nodes = [*ast.walk(self.tree)]
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.names = [each for each in nodes if isinstance(each, ast.Name)]
        self.calls = [each for each in nodes if isinstance(each, ast.Call)]
        self.imported = dict(_imports(nodes))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the first byte of a node, and the one after its last."""
        end = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return self.starts[node.lineno - 1] + node.col_offset, end

    def of(self, node: ast.expr | ast.stmt, renamed: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return the text of a node, some variables under other names."""
        start, end = self.span(node)
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in renamed]
        edits = [Edit(*self.span(each), renamed[each.id]) for each in names]
        return _edited(self.data[:end], edits)[start:].decode()

    def qualified(self, node: ast.expr) -> str:
        """Name what an expression refers to, by the imports; empty for any other expression."""
        if isinstance(node, ast.Attribute):
            base = self.qualified(node.value)
            return f"{base}.{node.attr}" if base else ""
        return self.imported.get(node.id, "") if isinstance(node, ast.Name) else ""

    def around(self, node: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements around a node within its function, from the inside."""
        while not isinstance(node, SCOPES):
            if isinstance(node, ast.stmt):
                yield node
            node = self.parents[node]

    def scope(self, node: ast.AST) -> ast.AST:
        """Find the function, class or module around an expression."""
        while not isinstance(node, SCOPES):
            node = self.parents[node]
        return node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that holds this one."""
        fields = (each for _, each in ast.iter_fields(self.parents[statement]) if isinstance(each, list))
        return next((each for each in fields if statement in each), [statement])

    def insert(self, statement: ast.stmt, lines: Sequence[str], *, after: bool = False) -> Edit:
        """Insert lines before or after a statement, at its indentation."""
        start, end = self.span(statement)
        line, next_line = self.starts[statement.lineno - 1], self.starts[statement.end_lineno or 0]
        blanks, rest = self.data[line:start].decode(), self.data[end:next_line].strip()
        if blanks.strip() or (after and rest and not rest.startswith(b"#")):
            raise NotPlacedError(f"line {statement.lineno} holds several statements")
        at = next_line if after else line
        unit = "\t" if "\t" in blanks else "    "
        text = "".join(
            f"{(blanks + each.replace('    ', unit)) if each else ''}{self.newline}" for each in lines
        )
        return Edit(at, at, text if not at or self.data[at - 1 : at] in b"\r\n" else f"{self.newline}{text}")

    def edited(self, edits: Sequence[Edit]) -> str:
        """Return the text with these edits. Raises `NotPlacedError` if they clash or give no Python."""
        try:
            text = _edited(self.data, edits).decode()
            parsed(text)
        except (SyntaxError, ValueError):
            raise NotPlacedError("an earlier fix changes the same place, or its form is unusual") from None
        return text


def _edited(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Apply edits, of which those at one place stay in order. Raises ValueError if they overlap."""
    end = len(data) + 1
    for _, edit in sorted(enumerate(edits), key=lambda each: (each[1].start, each[0]), reverse=True):
        if edit.end > end:
            raise ValueError
        data, end = data[: edit.start] + edit.text.encode() + data[edit.end :], edit.start
    return data


def parsed(text: str, name: str = "script") -> ast.Module:
    """Parse a script; raises SyntaxError also for a keyword that is given twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(text, name, "exec", dont_inherit=True)
        return ast.parse(text)


def _imports(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each imported name and what it names."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else 2 * (alias.name.partition(".")[0],)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
