"""SHP001 on real converted models: sides, rows, and 16-bit matmuls; the printed lines are carried out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torchao.prototype.moe_training import config as moe
from torchao.quantization import quantize_

from fp8doctor.code_snippets import with_imports
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial import with_forward
from tests.checks.arms import ran, timed
from tests.checks.models import by_block, float8, mlp, ran_in_te
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of
from tests.examine.models import llama
from tests.test_recorded import RECORDED

SIDES, ROWS, SLOW = "unaligned-dimensions", "rows-unaligned", "slow-16-bit-gemm"


def replaced(facts: Facts, part: str, **changes: Any) -> Facts:
    """The facts with other fields in one of their records."""
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def classifier(vocabulary: int = 64, classes: int = 1000) -> nn.Module:
    """A head of classes, which ends the model."""
    blocks, head = nn.ModuleList([mlp(), mlp()]), nn.Linear(256, classes)
    parts = {"embedding": nn.Embedding(vocabulary, 256), "blocks": blocks, "head": head}
    return nn.ModuleDict(parts).bfloat16()


def mixer() -> nn.Module:
    """MLP-Mixer, two blocks of it: one MLP of each runs over the 196 patches."""
    blocks = nn.ModuleList(
        nn.ModuleDict({"tokens": mlp(196, 96), "norm": nn.LayerNorm(64), "channels": mlp(64, 128)})
        for _ in range(2)
    )
    stem, head = nn.Conv2d(3, 64, 16, 16), nn.Linear(64, 16)
    return nn.ModuleDict({"stem": stem, "blocks": blocks, "head": head}).bfloat16()


def test_widths_that_raise_are_padded(look: Look) -> None:
    finding = found_by(SIDES, look(float8(mlp(1000)), tokens=1024))
    assert (finding.breaks, finding.evidence["raising_layers"]) == ("step_raises", 2)
    assert "nn.Linear(1008, 512)" in finding.treatment.code
    assert outcome_of(SIDES, look(float8(mlp(1008)), tokens=1008)) == "silent"
    assert outcome_of(SIDES, look(mlp(1000), tokens=1003)) == "not_applicable"


@pytest.mark.parametrize(
    ("build", "kept"),
    [
        (classifier, ("head",)),
        (mixer, tuple(f"blocks.{b}.tokens.{n}" for b in (0, 1) for n in (0, 2))),
    ],
    ids=["classes", "patches"],
)
def test_a_side_that_must_not_be_padded_is_left_in_bf16_by_a_line_that_runs(
    build: Callable[[], nn.Module], kept: tuple[str, ...], look: Look
) -> None:
    treatment = fix_of(SIDES, look(float8(build()), tokens=1024))
    assert (treatment.name, treatment.layers) == ("keep-in-bf16", kept)
    again = build()
    exec(with_imports(treatment.code), {"model": again})
    assert finding_of(SIDES, look(again, tokens=1024)) is None


@pytest.mark.parametrize("length", [None, 1003])
def test_tokens_that_raise_are_padded(look: Look, length: int | None) -> None:
    facts = replaced(look(float8(mlp()), tokens=1003), "workload", batch_size=1, sequence_length=length)
    finding = found_by(ROWS, facts)
    assert (finding.breaks, finding.evidence["rows"]) == ("step_raises", 1003)
    assert finding.treatment.name == "pad-tokens"
    if length is None:
        names = {"torch": torch, "x": torch.ones(1003, 256)}
        exec(finding.treatment.code, names)
        assert names["x"].shape == (1008, 256)
    assert outcome_of(ROWS, replaced(facts, "workload", batch_source="made up")) == "not_applicable"
    assert outcome_of(ROWS, look(float8(mlp()), tokens=1008)) == "silent"
    for model in (float8(mlp(), "rowwise_with_gw_hp"), float8(mlp(), pad_inner_dim=True)):
        assert outcome_of(ROWS, look(model, tokens=1003)) == "silent"


@pytest.mark.parametrize(
    ("recipe", "tokens", "multiple"),
    [("DelayedScaling", 64, None), ("DelayedScaling", 48, 64), ("MXFP8BlockScaling", 64, 128)],
)
def test_sequence_parallelism_divides_the_tokens(
    recipe: str, tokens: int, multiple: int | None, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """pytorch's ranks are not started: te.Linear keeps their number as these two attributes (1.0 to 2.20)."""
    model = ran_in_te(monkeypatch, recipe, rows=tokens)
    model[0].tp_size, model[0].sequence_parallel = 4, True
    finding = finding_of(ROWS, look(model, tokens=tokens))
    assert (finding and finding.evidence["multiple"]) == multiple
    model[0].sequence_parallel = False
    assert finding_of(ROWS, look(model, tokens=tokens)) is None


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


def counted(samples: int, keep: tuple[str, ...] = (), length: int = 16) -> Facts:
    """Facts with the rows that a forward shows, as a trial on a CPU counts them."""
    model, batch = float8(Conditioned(), keep=keep), torch.randn(samples, length, 32).bfloat16()
    workload = Workload(batch_source="given", batch_size=samples, sequence_length=None, tokens=None)
    job = Job(model=model, target=Target(), workload=workload, batch=batch)
    facts = with_forward(job, examine(job))
    return replaced(timed(facts, device="cpu"), "trial", rows=facts.workload.rows)


