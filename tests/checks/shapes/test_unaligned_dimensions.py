"""SHP001 on real converted models: sides, rows, and 16-bit matmuls; the printed lines are carried out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training import config as moe

from fp8doctor.checks.shapes.unaligned_dimensions import SILENT
from fp8doctor.code_snippets import with_imports
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.examine import examine
from fp8doctor.facts import Arm, Facts, Linear, Target, Trial, Workload
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.loading.job import Job
from fp8doctor.trial import with_forward
from tests.checks.rules import finding_of, found_by, outcome_of
from tests.examine.models import llama
from tests.stand_ins import transformer_engine

Look = Callable[..., Facts]
SIDES, ROWS, SLOW = "unaligned-dimensions", "rows-unaligned", "slow-16-bit-gemm"
RECORDED = Path(__file__).parents[2] / "patients" / "recorded"


def replaced(facts: Facts, part: str, **changes: Any) -> Facts:
    """The facts with other fields in one of their records."""
    return msgspec.structs.replace(facts, **{part: msgspec.structs.replace(getattr(facts, part), **changes)})


def mlp(width: int = 256, hidden: int = 512) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).bfloat16()


def converted(model: nn.Module, recipe: str = "tensorwise", **settings: Any) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=Float8LinearConfig(**settings) if settings else config)


def aligned(module: nn.Linear, name: str) -> bool:
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def classifier() -> nn.Module:
    """A head of classes, which ends the model."""
    model = nn.Module()
    model.embedding, model.blocks = nn.Embedding(64, 256), nn.ModuleList(mlp(256) for _ in range(2))
    model.head = nn.Linear(256, 1000)
    return model.bfloat16()


class Mixer(nn.Module):
    """MLP-Mixer, two blocks of it: one MLP of each runs over the 196 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 64, 16, 16), nn.Linear(64, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"tokens": mlp(196, 96), "norm": nn.LayerNorm(64), "channels": mlp(64, 128)})
            for _ in range(2)
        )


def test_widths_that_raise_are_padded(look: Look) -> None:
    finding = found_by(SIDES, look(converted(mlp(1000)), tokens=1024))
    assert (finding.breaks, finding.evidence["raising_layers"]) == ("step_raises", 2)
    assert "nn.Linear(1008, 512)" in finding.treatment.code
    assert outcome_of(SIDES, look(converted(mlp(1008)), tokens=1008)) == "silent"
    assert outcome_of(SIDES, look(mlp(1000), tokens=1003)) == "not_applicable"


def test_a_width_of_transformers_is_padded_in_its_configuration(look: Look) -> None:
    model = llama(intermediate_size=120, vocab_size=250)
    treatment = found_by(SIDES, look(convert_to_float8_training(model))).treatment
    exec(treatment.code, {"config": model.config})
    assert finding_of(SIDES, look(convert_to_float8_training(type(model)(model.config)))) is None


@pytest.mark.parametrize(
    ("build", "kept"),
    [
        (classifier, ("head",)),
        (lambda: Mixer().bfloat16(), tuple(f"blocks.{b}.tokens.{n}" for b in (0, 1) for n in (0, 2))),
    ],
    ids=["classes", "patches"],
)
def test_a_side_that_must_not_be_padded_is_left_in_bf16_by_a_line_that_runs(
    build: Callable[[], nn.Module], kept: tuple[str, ...], look: Look
) -> None:
    treatment = found_by(SIDES, look(convert_to_float8_training(build()), tokens=1024)).treatment
    assert (treatment.name, treatment.layers) == ("keep-in-bf16", kept)
    again = build()
    exec(with_imports(treatment.code), {"model": again})
    assert finding_of(SIDES, look(again, tokens=1024)) is None


