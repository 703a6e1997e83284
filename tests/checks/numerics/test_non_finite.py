"""NUM001 on real Float8Linears, one of which overflows, in a real trial on the CPU."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.checks.numerics.non_finite import FIRES, SILENT, non_finite
from fp8doctor.facts import Facts, Linear, Network, Trial, Workload, recorded
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import failed, ran
from tests.checks.numerics.outliers import Overflowing, batch, decoder, in_fp8
from tests.checks.trials import tried

pytestmark = pytest.mark.slow


def overflowing() -> nn.Module:
    model = in_fp8(decoder(None, None))
    model[1].down.__class__ = Overflowing  # type: ignore[index, union-attr]
    return model


def test_an_overflow_that_only_fp8_has_is_found() -> None:
    model = overflowing()
    facts = tried(model, batch(), "as_is", "bf16")
    assert [(arm.name, arm.non_finite) for arm in facts.trial.arms] == [
        ("as_is", ("loss", "gradients")),
        ("bf16", ()),
    ]
    finding = non_finite(facts)
    assert isinstance(finding, Finding)
    assert finding.title == "NaN or infinity in loss and gradients in FP8"
    assert finding.evidence["finite_arms"] == ("bf16",)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_step_that_bf16_cannot_do_either() -> None:
    model = in_fp8(decoder(None, lambda x: x * torch.inf))
    finding = non_finite(tried(model, batch(), "as_is", "bf16"))
    assert isinstance(finding, Finding)
    assert (finding.breaks, finding.treatment) == ("not_finite", None)
    assert finding.title == "NaN or infinity in loss and gradients, in BF16 too"


def with_arms(facts: Facts, *arms: object) -> Facts:
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))


def test_a_step_of_the_user_that_is_not_finite_is_the_verdict() -> None:
    now = non_finite(FIRES)
    assert isinstance(now, Finding)
    assert now.breaks == "not_finite"
    fixed_only = (
        ran("as_is", non_finite=()),
        ran("bf16", non_finite=()),
        ran("prescribed", non_finite=("loss",)),
    )
    later = non_finite(with_arms(SILENT, *fixed_only))
    assert isinstance(later, Finding)
    assert not recorded(later, "breaks")


def test_the_prescription_is_looked_at_too() -> None:
    arms = (
        ran("as_is", non_finite=()),
        ran("bf16", non_finite=()),
        ran("prescribed", non_finite=("gradients",)),
    )
    finding = non_finite(with_arms(SILENT, *arms))
    assert isinstance(finding, Finding)
    assert finding.title == "NaN or infinity in gradients in the fixed FP8 step, not in the step as it is"


@pytest.mark.parametrize(
    "names", [("bf16",), ("bf16_compiled",), ("bf16", "bf16_compiled")], ids=" and ".join
)
def test_any_bf16_that_is_not_finite_clears_fp8(names: tuple[str, ...]) -> None:
    bf16 = (
        ran(name, non_finite=("gradients",) if name in names else ()) for name in ("bf16", "bf16_compiled")
    )
    made_up = with_arms(FIRES, ran("as_is", non_finite=("gradients",)), *bf16)
    finding = non_finite(made_up)
    assert isinstance(finding, Finding)
    assert finding.title == "NaN or infinity in gradients, in BF16 too"
    assert (finding.severity, recorded(finding, "breaks")) == ("warning", False), "the batch is random"
    given = msgspec.structs.replace(made_up, workload=Workload(batch_source="given"))
    assert non_finite(given).breaks == "not_finite"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "arms",
    [
        (failed("as_is", "it raises"), ran("bf16", non_finite=())),
        (ran("as_is", non_finite=None), ran("bf16", non_finite=())),
    ],
    ids=["no FP8", "nobody saw"],
)
def test_without_both_there_is_no_answer(arms: tuple[object, ...]) -> None:
    assert isinstance(non_finite(with_arms(FIRES, *arms)), NotApplicable)


def test_transformer_engine_is_given_current_scaling_which_the_trial_can_carry_out() -> None:
    layer = Linear(name="up", stack="transformer_engine", use="training", recipe="delayed")
    arms = (ran("as_is", non_finite=("loss",)), ran("bf16", non_finite=()))
    trial = Trial(device="cuda", arms=arms)
    finding = non_finite(Facts(network=Network(linears=(layer,)), trial=trial))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "te-current"
    assert finding.treatment.name in TREATMENTS


@pytest.mark.parametrize(
    ("recipe", "compiled", "proposed"), [("rowwise", "block", True), ("rowwise", None, False)]
)
def test_compiled_rowwise_layers_that_are_finite_alone(
    recipe: str, compiled: str | None, proposed: bool
) -> None:
    layers = tuple(
        msgspec.structs.replace(each, recipe=recipe, compiled=compiled) for each in FIRES.network.linears
    )
    network = msgspec.structs.replace(FIRES.network, linears=layers)
    finding = non_finite(msgspec.structs.replace(FIRES, network=network))
    assert isinstance(finding, Finding)
    assert (finding.treatment is not None) is proposed
    if finding.treatment:
        assert "emulate_precision_casts = True" in finding.treatment.code
        assert hasattr(torch._inductor.config, "emulate_precision_casts")