def test_layers_with_a_row_for_each_sample_are_left_in_bf16() -> None:
    facts = counted(samples=4)
    finding = found_by(ROWS, facts)
    assert (finding.severity, finding.evidence["layers"], finding.evidence["rows"]) == ("error", 2, 4)
    assert finding.treatment.layers == ("time.0", "time.2")
    assert outcome_of(SIDES, facts) == "silent"
    assert outcome_of(ROWS, counted(samples=4, keep=finding.treatment.layers)) == "silent"
    assert outcome_of(ROWS, counted(samples=16)) == "silent"
    padded = found_by(ROWS, counted(samples=4, length=3)).treatment
    assert padded.name == "pad-tokens", "most layers are of every sample, and stay in FP8"
    assert outcome_of(ROWS, timed(facts, ran("as_is"))) == "silent", "the GPU took them"


class GroupedExperts(nn.Module):
    """Experts of one weight, as torchtitan and transformers write them."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.w1 = 2, nn.Parameter(torch.zeros(4, 64, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)


def routed(config: Any) -> Facts:
    model = nn.ModuleDict({"gate": nn.Linear(32, 4, dtype=torch.bfloat16), "experts": GroupedExperts()})
    quantize_(model, config, filter_fn=lambda module, name: name == "experts")
    return examine(Job(model=model, target=Target(), workload=Workload(batch_source="given", tokens=64)))


def test_rows_of_grouped_experts_are_unknown_unless_counted_or_padded() -> None:
    facts = routed(moe.Float8TrainingOpConfig())
    experts = next(each for each in facts.network.linears if each.role == "experts")
    in_te = replace(experts, stack="transformer_engine", recipe="delayed", features={})
    for unknown in (facts, replaced(facts, "network", linears=(in_te,))):
        assert outcome_of(ROWS, unknown) == "unknown"
    for rows, outcome in (((16, 32, 0, 16), "silent"), ((16, 8, 16, 24), "unknown")):
        assert outcome_of(ROWS, replaced(facts, "workload", rows={"experts.w1": rows})) == outcome
    assert (
        outcome_of(ROWS, routed(moe.Float8TrainingOpConfig(pad_token_groups_for_grouped_mm=True))) == "silent"
    )


def test_experts_that_are_linears_and_get_odd_rows_are_left_in_bf16(look: Look) -> None:
    def mixture() -> nn.Module:
        experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        return nn.ModuleDict({"gate": nn.Linear(32, 4), "experts": experts}).bfloat16()

    rows = {"experts.0": (8,)}
    workload = Workload(batch_source="given", tokens=64, sequence_length=None, rows=rows)
    names: dict[str, Any] = {"model": mixture()}
    facts = replace(look(float8(mixture(), "rowwise")), workload=workload)
    unseen = replaced(facts, "workload", rows={})
    assert outcome_of(ROWS, unseen) == "unknown", "a router decides them"
    most = replaced(facts, "workload", batch_size=4, rows={f"experts.{i}": (8,) for i in range(4)})
    assert fix_of(ROWS, most).name == "keep-in-bf16", "no batch aligns what a router decides"
    exec(fix_of(ROWS, facts).code, names)
    assert finding_of(ROWS, replace(look(names["model"]), workload=workload)) is None


def headed(vocabulary: int = 50257) -> Any:
    """A Llama whose blocks are in FP8 and compiled."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    model = float8(llama("meta", **sizes, num_hidden_layers=4, vocab_size=vocabulary), keep=("lm_head",))
    by_block(model.model.layers)
    return model


def test_an_odd_vocabulary_is_found_and_padding_it_makes_it_silent(look: Look) -> None:
    finding = found_by(SLOW, look(headed(), tokens=16384))
    assert finding.evidence["first"] == "lm_head"
    model = headed()
    exec(finding.treatment.code.partition("   #")[0], {"model": model})
    assert model.lm_head.out_features == 50304
    assert outcome_of(SLOW, look(headed(50304), tokens=16384)) == "silent"
    assert outcome_of(SLOW, look(headed(257), tokens=16384)) == "silent"
    model = headed()
    model.lm_head.compile()  # Inductor pads what a compiled region holds
    assert outcome_of(SLOW, look(torch.compile(model), tokens=16384)) == "silent"


def test_the_profile_decides_where_there_is_one() -> None:
    facts, *_ = read_saved(RECORDED / "h200-decoder_454m.json.gz")
    assert 30 < found_by(SLOW, facts).saving_ms.middle < 36
    as_is, *_ = facts.trial.arms
    parts = replace(as_is.breakdown, families_ms={**as_is.breakdown.families_ms, "gemm_16bit": 8.0})
    assert outcome_of(SLOW, replaced(facts, "trial", arms=(replace(as_is, breakdown=parts),))) == "silent"
