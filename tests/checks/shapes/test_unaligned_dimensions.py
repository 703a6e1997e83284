"""SHP001 on real converted models: what raises on a GPU, what a converter leaves out, and what is none of its
business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import fp8doctor.checks.shapes.unaligned_dimensions as unaligned_dimensions_file
from fp8doctor.analysis.recipe_support import tokens_divisor
from fp8doctor.checks.shapes.unaligned_dimensions import (
    FIRES,
    SILENT,
    padded_tokens,
    unaligned_dimensions,
)
from fp8doctor.code_snippets import with_imports
from fp8doctor.facts import Facts, Linear, Workload
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.environment.live import finding_of
from tests.examine.models import llama
from tests.stand_ins import transformer_engine

Look = Callable[..., Facts]


RULE = "FP8 matmuls need multiples of 16, and torch raises on a GPU"


def mlp(width: int = 256, hidden: int = 512) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)).bfloat16()


def converted(model: nn.Module, recipe: str = "tensorwise", **settings: Any) -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=Float8LinearConfig(**settings) if settings else config)


def test_widths_that_raise(look: Look) -> None:
    finding = unaligned_dimensions(look(converted(mlp(1000)), tokens=1024))
    assert isinstance(finding, Finding)
    assert finding.title == f"0 is 1000 x 512 (and 1 more of 2 FP8 layers): {RULE}"
    assert finding.treatment is not None
    assert "nn.Linear(1008, 512)   # was nn.Linear(1000, 512): multiples of 16" in finding.treatment.code
    assert "collator" not in finding.treatment.code


@pytest.mark.parametrize("outputs", [1, 2, 4, 10])
def test_a_few_outputs_in_the_middle_are_left_out_and_not_padded(outputs: int, look: Look) -> None:
    """SAM scores its masks by four numbers, in a Linear that ends no model."""

    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.score, self.tail = mlp(), nn.Linear(256, outputs).bfloat16(), mlp()

    finding = unaligned_dimensions(look(converted(Scored()), tokens=1024))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.layers == ("score",)
    skipped = convert_to_float8_training(Scored(), module_filter_fn=lambda layer, name: name != "score")
    assert unaligned_dimensions(look(skipped, tokens=1024)) is None


def test_actions_are_not_padded_to_twice_the_work(look: Look) -> None:
    """17 joints of a robot are 3% of its policy's work."""
    policy = nn.ModuleDict({"torso": nn.Linear(512, 512), "actions": nn.Linear(512, 17)}).bfloat16()
    finding = unaligned_dimensions(look(converted(policy), tokens=1024))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.layers == ("actions",)


@pytest.mark.parametrize(
    ("length", "what", "lines"),
    [
        (
            None,
            "rows",
            "x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 16))   # 1003 to 1008 rows",
        ),
        (
            1003,
            "tokens",
            "collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)   # 1003 to 1008 tokens",
        ),
    ],
)
def test_rows_that_raise(look: Look, length: int | None, what: str, lines: str) -> None:
    facts = look(converted(mlp()), tokens=1003)
    workload = msgspec.structs.replace(facts.workload, batch_size=1, sequence_length=length)
    finding = unaligned_dimensions(msgspec.structs.replace(facts, workload=workload))
    assert isinstance(finding, Finding)
    assert finding.title == f"1003 {what}/step are not a multiple of 16"
    assert finding.treatment is not None
    assert finding.treatment.name == "pad-tokens"
    assert finding.treatment.summary == f"pad to the next multiple: {what} in the collator"
    assert lines in finding.treatment.code


@pytest.mark.parametrize(("width", "shape"), [(1008, (1008, 1008)), (1000, (1008, 1008))])
def test_a_matrix_is_padded_by_the_line_that_is_printed(
    look: Look, width: int, shape: tuple[int, int]
) -> None:
    """Its columns only if they enter an FP8 layer that has to be widened."""
    facts = look(converted(mlp(width)), tokens=1003)
    finding = unaligned_dimensions(
        msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, sequence_length=None))
    )
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    (line,) = (each for each in finding.treatment.code.splitlines() if each.startswith("x = "))
    names = {"torch": torch, "x": torch.ones(1003, width)}
    exec(line, names)
    assert names["x"].shape == shape
    assert ("x.shape[-1]" in line) == (width % 16 != 0)


def test_treatment_makes_it_silent(look: Look) -> None:
    assert unaligned_dimensions(look(converted(mlp(1008)), tokens=1008)) is None


