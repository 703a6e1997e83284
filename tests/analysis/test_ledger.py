"""What single GEMMs let expect of a step, held to what the step shows; facts alone, no GPU."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fp8doctor.analysis.layer_gain import cast_shares
from fp8doctor.analysis.ledger import Ledger, ledger
from fp8doctor.analysis.losing_layers import losing
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import (
    Arm,
    Environment,
    Facts,
    LayerGemm,
    LayerShape,
    Linear,
    Network,
    Training,
    Trial,
    Workload,
)
from fp8doctor.recipes import RECIPES, named
from fp8doctor.render.detail_tables import ledger_table
from fp8doctor.render.text import render
from fp8doctor.report import Report
from tests.checks.step.profiled import profiled

LAYOUTS = ("output", "input_gradient", "weight_gradient")
WIDE, NARROW = (8192, 4096, 14336), (8192, 4096, 1024)


def shape(
    sides: tuple[int, int, int],
    *gemms: tuple[float, float | None],
    casts: float | None,
    layers: int = 2,
    recipe: str = "tensorwise",
) -> LayerShape:
    m, k, n = sides
    return LayerShape(
        m=m,
        k=k,
        n=n,
        recipe=recipe,
        trained=len(gemms) == 3,
        layers=tuple(f"{n}.{i}" for i in range(layers)),
        bf16_ms=sum(bf16 for bf16, _ in gemms),
        fp8_ms=sum(bf16 if fp8 is None else fp8 for bf16, fp8 in gemms),
        gemms=tuple(
            LayerGemm(layout=layout, bf16_ms=bf16, fp8_ms=fp8)  # type: ignore[arg-type]
            for layout, (bf16, fp8) in zip(LAYOUTS, gemms, strict=False)
        ),
        casts_ms=casts,
        reason=None,
    )


def facts(
    *shapes: LayerShape, arms: tuple[Arm, ...] = (), accumulate: int = 1, use: str = "training", **more: Any
) -> Facts:
    linears = tuple(
        Linear(
            name=name,
            kind="x.Float8Linear",
            stack="torchao",
            use=use,  # type: ignore[arg-type]
            recipe=each.recipe,
            in_features=each.k,
            out_features=each.n,
            features={},
            gemms=1,
            role="body",
            adapter=None,
            requires_grad=each.trained,
            flops_share_pct=10.0,
            **more,
        )
        for each in shapes
        for name in each.layers
    )
    return Facts(
        environment=Environment(variables={}),
        network=Network(linears=linears),
        training=Training(),
        workload=Workload(batch_source="given", tokens=8192, accumulate=accumulate),
        trial=Trial(device="cuda", gpu="NVIDIA H200", shapes=shapes, arms=arms),
        assumed_gpu="H200",
    )


WINS = shape(WIDE, (1.6, 0.9), (1.5, 0.9), (1.7, 1.0), casts=0.9)
LOSES = shape(NARROW, (0.12, 0.08), (0.12, 0.09), (0.13, 0.09), casts=0.3)

BF16 = profiled("bf16_compiled", 100.0, gemm_16bit=70.0, pointwise=20.0)
FP8 = profiled("as_is", 90.0, arm={"graphs_run": 24}, gemm_fp8=50.0, cast=12.0, pointwise=18.0)


def kept(of: Facts) -> Ledger:
    found = ledger(of)
    assert found is not None
    return found


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_lines_add_up_to_what_the_shapes_say_of_a_step(accumulate: int) -> None:
    found = kept(facts(WINS, LOSES, accumulate=accumulate))
    assert [(line.n, line.layout) for line in found.lines] == [
        (n, layout) for n in (14336, 1024) for layout in LAYOUTS
    ]
    assert {line.calls for line in found.lines} == {2 * accumulate}
    calls = 2 * accumulate
    assert found.bf16_ms == pytest.approx(calls * (WINS.bf16_ms + LOSES.bf16_ms))
    assert found.fp8_ms == pytest.approx(calls * (2.8 + 0.26))
    assert found.casts_ms == pytest.approx(calls * 1.2)
    assert found.net_ms == pytest.approx(found.bf16_ms - found.fp8_ms - found.casts_ms)
    assert found.net_ms == pytest.approx(sum(line.step_ms for line in found.lines))
    assert found.speedup == pytest.approx((4.8 + 0.37) / (2.8 + 0.26 + 1.2))
    assert found.layers == 4


def test_what_the_step_shows_beyond_single_layers_is_left_over() -> None:
    found = kept(facts(WINS, LOSES, arms=(FP8, BF16)))
    assert (found.fp8_arm, found.bf16_arm) == ("as_is", "bf16_compiled")
    # 2 ms of pointwise work went into the casts, and are not theirs.
    assert found.step_saved_ms == pytest.approx(70.0 - 50.0 - (12.0 - 2.0))
    assert found.unexplained_ms == pytest.approx(found.step_saved_ms - found.net_ms)
    assert (found.step_gemms_saved_ms, found.step_casts_ms) == (pytest.approx(20.0), pytest.approx(10.0))


def test_a_step_with_other_gemms_is_not_what_it_is_held_to() -> None:
    other = msgspec.structs.replace(FP8, name="prescribed", treatments=("recipe-rowwise",))
    assert kept(facts(WINS, arms=(FP8, BF16, other))).fp8_arm == "as_is"
    compiled = msgspec.structs.replace(FP8, name="prescribed", treatments=("compile-blocks",))
    assert kept(facts(WINS, arms=(FP8, BF16, compiled))).fp8_arm == "prescribed"
    without = kept(facts(WINS, arms=(other, BF16)))
    assert (without.fp8_arm, without.step_saved_ms, without.unexplained_ms) == (None, None, None)


def test_a_model_without_fp8_is_held_to_its_conversion() -> None:
    as_is = msgspec.structs.replace(BF16, name="as_is")
    arms = (
        as_is,
        *(msgspec.structs.replace(FP8, name=f"float8_{each}") for each in ("tensorwise", "rowwise")),
    )
    found = kept(facts(WINS, arms=arms, use="none"))
    assert (found.fp8_arm, found.bf16_arm) == ("float8_tensorwise", "as_is")


def test_a_gemm_that_the_recipe_keeps_in_bf16_neither_costs_nor_saves() -> None:
    recipe = "rowwise_with_gw_hp"
    found = kept(facts(shape(WIDE, (1.6, 0.9), (1.5, 0.9), (1.7, None), casts=0.8, recipe=recipe)))
    weight = found.lines[2]
    assert (weight.layout, weight.fp8_ms, weight.casts_ms, weight.step_ms) == ("weight_gradient", None, 0, 0)
    assert found.fp8_ms == pytest.approx(2 * (0.9 + 0.9 + 1.7))
    assert found.casts_ms == pytest.approx(2 * 0.8)


def test_a_frozen_layer_has_two_gemms_and_a_recomputed_one_its_output_twice() -> None:
    frozen = kept(facts(shape(WIDE, (1.6, 0.9), (1.5, 0.9), casts=0.5), checkpointed="blocks.0"))
    assert [(line.layout, line.calls) for line in frozen.lines] == [("output", 4), ("input_gradient", 2)]
    assert frozen.net_ms == pytest.approx(sum(line.calls * line.net_ms for line in frozen.lines))


@pytest.mark.parametrize("gemms", [msgspec.UNSET, ()])
def test_shapes_without_single_gemms_or_casts_are_in_no_ledger(gemms: Any) -> None:
    older = msgspec.structs.replace(WINS, gemms=gemms)
    assert ledger(facts(older)) is None
    assert ledger(facts(msgspec.structs.replace(WINS, casts_ms=None))) is None
    on_cpu = facts(WINS)
    on_cpu = msgspec.structs.replace(on_cpu, trial=msgspec.structs.replace(on_cpu.trial, device="cpu"))
    assert ledger(on_cpu) is None
    assert kept(facts(older, LOSES)).layers == 2


@pytest.mark.parametrize("recipe", [each.name for each in RECIPES.values() if each.cast_bytes])
@pytest.mark.parametrize("trained", [True, False])
def test_the_casts_are_divided_among_the_gemms_that_want_them(recipe: str, trained: bool) -> None:
    shares = cast_shares(LayerShape(m=8192, k=4096, n=1024, recipe=recipe, trained=trained))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares) == list(LAYOUTS[: 3 if trained else 2])
    assert all(share >= 0 for share in shares.values())
    assert (shares.get("weight_gradient", 0.0) > 0) == (
        trained and not named(recipe).weight_gradient_in_16_bits
    )


@pytest.mark.parametrize(
    ("gemms", "recipe", "loses"),
    [
        (((0.12, 0.05), (0.12, 0.05), (0.12, 0.50)), "rowwise", False),
        (((0.12, 0.05), (0.12, 0.05), (0.12, 0.50)), "tensorwise", True),
        (((0.12, 0.20), (0.12, 0.20), (0.12, 0.20)), "rowwise", True),
        (((0.12, 0.20), (0.12, 0.20)), "rowwise", True),
    ],
    ids=["weight gradient", "no recipe keeps it", "all", "frozen"],
)
def test_only_a_weight_gradient_that_loses_is_no_reason_to_keep_the_layer_in_bf16(
    gemms: tuple[tuple[float, float], ...], recipe: str, loses: bool
) -> None:
    """torchao's ``rowwise_with_gw_hp`` keeps just that GEMM in BF16."""
    of = facts(shape((8192, 2048, 64), *gemms, casts=0.1, recipe=recipe))
    assert bool(losing(of)) is loses


