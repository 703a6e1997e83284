"""The engine around the checks: registration, discovery, selection, what is missing, and crash isolation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.areas import AREAS
from fp8doctor.errors import UserError
from fp8doctor.facts import Dynamo, Facts, Linear, Network, Training, Trial, recorded
from fp8doctor.facts.record import Record
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import Check, check, discover, run, select


def made(function: registry.CheckFunction, code: str = "ZZZ001") -> Check:
    return Check(code, f"name-of-{code}", "step", "warning", (), function)


def test_every_shipped_check_is_discovered_once_and_in_the_order_of_the_areas() -> None:
    checks = discover()
    assert {each.code[:3] for each in checks} >= {"ENV", "GPU", "MOD", "SHP", "CMP"}
    assert len({each.name for each in checks}) == len(checks)
    assert [AREAS.index(each.area) for each in checks] == sorted(AREAS.index(each.area) for each in checks)


@pytest.mark.parametrize(
    ("code", "area", "message"),
    [
        ("cmp001", "step", "is not a code"),
        ("ZZZ1", "step", "is not a code"),
        ("ZZZ001", "kitchen", "is not an area"),
    ],
)
def test_a_malformed_registration_fails_at_import(code: str, area: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(code, "name", area=area, severity="info")(lambda facts: None)


def test_a_code_that_is_taken_fails_at_import() -> None:
    discover()
    with pytest.raises(ValueError, match="already registered"):
        check("CMP001", "another-name", area="step", severity="info")(lambda facts: None)
    with pytest.raises(ValueError, match="already registered"):
        check("ZZZ001", "eager-float8", area="step", severity="info")(lambda facts: None)


def test_selection_by_prefix() -> None:
    checks = discover()
    assert {each.code[:3] for each in select(checks, ["CMP", "GPU"])} == {"CMP", "GPU"}
    assert "CMP001" not in {each.code for each in select(checks, [], ["CMP001"])}
    assert {each.code for each in select(checks, ["CMP"], ["CMP001"])} == {
        each.code for each in select(checks, ["CMP"])
    } - {"CMP001"}
    assert select(checks) == checks


def test_a_prefix_that_no_check_has_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="'XYZ'; 'fp8doctor list'"):
        select(discover(), ["XYZ"])
    with pytest.raises(UserError, match="'cmp001'"):
        select(discover(), [], ["cmp001"])


def reason(function: Callable[[Facts], object], facts: Facts) -> str | None:
    """Why a check that reads what ``function`` reads does not know."""
    (outcome,) = run([made(lambda facts: function(facts) and None)], facts)[1]
    assert (outcome.outcome == "unknown") == (outcome.reason is not None)
    return outcome.reason


def test_a_missing_fact_makes_the_check_unknown_and_is_named_with_its_reason() -> None:
    gaps = {"training.dynamo": "torch 9.9 keeps it elsewhere"}
    assert reason(lambda facts: facts.training, Facts(gaps=gaps)) == "training: torch 9.9 keeps it elsewhere"
    facts = Facts(training=Training(dynamo=Dynamo()), gaps=gaps)
    told = "training.dynamo.stance: torch 9.9 keeps it elsewhere"
    assert reason(lambda facts: facts.training.dynamo.stance, facts) == told
    facts = Facts(network=Network())
    (outcome,) = run([made(lambda facts: facts.network.linears)], facts)[1]
    assert (outcome.missing, outcome.reason) == ("network.linears", "network.linears was not recorded")
    (outcome,) = run([made(lambda facts: None)], facts)[1]
    assert not recorded(outcome, "missing")


def test_the_gap_of_the_fact_itself_goes_before_those_within() -> None:
    facts = Facts(gaps={"network.saving": "torch.save failed", "network": "it has no module"})
    assert reason(lambda facts: facts.network, facts) == "network: it has no module"


def test_the_trials_own_gaps_give_the_reason_too() -> None:
    facts = Facts(trial=Trial(gaps={"trial.shapes": "the budget was used up"}))
    assert reason(lambda facts: facts.trial.shapes, facts) == "trial.shapes: the budget was used up"


def test_one_record_of_a_list_without_the_fact_is_enough_to_not_know() -> None:
    def compiled(facts: Facts) -> None:
        assert all(linear.compiled is None for linear in facts.network.linears)

    linears = (Linear(name="a", compiled=None), Linear(name="b"))
    facts = Facts(network=Network(linears=linears))
    assert reason(compiled, facts) == "network.linears.compiled was not recorded"
    assert reason(compiled, Facts(network=Network(linears=linears[:1]))) is None
    assert reason(compiled, Facts(network=Network(linears=()))) is None


def test_a_record_of_a_third_party_is_named_by_its_class() -> None:
    class Own(Record, frozen=True, kw_only=True):
        size: int = NOT_RECORDED

    assert reason(lambda facts: Own().size, Facts()) == "Own.size was not recorded"


def rule(name: str, function: registry.CheckFunction, **more: object) -> Check:
    return Check("ZZZ001", name, "step", "warning", (), function, **more)


def test_rules_of_one_code_run_alone_and_have_one_outcome() -> None:
    """One rule without its fact, or that raises, does not silence another of its file."""

    def sick(facts: Facts) -> Finding:
        return Finding(title="t", explanation="e")

    unknown = rule("unknown", lambda facts: facts.network and None)
    silent, fires = rule("silent", lambda facts: None), rule("fires", sick, was=("YYY001",))
    symptom = replace(rule("symptom", sick), explained_by=("fires",))
    for rules, outcome, names in (
        ((unknown, fires, silent), "sick", ["fires"]),
        ((unknown, silent), "unknown", []),
        ((fires, symptom), "sick", ["fires"]),
        ((symptom,), "sick", ["symptom"]),
    ):
        findings, outcomes = run(rules, Facts())
        assert [each.outcome for each in outcomes] == [outcome]
        assert [each.name for each in findings] == names


def test_a_former_code_selects_and_ignores_its_rule() -> None:
    now = rule("now", lambda facts: None)
    former = rule("former", lambda facts: None, was=("XXX001", "YYY001"))
    assert select((now, former), ["YYY001"]) == select((now, former), ["XXX"]) == (former,)
    assert select((now, former), ["ZZZ"]) == (now, former)
    assert select((now, former), [], ["YYY001"]) == (now,)


def test_a_check_that_crashes_costs_no_other() -> None:
    def broken(facts: Facts) -> None:
        raise KeyError("oops")

    def sick(facts: Facts) -> Finding:
        return Finding(title="t", explanation="e")

    findings, outcomes = run(
        [
            made(broken),
            made(sick, "ZZZ002"),
            made(lambda facts: None, "ZZZ003"),
            made(lambda facts: NotApplicable(reason="no LoRA"), "ZZZ004"),
        ],
        Facts(),
    )
    assert [(o.code, o.outcome, o.reason) for o in outcomes] == [
        ("ZZZ001", "crashed", "KeyError: 'oops'"),
        ("ZZZ002", "sick", None),
        ("ZZZ003", "healthy", None),
        ("ZZZ004", "not_applicable", "no LoRA"),
    ]
    assert [(f.code, f.name, f.area, f.severity) for f in findings] == [
        ("ZZZ002", "name-of-ZZZ002", "step", "warning")
    ]


def test_every_answer_carries_its_area() -> None:
    def broken(facts: Facts) -> None:
        raise KeyError("oops")

    checks = [
        made(broken),
        made(lambda facts: None, "ZZZ002"),
        made(lambda facts: NotApplicable(reason="no LoRA"), "ZZZ003"),
        made(lambda facts: Finding(title="t", explanation="e"), "ZZZ004"),
        made(lambda facts: facts.network and None, "ZZZ005"),
    ]
    assert [outcome.area for outcome in run(checks, Facts())[1]] == ["step"] * 5


def test_a_finding_names_those_of_its_causes_that_were_found() -> None:
    def sick(facts: Facts) -> Finding:
        return Finding(title="t", explanation="e")

    symptom = replace(made(sick), explained_by=("ZZZ002", "ZZZ003", "ZZZ004"))
    causes = [made(sick, "ZZZ002"), made(lambda facts: None, "ZZZ003"), made(sick, "ZZZ004")]
    findings, _ = run([symptom, *causes], Facts())
    assert [finding.caused_by for finding in findings] == [("ZZZ002", "ZZZ004"), (), ()]


def test_what_holds_of_healthy_jobs_too_is_told_last() -> None:
    checks = discover()
    sick = tuple(
        replace(each, function=lambda _: Finding(title="", explanation="", evidence={}))
        for each in checks
        if each.code in ("MEM005", "STP001")
    )
    findings, _ = run(sick, Facts())
    assert [finding.code for finding in findings] == ["STP001", "MEM005"]


def test_a_check_may_lower_its_severity() -> None:
    findings, _ = run([made(lambda facts: Finding(title="t", explanation="e", severity="info"))], Facts())
    assert findings[0].severity == "info"


OWN_CHECK = '''"""Too many layers

A check of a third party.
"""
from fp8doctor.finding import Finding
from fp8doctor.registry import check

@check("OWN001", "too-many-layers", area="step", severity="info")
def too_many(facts):
    return Finding(title=f"{len(facts.network.linears)} layers", explanation="counted")
'''


def test_a_folder_of_third_party_checks_is_discovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_checks", dict(registry._checks))
    (tmp_path / "too_many_layers.py").write_text(OWN_CHECK)
    own = next(each for each in discover([tmp_path]) if each.code == "OWN001")
    assert own.title == "Too many layers"
    assert discover([tmp_path])
    findings, _ = run([own], Facts(network=Network(linears=(Linear(),))))
    assert findings[0].title == "1 layers"


def test_a_folder_that_is_missing_or_broken_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        discover([tmp_path / "nowhere"])
    (tmp_path / "bad.py").write_text("import nothing_of_that_name")
    with pytest.raises(UserError, match=r"bad\.py: ModuleNotFoundError"):
        discover([tmp_path])
    (tmp_path / "bad.py").write_text("def f(:")
    with pytest.raises(UserError, match=r"bad\.py: SyntaxError"):
        discover([tmp_path])
