"""Every fact is taken away once from recordings of real jobs: what then cannot be known is unknown, nothing
crashes, and the report is still shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from fp8doctor import load_report, registry
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.facts import NOT_RECORDED, Facts, Record, recorded
from fp8doctor.render import text
from fp8doctor.render.markup import as_markdown
from fp8doctor.render.report_page import page
from tests.test_catalogue import RULES, cases

RECORDED = Path(__file__).parent / "patients" / "recorded"
CATALOGUE = registry.discover()

KINDS = {
    "torchao, eager": "h200-moe",
    "torchao, compiled, timed": "h200-trained_outlier",
    "Transformer Engine, timed": "h200-te_without_autocast",
    "Transformer Engine, checkpointed": "h200-te_checkpointed",
    "LoRA, timed": "h200-lora_fp32",
    "no FP8, timed": "h200-gpt2_conv1d",
    "FSDP2": "h200-fsdp2_without_precompute",
}

DRAWN_EVERY = 8
"""Reports of which one is drawn; what the others say is put together too, which takes a tenth of the time."""

Path_ = tuple[str, ...]

WITHOUT_A_TRIAL = "it says so itself: whether that is so shows only in a trial"
COMPUTED = "it computes what only a trial measures"
OLDER = "recordings from before this fact are judged without it"

ANSWERS_ALL_THE_SAME = {
    ("CMP005", "trial"): WITHOUT_A_TRIAL,
    ("CMP005", "trial.arms"): WITHOUT_A_TRIAL,
    ("MOD002", "trial"): WITHOUT_A_TRIAL,
    ("MEM001", "trial"): COMPUTED,
    ("MEM001", "trial.arms.peak_gib"): COMPUTED,
    ("STP004", "training.autocast_within"): OLDER,
}
"""Check and fact whose absence changes the answer to another than unknown -> why the check may do without."""


def paths(kind: type[Record] = Facts, above: Path_ = ()) -> Iterator[Path_]:
    """The way to every fact, from the root on."""
    for field in msgspec.structs.fields(kind):
        yield (*above, field.name)
        for inner in records_in(field.type):
            yield from paths(inner, (*above, field.name))


def records_in(annotation: Any) -> Iterator[type[Record]]:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        yield annotation
    for inner in get_args(annotation):
        yield from records_in(inner)


def without(value: Any, path: Path_, *, only_first: bool) -> Any:
    """The facts without this one, in all elements of a list or in the first alone; the very same where it is
    not there."""
    if isinstance(value, tuple):
        rest = value[1:] if only_first else tuple(without(each, path, only_first=False) for each in value[1:])
        changed: Any = (*(without(each, path, only_first=only_first) for each in value[:1]), *rest)
        return value if all(one is other for one, other in zip(value, changed, strict=True)) else changed
    if isinstance(value, dict):
        return {key: without(each, path, only_first=only_first) for key, each in value.items()}
    if value is None or not recorded(value, path[0]):
        return value
    now = getattr(value, path[0])
    then = without(now, path[1:], only_first=only_first) if path[1:] else NOT_RECORDED
    return value if then is now else msgspec.structs.replace(value, **{path[0]: then})


def outcomes(report: Document) -> dict[str, str]:
    return {each.code: each.outcome for each in report.outcomes}


@pytest.mark.gate("torchao, eager", "Transformer Engine, timed")
@pytest.mark.parametrize("recording", KINDS.values(), ids=KINDS)
@pytest.mark.slow
def test_a_fact_that_is_taken_away_is_unknown_at_most(recording: str) -> None:
    facts = load_report(RECORDED / f"{recording}.json.gz").facts
    before = outcomes(diagnose(facts))
    changed = set()
    taken = 0
    for path in paths():
        everywhere = without(facts, path, only_first=False)
        for left in (everywhere, without(facts, path, only_first=True)):
            if left == facts or (left is not everywhere and left == everywhere):
                continue
            taken += 1
            report = diagnose(left)
            changed |= {
                (code, ".".join(path), before[code], now)
                for code, now in outcomes(report).items()
                if now not in (before[code], "unknown") and (code, ".".join(path)) not in ANSWERS_ALL_THE_SAME
            }
            if left is everywhere:
                assert page(report), path
                assert as_markdown(page(report)), path
            if taken % DRAWN_EVERY == 0:
                assert text.render(report, verbose=True), path
    assert taken > 100
    assert changed == set()


def test_every_exception_names_a_check_and_a_fact() -> None:
    codes, facts = {check.code for check in CATALOGUE}, {".".join(path) for path in paths()}
    assert {code for code, _ in ANSWERS_ALL_THE_SAME} <= codes
    assert {fact for _, fact in ANSWERS_ALL_THE_SAME} <= facts


@pytest.mark.parametrize(
    "facts", [Facts(), *(case for rules in RULES.values() for case in cases(rules, "FIRES"))]
)
def test_partial_facts_are_shown(facts: Facts) -> None:
    report = diagnose(facts)
    assert "crashed" not in outcomes(report).values()
    assert text.render(report, verbose=True)
    assert as_markdown(page(report))
