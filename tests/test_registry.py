"""The engine around the checks: registration, discovery, selection, what is missing, and crash isolation."""

import json
import os
from operator import attrgetter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.cli.commands import main
from fp8doctor.cli.pages import DEMO
from fp8doctor.errors import UserError
from fp8doctor.facts import Dynamo, Facts, Linear, Network, Training, Trial, recorded
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import Check, check, discover, run, select


@pytest.fixture(autouse=True)
def _own_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    discover()
    monkeypatch.setattr(registry, "_checks", dict(registry._checks))


def made(function: registry.CheckFunction, code: str = "ZZZ001", explained_by: tuple[str, ...] = ()) -> Check:
    return Check(code, f"name-of-{code}", "step", "warning", explained_by, function)


def sick(facts: Facts) -> Finding:
    return Finding(title="t", explanation="e")


def broken(facts: Facts) -> None:
    raise KeyError("oops")


# Registration and selection


@pytest.mark.parametrize(
    ("code", "name", "area", "message"),
    [
        ("cmp001", "name", "step", "is not a code"),
        ("ZZZ001", "name", "kitchen", "is not an area"),
        ("CMP001", "another-name", "step", "already registered"),
        ("ZZZ001", "eager-float8", "step", "already registered"),
    ],
)
def test_a_wrong_registration_fails_at_import(code: str, name: str, area: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(code, name, area=area, severity="info")(lambda facts: None)


def test_selection_by_prefix() -> None:
    checks = discover()
    codes = [{each.code, *each.was} for each in select(checks, ["SHP", "GPU"])]
    assert all(any(code.startswith(("SHP", "GPU")) for code in each) for each in codes)
    of_area = {each.code for each in select(checks, ["CMP"])}
    assert {each.code for each in select(checks, ["CMP"], ["CMP001"])} == of_area - {"CMP001"}
    assert select(checks) == checks
    for wrong in (["XYZ"], ["cmp001"]):
        with pytest.raises(UserError, match=f"'{wrong[0]}'"):
            select(checks, wrong)


# What is missing

ELSEWHERE = "torch 9.9 keeps it elsewhere"
GAPS = {"training.dynamo": ELSEWHERE, "network.saving": "torch.save failed", "network": "it has no module"}
UNSAVED = Facts(gaps=GAPS)


@pytest.mark.parametrize(
    ("path", "facts", "reason"),
    [
        ("training", UNSAVED, f"training: {ELSEWHERE}"),
        ("network", UNSAVED, "network: it has no module"),
        ("training.dynamo.disabled", replace(UNSAVED, training=Training(dynamo=Dynamo())), f": {ELSEWHERE}"),
        ("trial.rows", Facts(trial=Trial(gaps={"trial.rows": "no time"})), "trial.rows: no time"),
        ("network.linears", Facts(network=Network()), "network.linears was not recorded"),
        ("network.linears", Facts(network=Network(linears=(Linear(),))), None),
    ],
)
def test_a_missing_fact_makes_the_check_unknown_and_is_named_with_its_reason(
    path: str, facts: Facts, reason: str | None
) -> None:
    (outcome,) = run([made(lambda facts: attrgetter(path)(facts) and None)], facts)[1]
    assert outcome.outcome == ("unknown" if reason else "silent")
    assert (outcome.reason or "").endswith(reason or "")
    assert (outcome.missing if recorded(outcome, "missing") else None) == (path if reason else None)


# What a check answers


def test_a_check_that_crashes_costs_no_other() -> None:
    checks = [
        made(broken),
        made(sick, "ZZZ002"),
        made(lambda facts: None, "ZZZ003"),
        made(lambda facts: NotApplicable(reason="no LoRA"), "ZZZ004"),
        made(lambda facts: facts.network and None, "ZZZ005"),
        made(sick, "ZZZ006", explained_by=("ZZZ002", "ZZZ003", "ZZZ004")),
    ]
    findings, outcomes = run(checks, Facts())
    assert [(each.code, each.outcome, each.reason) for each in outcomes] == [
        ("ZZZ001", "crashed", "KeyError: 'oops'"),
        ("ZZZ002", "fires", None),
        ("ZZZ003", "silent", None),
        ("ZZZ004", "not_applicable", "no LoRA"),
        ("ZZZ005", "unknown", "network was not recorded"),
        ("ZZZ006", "fires", None),
    ]
    assert {each.area for each in outcomes} == {"step"}
    assert [(each.name, each.severity, each.caused_by) for each in findings] == [
        ("name-of-ZZZ002", "warning", ()),
        ("name-of-ZZZ006", "warning", ("ZZZ002",)),
    ]


def rule(name: str, function: registry.CheckFunction, **more: object) -> Check:
    return Check("ZZZ001", name, "step", "warning", (), function, **more)


def test_rules_of_one_code_run_alone_and_have_one_outcome() -> None:
    """One rule without its fact, or that raises, does not silence another of its file."""
    unknown = rule("unknown", lambda facts: facts.network and None)
    silent, fires = rule("silent", lambda facts: None), rule("fires", sick, was=("YYY001",))
    symptom = replace(rule("symptom", sick), explained_by=("fires",))
    for rules, outcome, names in (
        ((unknown, fires, silent), "fires", ["fires"]),
        ((unknown, silent), "unknown", []),
        ((fires, symptom), "fires", ["fires"]),
        ((symptom,), "fires", ["symptom"]),
        ((fires, replace(symptom, explained_by=("YYY001",))), "fires", ["fires"]),
        ((replace(symptom, explained_by=("ZZZ001",)),), "fires", ["symptom"]),
    ):
        findings, outcomes = run(rules, Facts())
        assert [each.outcome for each in outcomes] == [outcome]
        assert [each.name for each in findings] == names


def test_information_comes_last_and_last_of_all_that_of_rules_that_never_say_more() -> None:
    def info(facts: Facts) -> Finding:
        return Finding(title="t", explanation="e", severity="info")

    ledger = replace(rule("ledger", sick), severity="info")
    findings, _ = run([ledger, rule("mild", info), rule("grave", sick)], Facts())
    assert [each.name for each in findings] == ["grave", "mild", "ledger"]


def test_a_former_code_selects_and_ignores_its_rule() -> None:
    now, former = rule("now", sick), rule("former", sick, was=("XXX001", "YYY001"))
    assert select((now, former), ["YYY001"]) == select((now, former), ["XXX"]) == (former,)
    assert select((now, former), ["ZZZ"]) == (now, former)
    assert select((now, former), [], ["YYY001"]) == (now,)


# Checks of third parties

CHECK = """from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check

@check("OWN001", "own-check", area="step", severity="info")
def own(facts):
"""


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
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("class Own(BaseException): pass\nraise Own('x' * 10_000)", "Own: xxx"),
        ("raise ValueError('\\x1b[31mred')", r"\x1b[31mred"),
        (CHECK.replace('"info"', '"fatal"') + "    return None", "'fatal' is not a severity"),
        (CHECK.replace('"own-check"', "7") + "    return None", "is not a name"),
        (CHECK + "    return None\nraise OSError('late')", "OSError: late"),
    ],
)
def test_a_file_that_cannot_be_a_check_is_the_users_mistake(tmp_path: Path, text: str, said: str) -> None:
    result = replayed(folder(tmp_path / "checks", text))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "own.py" in result.stderr
    assert said in result.stderr
    assert len(result.stderr) < 500
    assert "\x1b" not in result.stderr
    assert "OWN001" not in {each.code for each in discover()}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("return Finding(title='t', explanation='e', evidence={'x': object()})", "object is unsupported"),
        ("return Finding(title='t', explanation='e', severity='fatal')", "severity"),
        ("return NotApplicable(reason=7)", "reason"),
        ("return 'fires'", "returned a str"),
        ("return own(facts)", "RecursionError"),
    ],
)
def test_a_check_that_answers_nonsense_is_crashed_and_the_report_is_whole(
    tmp_path: Path, body: str, said: str
) -> None:
    own = folder(tmp_path / "checks", f"print('imported')\n{CHECK}    print('run')\n    {body}\n")
    result = replayed(own, "--format", "json")
    assert result.exit_code in (0, 1), result.stderr
    outcomes = {each["code"]: each for each in json.loads(result.stdout)["outcomes"]}
    assert outcomes["OWN001"]["outcome"] == "crashed"
    assert said in outcomes["OWN001"]["reason"]
    assert outcomes["CMP001"]["outcome"] == "fires"
    assert {"imported", "run"} <= {*result.stderr.split()}