def test_tokens_of_a_made_up_batch_are_nobodys_fault(look: Look) -> None:
    facts = look(converted(mlp()), tokens=1003)
    assert (
        unaligned_dimensions(
            msgspec.structs.replace(
                facts, workload=msgspec.structs.replace(facts.workload, batch_source="made up")
            )
        )
        is None
    )


def test_pad_inner_dim_mends_tokens_and_not_widths(look: Look) -> None:
    assert unaligned_dimensions(look(converted(mlp(), pad_inner_dim=True), tokens=1003)) is None
    finding = unaligned_dimensions(look(converted(mlp(1000), pad_inner_dim=True), tokens=1003))
    assert isinstance(finding, Finding)
    assert "it pads the tokens, not in and out" in finding.explanation
    assert "tokens/step" not in finding.title


def test_the_weight_gradient_in_bf16_takes_any_tokens(look: Look) -> None:
    assert unaligned_dimensions(look(converted(mlp(), "rowwise_with_gw_hp"), tokens=1003)) is None
    assert unaligned_dimensions(look(converted(mlp(), "rowwise"), tokens=1003)) is not None


def test_emulation_takes_any_side(look: Look) -> None:
    facts = look(converted(mlp(1000), emulate=True), tokens=1003)
    assert not isinstance(unaligned_dimensions(facts), Finding)


def test_layers_that_a_filter_skipped(look: Look) -> None:
    model = nn.Sequential(
        *(mlp() for _ in range(3)), nn.Linear(256, 1000).bfloat16(), nn.Linear(1000, 256).bfloat16(), mlp()
    )
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: module.in_features % 16 == 0 and module.out_features % 16 == 0,
    )
    finding = unaligned_dimensions(look(model, tokens=1024))
    assert isinstance(finding, Finding)
    assert finding.evidence["skipped_layers"] == 2
    assert "cannot be converted" in finding.title


def test_a_skipped_layer_without_weight_in_the_step_is_not_worth_it(look: Look) -> None:
    model = nn.Sequential(mlp(), nn.Linear(256, 2).bfloat16(), nn.Linear(2, 256).bfloat16(), mlp(), mlp())
    convert_to_float8_training(
        model,
        module_filter_fn=lambda module, name: module.in_features % 16 == 0 and module.out_features % 16 == 0,
    )
    assert unaligned_dimensions(look(model, tokens=1024)) is None


