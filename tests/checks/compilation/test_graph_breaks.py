"""CMP003 on float8 models that a trial compiles: where a break is decides, and what it is names the
treatment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.checks.compilation.graph_breaks import graph_breaks
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import ran, timed
from tests.checks.environment.test_incompatible_versions import with_releases
from tests.checks.trials import tried
from tests.examine.models import llama
from tests.stand_ins import packages
from tests.stand_ins import transformer_engine as stand_in

pytestmark = pytest.mark.slow

BATCH = torch.ones(32, 32, dtype=torch.bfloat16)


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


def prints(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x


def logs(x: torch.Tensor) -> torch.Tensor:
    logging.getLogger(__name__).info("in a block")
    return x


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.float().mean().item()


def branches(x: torch.Tensor) -> torch.Tensor:
    return x[x.sum(1) > -1e9] if x.shape[0] == 32 else x


@torch.compiler.disable
def is_disabled(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def calls_a_disabled(x: torch.Tensor) -> torch.Tensor:
    return is_disabled(x)


def takes_a_branch(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.float().sum() > 0 else x


def gives_up(x: torch.Tensor) -> torch.Tensor:
    try:
        print(end="")
    except OSError:
        return x
    return x


class Block(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(32, 64), nn.Linear(64, 32), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(torch.relu(self.up(x))))


class Decoder(nn.Module):
    def __init__(self, inside: Any = nothing, outside: Any = nothing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inside) for _ in range(4))
        self.head, self.outside = nn.Linear(32, 32), outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.outside(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks_compiled(**where: Any) -> nn.Module:
    model = convert_to_float8_training(Decoder(**where).bfloat16())
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def whole_compiled(**where: Any) -> nn.Module:
    model = convert_to_float8_training(Decoder(**where).bfloat16())
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("between", "words", "treatment"),
    [
        (prints, "a print, warning or log call", "log-outside-graph"),
        pytest.param(logs, "a print, warning or log call", "log-outside-graph", marks=pytest.mark.nightly),
        (reads_a_value, "a value read back from a tensor, such as .item()", "keep-values-on-gpu"),
        pytest.param(
            gives_up, "a print, warning or log call", "log-outside-graph", marks=pytest.mark.nightly
        ),
        pytest.param(
            takes_a_branch,
            "control flow or a shape that depends on data",
            "select-without-branch",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            branches,
            "control flow or a shape that depends on data",
            "select-without-branch",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            calls_a_disabled,
            "a function under torch.compiler.disable",
            "allow-in-graph",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_break_inside_the_blocks(between: Any, words: str, treatment: str) -> None:
    finding = graph_breaks(tried(blocks_compiled(inside=between), BATCH, "as_is"))
    assert isinstance(finding, Finding)
    assert finding.severity == "warning"
    assert finding.title.endswith(f"split the compiled FP8 layers; the first is at {words}")
    assert finding.evidence["graph_breaks"]
    assert finding.treatment is not None
    assert finding.treatment.name == treatment


@pytest.mark.nightly
def test_a_break_inside_the_blocks_of_a_model_compiled_as_one() -> None:
    finding = graph_breaks(tried(whole_compiled(inside=prints), BATCH, "as_is"))
    assert isinstance(finding, Finding)
    assert finding.severity == "warning"


@pytest.mark.gate("blocks_compiled")
@pytest.mark.parametrize("build", [blocks_compiled, whole_compiled])
def test_no_break(build: Callable[..., nn.Module]) -> None:
    """Compiled blocks in an uncompiled loop are no break either."""
    assert graph_breaks(tried(build(), BATCH, "as_is")) is None


def test_a_break_outside_the_layers_is_information() -> None:
    finding = graph_breaks(tried(whole_compiled(outside=prints), BATCH, "as_is"))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert "did not split the compiled FP8 layers" in finding.title


def logs_outside_the_graph(x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        print(end="")
    return x


def test_the_treatment_makes_it_silent() -> None:
    assert graph_breaks(tried(blocks_compiled(inside=logs_outside_the_graph), BATCH, "as_is")) is None


@pytest.mark.nightly
def test_pieces_without_a_counted_break() -> None:
    """Not every torch counts a frame that it gives up as a break."""
    facts = tried(blocks_compiled(inside=gives_up), BATCH, "as_is")
    arm = facts.trial.arms[0]
    finding = graph_breaks(
        timed(
            facts,
            msgspec.structs.replace(
                arm, cuts=(msgspec.structs.replace(arm.cuts[0], graph_breaks=0, break_reasons=()),)
            ),
        )
    )
    assert isinstance(finding, Finding)
    assert (finding.severity, finding.title) == (
        "warning",
        "Compiled blocks run in pieces: 8 regions per step instead of 4",
    )
    assert finding.treatment is not None
    assert finding.treatment.name == "show-graph-breaks"


@pytest.mark.gate("256-True")
@pytest.mark.parametrize(("regions", "split"), [(128, False), (256, True)])
def test_regions_are_counted_per_micro_batch(regions: int, split: bool) -> None:
    """The trial's step has one micro-batch; one of 32 enters 32 times as many regions."""
    facts = tried(blocks_compiled(inside=gives_up if split else nothing), BATCH, "as_is")
    (arm,) = facts.trial.arms
    assert arm.graphs_run == regions / 32
    facts = msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, accumulate=32))
    finding = graph_breaks(timed(facts, msgspec.structs.replace(arm, graphs_run=regions)))
    assert (isinstance(finding, Finding) and finding.severity == "warning") is split
    if isinstance(finding, Finding):
        assert finding.explanation.startswith(
            "One step entered 256 compiled regions; whole blocks would make 128 in 32 micro-batches."
        )


