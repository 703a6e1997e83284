"""Who imports whom, held to the two tables of docs/layers.md: no import goes up, none goes round."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "layers.md").read_text("utf-8")
PACKAGE = "fp8doctor"

NOT_YET: set[tuple[str, str]] = set()
"""Imports that the table does not allow, each waiting to be mended. Whoever mends one takes it out here; none
is added."""

NEEDS_NO_TORCH = ("cli", "__main__", "registry", "render", "diagnosis", "report", "worker.parent")
"""What the parent process and replaying a report load."""

When = Literal["top", "function", "typing"]


@dataclass(frozen=True)
class Import:
    """One import of a module."""

    of: str
    when: When
    """``typing``: under ``if TYPE_CHECKING``."""


def import_statements(
    nodes: Iterable[ast.AST], when: When
) -> Iterator[tuple[ast.Import | ast.ImportFrom, When]]:
    """All of them, wherever they stand."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, when
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from import_statements(node.body, "function")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from import_statements(node.body, "typing")
            yield from import_statements(node.orelse, when)
        else:
            yield from import_statements(ast.iter_child_nodes(node), when)


@cache
def files() -> dict[str, Path]:
    """Every module of the package by its name, with its file."""
    found = {}
    for path in (*ROOT.glob("fp8doctor/**/*.py"), *ROOT.glob("checks/**/*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named = ".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts))
        found[named.removesuffix(".__init__")] = path
    return found


@cache
def imports(module: str) -> tuple[Import, ...]:
    """What a module imports. To import the package itself (for its folder) is to import nothing of it."""
    found: dict[Import, None] = {}
    for node, when in import_statements(ast.parse(files()[module].read_text("utf-8")).body, "top"):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name != PACKAGE]
        else:
            within = node.level == 1 and module.startswith(f"{PACKAGE}.checks.")
            assert within or not node.level, f"{module}: imports name the whole path"
            source = module.rpartition(".")[0] if within else node.module
            inside = [f"{source}.{alias.name}" for alias in node.names]
            names = [each if each in files() else str(source) for each in inside]
        found |= dict.fromkeys(Import(name, when) for name in names)
    return tuple(found)


def cells(head: str) -> Iterator[list[str]]:
    """The rows of the table of docs/layers.md whose first row begins with ``head``."""
    table = PAGE[PAGE.index(f"| {head} |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def words(cell: str) -> frozenset[str]:
    return frozenset(re.split(r",\s*", cell)) - {""}


def room_of_path(cell: str) -> str:
    """A room as the other cells call it: `fp8doctor/facts/` is ``facts``."""
    path = cell.strip("`")
    return path.removeprefix(f"{PACKAGE}/").removesuffix(".py").rstrip("/")


ROOMS = {room_of_path(path): words(may) for path, may in cells("package")}
OUTSIDE = {name.strip("`"): (words(top), words(lazy)) for name, top, lazy in cells("library")}


def room(module: str) -> str:
    """The room of a module: the longest row that its path begins with."""
    path = module.removeprefix(PACKAGE).lstrip(".").replace(".", "/") or "__init__"
    return max((each for each in ROOMS if f"{path}/".startswith(f"{each}/")), key=len, default="")


def forbidden(module: str) -> list[str]:
    """The modules that this one imports and may not."""
    own = room(module)
    inside = [each.of for each in imports(module) if each.of.split(".")[0] == PACKAGE]
    return [each for each in inside if room(each) != own and room(each) not in ROOMS[own]]


def test_the_table_goes_one_way() -> None:
    above: set[str] = set()
    for name, may in ROOMS.items():
        assert may <= above, f"{name} may import {', '.join(sorted(may - above))}, which is not above it"
        above.add(name)


def test_every_module_has_a_room_and_every_room_a_module() -> None:
    taken = {room(module) for module in files()}
    assert [module for module in files() if not room(module)] == [], "name them in docs/layers.md"
    assert sorted(set(ROOMS) - taken) == []


def test_a_room_imports_what_it_may() -> None:
    found = {(module, each) for module in files() for each in forbidden(module)}
    assert [f"{module} imports {each}" for module, each in sorted(found - NOT_YET)] == []
    assert sorted(NOT_YET - found) == [], "mended: take it out of NOT_YET"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module: {each.of for each in imports(module)} & set(files()) for module in files()}

    def reached(start: str) -> set[str]:
        seen, pending = set[str](), list(graph[start])
        while pending:
            if (module := pending.pop()) not in seen:
                seen.add(module)
                pending += graph[module]
        return seen

    beyond = {module: reached(module) for module in graph}
    circles = {
        frozenset(other for other in beyond[module] if module in beyond[other])
        for module in graph
        if module in beyond[module]
    }
    assert circles == set()


def from_outside(module: str) -> Iterator[tuple[str, When]]:
    """The packages that a module imports and that are neither this one nor Python's, types aside."""
    for each in imports(module):
        package = each.of.split(".")[0]
        if package != PACKAGE and package not in sys.stdlib_module_names and each.when != "typing":
            yield package, each.when


def test_packages_from_outside_are_imported_where_they_may() -> None:
    for module in files():
        for package, when in from_outside(module):
            top, lazy = OUTSIDE.get(package, (frozenset(), frozenset()))
            allowed = top if when == "top" else top | lazy
            within = any(f"{room(module)}/".startswith(f"{each}/") for each in allowed)
            assert within or "everything" in allowed, f"{module} imports {package} ({when})"


def test_mypy_follows_what_is_imported() -> None:
    """What pyproject.toml has it skip to save time would be Any here without a word."""
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    skipped = [
        pattern.removesuffix(".*")
        for override in mypy["overrides"]
        if override.get("follow_imports") == "skip" and not override.get("ignore_missing_imports")
        for pattern in override["module"]
    ]
    assert "torch._inductor" in skipped
    imported = {each.of for module in files() for each in imports(module)} - {"transformers"}
    assert [each for each in imported if any(f"{each}.".startswith(f"{name}.") for name in skipped)] == []


@pytest.mark.parametrize("start", NEEDS_NO_TORCH)
def test_what_the_parent_loads_loads_no_torch(start: str) -> None:
    """By what is imported at the top of modules, and the packages that Python enters on the way."""
    pending = [each for each in files() if f"{each}.".startswith(f"{PACKAGE}.{start}.")]
    came_from: dict[str, str] = dict.fromkeys(pending, start)
    while pending:
        module = pending.pop()
        for each in imports(module):
            if each.when != "top":
                continue
            assert each.of.split(".")[0] != "torch", f"{start} -> {came_from[module]} -> {module} -> torch"
            parts = each.of.split(".")
            for entered in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                if entered in files() and entered not in came_from:
                    came_from[entered] = module
                    pending.append(entered)
