"""Printed lines: each name that Python uses is imported or is one that a script has by convention, and no two
fixes of one report set a variable to different values, or set and unset it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fp8doctor.code_snippets import IMPORTS, MODULES, OF_THE_SCRIPT, free_names, settings
from fp8doctor.diagnosis.diagnose import diagnose, replay
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import (
    Accelerate,
    Environment,
    Facts,
    Linear,
    Network,
    Package,
    Software,
    Training,
)
from fp8doctor.finding import Treatment
from fp8doctor.known_errors import known_errors
from fp8doctor.registry import discover, run
from fp8doctor.render import text
from tests.test_catalogue import RULES, cases

TESTS = Path(__file__).parent

PACKAGES = "accelerate functools lightning math peft torchao transformer_engine transformers trl unsloth te"
IN_A_CHAIN = re.compile(rf"(?<!import )(?<!from )(?<![\w./\"'-])({PACKAGES.replace(' ', '|')})\.\w+")
"""A package before a dot, as in ``transformer_engine.common.recipe``."""

PLACEHOLDERS = set(
    "BATCH NAMES STEPS a b base batch_size bf16_checkpoint block build_model compute_loss config conv1d "
    "dataset folder function hook key layer loss name next_block offsets operand parameters query recipe "
    "sample sample_args scale self shape tensor tensor_parallel_size tp_size value weight x".split()
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
    yield from (Snippet(error.says, error.lines) for error in known_errors())


def of_the_checks() -> Iterator[Snippet]:
    """The treatments in the tables of each check, and those of the facts that it ends with."""
    for code, rules in RULES.items():
        answers = [run(rules, case)[0] for case in cases(rules, "FIRES")]
        for each in treatments_in([vars(rules[0].module), answers]):
            yield Snippet(f"{code} {each.name}", each.code)


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
    assert wrong(snippets) == {}, "import it in fp8doctor/code_snippets.py, or add it to PLACEHOLDERS"


def test_no_page_names_a_package_that_it_does_not_import() -> None:
    blocks = [
        Snippet(check.code, "\n".join(line for line in check.page.splitlines() if line.startswith("    ")))
        for check in discover()
    ]
    bad = {
        each.where: match[0]
        for each in blocks
        for line in each.code.splitlines()
        for match in IN_A_CHAIN.finditer(line.partition("#")[0])
        if match[1] not in MODULES
    }
    assert bad == {}


@pytest.mark.parametrize(("module", "name"), INSTALLED)
def test_what_is_imported_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def assigned(lines: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """What a shell sets by these lines; None stands for a variable that is unset. Comments are left out: an
    alternative after ``# or`` is the reader's choice."""
    for line in lines:
        words = (
            shlex.split(line.strip(), comments=True)
            if re.match(r"\s*(export|unset|[A-Z0-9_]+=)", line)
            else []
        )
        command, rest = (words[0], words[1:]) if words else ("", [])
        if command == "unset":
            yield from ((name, None) for name in rest)
        elif command == "export":
            yield from ((name, value) for name, _, value in (each.partition("=") for each in rest))
        elif words:
            yield from ((name, value) for name, _, value in (w.partition("=") for w in words if "=" in w))


def contradictions(lines: Iterable[str]) -> dict[str, set[str | None]]:
    told: dict[str, set[str | None]] = {}
    for name, value in assigned(lines):
        told.setdefault(name, set()).add(value)
    return {name: values for name, values in told.items() if len(values) > 1}


def printed(document: Document) -> list[str]:
    """Lines of the plan, and of the whole page where these are commands; elsewhere it says what is set."""
    plan = [line for step in document.prescription for line in step.treatment.code.splitlines()]
    page = text.render(document, verbose=True, width=400).splitlines()
    return [*plan, *(line for line in page if re.match(r"\s*(export|unset) ", line))]


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["export A=1", "unset A"], {"A"}),
        (["export A=1", "  export A=2   # said"], {"A"}),
        (["A=1 python train.py", "unset B A"], {"A"}),
        (["export A=1   # or unset A", "export A=1"], set()),
        (["unset A", "export B=1"], set()),
    ],
)
def test_what_contradicts(lines: list[str], names: set[str]) -> None:
    assert set(contradictions(lines)) == names
    assert {(n, v) for line in lines for n, v in settings(line).items()} == set(assigned(lines))


def test_a_dead_name_of_the_backend_never_changes_the_backend() -> None:
    document = replay(TESTS / "patients" / "recorded" / "h200-setting_without_effect.json.gz")
    set_to = [value for name, value in assigned(printed(document)) if name == "ACCELERATE_FP8_BACKEND"]
    assert set(set_to) <= {"AO"}, "the layers of this job are torchao's"


VARIABLES = {
    "ACCELERATE_MIXED_PRECISION": (None, "fp8", "bf16"),
    "ACCELERATE_FP8_BACKEND": (None, "TE", "AO", "te"),
    "FP8_BACKEND": (None, "te", "torchao"),
    "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": (None, "true", "false"),
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": (None, "false"),
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": (None, "16"),
}
WITH_PACKAGES = (("torchao",), ("transformer_engine",), ("torchao", "transformer_engine"))
LAYERS = (None, "torchao", "transformer_engine")


def jobs() -> Iterator[tuple[str | None, Facts]]:
    """Every environment of these variables, with the packages and the layers that go with it."""
    for values, packages, stack in product(product(*VARIABLES.values()), WITH_PACKAGES, LAYERS):
        variables = {name: value for name, value in zip(VARIABLES, values, strict=True) if value is not None}
        if stack not in (None, *packages):
            continue
        layer = Linear(
            name="up", stack=stack, use="training", recipe="tensorwise", features={}, compiled=None
        )
        yield (
            {"torchao": "AO", "transformer_engine": "TE"}.get(stack or ""),
            Facts(
                software=Software(
                    packages={
                        name: Package(version=version, imported=True)
                        for name, version in (
                            ("accelerate", "1.15.0"),
                            ("torchao", "0.18.0"),
                            ("transformer_engine", "2.20.2"),
                        )
                        if name in ("accelerate", *packages)
                    }
                ),
                environment=Environment(variables=variables, deepspeed_fp8_section=None, backend_imports={}),
                network=Network(linears=(layer,) if stack else ()),
                training=Training(
                    accelerate=Accelerate(
                        mixed_precision="fp8", distributed="NO", prepared=stack is not None
                    ),
                    trainer=None,
                ),
            ),
        )


@pytest.mark.nightly
def test_no_environment_gets_contradicting_fixes() -> None:
    count = 0
    for backend, facts in jobs():
        document = diagnose(facts, select=["ENV", "MOD"])
        lines = [line for step in document.prescription for line in step.treatment.code.splitlines()]
        every = [
            line for each in document.findings if each.treatment for line in each.treatment.code.splitlines()
        ]
        assert contradictions(lines) == {}, facts.environment.variables
        for each in document.findings:
            if each.treatment:
                assert contradictions(each.treatment.code.splitlines()) == {}, facts.environment.variables
        if backend:
            named = {value for name, value in assigned(every) if name == "ACCELERATE_FP8_BACKEND"}
            written = facts.environment.variables.get("ACCELERATE_FP8_BACKEND", "").upper()
            assert named <= {backend, written, None}, facts.environment.variables
        count += 1
    assert count > 1000
