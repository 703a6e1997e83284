"""CMP006 on models that a trial compiles both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.checks.compilation import whole_model_compile as check
from fp8doctor.checks.compilation.whole_model_compile import whole_model_compile
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import failed, ran, timed
from tests.checks.trials import tried
from tests.examine.models import Stacked

Look = Callable[..., Facts]
TOKENS = torch.zeros(2, 8, dtype=torch.long)


def compiled() -> nn.Module:
    model = Stacked()
    model.compile()
    return model


def both(facts: Facts, whole_s: float, blocks_s: float, *, blocks_ms: float = 100.0) -> Facts:
    """The facts of a trial whose arms took this long to compile, as they would on a GPU."""
    arms = {"as_is": (whole_s, 100.0), "compile-blocks": (blocks_s, blocks_ms)}
    cuts = facts.trial.arms[0].cuts
    return timed(
        facts,
        *(
            ran(name, ms, cuts=(msgspec.structs.replace(cuts[0], warm_up_s=seconds),))
            for name, (seconds, ms) in arms.items()
        ),
    )


@pytest.fixture(scope="module")
def facts() -> Facts:
    """Compiled by a backend that makes no kernels, which would take the CPU's compiler a minute. It is said
    to be of a GPU: seconds of a CPU's compiler are not judged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
        seen = tried(compiled(), TOKENS, "as_is", "compile-blocks")
    return on(seen, "cuda")


def on(facts: Facts, device: str) -> Facts:
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, device=device))


@pytest.mark.slow
def test_what_a_cpu_compiles_for_itself_is_not_judged(facts: Facts) -> None:
    assert isinstance(whole_model_compile(on(both(facts, 72.0, 8.0), "cpu")), NotApplicable)


@pytest.mark.slow
def test_the_trial_compiles_it_both_ways(facts: Facts) -> None:
    whole, blocks = facts.trial.arms
    assert (whole.graphs_run, blocks.graphs_run) == (1, 3)
    assert check.full_warm_up(facts, whole) == whole.cuts[-1].warm_up_s
    assert blocks.base == "as_is"


def test_seconds_that_are_worth_saving(facts: Facts) -> None:
    finding = whole_model_compile(both(facts, 72.0, 8.0))
    assert isinstance(finding, Finding)
    assert finding.title == "Compiling the model as one takes 72 s; block by block it takes 8 s"
    assert finding.treatment is not None
    assert (finding.treatment.name, finding.treatment.code) == (
        "compile-blocks",
        "for block in model.blocks:\n    block.compile()",
    )


@pytest.mark.parametrize(
    ("blocks_s", "blocks_ms"), [(70.0, 100.0), (8.0, 110.0)], ids=["as long", "a slower step"]
)
def test_nothing_to_gain(facts: Facts, blocks_s: float, blocks_ms: float) -> None:
    assert whole_model_compile(both(facts, 72.0, blocks_s, blocks_ms=blocks_ms)) is None


def test_the_treatment_makes_it_silent(facts: Facts, look: Look) -> None:
    finding = whole_model_compile(both(facts, 72.0, 8.0))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    model = Stacked()
    exec(finding.treatment.code, {"model": model})
    assert isinstance(whole_model_compile(timed(look(model), ran("as_is"))), NotApplicable)


def test_without_the_other_arm(facts: Facts, look: Look) -> None:
    assert isinstance(whole_model_compile(timed(look(compiled()), ran("as_is"))), NotApplicable)


def cuts_that_took(facts: Facts, seconds: tuple[float, float], reason: str | None = None) -> Facts:
    """Only the whole graph was timed, at 4 and 12 of 28 blocks."""
    (cut,) = facts.trial.arms[0].cuts
    cuts = tuple(
        msgspec.structs.replace(cut, blocks={"blocks": kept}, warm_up_s=each)
        for kept, each in zip((4, 12), seconds, strict=True)
    )
    arms = (ran("as_is", cuts=cuts), *([failed("compile-blocks", reason)] if reason else []))
    found = timed(facts, *arms)
    return msgspec.structs.replace(found, trial=msgspec.structs.replace(found.trial, blocks={"blocks": 28}))


def test_what_the_whole_took_is_enough(facts: Facts) -> None:
    finding = whole_model_compile(cuts_that_took(facts, (48.0, 76.0), "the budget was used up before it"))
    assert isinstance(finding, Finding)
    assert finding.title == "Compiling the model as one takes 132 s; block by block it takes about 38 s"
    assert "did not time it block by block (the budget was used up before it)." in finding.explanation
    assert finding.evidence["step_of_blocks_ms"] is None


def test_a_graph_that_grows_little_is_no_finding(facts: Facts) -> None:
    assert whole_model_compile(cuts_that_took(facts, (8.0, 10.0))) is None
    assert isinstance(whole_model_compile(cuts_that_took(facts, (10.0, 8.0))), NotApplicable)


def test_cuts_are_carried_on_to_the_full_depth(facts: Facts) -> None:
    (cut,) = facts.trial.arms[0].cuts
    cuts = tuple(
        msgspec.structs.replace(cut, blocks={"blocks": kept}, warm_up_s=seconds)
        for kept, seconds in ((4, 14.0), (12, 38.0))
    )
    deep = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, blocks={"blocks": 24}))
    assert check.full_warm_up(deep, ran("as_is", cuts=cuts)) == pytest.approx(74.0)
    assert check.full_warm_up(deep, ran("as_is", cuts=cuts[::-1][1:])) == pytest.approx(14.0)


def test_blocks_take_what_the_cut_took_that_compiled_them(facts: Facts) -> None:
    cuts = tuple(
        msgspec.structs.replace(facts.trial.arms[0].cuts[0], blocks={"blocks": kept}, warm_up_s=seconds)
        for kept, seconds in ((2, 0.2), (6, 13.0))
    )
    assert check.of_blocks(ran("compile-blocks", 100.0, cuts=cuts)) == 13.0
