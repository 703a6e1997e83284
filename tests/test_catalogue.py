"""Every check of the catalogue, whoever wrote it: its page, its registration and its own two cases."""

from __future__ import annotations

import ast
import re
from difflib import get_close_matches
from pathlib import Path

import pytest
from click.testing import CliRunner

from fp8doctor import cli, registry
from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.areas import SEVERITIES
from fp8doctor.facts import Facts
from fp8doctor.headings import SECTIONS
from fp8doctor.render.terminal import columns
from tests.treatment_names import treatment_names

CATALOGUE = registry.discover()
CHECKS = Path(__file__).resolve().parents[1] / "checks"

IMPORTABLE = (
    "fp8doctor.facts",
    "fp8doctor.finding",
    "fp8doctor.registry",
    "fp8doctor.wording",
    "fp8doctor.analysis",
    "fp8doctor.cost",
    "fp8doctor.diagnosis.leaving_fp8",
    "fp8doctor.diagnosis.treatments",
    "fp8doctor.known_errors",
    "fp8doctor.recipes",
)
"""Modules of fp8doctor that a check may import: what was seen, what it adds up to, what it costs, what is
known of messages, and the words of an answer. No torch, no os, no sys."""

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

CODE_MAX = 14
"""Lines of the two examples of one page together."""

WORDS_MAX = 250
"""Words of a page before its references."""


def test_every_file_of_the_catalogue_registers_one_check() -> None:
    files = sorted(path.relative_to(CHECKS) for path in CHECKS.rglob("*.py") if path.name != "__init__.py")
    registered = sorted(Path(*check.module.__name__.split(".")[2:]).with_suffix(".py") for check in CATALOGUE)
    assert files == registered


@pytest.mark.parametrize("check", CATALOGUE, ids=[check.code for check in CATALOGUE])
def test_a_check(check: registry.Check) -> None:
    its_own_cases(check)
    its_file(check)
    its_page(check)


def its_own_cases(check: registry.Check) -> None:
    """Affected facts make it fire, healthy ones do not, and without facts it is unknown."""
    findings, outcomes = registry.run([check], check.module.SICK)
    assert outcomes[0].outcome == "sick", outcomes[0].reason
    finding = findings[0]
    assert finding.title
    assert finding.explanation.endswith((".", "!", "?"))
    assert finding.evidence, "a finding proves itself"
    assert finding.severity is not None
    assert registry.run([check], check.module.SICK)[0] == findings
    treatments = [finding.treatment] if finding.treatment else []
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", each.name) for each in treatments)
    assert all(each.summary and each.code.strip() for each in treatments)
    findings, outcomes = registry.run([check], check.module.HEALTHY)
    assert findings == ()
    assert outcomes[0].outcome in ("healthy", "not_applicable"), outcomes[0].reason
    assert registry.run([check], Facts())[1][0].outcome == "unknown"
    for case in (check.module.SICK, check.module.HEALTHY):
        assert Facts.from_dict(case.to_dict()) == case


@pytest.mark.slow
def test_a_treatment_of_a_check_is_spelled_as_in_the_table() -> None:
    """A name that is spelled otherwise in one place is another treatment, with none of the traits."""
    for check in CATALOGUE:
        finding = registry.run([check], check.module.SICK)[0][0]
        names = {finding.treatment.name} if finding.treatment else set()
        names |= treatment_names(Path(str(check.module.__file__)))
        alike = {name: get_close_matches(name, TREATMENTS, cutoff=0.9) for name in names - set(TREATMENTS)}
        assert not any(alike.values()), (check.code, alike)


def its_file(check: registry.Check) -> None:
    *_, folder, file = check.module.__name__.split(".")
    assert check.area == folder
    assert check.name.replace("-", "_") == file
    assert check.function.__name__ == file
    tree = ast.parse(Path(str(check.module.__file__)).read_text("utf-8"))
    said = {
        node.value
        for keyword in ast.walk(tree)
        if isinstance(keyword, ast.keyword) and keyword.arg == "severity"
        for node in ast.walk(keyword.value)
        if isinstance(node, ast.Constant) and node.value in SEVERITIES
    }
    assert max(map(SEVERITIES.index, said)) == SEVERITIES.index(check.severity)
    decorated = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert len(decorated) == 1
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal)]
    modules = imports(Path(str(check.module.__file__)))
    assert [each for each in modules if each not in STANDARD and not each.startswith(IMPORTABLE)] == []
    assert all(re.fullmatch(r"[A-Z]{3,5}\d{3}", code) and code != check.code for code in check.explained_by)


def test_no_check_explains_itself_in_a_circle() -> None:
    causes = {check.code: check.explained_by for check in CATALOGUE}
    for code in causes:
        behind, pending = set[str](), list(causes[code])
        while pending:
            behind.add(cause := pending.pop())
            pending += set(causes.get(cause, ())) - behind
        assert code not in behind


def its_page(check: registry.Check) -> None:
    """It has the six sections, code before and after, and fits the terminal."""
    title, blank, *body = check.page.splitlines()
    assert 0 < len(title) <= TITLE_MAX
    assert title[0].isupper()
    assert not title.endswith(".")
    assert blank == ""
    paragraphs = "\n".join(body).split("\n\n")
    heads = [head for each in paragraphs for head in SECTIONS if each.startswith(f"{head} ")]
    assert heads == list(SECTIONS)
    assert "https://" in paragraphs[-1]
    assert not paragraphs[-1].startswith("    ")
    assert len(" ".join(paragraphs).partition(SECTIONS[-1])[0].split()) <= WORDS_MAX
    _, _, fix = check.page.partition(SECTIONS[2])
    fix, _, _ = fix.partition(SECTIONS[3])
    before, after = [each for each in fix.split("\n\n") if each.startswith("    ")]
    assert "# before" in before
    assert "# after" in after
    assert len(f"{before}\n{after}".splitlines()) <= CODE_MAX
    assert check.page.count("\n    ") == len(f"{before}\n{after}".splitlines()), "no code in other sections"
    explained = CliRunner().invoke(cli.main, ["explain", check.code])
    assert explained.exit_code == 0
    assert [line for line in explained.stdout.splitlines() if columns(line) > WIDTH_MAX] == []


def imports(path: Path) -> list[str]:
    """Names of all modules that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.append("." * node.level + (node.module or ""))
    return names
