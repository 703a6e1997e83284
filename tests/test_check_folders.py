"""A folder of third-party checks costs a sentence or one check, never the report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fp8doctor import check_folders, registry
from fp8doctor.cli.commands import DEMO, main
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.registry import discover, run

CHECK = """from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check

@check("OWN001", "own-check", area="step", severity="info")
def own(facts):
"""


OF_0_1 = '''"""Parameters have more than two dtypes

What it finds. The model's parameters have three or more dtypes.
"""

from __future__ import annotations

from fp8doctor.facts import Facts
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, Treatment
from fp8doctor.registry import check

MOST_DTYPES = 2
"""One for the weights, one for what needs more precision. A convention of this example."""

@check("MEM900", "many-dtypes", area="memory", severity="info")
def many_dtypes(facts: Facts) -> Finding | None:
    dtypes = facts.network.dtypes
    if len(dtypes) <= MOST_DTYPES:
        return None
    rarest = min(dtypes, key=lambda dtype: dtypes[dtype])
    return Finding(
        title=f"The parameters have {len(dtypes)} dtypes",
        explanation=f"The rarest is {rarest}, with {dtypes[rarest]:,} parameters.",
        evidence={"dtypes": tuple(dtypes), "rarest": rarest},
        treatment=Treatment(name="one-dtype", summary="convert the rarest dtype", code="model.bfloat16()"),
    )

FIRES = example(dtypes={"bfloat16": 900, "float32": 90, "float16": 10})
SILENT = example(dtypes={"bfloat16": 900, "float32": 90})
'''
"""The example of `checks/README.md` before there was a kit, as others may have copied it."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    discover()
    monkeypatch.setattr(registry, "_checks", dict(registry._checks))


def folder(tmp_path: Path, text: str, name: str = "own.py") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return tmp_path


def replayed(checks: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["report", str(DEMO), "--checks", str(checks), *options])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise GeneratorExit('x')", "GeneratorExit: x"),
        ("class Own(BaseException): pass\nraise Own('x' * 10_000)", "Own: xxx"),
        ("raise ValueError('\\x1b[31mred')", r"\x1b[31mred"),
        (CHECK.replace('"info"', '"fatal"') + "    return None", "'fatal' is not a severity"),
        (CHECK.replace('"own-check"', '"own\\x1b[31m"') + "    return None", "is not a name"),
        (CHECK.replace('"own-check"', "7") + "    return None", "is not a name"),
        (CHECK.replace('"OWN001"', "7") + "    return None", "is not a code"),
    ],
)
def test_a_file_that_cannot_be_a_check_is_the_users_mistake(tmp_path: Path, text: str, said: str) -> None:
    own = folder(tmp_path / "checks", text)
    with pytest.raises(UserError) as caught:
        discover([own])
    assert "own.py" in str(caught.value)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
    result = replayed(own)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "internal error" not in result.stderr
    assert "\x1b" not in result.stderr


def test_a_file_that_registers_and_fails_leaves_no_check_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        discover([folder(tmp_path, CHECK + "    return None\nraise OSError('late')")])
    assert "OWN001" not in {each.code for each in discover()}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise BaseException('x')", "BaseException: x"),
        ("return Finding(title='t', explanation='e', evidence={'x': object()})", "evidence"),
        ("return Finding(title='t', explanation='e', evidence={'x': {1: 2}})", "evidence"),
        ("return Finding(title='t', explanation='e', evidence=[1])", "evidence"),
        ("return Finding(title='t', explanation='e', severity='fatal')", "severity"),
        ("return Finding(title=7, explanation='e')", "title"),
        ("return Finding(title='t', explanation='e', treatment='compile')", "treatment"),
        ("return NotApplicable(reason=7)", "reason"),
        ("return 'sick'", "returned a str"),
        ("return facts.nothing", "AttributeError"),
        ("return own(facts)", "RecursionError"),
    ],
)
def test_a_check_that_answers_nonsense_is_crashed_and_the_report_is_whole(
    tmp_path: Path, body: str, said: str
) -> None:
    result = replayed(folder(tmp_path / "checks", f"{CHECK}    {body}\n"), "--format", "json")
    assert result.exit_code in (0, 1), result.stderr
    outcomes = {each["code"]: each for each in json.loads(result.stdout)["outcomes"]}
    assert outcomes["OWN001"]["outcome"] == "crashed"
    assert said in outcomes["OWN001"]["reason"]
    assert outcomes["CMP001"]["outcome"] == "sick"


