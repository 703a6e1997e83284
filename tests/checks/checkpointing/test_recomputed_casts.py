"""CKP003 on real models, with the times of an H200 and those that a user reported; the policy it prints runs
on torchao."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.checks.checkpointing.recomputed_casts import recomputed_casts
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import ran, timed
from tests.checks.trials import tried
from tests.examine.models import Block, Stacked
from tests.patients.record import HERE

Look = Callable[..., Facts]


def converted(recipe: str = "tensorwise", fp8: bool = True) -> nn.Module:
    model = Stacked().bfloat16()
    if fp8:
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


def costs(facts: Facts, fp8: float, bf16: float, spread_ms: float = 0.5) -> Facts:
    """The facts with arms in which checkpointing multiplies a step of 100 ms by so much."""
    return timed(
        facts,
        ran("as_is", 100 * fp8, spread_ms=spread_ms),
        ran("checkpointing-off", 100.0, base="as_is", spread_ms=spread_ms),
        ran("bf16_compiled", 100 * bf16, spread_ms=spread_ms),
        ran("bf16_without_checkpointing", 100.0, base="bf16_compiled", spread_ms=spread_ms),
    )


@pytest.mark.parametrize(
    ("recipe", "operator"), [("tensorwise", "aten.max.default"), ("rowwise", "aten.amax.default")]
)
def test_as_reported_with_fsdp2(recipe: str, operator: str, look: Look) -> None:
    finding = recomputed_casts(costs(look(converted(recipe)), 3.4, 1.27))
    assert isinstance(finding, Finding)
    assert finding.title == "Checkpointing slows FP8 down by 3.40x, but BF16 only by 1.27x"
    assert finding.treatment is not None
    assert operator in finding.treatment.code


@pytest.mark.parametrize(("fp8", "bf16"), [(1.193, 1.267), (1.28, 1.267)], ids=["H200", "alike"])
def test_fp8_that_pays_no_more(fp8: float, bf16: float, look: Look) -> None:
    assert recomputed_casts(costs(look(converted()), fp8, bf16)) is None


def test_rounds_that_scatter_decide_nothing(look: Look) -> None:
    facts = costs(look(converted()), 1.45, 1.27, spread_ms=30.0)
    arms = [
        msgspec.structs.replace(arm, rounds_ms=arm.rounds_ms[::-1]) if recorded(arm, "base") else arm
        for arm in facts.trial.arms
    ]
    assert recomputed_casts(timed(facts, *arms)) is None


def test_where_the_question_does_not_arise(look: Look) -> None:
    assert isinstance(recomputed_casts(costs(look(converted(fp8=False)), 3.4, 1.27)), NotApplicable)
    assert isinstance(
        recomputed_casts(costs(look(convert_to_float8_training(Stacked().bfloat16())), 3.4, 1.27)),
        NotApplicable,
    )
    assert isinstance(recomputed_casts(timed(look(converted()), ran("as_is"))), NotApplicable)


def test_no_policy_sees_the_gemms_of_transformer_engine() -> None:
    report = load_report(HERE / "recorded" / "h200-te_checkpointed_inside.json.gz")
    (finding,) = (each for each in report.findings if each.code == "CKP003")
    assert finding.treatment is None


@pytest.mark.slow
def test_a_real_trial_has_the_arms() -> None:
    facts = tried(
        converted(),
        torch.zeros(2, 8, dtype=torch.long),
        "as_is",
        "bf16",
        "bf16_without_checkpointing",
        "checkpointing-off",
    )
    bases = {arm.name: arm.base for arm in facts.trial.arms}
    assert (bases["checkpointing-off"], bases["bf16_without_checkpointing"]) == ("as_is", "bf16")
    assert isinstance(recomputed_casts(facts), NotApplicable)  # a CPU says nothing about a GPU
    on_gpu = msgspec.structs.replace(facts.trial, device="cuda")
    assert not isinstance(recomputed_casts(msgspec.structs.replace(facts, trial=on_gpu)), NotApplicable)


class Amaxes(TorchDispatchMode):
    """Counts reductions to an amax."""

    calls = 0

    def __torch_dispatch__(
        self, function: object, types: object, arguments: tuple = (), settings: dict | None = None
    ) -> object:  # type: ignore[type-arg]
        self.calls += str(function) in ("aten.max.default", "aten.amax.default")
        return function(*arguments, **(settings or {}))  # type: ignore[operator]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_printed_policy_recomputes_no_fp8_gemm(
    recipe: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The FP8 GEMM is called below torchao's tensor, where no mode of ours sees it."""
    finding = recomputed_casts(costs(look(converted(recipe)), 3.4, 1.27))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    *policy, call = finding.treatment.code.splitlines()
    config = Float8LinearConfig.from_recipe_name(recipe)
    block = convert_to_float8_training(Block().bfloat16(), config=config)
    gemm, gemms, amaxes = torch._scaled_mm, Counter[str](), Counter[str]()
    for name, code in (
        ("none", "output = block(x)"),
        ("plain", "output = checkpoint(block, x, use_reentrant=False)"),
        ("printed", "\n".join((*policy, f"output = {call}"))),
    ):
        x = torch.ones(16, 32, dtype=torch.bfloat16, requires_grad=True)
        names = {"torch": torch, "checkpoint": checkpoint, "block": block, "x": x}

        def counting(*arguments: Any, name: str = name, **settings: Any) -> Any:
            gemms[name] += 1
            return gemm(*arguments, **settings)

        monkeypatch.setattr(torch, "_scaled_mm", counting)
        with Amaxes() as seen:
            exec(code, names)
            names["output"].sum().backward()  # type: ignore[attr-defined]
        amaxes[name] = seen.calls
    assert 0 < gemms["none"] < gemms["plain"]
    assert gemms["printed"] == gemms["none"]
    assert amaxes["printed"] < amaxes["plain"]
