"""Every check of the catalogue, whoever wrote it: its page, its registration and its own two cases."""

import ast
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from click.testing import CliRunner

from fp8doctor import cli, kit, registry
from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.areas import SEVERITIES
from fp8doctor.cli import explain
from fp8doctor.facts import Facts
from tests.treatment_names import treatment_names

CATALOGUE = registry.discover()
CHECKS = Path(__file__).resolve().parents[1] / "checks"

STANDARD = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "itertools",
    "math",
    "re",
    "functools",
    "typing",
    "packaging.version",
}
"""Modules from outside the project that a pure function of the facts may want."""

TITLE_MAX = 60
"""Characters; the title stands in a table of 100 columns."""

WIDTH_MAX = 100
"""Columns of a page, as of every other text that the command line prints."""

PAGE_LINES = range(10, 26)
"""Lines of a page, its title and its code among them."""

OLD_PAGE = "\n\nWhat it finds. "
"""On a page that still has six sections and is longer."""

RULES = {
    code: tuple(each for each in CATALOGUE if each.code == code)
    for code in {each.code: 0 for each in CATALOGUE}
}
"""Code -> its rules; they share a file and a page."""


def cases(rules: tuple[registry.Check, ...], name: str) -> tuple[Facts, ...]:
    """The facts of a check's files that make it fire, or leave it silent: one record or several each."""
    held = [getattr(file, name, ()) for file in files_of(rules)]
    return tuple(facts for each in held for facts in ((each,) if isinstance(each, Facts) else each))


def files_of(rules: tuple[registry.Check, ...]) -> tuple[ModuleType, ...]:
    """The files of a check that hold its rules."""
    return tuple(dict.fromkeys(sys.modules[rule.function.__module__] for rule in rules))


def test_every_file_of_the_catalogue_registers_one_code() -> None:
    files = sorted(f"{path.parent.name}.{path.stem}" for path in CHECKS.glob("*/[!_]*"))
    registered = {rule.module.__name__.removeprefix("fp8doctor.checks.") for rule in CATALOGUE}
    assert files == sorted(registered)
    former = [code for rule in CATALOGUE for code in rule.was]
    assert len(set(former)) == len(former)
    assert not RULES.keys() & {*former}


def test_a_list_reads_the_heads_from_the_files() -> None:
    """Importing all checks for it would be too slow."""
    assert explain.headings() == explain.of_rules(CATALOGUE)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_check(rules: tuple[registry.Check, ...]) -> None:
    its_own_cases(rules)
    its_file(rules)
    its_page(rules)


def its_own_cases(rules: tuple[registry.Check, ...]) -> None:
    """Affected facts make each rule fire, healthy ones none, and without facts it is unknown."""
    fired = set()
    for case in cases(rules, "FIRES"):
        findings, (outcome,) = registry.run(rules, case)
        assert outcome.outcome == "fires", outcome.reason
        assert registry.run(rules, case)[0] == findings
        fired |= {finding.name for finding in findings}
        for finding in findings:
            assert finding.title
            assert finding.explanation.endswith((".", "!", "?"))
            assert finding.evidence, "a finding proves itself"
            treatments = [finding.treatment] if finding.treatment else []
            assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", each.name) for each in treatments)
            assert all(each.summary and each.code.strip() for each in treatments)
    assert fired == {rule.name for rule in rules}
    for case in cases(rules, "SILENT"):
        findings, (outcome,) = registry.run(rules, case)
        assert findings == ()
        assert outcome.outcome in ("silent", "not_applicable"), outcome.reason
    assert registry.run(rules, Facts())[1][0].outcome == "unknown"
    for case in (*cases(rules, "FIRES"), *cases(rules, "SILENT")):
        assert Facts.from_dict(case.to_dict()) == case


@pytest.mark.slow
def test_a_treatment_of_a_check_is_spelled_as_in_the_table() -> None:
    """A name that is spelled otherwise in one place is another treatment, with none of the traits."""
    for code, rules in RULES.items():
        findings = [each for case in cases(rules, "FIRES") for each in registry.run(rules, case)[0]]
        names = {each.treatment.name for each in findings if each.treatment}
        names = names.union(*(treatment_names(Path(str(file.__file__))) for file in files_of(rules)))
        alike = {name: get_close_matches(name, TREATMENTS, cutoff=0.9) for name in names - set(TREATMENTS)}
        assert not any(alike.values()), (code, alike)