def test_what_a_converter_must_skip_if_fp8_was_asked_for(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(mlp(), mlp(), nn.Linear(256, 1000), nn.Linear(1000, 256), mlp()).bfloat16()
    skipped = look(convert_to_float8_training(model, module_filter_fn=aligned), tokens=1024)
    assert found_by(SIDES, skipped).severity == "warning"
    little = nn.Sequential(mlp(), nn.Linear(256, 2), nn.Linear(2, 256), mlp(), mlp()).bfloat16()
    assert finding_of(SIDES, look(convert_to_float8_training(little, module_filter_fn=aligned))) is None
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert found_by(SIDES, look(nn.Sequential(mlp(1000), mlp(1000)))).evidence["skipped_layers"] == 4
    assert finding_of(SIDES, look(Mixer())) is None


def layer(**changes: Any) -> Linear:
    return msgspec.structs.replace(SILENT.network.linears[0], **changes)


MX, TE = {"recipe": "mxfp8"}, {"stack": "transformer_engine"}


@pytest.mark.parametrize(
    ("changes", "takes", "refuses"),
    [
        ({}, 1040, 1032),
        (MX, 1056, 1040),
        ({"recipe": "blockwise"}, 1152, 1056),
        ({"recipe": "nvfp4"}, 1152, 1120),
        (MX | TE, 1056, 1040),
        ({"recipe": "delayed"} | TE, 1040, 1032),
    ],
)
def test_multiples_by_recipe(changes: dict[str, Any], takes: int, refuses: int) -> None:
    for side, found in ((takes, False), (refuses, True)):
        for sides in ({"in_features": side}, {"out_features": side}):
            facts = replaced(SILENT, "network", linears=(layer(**changes, **sides),))
            assert (finding_of(SIDES, facts) is not None) is found


@pytest.mark.parametrize("length", [None, 1003])
def test_tokens_that_raise_are_padded(look: Look, length: int | None) -> None:
    facts = replaced(look(converted(mlp()), tokens=1003), "workload", batch_size=1, sequence_length=length)
    finding = found_by(ROWS, facts)
    assert (finding.breaks, finding.evidence["rows"]) == ("step_raises", 1003)
    assert finding.treatment.name == "pad-tokens"
    if length is None:
        names = {"torch": torch, "x": torch.ones(1003, 256)}
        exec(finding.treatment.code, names)
        assert names["x"].shape == (1008, 256)
    assert outcome_of(ROWS, replaced(facts, "workload", batch_source="made up")) == "not_applicable"
    assert outcome_of(ROWS, look(converted(mlp(), "rowwise_with_gw_hp"), tokens=1003)) == "silent"
    assert outcome_of(ROWS, look(converted(mlp(), pad_inner_dim=True), tokens=1003)) == "silent"
    assert outcome_of(ROWS, look(converted(mlp()), tokens=1008)) == "silent"


@pytest.mark.parametrize(
    ("recipe", "tokens", "multiple"),
    [("DelayedScaling", 64, None), ("DelayedScaling", 48, 64), ("MXFP8BlockScaling", 64, 128)],
)
def test_sequence_parallelism_divides_the_tokens(
    recipe: str, tokens: int, multiple: int | None, monkeypatch: pytest.MonkeyPatch, look: Look
) -> None:
    """pytorch's ranks are not started: te.Linear keeps their number as these two attributes (1.0 to 2.20)."""
    te: Any = transformer_engine.install(monkeypatch)
    model = nn.Sequential(te.Linear(64, 64))
    model[0].tp_size, model[0].sequence_parallel = 4, True
    with te.autocast(recipe=getattr(transformer_engine, recipe)()):
        model(torch.zeros(tokens, 64))
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


def counted(samples: int, keep: tuple[str, ...] = (), **config: Any) -> Facts:
    """Facts with the rows that a forward shows, as a trial on a CPU counts them."""
    model = convert_to_float8_training(
        Conditioned().bfloat16(),
        config=Float8LinearConfig(**config),
        module_filter_fn=lambda layer, name: name not in keep,
    )
    workload = Workload(batch_source="given", batch_size=samples, sequence_length=16, tokens=16 * samples)
    job = Job(model=model, target=Target(), workload=workload, batch=torch.randn(samples, 16, 32).bfloat16())
    facts = with_forward(job, examine(job))
    return msgspec.structs.replace(facts, trial=Trial(device="cpu", rows=facts.workload.rows, arms=()))


def test_layers_with_a_row_for_each_sample_are_left_in_bf16() -> None:
    facts = counted(samples=4)
    finding = found_by(ROWS, facts)
    assert (finding.severity, finding.evidence["layers"], finding.evidence["rows"]) == ("error", 2, 4)
    assert finding.treatment.layers == ("time.0", "time.2")
    assert outcome_of(SIDES, facts) == "silent"
    assert outcome_of(ROWS, counted(samples=4, keep=finding.treatment.layers)) == "silent"
    assert outcome_of(ROWS, counted(samples=16)) == "silent"
    ran = {"device": "cuda", "arms": (Arm(name=ArmName.AS_IS, tried=True, step_ms=1.0),)}
    assert outcome_of(ROWS, replaced(facts, "trial", **ran)) == "silent"


def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    return nn.functional.pad(x, (0, 0, 0, -len(x) % multiple))


class GroupedExperts(nn.Module):
    """Experts of one weight, as torchtitan and transformers write them."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.w1 = 2, nn.Parameter(torch.zeros(4, 64, 32, dtype=torch.bfloat16))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)


class PaddedExperts(GroupedExperts):
    """Experts whose own code pads."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return super().forward(pad_to_multiple(x, 16), ends)


def routed(experts: nn.Module, config: Any) -> Facts:
    from torchao.quantization import quantize_

    model = nn.ModuleDict({"gate": nn.Linear(32, 4, dtype=torch.bfloat16), "experts": experts})
    quantize_(model, config, filter_fn=lambda module, name: name == "experts")
    return examine(Job(model=model, target=Target(), workload=Workload(batch_source="made up", tokens=64)))


@pytest.mark.parametrize("name", ["Float8TrainingOpConfig", "MXFP8TrainingOpConfig"])
def test_rows_of_grouped_experts_are_to_be_padded(name: str) -> None:
    config = getattr(moe, name)
    seen = replaced(routed(GroupedExperts(), config()), "workload", rows={"experts.w1": (8, 56)})
    finding = found_by(ROWS, seen)
    assert finding.breaks == "step_raises"
    assert f"{name}(pad_token_groups_for_grouped_mm=True)" in finding.treatment.code
    assert finding_of(ROWS, routed(GroupedExperts(), config(pad_token_groups_for_grouped_mm=True))) is None


def test_rows_of_experts_that_are_linears_are_to_be_padded() -> None:
    def mixture() -> nn.Module:
        experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        return nn.ModuleDict({"gate": nn.Linear(32, 4), "experts": experts}).bfloat16()

    def examined(model: nn.Module) -> Facts:
        workload = Workload(batch_source="given", tokens=64, rows={"experts.0": (8,)})
        return examine(Job(model=model, target=Target(), workload=workload))

    treatment = found_by(ROWS, examined(converted(mixture(), "rowwise"))).treatment
    names: dict[str, Any] = {"model": mixture()}
    exec(treatment.code, names)
    assert finding_of(ROWS, examined(names["model"])) is None


def test_experts_that_the_users_code_may_pad_are_unknown_unless_counted() -> None:
    facts = routed(GroupedExperts(), moe.Float8TrainingOpConfig())
    without_router = tuple(each for each in facts.network.linears if each.role != "router")
    te = {"role": "experts", "stack": "transformer_engine", "kind": "te.GroupedLinear", "recipe": "delayed"}
    in_te = tuple(msgspec.structs.replace(each, **te) for each in counted(samples=16).network.linears)
    padded = routed(PaddedExperts(), moe.Float8TrainingOpConfig())
    for rows, outcome in (((16, 32, 0, 48), "silent"), ((16, 8, 16, 24), "fires")):
        seen = replaced(padded, "workload", batch_source="given", rows={"experts.w1": rows})
        assert outcome_of(ROWS, seen) == outcome
    for unknown in (
        padded,
        replaced(facts, "network", linears=without_router),
        replaced(counted(samples=16), "network", linears=in_te),
    ):
        assert outcome_of(ROWS, unknown) == "unknown"


def headed(vocabulary: int = 50257, fp8: bool = True) -> Any:
    """A Llama whose blocks are in FP8 and compiled."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    with torch.device("meta"):
        model = llama(**sizes, num_hidden_layers=4, vocab_size=vocabulary, use_cache=False).bfloat16()
    if fp8:
        convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    for block in model.model.layers:
        block.compile()
    return model


def test_an_odd_vocabulary_is_found_and_padding_it_makes_it_silent(look: Look) -> None:
    finding = found_by(SLOW, look(headed(), tokens=16384))
    assert finding.evidence["first"] == "lm_head"
    model = headed(fp8=False)
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
    fast = facts.to_dict()
    arm = next(each for each in fast["trial"]["arms"] if each["name"] == "as_is")
    arm["breakdown"]["families_ms"]["gemm_16bit"] = 8.0
    assert outcome_of(SLOW, Facts.from_dict(fast)) == "silent"
