"""The table of steps with where the time goes, and the sentences under it; breakdowns composed in measured
proportions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from fp8doctor.analysis.step_difference import PARTS, REST
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.next_step import more_time_s
from fp8doctor.facts import Arm, Facts, Family, Target, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.render import markdown, text
from fp8doctor.render.screen import first_screen
from fp8doctor.render.terminal import columns
from fp8doctor.render.timing import COLUMNS, timing
from fp8doctor.render.words import variant_of
from fp8doctor.report import Report
from fp8doctor.wording import error_in_words
from tests.checks.arms import failed, ran, timed, too_late
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER, replaced, unprofiled
from tests.diagnosis.trials import Of, around
from tests.facts_of import DECODER_468M
from tests.render.reports import report

BERT = Path(__file__).parents[1] / "benchmarks" / "recorded" / "h200-bert_large_accelerate.json.gz"


def shown(arm: Arm, gib: float) -> Arm:
    assert arm.step_ms is not None
    return msgspec.structs.replace(arm, low_ms=arm.step_ms - 0.4, high_ms=arm.step_ms + 0.4, peak_gib=gib)


ARMS = (
    shown(FP8_EAGER, 24.7),
    shown(unprofiled("bf16", 103.6), 24.7),
    shown(BF16, 21.7),
    shown(FP8_COMPILED, 17.2),
    too_late("recipe-rowwise"),
)

TABLE = """\
  ms/step            FP8 matmul  other matmul  casts  attention  other  idle
  BF16 compiled               -          62.4      -       11.1   17.9   1.3
  FP8 as you run it        25.2           4.2  273.6       10.4   39.4  13.3
  FP8, compiled            32.1           4.2   23.7       10.1   15.1   3.1
  FP8, compiled, against BF16 compiled: −4.4 ms = matmuls −26.1, casts +21.0, idle GPU +1.8,
  attention −1.0, optimizer −0.1 ms (2.7 ms of norm and pointwise work runs inside the casts and is
  not counted as theirs).
"""
"""What the first screen does not say: the bars in numbers, and the second difference."""

NARROW = """\
  BF16 compiled: other matmul 62.4, attention 11.1, other
  17.9, idle 1.3 ms.
  FP8 as you run it: FP8 matmul 25.2, other matmul 4.2,
  casts 273.6, attention 10.4, other 39.4, idle 13.3 ms.