def test_the_report_has_it_in_the_json_and_with_v_on_the_screen() -> None:
    document = diagnose(facts(WINS, LOSES, arms=(FP8, BF16)), select=["SHP"])
    report = Report.of(document)
    assert report.to_dict()["ledger"]["lines"][0]["layout"] == "output"
    told = " ".join(render(report, verbose=True).split())
    for words in (
        "8192 x 4096 x 14336 tensorwise, 2 layers output 2 1.600 0.900",
        "Timed alone, the matmuls of 4 layers take 10.3 ms of a step in BF16, in FP8 6.1 and their "
        "casts 2.4: 1.21x, saved +1.8 ms.",
        "In the step matmuls save +20.0 ms (alone +4.2), and casts cost 10.0 ms (alone 2.4): "
        "FP8 as you run it, against BF16 compiled. Not explained by single layers: +8.2 ms.",
    ):
        assert words in told
    assert "Timed alone" not in render(report)
    assert "Timed alone" in render(report, verbose=True, width=40)
    assert "14336 tensorwise" not in render(report, verbose=True, width=40)


def test_a_report_without_it_has_no_such_key() -> None:
    report = Report.of(diagnose(facts(msgspec.structs.replace(WINS, gemms=msgspec.UNSET)), select=["SHP"]))
    assert report.ledger is None
    assert "ledger" not in report.to_dict()
    render(report, verbose=True)


def test_a_gemm_in_bf16_has_no_times_of_fp8() -> None:
    recipe = "rowwise_with_gw_hp"
    found = kept(facts(shape(WIDE, (1.6, 0.9), (1.5, 0.9), (1.7, None), casts=0.8, recipe=recipe)))
    assert ledger_table(found, {}).rows[-1][1:] == ("2", "1.700", "in BF16", "-", "-", "-")
