"""Every name that a printed line of Python uses is imported, or is one that a script has by convention."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fp8doctor import glossary
from fp8doctor.code_snippets import IMPORTS, MODULES, OF_THE_SCRIPT, free_names
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.finding import Treatment
from fp8doctor.known_errors import KNOWN_ERRORS
from fp8doctor.registry import discover, run
from tests.recordings import name_of

TESTS = Path(__file__).parent
RECORDINGS = sorted(TESTS.glob("*/recorded/h*.json.gz"))

PACKAGES = "accelerate functools lightning math peft torchao transformer_engine transformers trl unsloth te"
IN_A_CHAIN = re.compile(rf"(?<!import )(?<!from )(?<![\w./\"'-])({PACKAGES.replace(' ', '|')})\.\w+")
"""A package before a dot, as in ``transformer_engine.common.recipe``."""

PLACEHOLDERS = set(
    "BATCH NAMES a b base batch_size bf16_checkpoint block build_model compute_loss config conv1d dataset "
    "folder hook key layer loss name next_block offsets parameters query recipe self value x".split()
)
"""What a sketch leaves to the reader, who sees that it is left out; never a package."""

INSTALLED = [
    (module, name)
    for module, names in IMPORTS.items()
    for name in names
    if importlib.util.find_spec(module.partition(".")[0])
]


class Snippet(NamedTuple):
    where: str
    code: str


def of_the_errors() -> Iterator[Snippet]:
    yield from (Snippet(error.says, error.lines) for error in KNOWN_ERRORS)


def of_the_checks() -> Iterator[Snippet]:
    """The treatments in the tables of each check, and those of the facts that it ends with."""
    for check in discover():
        answers = run([check], check.module.SICK)[0]
        for each in treatments_in([vars(check.module), answers]):
            yield Snippet(f"{check.code} {each.name}", each.code)


def treatments_in(values: Any) -> Iterator[Treatment]:
    if isinstance(values, Treatment):
        yield values
    elif isinstance(values, dict):
        yield from treatments_in([each for key, each in values.items() if key != "__builtins__"])
    elif isinstance(values, (list, tuple)):
        yield from (found for each in values for found in treatments_in(each))
    elif isinstance(getattr(values, "treatment", None), Treatment):
        yield values.treatment


def unresolved(code: str) -> set[str]:
    """Names that Python lines have from nowhere; of lines that are no Python, packages before a dot."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.M))
        named = {
            match[1] for line in code.splitlines() for match in IN_A_CHAIN.finditer(line.partition("#")[0])
        }
        return named - imported
    return set(free_names(tree)) - OF_THE_SCRIPT - PLACEHOLDERS


def wrong(snippets: Iterable[Snippet]) -> dict[str, set[str]]:
    return {each.where: names for each in snippets if (names := unresolved(each.code))}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        (
            "import transformer_engine.pytorch as te\ntransformer_engine.common.recipe.X()",
            {"transformer_engine"},
        ),
        ("with te.autocast():", {"te"}),
        ("import transformer_engine.pytorch as te\nwith te.autocast():\n    model(**batch)", set()),
        ("convert(model)", {"convert"}),
        ("pip install torchao   # torchao.float8 imports", set()),
    ],
)
def test_what_is_unresolved(code: str, names: set[str]) -> None:
    assert unresolved(code) == names


def test_lines_for_known_errors_have_what_they_name() -> None:
    assert wrong(of_the_errors()) == {}


def test_lines_of_the_checks_have_what_they_name() -> None:
    snippets = list(of_the_checks())
    assert len(snippets) > 60
    assert wrong(snippets) == {}


@functools.cache
def of_a_recording(path: Path) -> tuple[Snippet, ...]:
    findings = replay(path).findings
    return tuple(Snippet(each.code, each.treatment.code) for each in findings if each.treatment)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDINGS, ids=name_of)
def test_lines_on_a_recording_have_what_they_name(path: Path) -> None:
    assert wrong(of_a_recording(path)) == {}


def test_no_page_and_no_word_names_a_package_that_it_does_not_import() -> None:
    blocks = [
        Snippet(check.code, "\n".join(line for line in check.page.splitlines() if line.startswith("    ")))
        for check in discover()
    ]
    words = [Snippet(word.names[0], word.says) for word in glossary.words()]
    bad = {
        each.where: match[0]
        for each in (*blocks, *words)
        for line in each.code.splitlines()
        for match in IN_A_CHAIN.finditer(line.partition("#")[0])
        if match[1] not in MODULES
    }
    assert bad == {}


@pytest.mark.parametrize(("module", "name"), INSTALLED)
def test_what_is_imported_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