class TiedDecoder(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 256)
        self.blocks = nn.ModuleList(mlp() for _ in range(2))
        self.head = nn.Linear(256, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.slow
def test_the_head_of_gpt2s_vocabulary_in_bf16_is_healthy(look: Look) -> None:
    model = convert_to_float8_training(
        TiedDecoder(50257), module_filter_fn=lambda module, name: name != "head"
    )
    assert unaligned_dimensions(look(model, tokens=1024)) is None


@pytest.mark.slow
def test_the_head_of_gpt2s_vocabulary_in_fp8_raises(look: Look) -> None:
    finding = unaligned_dimensions(look(convert_to_float8_training(TiedDecoder(50257)), tokens=1024))
    assert isinstance(finding, Finding)
    assert finding.evidence["first"] == "head"
    assert finding.treatment is not None
    assert "nn.Linear(256, 50272)" in finding.treatment.code


class Classifier(TiedDecoder):
    def __init__(self, classes: int, width: int = 256) -> None:
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(64, 256)
        self.blocks = nn.ModuleList(mlp(256, width) for _ in range(2))
        self.head = nn.Linear(256, classes)


def test_classes_are_not_padded(look: Look) -> None:
    """8 more of them would be another task: the layer is left in BF16, in a line that runs."""
    model = Classifier(1000).bfloat16()
    finding = unaligned_dimensions(look(convert_to_float8_training(model), tokens=1024))
    assert isinstance(finding, Finding)
    assert finding.title == f"head is 256 x 1000: {RULE}"
    assert finding.treatment is not None
    assert (finding.treatment.name, finding.treatment.layers) == ("keep-in-bf16", ("head",))
    assert "1008" not in finding.treatment.code
    again = Classifier(1000).bfloat16()
    exec(with_imports(finding.treatment.code), {"model": again})
    assert unaligned_dimensions(look(again, tokens=1024)) is None


def test_widths_beside_classes_are_padded(look: Look) -> None:
    model = Classifier(1000, width=1000).bfloat16()
    finding = unaligned_dimensions(look(convert_to_float8_training(model), tokens=1024))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert "nn.Linear(256, 1008)   # was nn.Linear(256, 1000)" in finding.treatment.code
    assert "# head: do not pad its 1000 classes" in finding.treatment.code


class Mixer(nn.Module):
    """MLP-Mixer, two blocks of it: one MLP of each runs over the 196 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 16, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"tokens": mlp(196, 96), "norm": nn.LayerNorm(64), "channels": mlp(64, 128)})
            for _ in range(2)
        )
        self.head = nn.Linear(64, 16)


def test_a_width_of_transformers_is_padded_in_its_configuration(look: Look) -> None:
    model = llama(intermediate_size=120, vocab_size=250)
    finding = unaligned_dimensions(look(convert_to_float8_training(model)))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    exec(finding.treatment.code, {"config": model.config})
    again = type(model)(model.config)
    assert unaligned_dimensions(look(convert_to_float8_training(again))) is None


def test_a_number_of_patches_is_not_padded(look: Look) -> None:
    """196 is what the size of the image gives: the layers are left in BF16, in a line that runs."""
    finding = unaligned_dimensions(look(convert_to_float8_training(Mixer().bfloat16())))
    assert isinstance(finding, Finding)
    assert finding.title == f"blocks.0.tokens.0 is 196 x 96 (and 3 more of 9 FP8 layers): {RULE}"
    assert finding.treatment is not None
    assert finding.treatment.name == "keep-in-bf16"
    assert finding.treatment.layers == tuple(f"blocks.{b}.tokens.{n}" for b in (0, 1) for n in (0, 2))
    again = Mixer().bfloat16()
    exec(with_imports(finding.treatment.code), {"model": again})
    assert unaligned_dimensions(look(again)) is None


def test_a_width_beside_patches_is_padded(look: Look) -> None:
    model = Mixer()
    model.blocks[0]["channels"][0] = nn.Linear(64, 100)  # type: ignore[index]
    finding = unaligned_dimensions(look(convert_to_float8_training(model.bfloat16())))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert finding.treatment.name == "pad-dimensions"
    assert "nn.Linear(64, 112)   # was nn.Linear(64, 100)" in finding.treatment.code
    assert "nn.Linear(196" not in finding.treatment.code
    assert (
        "# blocks.0.tokens.0: no norm, embedding or convolution is 196 or 96 wide" in finding.treatment.code
    )


def test_patches_are_no_candidates(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert unaligned_dimensions(look(Mixer())) is None


def test_a_width_that_only_linears_have_is_a_width(look: Look) -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 100), nn.Linear(100, 104), nn.Linear(104, 64))
    finding = unaligned_dimensions(look(convert_to_float8_training(model.bfloat16())))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert "nn.Linear(112, 112)   # was nn.Linear(100, 104)" in finding.treatment.code


def test_where_the_norms_are_of_something_else_all_widths_are_widths(look: Look) -> None:
    """Flux: its norms have no parameters but those of the queries and keys."""
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(100, 104), nn.Linear(104, 100))
    finding = unaligned_dimensions(look(convert_to_float8_training(model.bfloat16())))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert "nn.Linear(112, 112)   # was nn.Linear(100, 104)" in finding.treatment.code


def test_without_fp8_it_does_not_apply(look: Look) -> None:
    assert isinstance(unaligned_dimensions(look(mlp(1000), tokens=1003)), NotApplicable)


def test_candidates_when_fp8_was_asked_for(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    finding = unaligned_dimensions(look(nn.Sequential(*(mlp(1000) for _ in range(3))), tokens=1003))
    assert isinstance(finding, Finding)
    assert finding.evidence["raising_layers"] == 0
    assert unaligned_dimensions(look(nn.Sequential(*(mlp() for _ in range(3))), tokens=1003)) is None


def layer(**changes: Any) -> Linear:
    return msgspec.structs.replace(SILENT.network.linears[0], **changes)


@pytest.mark.parametrize(
    ("changes", "sides", "silent"),
    [
        ({"recipe": "tensorwise"}, (1040, 4096), True),
        ({"recipe": "mxfp8"}, (1040, 4096), False),
        ({"recipe": "mxfp8"}, (1056, 4096), True),
        ({"recipe": "blockwise"}, (1056, 4096), False),
        ({"recipe": "float8_block_scaling", "stack": "transformer_engine"}, (1152, 4096), True),
        ({"recipe": "blockwise", "stack": "transformer_engine"}, (2880, 1040), True),
        ({"recipe": "blockwise", "stack": "transformer_engine"}, (1032, 4096), False),
        ({"recipe": "nvfp4"}, (1120, 4096), False),
        ({"recipe": "nvfp4", "stack": "transformer_engine"}, (1040, 4096), True),
        ({"recipe": "nvfp4", "stack": "transformer_engine"}, (1032, 4096), False),
        ({"recipe": "mxfp8", "stack": "transformer_engine"}, (1040, 4096), False),
        ({"recipe": None, "kind": "torchao.prototype.mx_formats.mx_linear.MXLinear"}, (1040, 4096), False),
        (
            {"recipe": None, "kind": "torchao.prototype.blockwise_fp8_training.linear.Float8BlockwiseLinear"},
            (1056, 4096),
            False,
        ),
        ({"recipe": "delayed", "stack": "transformer_engine"}, (1040, 4096), True),
        ({"recipe": "delayed", "stack": "transformer_engine"}, (1032, 4096), False),
        ({"recipe": "delayed", "stack": "transformer_engine"}, (1024, 4104), False),
    ],
)
def test_multiples_by_recipe(changes: dict[str, Any], sides: tuple[int, int], silent: bool) -> None:
    linear = layer(in_features=sides[0], out_features=sides[1], **changes)
    facts = msgspec.structs.replace(
        SILENT, network=msgspec.structs.replace(SILENT.network, linears=(linear,))
    )
    assert (unaligned_dimensions(facts) is None) == silent


@pytest.mark.parametrize(
    ("recipe", "frozen", "trained"),
    [("delayed", 8, 16), ("blockwise", 8, 16), ("mxfp8", 32, 32), ("nvfp4", 16, 16)],
)
def test_tokens_of_transformer_engine_by_recipe(recipe: str, frozen: int, trained: int) -> None:
    assert tokens_divisor(layer(stack="transformer_engine", recipe=recipe, requires_grad=False)) == frozen
    assert tokens_divisor(layer(stack="transformer_engine", recipe=recipe, requires_grad=True)) == trained


def test_padding_goes_to_the_sequence_where_there_is_one() -> None:
    assert padded_tokens(Workload(batch_size=3, sequence_length=1003, tokens=3009), 16) == 3 * 1008
    assert padded_tokens(Workload(batch_size=1003, sequence_length=None, tokens=1003), 16) == 1008


def test_both_at_once() -> None:
    finding = unaligned_dimensions(FIRES)
    assert isinstance(finding, Finding)
    assert finding.title == f"up is 1000 x 4096: {RULE}; 1003 tokens/step are not a multiple of 16"


def test_the_work_of_a_shape_is_summed_up_once(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture has thousands of layers of one shape; each sum goes over all of them."""
    facts = look(converted(nn.Sequential(*(mlp(1000) for _ in range(8)))), tokens=1024)
    sums: list[int] = []
    counted = unaligned_dimensions_file.flops_share_pct

    def counting(linears: list[Linear], facts: Facts) -> float:
        sums.append(len(linears))
        return counted(linears, facts)

    monkeypatch.setattr(unaligned_dimensions_file, "flops_share_pct", counting)
    assert isinstance(unaligned_dimensions(facts), Finding)
    assert len(sums) <= 5


@pytest.mark.parametrize(
    ("recipe", "tokens", "multiple"),
    [
        ("DelayedScaling", 64, None),
        ("DelayedScaling", 48, 64),
        ("MXFP8BlockScaling", 64, 128),
        ("MXFP8BlockScaling", 128, None),
    ],
)
def test_sequence_parallelism_divides_the_tokens(
    recipe: str,
    tokens: int,
    multiple: int | None,
    monkeypatch: pytest.MonkeyPatch,
    look: Callable[..., Facts],
) -> None:
    """pytorch's ranks are not started: te.Linear keeps their number as these two attributes (1.0 to 2.20)."""
    te: Any = transformer_engine.install(monkeypatch)
    model = nn.Sequential(te.Linear(64, 64))
    model[0].tp_size, model[0].sequence_parallel = 4, True
    with te.autocast(recipe=getattr(transformer_engine, recipe)()):
        model(torch.zeros(tokens, 64))
    finding = finding_of("SHP001", look(model, tokens=tokens))
    assert (finding is None) == (multiple is None)
    if finding:
        assert multiple is not None
        assert f"are not a multiple of {multiple}, {multiple // 4} for each of 4 ranks" in finding.title
        assert finding.breaks == "step_raises"
        assert finding.treatment is not None
        assert "mask the added tokens" in finding.treatment.code
        model[0].sequence_parallel = False
        assert finding_of("SHP001", look(model, tokens=tokens)) is None