def its_file(rules: tuple[registry.Check, ...]) -> None:
    check = rules[0]
    *_, folder, file = check.module.__name__.split(".")
    assert {rule.area for rule in rules} == {folder}
    assert check.name.replace("-", "_") == file
    assert [rule.function.__name__ for rule in rules] == [rule.name.replace("-", "_") for rule in rules]
    paths = [Path(str(file.__file__)) for file in files_of(rules)]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    said = {
        node.value
        for keyword in nodes
        if isinstance(keyword, ast.keyword) and keyword.arg == "severity"
        for node in ast.walk(keyword.value)
        if isinstance(node, ast.Constant) and node.value in SEVERITIES
    }
    highest = max(SEVERITIES.index(rule.severity) for rule in rules)
    assert max(map(SEVERITIES.index, said)) == highest
    assert not [node for node in nodes if isinstance(node, ast.Global | ast.Nonlocal)]
    modules = [module for path in paths for module in imports(path)]
    others = [each for each in modules if each not in STANDARD and not each.startswith(".")]
    assert {*others} == {"fp8doctor.kit"}, "of fp8doctor a check imports the kit, and its own other files"


def test_the_page_names_every_module_of_the_kit() -> None:
    named = {*re.findall(r"`kit\.(\w+)[`.(]", (CHECKS / "README.md").read_text("utf-8"))}
    assert named <= {*dir(kit)}
    modules = {name for name, held in vars(kit).items() if isinstance(held, ModuleType)}
    assert {name for name in modules if name.isidentifier()} <= named


def test_the_page_names_facts_that_there_are() -> None:
    rows = re.findall(r"^\| `facts\.([\w.]+)` \| (.*) \|$", (CHECKS / "README.md").read_text("utf-8"), re.M)
    assert len(rows) > 8
    for path, finds in rows:
        fields = re.findall(r"`([a-z_]+)`", finds)
        at = path.replace("network.fp8", "network.linears").split(".")
        assert [each for each in ["", *fields] if not is_field(Facts, [*at, each] if each else at)] == [], (
            path
        )


def test_no_check_explains_itself_in_a_circle() -> None:
    keys = {key: rule for rule in CATALOGUE for key in (rule.name, rule.code, *rule.was)}
    for rule in CATALOGUE:
        assert keys.keys() >= {*rule.explained_by}, rule.name
        behind, pending = set[str](), list(rule.explained_by)
        while pending:
            behind.add(cause := pending.pop())
            pending += {*keys[cause].explained_by} - behind
        assert rule.name not in behind


def its_page(rules: tuple[registry.Check, ...]) -> None:
    """It has a title, code before and after and a link, and fits the terminal."""
    check = rules[0]
    title, blank, *body = check.page.splitlines()
    assert 0 < len(title) <= TITLE_MAX
    assert title[0].isupper()
    assert not title.endswith(".")
    assert blank == ""
    assert len(check.page.splitlines()) in PAGE_LINES or OLD_PAGE in check.page
    marked = [
        mark for line in body if line.startswith("    ") for mark in re.findall("# (before|after)", line)
    ]
    assert marked == ["before", "after"]
    assert "https://" in check.page
    explained = CliRunner().invoke(cli.main, ["explain", check.code])
    assert explained.exit_code == 0
    assert [line for line in explained.stdout.splitlines() if len(line) > WIDTH_MAX] == []


def is_field(kind: object, path: list[str]) -> bool:
    """Whether a dotted path leads from a record to a field, through tuples and optional records."""
    if not path:
        return True
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    if path[0] not in fields:
        return False
    return len(path) == 1 or any(is_field(record, path[1:]) for record in records_in(fields[path[0]]))


def records_in(annotation: object) -> list[object]:
    """The record classes inside an annotation such as ``tuple[Linear, ...]`` or ``Accelerate | None``."""
    inside = [record for argument in getattr(annotation, "__args__", ()) for record in records_in(argument)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else inside


def imports(path: Path) -> list[str]:
    """Names of all modules that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [f"{module}.{each.name}" if module == "fp8doctor" else module for each in node.names]
    return names