def test_an_interrupt_is_no_crash(tmp_path: Path) -> None:
    own = [
        each
        for each in discover([folder(tmp_path, CHECK + "    raise KeyboardInterrupt")])
        if each.code == "OWN001"
    ]
    with pytest.raises(KeyboardInterrupt):
        run(own, Facts())


def test_what_a_check_prints_goes_to_stderr(tmp_path: Path) -> None:
    own = folder(tmp_path / "checks", f"print('while imported')\n{CHECK}    print('while run')\n")
    result = replayed(own, "--format", "json")
    json.loads(result.stdout)
    assert "while imported" in result.stderr
    assert "while run" in result.stderr


def test_escape_sequences_of_a_page_are_shown_harmlessly(tmp_path: Path) -> None:
    own = folder(
        tmp_path, f'"""Red \\x1b[31malert\\x07\n\nMore \\x1b]0;title\\x07 of it."""\n{CHECK}    return None\n'
    )
    for command in (["list"], ["explain", "OWN001"], ["explain", "OWN001", "--format", "json"]):
        result = CliRunner().invoke(main, [*command, "--checks", str(own)])
        assert result.exit_code == 0
        assert not {"\x1b", "\x07"} & set(result.output)
    assert "More" in result.output


def test_files_are_looked_for_in_the_folder_and_one_below(tmp_path: Path) -> None:
    for at, name in enumerate(
        ("a.py", "b/c.py", "d/e/f.py", ".hidden/g.py", "__pycache__/h.py", "i/__init__.py")
    ):
        folder(
            tmp_path,
            CHECK.replace("OWN001", f"OWN{at:03}").replace("own-check", f"own-{at}") + "    pass",
            name,
        )
    os.mkfifo(tmp_path / "pipe.py")
    codes = {each.code for each in discover([tmp_path])}
    assert {code for code in codes if code.startswith("OWN")} == {"OWN000", "OWN001"}


def test_a_tree_that_is_no_folder_of_checks_is_refused_before_anything_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_folders, "MOST_FILES", 3)
    for at in range(4):
        folder(tmp_path, "raise SystemExit", f"{at}.py")
    with pytest.raises(UserError, match=r"more than 3 Python files"):
        discover([tmp_path])


def test_the_root_of_the_file_system_is_no_folder_of_checks() -> None:
    with pytest.raises(UserError, match="root of the file system"):
        discover([Path("/")])


def installed(folder: Path, module: str, text: str) -> None:
    """Lay a package that offers checks into a folder, as an installer would."""
    (folder / f"{module}.py").write_text(text, "utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[fp8doctor.checks]\nours = {module}\n", "utf-8")


def test_installed_packages_offer_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(registry._checks)
    installed(tmp_path, "offers_checks", f"{CHECK}    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_folders.import_offered()
    assert {registry._checks[name].code for name in set(registry._checks) - known} == {"OWN001"}


def test_an_installed_package_whose_checks_fail_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "offers_nothing", "raise RuntimeError('too old')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="the installed package offers_nothing offers checks that cannot"):
        check_folders.import_offered()


def test_a_check_from_before_the_kit_runs_unchanged(tmp_path: Path) -> None:
    own = folder(tmp_path / "checks", OF_0_1, "many_dtypes.py")
    (rule,) = [each for each in discover([own]) if each.code == "MEM900"]
    for case, outcome in ((rule.module.FIRES, "sick"), (rule.module.SILENT, "healthy")):
        findings, (answer,) = run([rule], case)
        assert (answer.outcome, len(findings)) == (outcome, outcome == "sick")
    assert "MEM900" in replayed(own, "--select", "MEM900", "--format", "json").stdout
    explained = CliRunner().invoke(main, ["explain", "MEM900", "--checks", str(own)])
    assert explained.stdout.startswith("MEM900 many-dtypes")