def test_an_interrupt_is_no_crash(tmp_path: Path) -> None:
    checks = discover([folder(tmp_path, CHECK + "    raise KeyboardInterrupt")])
    with pytest.raises(KeyboardInterrupt):
        run([each for each in checks if each.code == "OWN001"], Facts())


def test_escape_sequences_of_a_page_are_shown_harmlessly(tmp_path: Path) -> None:
    page = '"""Red \\x1b[31malert\\x07\n\nMore \\x1b]0;title\\x07 of it."""'
    own = folder(tmp_path, f"{page}\n{CHECK}    return None\n")
    for command in (["list"], ["explain", "OWN001"], ["explain", "OWN001", "--format", "json"]):
        result = CliRunner().invoke(main, [*command, "--checks", str(own)])
        assert result.exit_code == 0
        assert not {"\x1b", "\x07"} & set(result.output)
    assert "More" in result.output


def test_files_are_looked_for_in_the_folder_and_one_below(tmp_path: Path) -> None:
    for at, name in enumerate(
        ("a.py", "b/c.py", "d/e/f.py", ".hidden/g.py", "__pycache__/h.py", "i/__init__.py")
    ):
        own = CHECK.replace("OWN001", f"OWN{at:03}").replace("own-check", f"own-{at}")
        folder(tmp_path, own + "    pass", name)
    os.mkfifo(tmp_path / "pipe.py")
    codes = {each.code for each in discover([tmp_path])}
    assert {code for code in codes if code.startswith("OWN")} == {"OWN000", "OWN001"}


def test_what_is_no_folder_of_checks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        discover([tmp_path / "nowhere"])