"""

MARKDOWN = """\
||ms/step|speed|FP8 matmul|other matmul|casts|attention|other|idle|GiB|
|BF16|103.6 ± 1.6|0.89x|||||||24.7|
|BF16 compiled|92.7 ± 1.4|1x|-|62.4|-|11.1|17.9|1.3|21.7|
|FP8 as you run it|366.1 ± 5.5|0.25x|25.2|4.2|273.6|10.4|39.4|13.3|24.7|
"""
"""Without backslashes, rules and the spaces around cells."""

NEVER_PROFILED = "\nTimed: 3 variants in turn on NVIDIA H200, "


def of(*arms: Arm, **trial: Any) -> Report:
    facts = timed(DECODER_468M, *arms)
    return report(
        msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, **trial)),
        "FP8 runs at 0.25x of BF16.",
    )


def notes(*arms: Arm, **trial: Any) -> tuple[str, ...]:
    found = timing(of(*arms, **trial).facts)
    assert found is not None
    return found.notes


def test_the_table_says_where_the_time_goes() -> None:
    assert TABLE in text.render(of(*ARMS), verbose=True)


def test_a_treatment_that_is_the_whole_prescription_has_one_row() -> None:
    alone = msgspec.structs.replace(ARMS[3], name="compile-blocks")
    other = ran("cache-off", 99.0, treatments=("cache-off",))
    rows = [
        row.label
        for row in (timing(timed(DECODER_468M, *ARMS, alone, other)) or pytest.fail("no table")).rows
    ]
    assert rows == [
        "BF16",
        "BF16 compiled",
        "FP8 as you run it",
        "FP8 with all fixes",
        "FP8 rowwise",
        "FP8, no KV cache",
    ]


def test_the_table_without_gib() -> None:
    """A CPU has no peak: the column is left out, as an empty one always was."""
    screen = text.render(of(FP8_EAGER, BF16), verbose=True)
    assert "speed\n" in screen
    (told,) = (line for line in screen.splitlines() if "GiB" in line)
    assert told.startswith("Memory ")


def test_where_it_does_not_fit_the_parts_are_told_below() -> None:
    assert NARROW in text.render(of(*ARMS), width=60, verbose=True)


@pytest.mark.parametrize("width", [40, 60, 79, 86, 87, 100, 140])
@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_asked(width: int, ascii: bool) -> None:
    screen = text.render(of(*ARMS), width=width, ascii=ascii, verbose=True)
    assert all(columns(line) <= width and line == line.rstrip() for line in screen.splitlines())


def test_markdown_has_the_same_columns_and_sentences() -> None:
    screen = markdown.render(of(*ARMS))
    rows = [
        re.sub(r" *\| *", "|", line.replace("\\", ""))
        for line in screen.splitlines()
        if line.startswith("| ")
    ]
    assert MARKDOWN in "\n".join(rows)
    said = "\n\nFP8 as you run it, against BF16 compiled: +273.4 ms = casts +273.6, matmuls −33.0, "
    assert said in screen


def test_a_trial_without_breakdowns_looks_as_before() -> None:
    arms = (
        shown(unprofiled("as_is", 366.1), 24.7),
        shown(unprofiled("bf16", 103.6), 24.7),
        shown(unprofiled("bf16_compiled", 92.7), 21.7),
    )
    assert NEVER_PROFILED in text.render(of(*arms), verbose=True)
    older = [msgspec.structs.replace(each, breakdown=msgspec.UNSET) for each in arms]
    assert NEVER_PROFILED in text.render(of(*older), verbose=True)
    assert "matmul |" not in markdown.render(of(*older))
    assert "FP8 matmul" not in text.render(of(*older), verbose=True)


def test_there_is_nothing_to_note_where_the_parts_are_plain() -> None:
    assert notes(*ARMS) == ()


def test_scaled_parts_name_the_factor() -> None:
    assert notes(replaced(FP8_COMPILED, scale=1.08), replaced(BF16, scale=1.021)) == (
        "Scaled down to the step: BF16 compiled (profiled, its kernels took 1.02 times as long); "
        "FP8 with all fixes (profiled, its kernels took 1.08 times as long).",
    )


def test_unreliable_parts_are_called_so_and_explain_nothing() -> None:
    facts = of(replaced(FP8_EAGER, reliable=False, scale=1.4, busy_ms=512.5), BF16).facts
    found = timing(facts)
    assert found is not None
    assert found.notes == ("Unreliable parts: FP8 as you run it (profiled, its kernels took 512.5 ms).",)
    assert found.differences == ()


def test_what_no_rule_knows_is_told_above_one_per_cent() -> None:
    told = notes(
        replaced(FP8_EAGER, unclassified_pct=2.3),
        replaced(FP8_COMPILED, unclassified_pct=1.0),
        replaced(BF16, unclassified_pct=0.4),
    )
    assert told == ("In kernels that no rule knows (in other): 2.3% of FP8 as you run it.",)


def test_a_profile_that_failed_has_its_reason() -> None:
    reason = "another profiler is active in this process, and a second one would end it"
    arm = msgspec.structs.replace(BF16, breakdown=msgspec.UNSET)
    assert not recorded(arm, "breakdown")
    assert notes(arm, gaps={"trial.arms.breakdown": reason}) == (
        f"Where the time goes is not known of every variant: {reason}.",
    )


def test_a_recipe_that_was_timed_by_block_says_so() -> None:
    arms = [
        Arm(name="compile-blocks", base="as_is", treatments=("compile-blocks",)),
        Arm(name="recipe-rowwise", base="compile-blocks", treatments=("recipe-rowwise",)),
    ]
    fixes = {"recipe-rowwise": 1}
    assert variant_of(arms[1], arms, True, {}) == "FP8 rowwise, by block"
    assert variant_of(arms[1], arms, True, fixes) == "FP8 rowwise, by block", "fix 1 alone was not timed"
    assert variant_of(arms[1], arms, True, {**fixes, "compile-blocks": 2}) == "FP8 with fixes 1 and 2"
    assert variant_of(arms[0], arms, True, {}) == "FP8, compiled"
    whole = [*arms, Arm(name="bf16_as_compiled")]
    assert variant_of(arms[0], whole, True, {}) == "FP8, by block", "as it is run it is compiled too"
    three = Arm(name="prescribed", base="as_is", treatments=("a", "b", "c"))
    assert variant_of(three, [three], True, {"a": 1, "b": 2, "c": 3}) == "FP8 with fixes 1, 2 and 3"


@pytest.mark.parametrize(
    ("change", "fixes", "label"),
    [
        ("cuda-graphs", {"cuda-graphs": 1}, "FP8 with fix 1"),
        ("recipe-rowwise", {"cuda-graphs": 1}, "FP8 rowwise, compiled"),
        ("recipe-rowwise", {"recipe-rowwise": 2, "cuda-graphs": 1}, "FP8 rowwise, compiled"),
        ("recipe-rowwise", {"compile-blocks": 1}, "FP8 rowwise, fix 1"),
        ("recipe-rowwise", {}, "FP8 rowwise, compiled"),
        ("recipe-rowwise", None, "FP8 rowwise, all fixes"),
    ],
)
def test_what_was_built_on_a_plan_of_before_names_what_is_in_it(
    change: str, fixes: dict[str, int] | None, label: str
) -> None:
    """CUDA graphs stand for the compiled blocks that they were tried on, and are the plan now."""
    arms = [
        Arm(name="prescribed", base="as_is", treatments=("cuda-graphs",)),
        Arm(name="prescribed_first", base="as_is_first", treatments=("compile-blocks",)),
        Arm(name=change, base="prescribed_first", treatments=(change,)),
    ]
    assert variant_of(arms[2], arms, True, fixes) == label


def test_what_takes_the_place_of_all_that_it_was_built_on_names_no_fix_beside_itself() -> None:
    arms = [
        Arm(name="prescribed", base="as_is", treatments=("compile-blocks", "checkpointing-off")),
        Arm(name="prescribed_first", base="as_is", treatments=("compile-blocks",)),
        Arm(name="cuda-graphs", base="prescribed_first", treatments=("cuda-graphs",)),
    ]
    fixes = {"compile-blocks": 1, "checkpointing-off": 2}
    assert variant_of(arms[2], arms, True, fixes) == "FP8, CUDA graphs"
    without = Arm(name="without_adapters", base="prescribed_first")
    assert variant_of(without, [*arms, without], True, fixes) == "FP8 without adapters, fix 1"
    of_now = Arm(name="without_adapters", base="as_is")
    assert variant_of(of_now, [*arms, of_now], True, fixes) == "FP8 without adapters"


def test_a_part_of_the_plan_that_was_timed_beside_the_whole_has_a_row() -> None:
    """Others are built on it, and findings name its time."""
    arms = {"as_is": around(366.1), "bf16_compiled": around(92.7), "prescribed": around(88.3)}
    facts = Of(
        {**arms, "prescribed_first": around(99.0), "checkpointing-off": around(88.3)},
        treatments=("compile-blocks", "checkpointing-off"),
        bases={"checkpointing-off": "prescribed_first", "prescribed_first": "as_is"},
    ).facts()
    first = msgspec.structs.replace(facts.trial.arms[3], treatments=("compile-blocks",))
    trial = msgspec.structs.replace(facts.trial, arms=(*facts.trial.arms[:3], first, facts.trial.arms[4]))
    facts = msgspec.structs.replace(facts, trial=trial)
    fixes = {"compile-blocks": 1, "checkpointing-off": 2}
    told = timing(facts, fixes)
    assert told is not None
    assert [row.label for row in told.rows] == [
        "BF16 compiled",
        "FP8 as you run it",
        "FP8 with fix 1",
        "FP8 with fixes 1 and 2",
    ]
    alone = timing(facts, {"compile-blocks": 1})
    assert alone is not None
    assert "FP8 with fix 1" in [row.label for row in alone.rows]
    unplanned = timing(facts, {"checkpointing-off": 1})
    assert unplanned is not None
    assert "FP8, compiled" in [row.label for row in unplanned.rows]


def test_a_peak_that_the_cuts_leave_open_has_its_reason() -> None:
    reason = "with 2 and 6 blocks the peak is elsewhere in the step than at full depth"
    arm = msgspec.structs.replace(BF16, peak_gib=msgspec.UNSET)
    assert notes(arm, gaps={"trial.arms.peak_gib": reason}) == (
        f"Peak memory is not known of every variant: {reason}.",
    )
    found = timing(of(arm, shown(FP8_COMPILED, 17.2)).facts)
    assert found is not None
    assert [(row.label, row.memory) for row in found.rows] == [
        ("BF16 compiled", "?"),
        ("FP8 with all fixes", "17.2"),
    ]


def test_a_model_without_fp8_has_the_difference_that_fp8_would_make() -> None:
    plain = tuple(
        msgspec.structs.replace(each, stack="torch", use="none") for each in DECODER_468M.network.linears
    )
    without: Facts = msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=plain)
    )
    arms = (
        msgspec.structs.replace(BF16, name="as_is"),
        msgspec.structs.replace(FP8_COMPILED, name="float8_tensorwise", treatments=()),
    )
    found = timing(timed(without, *arms))
    assert found is not None
    assert [each.partition(":")[0] for each in found.differences] == [
        "FP8 tensorwise compiled, against as you run it"
    ]


def test_every_family_has_its_column_and_its_part() -> None:
    assert sorted(family for families in COLUMNS.values() for family in families) == sorted(get_args(Family))
    assert {family for families in PARTS.values() for family in families} == set(get_args(Family)) - {
        "unknown"
    }
    assert REST == "unclassified"


WIDE = ("recipe-rowwise", "recipe-rowwise-with-gw-hp")


def waiting(*names: str) -> tuple[Arm, ...]:
    return tuple(too_late(name, name) for name in names)


def test_what_failed_alike_stands_in_one_line_in_its_own_words() -> None:
    found = timing(of(*ARMS[:-1], *(failed(name, "it raises ValueError: no kernel") for name in "abc")).facts)
    assert found is not None
    assert [(row.label, row.note) for row in found.rows][-1] == (
        "3 more variants",
        "not timed: it raises ValueError: no kernel",
    )


def test_what_the_budget_left_no_time_for_stands_in_one_line_and_how_to_time_it_below() -> None:
    found = timing(of(*ARMS[:-1], *waiting(*WIDE, "fused-optimizer"), budget_s=60.0).facts)
    assert found is not None
    assert [(row.label, row.note) for row in found.rows if row.note] == [
        ("3 more variants", "not timed: it did not fit into the budget of 60 s")
    ]
    assert more_time_s(of(*ARMS[:-1], *waiting(*WIDE), budget_s=60.0).facts.trial) == 120.0
    assert more_time_s(of(*ARMS[:-1], budget_s=60.0).facts.trial) is None
    known = of(*ARMS[:-1], *waiting(*WIDE), budget_s=60.0, elapsed_s=118.0, enough_s=90.0)
    assert more_time_s(known.facts.trial) == 90.0


def test_more_time_is_asked_for_in_the_words_of_who_holds_the_model() -> None:
    short = of(*ARMS[:-1], *waiting(*WIDE), budget_s=60.0, enough_s=90.0).facts
    live = msgspec.structs.replace(short, target=Target(kind="live", name="Net", attribute=None))
    assert "--budget 90 to time more variants" in first_screen(diagnose(short)).next
    assert "budget_s=90 to time more variants" in first_screen(diagnose(live)).next


@pytest.mark.parametrize(
    ("budget_s", "elapsed_s", "advised"),
    [(0.5, 3.0, 30), (0.001, 0.1, 30), (10.0, 13.0, 30), (60.0, 90.0, 150)],
)
def test_the_budget_that_is_advised_is_more_than_the_trial_took(
    budget_s: float, elapsed_s: float, advised: int
) -> None:
    short = of(*ARMS[:-1], *waiting(*WIDE), budget_s=budget_s, elapsed_s=elapsed_s)
    assert more_time_s(short.facts.trial) == advised


def test_a_trial_that_timed_nothing_in_time_advises_more() -> None:
    trial = msgspec.structs.replace(of(*ARMS, budget_s=60.0).facts.trial, arms=())
    late, raising = (
        msgspec.structs.replace(trial, why=why, reason="")
        for why in (Reason.NO_TIME_LEFT, Reason.STEP_RAISES)
    )
    assert (more_time_s(late), more_time_s(raising)) == (120.0, None)


def test_a_recipe_is_told_in_words_and_the_table_of_a_large_model_fits() -> None:
    found = timing(of(FP8_EAGER, *waiting(*WIDE)).facts)
    assert found is not None
    assert [row.label for row in found.rows if row.note] == [
        "FP8 rowwise",
        "FP8 rowwise with BF16 weight gradients",
    ]
    large = [
        replaced(each, families_ms={**each.breakdown.families_ms, "gemm_16bit": 527.2, "cast": 151.7})
        for each in (FP8_EAGER, BF16)
        if each.breakdown
    ]
    arms = [
        msgspec.structs.replace(each, step_ms=773.5, low_ms=752.0, high_ms=795.0, peak_gib=107.9)
        for each in large
    ]
    shown = text.render(of(*arms, *waiting(*WIDE)), width=120, verbose=True)
    assert (
        "Not timed: FP8 rowwise · FP8 rowwise with BF16 weight gradients "
        "(did not fit into the budget of 60 s)." in shown
    )
    assert "  ms/step            FP8 matmul" in shown


def test_what_is_known_of_an_error_that_stopped_variants_stands_below() -> None:
    float8 = torch.ones(4).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="Promotion") as caught:
        float8 * torch.ones(4).bfloat16()
    reason = error_in_words(caught.value)
    arms = (*ARMS[:3], failed("as_is", reason), failed("recipe-rowwise", reason))
    told = " ".join(notes(*arms))
    assert (
        "FP8 as you run it; FP8 rowwise: An FP8 tensor met one of another dtype outside an FP8 layer" in told
    )
    assert "More: fp8doctor explain MOD003." in told
    assert told.count("An FP8 tensor met one") == 1
