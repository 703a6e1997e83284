"""What the screen tells of a trial, from arms written down by hand."""

from __future__ import annotations

import re

import msgspec
import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Gpu
from tests.diagnosis.trials import SLOW, Of, around, explored, render
from tests.facts_of import DECODER_468M

GPU = Gpu(name="NVIDIA H200", vendor="nvidia", compute_capability="9.0", architecture=None, visible=True)


def test_the_screen_shows_every_arm_with_its_time_and_why_one_has_none() -> None:
    screen = render(
        diagnose(Of({**SLOW, "bf16_compiled": "it raises BackendCompilerFailed: no compiler"}).facts())
    )
    assert re.search(r"^FP8 as you run it  366\.1 ± 5\.5 .* 20\.0$", screen, re.M)
    assert re.search(r"^BF16               103\.6 ± 1\.6 .* 20\.0$", screen, re.M)
    assert "Not timed: BF16 compiled (raises BackendCompilerFailed: no compiler).\n" in screen
    assert (
        "Timed: 3 variants in turn on NVIDIA H200, 6 rounds, the whole model, 31 s; two copies of one step "
        "differ by 0.0%." in " ".join(screen.split())
    )
    assert "−278 ms/step, measured on NVIDIA H200" in screen
    assert "nothing was timed" not in screen


@pytest.mark.parametrize(
    ("own", "where"), [(True, "in a process of its own"), (False, "in your process, on copies of the model")]
)
def test_the_screen_says_where_the_trial_ran(own: bool, where: str) -> None:
    facts = Of(SLOW).facts()
    facts = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, own_process=own))
    assert f"The trial ran {where}." in " ".join(render(diagnose(facts)).split())


def test_the_screen_shows_what_the_trial_found_by_itself() -> None:
    arms = {**SLOW, "fused-optimizer": around(84.0)}
    total = Of(
        {**arms, "prescribed": around(84.0)},
        treatments=("compile-blocks", "fused-optimizer"),
        bases={"fused-optimizer": "prescribed_first"},
    )
    facts = total.facts()
    first = msgspec.structs.replace(
        next(arm for arm in Of(SLOW).facts().trial.arms if arm.name == "prescribed"),
        name="prescribed_first",
        base="as_is",
    )
    facts = msgspec.structs.replace(
        facts, trial=msgspec.structs.replace(facts.trial, arms=(*facts.trial.arms, first))
    )
    screen = render(diagnose(facts))
    assert re.search(r"^2  fused-optimizer +−4.3 ms/step, measured on NVIDIA H200$", screen, re.M), screen
    assert "fused-optimizer is faster, timed with all else equal." in screen


def test_slower_fp8_that_no_check_explains_is_not_called_fine() -> None:
    arms = {"as_is": around(38.0), "bf16": around(29.9)}
    compiled = tuple(msgspec.structs.replace(each, compiled="") for each in DECODER_468M.network.linears)
    base = msgspec.structs.replace(
        DECODER_468M, network=msgspec.structs.replace(DECODER_468M.network, linears=compiled), gpus=(GPU,)
    )
    screen = render(diagnose(Of(arms).facts(base)))
    assert "fp8doctor cannot explain the gap: no check found its cause." in screen
    assert "Nothing was found" not in screen


def test_arms_of_the_first_window_are_not_shown_twice() -> None:
    screen = render(diagnose(explored()))
    assert len(re.findall(r"FP8 with fixes 1 and 2 +80\.0 ± 1\.2 .* 20\.0\n", screen)) == 1
    assert "prescribed" not in screen


def test_variants_without_a_time_for_one_reason_stand_in_one_line() -> None:
    late = "it did not fit into the budget of 60 s"
    screen = render(
        diagnose(explored(**dict.fromkeys(("cache-off", "recipe-tensorwise", "fused-optimizer"), late)))
    )
    assert "Not timed: 3 more variants (did not fit into the budget of 60 s)." in screen
    assert screen.lower().count("not timed") == 1