class Checkpointing(Decoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def called(inside: Any) -> nn.Module:
    model = Checkpointing(inside)
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def wrapped_inside(inside: Any) -> nn.Module:
    """The wrapper is compiled, and what it recomputes is in the region."""
    model = Decoder(inside)
    for number in range(4):
        model.blocks[number] = checkpoint_wrapper(model.blocks[number])
        model.blocks[number].compile(backend="eager")
    return model


def wrapped_around(inside: Any) -> nn.Module:
    model = called(inside)
    model.__class__ = Decoder
    for number in range(4):
        model.blocks[number] = checkpoint_wrapper(model.blocks[number])
    return model


def transformers_own(inside: Any) -> nn.Module:
    """Two layers; before 5.23 the checkpoint is around what is compiled."""
    model = llama(num_hidden_layers=2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model.train()


@pytest.mark.gate("transformers_own-regions3")
@pytest.mark.parametrize(
    ("build", "regions"),
    [(called, (8,)), (wrapped_inside, (4,)), (wrapped_around, (8,)), (transformers_own, (2, 4))],
)
def test_what_checkpointing_recomputes_is_entered_twice(
    build: Callable[[Any], nn.Module], regions: tuple[int, ...]
) -> None:
    batch = (
        {"input_ids": torch.ones(2, 32, dtype=torch.long), "labels": torch.ones(2, 32, dtype=torch.long)}
        if build is transformers_own
        else BATCH
    )
    facts = tried(convert_to_float8_training(build(nothing).bfloat16()), batch, "as_is")
    assert facts.trial.arms[0].graphs_run in regions
    assert graph_breaks(facts) is None


@pytest.mark.nightly
def test_a_break_beside_a_checkpoint_is_found() -> None:
    finding = graph_breaks(tried(convert_to_float8_training(called(gives_up).bfloat16()), BATCH, "as_is"))
    assert isinstance(finding, Finding)
    assert finding.severity == "warning"


@pytest.mark.nightly
def test_of_a_wrapper_and_a_region_a_counted_break_decides() -> None:
    """Their names do not tell which is around the other; a region twice a block, as in the wrapped blocks
    above."""
    facts = tried(convert_to_float8_training(wrapped_inside(prints).bfloat16()), BATCH, "as_is")
    arm = facts.trial.arms[0]
    assert arm.cuts[-1].graph_breaks
    finding = graph_breaks(timed(facts, msgspec.structs.replace(arm, graphs_run=8)))
    assert isinstance(finding, Finding)
    assert finding.severity == "warning"


@pytest.mark.nightly
def test_a_compiled_loss_beside_the_blocks() -> None:
    """A few regions more than blocks, and a break in it."""
    loss = torch.compile(lambda output, batch: prints(output).float().square().mean(), backend="eager")
    finding = graph_breaks(tried(blocks_compiled(), BATCH, "as_is", loss=loss))
    assert not (isinstance(finding, Finding) and finding.severity == "warning")


@pytest.mark.nightly
def test_bf16_has_no_casts_to_lose() -> None:
    model = Decoder(inside=prints).bfloat16()
    model.compile(backend="eager")
    finding = graph_breaks(tried(model, BATCH, "as_is"))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert isinstance(graph_breaks(timed(tried(Decoder().bfloat16(), BATCH, "as_is"))), NotApplicable)


@pytest.mark.nightly
def test_transformer_engines_modules_are_information(
    monkeypatch: pytest.MonkeyPatch, look: Callable[..., Facts]
) -> None:
    """A stand-in's layers; the break is one of a real function under torch.compiler.disable, which is what
    TE's were up to 2.19."""
    broken = tried(whole_compiled(inside=calls_a_disabled), BATCH, "as_is").trial.arms[0].cuts
    stand_in.install(monkeypatch, "quantization")
    model = nn.Sequential(*(nn.Sequential(stand_in.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    model.compile(backend="eager")
    finding = graph_breaks(timed(look(model), ran("as_is", cuts=broken, graphs_run=8)))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert finding.title.endswith("the first is at Transformer Engine's modules")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("release", "kind", "recipe", "breaks"),
    [
        ("2.19", "Linear", "Float8CurrentScaling", True),
        ("2.20.2", "Linear", "Float8CurrentScaling", False),
        ("2.20.2", "Linear", "DelayedScaling", True),
        ("2.20.2", "LayerNormLinear", "Float8CurrentScaling", True),
        ("no version", "Linear", "DelayedScaling", False),
    ],
)
def test_transformer_engines_modules_are_known_to_break(
    release: str,
    kind: str,
    recipe: str,
    breaks: bool,
    look: Callable[..., Facts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    te: Any = stand_in.install(monkeypatch)
    model = nn.Sequential(getattr(te, kind)(32, 32))
    with te.autocast(recipe=getattr(stand_in, recipe)()):
        model(torch.ones(32, 32))
    model.compile()
    finding = graph_breaks(with_releases(look(model), transformer_engine=release))
    assert isinstance(finding, Finding) == breaks
    if isinstance(finding, Finding):
        assert finding.severity == "info"
        assert finding.title == f"1 compiled layer of Transformer Engine {release} breaks the graph"


def test_a_recording_without_reasons(look: Callable[..., Facts]) -> None:
    facts = tried(blocks_compiled(inside=prints), BATCH, "as_is")
    arm = facts.trial.arms[0]
    old = type(arm.cuts[-1])(blocks={}, graph_breaks=2)
    finding = graph_breaks(timed(facts, msgspec.structs.replace(arm, cuts=(old,))))
    assert isinstance(finding, Finding)
    assert finding.title.endswith("the reason was not recorded")


def test_known_breaks_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without a trial, as ``--no-trial`` gives it."""
    te: Any = stand_in.install(monkeypatch)
    packages.stand_in(monkeypatch, transformer_engine="2.8.0")
    model = nn.Sequential(te.Linear(32, 32))
    model.compile()
    report = inspect_model(model, torch.ones(32, 32), trial=False, progress=False)
    assert "CMP003" in {each.code for each in report.findings}
