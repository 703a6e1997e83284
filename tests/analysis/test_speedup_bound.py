"""The most that FP8 can give, from breakdowns composed in the proportions of measured ones."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.analysis.outcome import ceiling
from fp8doctor.analysis.speedup_bound import bound
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Facts, Gpu, LayerShape
from tests.checks.arms import timed
from tests.checks.step.profiled import BF16, COMPILED, FP8_COMPILED, FP8_EAGER, profiled, replaced, unprofiled
from tests.facts_of import DECODER_468M

ON_H200 = msgspec.structs.replace(
    DECODER_468M, gpus=(Gpu(name="NVIDIA H200", compute_capability="9.0", visible=True),)
)
NOT_PROFILED = (unprofiled("as_is", 366.1), unprofiled("prescribed", 88.3, **COMPILED))
SENTENCE = "FP8 can make this step at most about 1.39x as fast as BF16 on this GPU."


def shape(bf16_ms: float, fp8_ms: float | None, layers: int = 24) -> LayerShape:
    names = tuple(f"blocks.{i}.up" for i in range(layers))
    return LayerShape(
        m=16384,
        k=1024,
        n=4096,
        recipe="tensorwise",
        layers=names,
        trained=True,
        bf16_ms=bf16_ms,
        fp8_ms=fp8_ms,
        casts_ms=0.1,
        reason=None,
    )


def with_shapes(facts: Facts, *shapes: LayerShape) -> Facts:
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, shapes=shapes))


def test_the_gemms_of_the_fastest_fp8_step_bound_it() -> None:
    found = ceiling(timed(ON_H200, BF16, FP8_EAGER, FP8_COMPILED))
    assert found is not None
    assert (found.basis, found.source) == ("measured", "the matmuls of the variant prescribed")
    assert found.speedup == pytest.approx(92.7 / (92.7 - 62.4 + 36.3))
    assert found.gemms_pct == pytest.approx(100 * 62.4 / 92.7)


def test_the_verdict_says_it() -> None:
    assert SENTENCE in diagnose(timed(ON_H200, BF16, FP8_EAGER, FP8_COMPILED)).verdict.summary


def test_a_model_without_fp8_is_told_too() -> None:
    plain = tuple(
        msgspec.structs.replace(each, stack="torch", use="none") for each in ON_H200.network.linears
    )
    facts = msgspec.structs.replace(ON_H200, network=msgspec.structs.replace(ON_H200.network, linears=plain))
    arms = (
        msgspec.structs.replace(BF16, name="as_is"),
        msgspec.structs.replace(FP8_COMPILED, name="float8_tensorwise"),
    )
    verdict = diagnose(timed(facts, *arms)).verdict
    assert verdict.status == "no_fp8"
    assert SENTENCE in verdict.summary


def test_shapes_timed_alone_bound_it_where_no_fp8_step_was_profiled() -> None:
    facts = with_shapes(
        timed(ON_H200, BF16, *NOT_PROFILED), shape(1.0, 0.5), shape(1.0, 1.4), shape(1.0, None)
    )
    found = ceiling(facts)
    assert found is not None
    assert (found.basis, found.source) == ("measured", "the matmuls of every shape timed alone")
    assert found.fp8_gemms_ms == pytest.approx(62.4 * 2.5 / 3), "alone they take longer than in the step"


@pytest.mark.parametrize(("micro_batches", "saved"), [(1, 24 * 0.5), (2, 48 * 0.5), (4, 62.4 / 2)])
def test_what_is_no_linear_of_the_timed_ones_stays_as_it_is(micro_batches: int, saved: float) -> None:
    """As an H200 has it for GEMMs in fp32 or eager attention's: in BF16 the Linears alone took 54 of 122 and
    62 of 108 ms."""
    workload = msgspec.structs.replace(ON_H200.workload, accumulate=micro_batches)
    facts = timed(msgspec.structs.replace(ON_H200, workload=workload), BF16, *NOT_PROFILED)
    found = ceiling(with_shapes(facts, shape(1.0, 0.5)))
    assert found is not None
    assert found.fp8_gemms_ms == pytest.approx(62.4 - saved)


def test_the_least_time_that_was_measured_counts() -> None:
    facts = timed(ON_H200, BF16, FP8_EAGER, FP8_COMPILED)
    assert ceiling(with_shapes(facts, shape(1.0, 0.9))) == ceiling(facts)
    lower = ceiling(with_shapes(facts, shape(3.0, 1.5)))
    assert lower is not None
    assert lower.fp8_gemms_ms == pytest.approx(31.2)


def test_without_fp8_gemms_it_is_modelled_and_says_so() -> None:
    facts = timed(ON_H200, BF16, *NOT_PROFILED)
    found = ceiling(facts)
    assert found is not None
    assert (found.basis, found.source) == ("modelled", "the datasheet of H200")
    assert 1.2 < found.speedup < 1.6


def test_the_datasheet_leaves_adapters_in_bf16() -> None:
    linears = tuple(msgspec.structs.replace(each, adapter="adapter") for each in ON_H200.network.linears)
    facts = msgspec.structs.replace(
        ON_H200, network=msgspec.structs.replace(ON_H200.network, linears=linears)
    )
    found = bound(timed(facts, BF16), BF16, ())
    assert found is not None
    assert found.speedup == pytest.approx(1)


def test_a_step_that_was_measured_faster_is_not_denied() -> None:
    facts = timed(ON_H200, BF16, FP8_EAGER, replaced(FP8_COMPILED, families_ms={"gemm_fp8": 60.0}))
    facts = with_shapes(facts, shape(1.0, 1.0))
    found = ceiling(facts)
    assert found is not None
    assert found.speedup == pytest.approx(92.7 / 88.3)


def test_fp8_gemms_that_lose_can_be_left_in_bf16() -> None:
    found = ceiling(timed(ON_H200, BF16, profiled("as_is", 120.0, gemm_fp8=80.0, cast=20.0)))
    assert found is not None
    assert found.speedup == 1


def test_an_arm_that_does_less_work_says_nothing_about_the_gemms() -> None:
    without = msgspec.structs.replace(
        FP8_COMPILED, treatments=("checkpointing-off",), breakdown=FP8_COMPILED.breakdown
    )
    found = ceiling(timed(ON_H200, BF16, FP8_EAGER, without))
    assert found is not None
    assert found.source == "the matmuls of the variant as_is"


ROWWISE: dict[str | None, Facts] = {
    recipe: msgspec.structs.replace(
        ON_H200,
        network=msgspec.structs.replace(
            ON_H200.network,
            linears=tuple(
                msgspec.structs.replace(each, recipe=recipe if each.use == "training" else None)
                for each in ON_H200.network.linears
            ),
        ),
    )
    for recipe in ("rowwise", "rowwise_with_gw_hp", None)
}
HALF = msgspec.structs.replace(
    ON_H200,
    network=msgspec.structs.replace(
        ON_H200.network,
        linears=tuple(
            msgspec.structs.replace(each, use="none", stack="torch", recipe=None)
            if each.name.endswith((".u", ".g"))
            else each
            for each in ON_H200.network.linears
        ),
    ),
)


@pytest.mark.parametrize("facts", [*ROWWISE.values(), HALF], ids=[*map(str, ROWWISE), "layers left out"])
def test_the_job_as_it_is_does_not_bound_the_model(facts: Facts) -> None:
    slow = msgspec.structs.replace(shape(1.0, 0.95), recipe="rowwise" if facts is not HALF else "tensorwise")
    found = ceiling(
        with_shapes(
            timed(facts, BF16, FP8_EAGER, replaced(FP8_COMPILED, families_ms={"gemm_fp8": 60.0})), slow
        )
    )
    modelled = ceiling(timed(ON_H200, BF16, *NOT_PROFILED))
    assert found is not None
    assert modelled is not None
    assert (found.basis, found.source) == ("modelled", "the datasheet of H200")
    assert found.speedup == pytest.approx(modelled.speedup)


def test_what_was_measured_of_a_dearer_recipe_is_not_denied() -> None:
    found = ceiling(
        timed(ROWWISE["rowwise"], BF16, FP8_EAGER, replaced(FP8_COMPILED, families_ms={"gemm_fp8": 10.0}))
    )
    assert found is not None
    assert (found.basis, found.fp8_gemms_ms) == ("modelled", 10.0)


@pytest.mark.parametrize(
    ("recipe", "treatment", "basis"),
    [
        ("rowwise", "recipe-tensorwise", "measured"),
        ("tensorwise", "recipe-rowwise", "modelled"),
        ("tensorwise", "keep-in-bf16", "modelled"),
    ],
)
def test_a_prescription_that_changes_the_recipe_or_the_layers(
    recipe: str, treatment: str, basis: str
) -> None:
    facts = ON_H200 if recipe == "tensorwise" else ROWWISE[recipe]
    changed = msgspec.structs.replace(FP8_COMPILED, treatments=("compile-blocks", treatment))
    found = ceiling(timed(facts, BF16, unprofiled("as_is", 366.1), changed))
    assert found is not None
    assert found.basis == basis


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_transformer_engines_recipes_for_whole_tensors_bound_it(recipe: str) -> None:
    linears = tuple(
        msgspec.structs.replace(each, stack="transformer_engine", recipe=recipe)
        if each.use == "training"
        else each
        for each in ON_H200.network.linears
    )
    facts = msgspec.structs.replace(
        ON_H200, network=msgspec.structs.replace(ON_H200.network, linears=linears)
    )
    found = ceiling(timed(facts, BF16, FP8_EAGER))
    assert found is not None
    assert found.basis == "measured"


@pytest.mark.parametrize(("recipe", "basis"), [("tensorwise", "measured"), ("rowwise", "modelled")])
def test_the_conversion_of_a_model_without_fp8(recipe: str, basis: str) -> None:
    plain = tuple(
        msgspec.structs.replace(each, stack="torch", use="none", recipe=None)
        for each in ON_H200.network.linears
    )
    facts = msgspec.structs.replace(ON_H200, network=msgspec.structs.replace(ON_H200.network, linears=plain))
    arms = (
        msgspec.structs.replace(BF16, name="as_is"),
        msgspec.structs.replace(FP8_COMPILED, name=f"float8_{recipe}", treatments=(f"convert-{recipe}",)),
    )
    found = ceiling(timed(facts, *arms))
    assert found is not None
    assert found.basis == basis


UNKNOWN: dict[str, tuple[Arm, ...]] = {
    "BF16 was not profiled": (unprofiled("bf16_compiled", 92.7), FP8_EAGER),
    "its breakdown is unreliable": (replaced(BF16, reliable=False), FP8_EAGER),
    "there is no BF16": (FP8_EAGER,),
}


@pytest.mark.parametrize("arms", UNKNOWN.values(), ids=UNKNOWN)
def test_it_is_unknown_without_a_profiled_bf16_step(arms: tuple[Arm, ...]) -> None:
    facts = timed(ON_H200, *arms)
    assert ceiling(facts) is None
    assert "cannot give" not in diagnose(facts).verdict.summary


def test_a_cpu_says_nothing_about_a_gpu() -> None:
    assert ceiling(timed(ON_H200, BF16, FP8_EAGER, device="cpu")) is None


def test_the_datasheet_is_asked_with_the_rows_that_the_trial_saw() -> None:
    """A million frames go through one narrow layer, 8,192 tokens through the others: their GEMMs are not
    those of a million rows."""
    facts = timed(ON_H200, BF16, *NOT_PROFILED)
    linears = [each for each in facts.network.linears if each.use == "training"]
    few = {each.name: (16,) for each in linears}
    plenty, little = (
        ceiling(each)
        for each in (
            facts,
            msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, rows=few)),
        )
    )
    assert plenty is not None
    assert little is not None
    assert (plenty.basis, little.basis) == ("modelled", "modelled")
    assert little.fp8_gemms_ms > plenty.fp8_gemms_ms
