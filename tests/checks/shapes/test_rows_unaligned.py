"""SHP007 on a model whose time embedding sees one row a sample."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training import config as moe

from fp8doctor.examine import examine
from fp8doctor.facts import Arm, Facts, Target, Trial, Workload
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.trial.layers.rows import watch_copy
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from tests.checks.environment.live import finding_of, outcome_of


class Conditioned(nn.Module):
    """Blocks that a time embedding shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shift = self.time(x[:, 0])[:, None]
        for block in self.blocks:
            x = x + block(x + shift)
        return x


def counted(samples: int, *, keep: tuple[str, ...] = (), padded: bool = False) -> Facts:
    """Facts with the rows that a trial on a CPU counts."""
    model = convert_to_float8_training(
        Conditioned().bfloat16(),
        config=Float8LinearConfig(pad_inner_dim=padded),
        module_filter_fn=lambda layer, name: name not in keep,
    )
    workload = Workload(
        batch_source="given", batch_size=samples, sequence_length=16, tokens=16 * samples, accumulate=1
    )
    batch = torch.randn(samples, 16, 32, dtype=torch.bfloat16)
    job = Job(model=model, target=Target(), workload=workload, batch=batch)
    facts = examine(job)
    facts, seen, reason = watch_copy(job, facts, TrialRun(torch.device("cpu"), Budget(600.0)))
    assert reason is None
    return msgspec.structs.replace(facts, trial=Trial(device="cpu", rows=seen, arms=()))


def test_rows_of_samples_are_found_and_the_filter_makes_it_silent() -> None:
    facts = counted(samples=4)
    finding = finding_of("SHP007", facts)
    assert finding is not None
    assert finding.severity == "error"
    assert (finding.evidence["layers"], finding.evidence["rows"]) == (2, 4)
    assert finding.treatment is not None
    assert finding.treatment.layers == ("time.0", "time.2")
    assert outcome_of("SHP001", facts).outcome == "healthy", "64 tokens are a multiple of 16"
    mended = counted(samples=4, keep=finding.treatment.layers)
    assert outcome_of("SHP007", mended).outcome == "healthy"


def test_every_call_of_a_layer_counts_and_not_the_largest_alone() -> None:
    facts = counted(samples=16)
    rows = {**facts.trial.rows, "blocks.1": (16 * 16, 4)}
    finding = finding_of(
        "SHP007", msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, rows=rows))
    )
    assert finding is not None
    assert (finding.evidence["first"], finding.evidence["rows"]) == ("blocks.1", 4)


def test_rows_that_a_router_decides_are_unknown_unless_they_are_padded() -> None:
    """Experts take what ``torch.where`` gives them: a forward on fake tensors does not get past it."""
    for padded, outcome in ((False, "unknown"), (True, "healthy")):
        facts = counted(samples=16, padded=padded)
        experts = tuple(
            msgspec.structs.replace(each, role="experts", gemms=1) for each in facts.network.linears
        )
        network = msgspec.structs.replace(facts.network, linears=experts)
        workload = msgspec.structs.replace(facts.workload, rows=NOT_RECORDED)
        routed = msgspec.structs.replace(facts, network=network, workload=workload, trial=NOT_RECORDED)
        assert outcome_of("SHP007", routed).outcome == outcome


def test_rows_that_are_padded_or_whole_are_not_told() -> None:
    assert outcome_of("SHP007", counted(samples=4, padded=True)).outcome == "healthy"
    assert outcome_of("SHP007", counted(samples=16)).outcome == "healthy"


def test_a_batch_that_was_made_up_and_a_step_that_ran_on_a_gpu_accuse_nobody() -> None:
    facts = counted(samples=4)
    made_up = msgspec.structs.replace(facts.workload, batch_source="made up")
    assert finding_of("SHP007", msgspec.structs.replace(facts, workload=made_up)) is None
    ran = msgspec.structs.replace(
        facts.trial, device="cuda", arms=(Arm(name=ArmName.AS_IS, tried=True, step_ms=1.0),)
    )
    assert outcome_of("SHP007", msgspec.structs.replace(facts, trial=ran)).outcome == "healthy"


@pytest.mark.parametrize(("rows", "raises"), [(4, True), (16, False)])
def test_torchao_raises_in_the_backward(rows: int, raises: bool) -> None:
    """On the meta device, whose kernel asks what a GPU's asks."""
    with torch.device("meta"):
        layer = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)).bfloat16())
        output = layer(torch.randn(rows, 32, dtype=torch.bfloat16, requires_grad=True))
    if raises:
        with pytest.raises(RuntimeError, match=r"divisible by 16, but got self.size\(1\)=4"):
            output.sum().backward()
    else:
        output.sum().backward()


def test_layers_with_different_rows_are_not_said_to_see_the_same() -> None:
    facts = counted(samples=4)
    rows = {**facts.trial.rows, "time.2": (154,)}
    finding = finding_of(
        "SHP007", msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, rows=rows))
    )
    assert finding is not None
    assert "multiply 4 to 154 rows" in finding.title


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, -len(x) % multiple))


class GroupedExperts(nn.Module):
    """Experts of one weight, as torchtitan and transformers write them."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.w1 = nn.Parameter(torch.zeros(4, 64, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)


class PaddedExperts(GroupedExperts):
    """Experts whose own code pads."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return super().forward(pad_to_multiple(x, 16), ends)


class Dispatcher:
    """torchtitan's, which pads by a number of its own."""

    def __init__(self) -> None:
        self.pad_multiple = 16

    def dispatch(self, x: Tensor) -> Tensor:
        return pad_to_multiple(x, self.pad_multiple)


class DispatchedExperts(GroupedExperts):
    """Experts whose dispatcher pads."""

    def __init__(self) -> None:
        super().__init__()
        self.token_dispatcher = Dispatcher()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return super().forward(self.token_dispatcher.dispatch(x), ends)


class Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, dtype=torch.bfloat16)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.tensor([2, 4, 6, 8]))


def routed(experts: nn.Module, config: Any) -> Facts:
    from torchao.quantization import quantize_

    model = Routed(experts)
    quantize_(model, config, filter_fn=lambda module, name: name == "experts")
    return examine(Job(model=model, target=Target(), workload=Workload(batch_source="made up", tokens=64)))


@pytest.mark.parametrize(
    ("name", "multiple"), [("Float8TrainingOpConfig", 16), ("MXFP8TrainingOpConfig", 32)]
)
def test_each_experts_rows_are_to_be_padded(name: str, multiple: int) -> None:
    config = getattr(moe, name)
    finding = finding_of("SHP007", routed(GroupedExperts(), config()))
    assert finding is not None
    assert (finding.severity, finding.breaks, finding.evidence["multiple"]) == (
        "error",
        "step_raises",
        multiple,
    )
    assert finding.treatment is not None
    assert f"{name}(pad_token_groups_for_grouped_mm=True)" in finding.treatment.code
    padded = routed(GroupedExperts(), config(pad_token_groups_for_grouped_mm=True))
    assert outcome_of("SHP007", padded).outcome != "sick"


class Mixture(nn.Module):
    """Experts that are Linears, as Mixtral's up to transformers 4."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            y = y.index_add(0, rows, expert(x[rows]))
        return y


class PaddedMixture(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_to_multiple(x, 64))


def mixture(kind: type[Mixture], config: Float8LinearConfig) -> Facts:
    model = convert_to_float8_training(
        kind().bfloat16(), config=config, module_filter_fn=lambda _, name: name != "gate"
    )
    return examine(Job(model=model, target=Target(), workload=Workload(batch_source="given", tokens=64)))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_experts_that_are_linears_are_to_be_padded(recipe: str) -> None:
    facts = mixture(Mixture, Float8LinearConfig.from_recipe_name(recipe))
    finding = finding_of("SHP007", facts)
    assert finding is not None
    assert (finding.breaks, finding.evidence["layers"], finding.evidence["multiple"]) == (
        "step_raises",
        4,
        16,
    )
    assert "pad_inner_dim is False" in finding.explanation
    assert finding.treatment is not None
    names: dict[str, Any] = {"model": Mixture().bfloat16()}
    exec(finding.treatment.code, names)
    model = names["model"]
    padded = examine(Job(model=model, target=Target(), workload=facts.workload))
    assert {each.features["pad_inner_dim"] for each in padded.network.fp8} == {True}
    assert [each.recipe for each in padded.network.fp8] == [recipe] * 4
    assert finding_of("SHP007", padded) is None
    assert outcome_of("SHP007", mixture(PaddedMixture, Float8LinearConfig())).outcome == "unknown"


def test_experts_without_a_router_may_get_equal_shares() -> None:
    facts = routed(GroupedExperts(), moe.Float8TrainingOpConfig())
    linears = tuple(each for each in facts.network.linears if each.role != "router")
    outcome = outcome_of(
        "SHP007",
        msgspec.structs.replace(facts, network=msgspec.structs.replace(facts.network, linears=linears)),
    )
    assert (outcome.outcome, "no router" in (outcome.reason or "")) == ("unknown", True)


@pytest.mark.parametrize(("rows", "outcome"), [((16, 32, 0, 48), "healthy"), ((16, 8, 16, 24), "sick")])
def test_rows_of_experts_that_were_counted(rows: tuple[int, ...], outcome: str) -> None:
    facts = routed(PaddedExperts(), moe.Float8TrainingOpConfig())
    workload = msgspec.structs.replace(facts.workload, batch_source="given", rows={"experts.w1": rows})
    assert outcome_of("SHP007", msgspec.structs.replace(facts, workload=workload)).outcome == outcome


@pytest.mark.parametrize("experts", [PaddedExperts, DispatchedExperts])
def test_code_that_may_pad_leaves_it_unknown(experts: type[GroupedExperts]) -> None:
    outcome = outcome_of("SHP007", routed(experts(), moe.Float8TrainingOpConfig()))
    assert outcome.outcome == "unknown"
    assert "whether your code pads" in (outcome.reason or "")


def test_groups_of_transformer_engine_are_named() -> None:
    facts = counted(samples=16)
    name = "transformer_engine.pytorch.module.grouped_linear.GroupedLinear"
    experts = tuple(
        msgspec.structs.replace(each, role="experts", stack="transformer_engine", kind=name, recipe="delayed")
        for each in facts.network.linears
    )
    outcome = outcome_of(
        "SHP007",
        msgspec.structs.replace(facts, network=msgspec.structs.replace(facts.network, linears=experts)),
    )
    assert outcome.outcome == "unknown"
    assert "4 te.GroupedLinears (first: time.0)" in (outcome.reason or "")
