"""The rows of every layer, seen in one forward of a cut of real models."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

import fp8doctor.trial
from fp8doctor.examine import examine
from fp8doctor.facts import Trial
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.trial.copies.depth import Cut
from fp8doctor.trial.layers import fake_forward, rows
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from tests.trial.test_shapes import CPU, TOKENS, in_time, job

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seen(of: Job, **given: Any) -> tuple[rows.Rows, str | None]:
    _, counted, reason = rows.watch_copy(of, examine(of), TrialRun(CPU, Budget(600.0), **given))
    return counted, reason


def t5(layers: int = 3) -> nn.Module:
    config = T5Config(
        d_model=32,
        d_ff=64,
        d_kv=16,
        num_layers=layers,
        num_heads=2,
        vocab_size=64,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return convert_to_float8_training(
        T5ForConditionalGeneration(config).bfloat16(), module_filter_fn=lambda layer, name: name != "lm_head"
    )


def sentences() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(4, 16, dtype=torch.long), "labels": torch.ones(4, 4, dtype=torch.long)}


class Frames(nn.Module):
    """Blocks behind a layer that sees eight times their rows, and before a head that sees one of them for
    each sample."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.frames = nn.Linear(32, 32)
        self.b = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(blocks))
        self.head = nn.Linear(32, 16)
        self.unused = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frames(x).view(x.shape[0], -1, 8, 32).mean(2)
        for block in self.b:
            x = block(x)
        return self.head(x[:, 0])


def frames(blocks: int = 3, kind: type[Frames] = Frames) -> Job:
    model = convert_to_float8_training(kind(blocks).bfloat16())
    return replace(job(model), batch=torch.ones(16, 32, 32, dtype=torch.bfloat16))


def test_an_encoder_and_a_decoder_see_different_rows() -> None:
    found, gap = seen(replace(job(t5()), batch=sentences()))
    assert gap is None
    assert len(found) == 3 * 6 + 3 * 10 + 1
    assert found["lm_head"] == (4 * 4,)
    for number in range(3):
        assert (
            found[f"encoder.block.{number}.layer.0.SelfAttention.q"]
            == found[f"decoder.block.{number}.layer.1.EncDecAttention.k"]
            == (64,)
        )
        assert (
            found[f"decoder.block.{number}.layer.1.EncDecAttention.q"]
            == found[f"decoder.block.{number}.layer.2.DenseReluDense.wo"]
            == (16,)
        )


def test_only_a_cut_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[dict[str, int]] = []
    make = rows.cut_of

    def noting(job: Job, cut: Cut, device: torch.device) -> Any:
        kept.append(dict(cut.kept))
        return make(job, cut, device)

    monkeypatch.setattr(rows, "cut_of", noting)
    found, _ = seen(frames(30))
    assert kept == [{"b": 4}]
    assert found["b.0.0"] == found["b.29.0"] == (64,)


class Striding(nn.Module):
    """One special block, then two kinds in turn, of which the second sees half the rows."""

    def __init__(self) -> None:
        super().__init__()
        widths = (128, *itertools.islice(itertools.cycle((64, 96)), 6))
        self.b = nn.ModuleList(nn.Sequential(nn.Linear(32, width), nn.Linear(width, 32)) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = x + (block(x) if block[0].out_features != 96 else block(x[:24]).mean())  # type: ignore[index, operator, union-attr]
        return x


def test_a_block_that_was_cut_away_has_the_rows_of_its_kind() -> None:
    found, _ = seen(
        replace(
            job(convert_to_float8_training(Striding().bfloat16())),
            batch=torch.ones(TOKENS, 32, dtype=torch.bfloat16),
        )
    )
    assert [found[f"b.{number}.1"] for number in range(7)] == [
        (48,),
        (48,),
        (24,),
        (48,),
        (24,),
        (48,),
        (24,),
    ]


def test_nothing_is_compiled_and_nothing_of_the_users_is_touched() -> None:
    of = frames()
    of.model.compile(backend=lambda graph, examples: 1 / 0)
    before = {name: value._version for name, value in of.model.state_dict(keep_vars=True).items()}
    found, gap = seen(of)
    assert (len(found), gap) == (8, None)
    assert {name: value._version for name, value in of.model.state_dict(keep_vars=True).items()} == before
    assert not any(module._forward_pre_hooks for module in of.model.modules())


def raising(*arguments: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (lambda: replace(frames(), batch=torch.ones(3, 5, dtype=torch.bfloat16)), "RuntimeError: "),
        (lambda: replace(frames(), training_step=raising), "OutOfMemoryError: CUDA out of memory"),
        (lambda: replace(frames(), training_step=functools.partial(_runs, of=frames().model)), None),
    ],
    ids=["the forward raises", "memory", "another model"],
)
def test_where_the_forward_fails_the_tokens_stand_in(
    of: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = of()
    found, gap = seen(made)
    if reason is None:
        assert found == {}, "no hook saw a layer of the model"
    else:
        assert found is NOT_RECORDED
        assert (gap or "").startswith(reason)
    in_time(monkeypatch)
    monkeypatch.setattr(fp8doctor.trial, "timed", lambda *given: Trial(device="cpu", arms=()))
    trial = fp8doctor.trial.run_trial(made, examine(made), lambda facts: (), TrialRun(CPU, Budget(60))).trial
    assert {shape.m for shape in trial.shapes} == {TOKENS}
    assert trial.gaps.get("trial.rows") == gap


def _runs(model: nn.Module, batch: torch.Tensor, of: nn.Module) -> torch.Tensor:
    return of(batch).float().mean()


def test_a_step_that_runs_the_original_is_found_out() -> None:
    of = frames()
    of.training_step = functools.partial(_runs, of=of.model)
    found, gap = seen(of)
    assert found is NOT_RECORDED
    assert gap == "it runs the original itself"


def test_a_trial_begins_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    in_time(monkeypatch)
    monkeypatch.setattr(fp8doctor.trial, "timed", lambda *given: Trial(device="cpu", arms=()))
    told: list[Any] = []
    of = frames()
    trial = fp8doctor.trial.run_trial(
        of, examine(of), lambda facts: (), TrialRun(CPU, Budget(60), lambda *each: told.append(each))
    ).trial
    assert told[1:-1] == [
        ("counting the rows of its layers", "rows"),
        ("timing the matmuls of its layers", "shapes"),
    ]
    assert trial.rows["frames"] == (512,)
    assert {shape.m for shape in trial.shapes} == {512, 64, 16, TOKENS}
    assert "trial.rows" not in trial.gaps


def test_the_experts_of_one_weight_have_the_rows_that_the_router_gave_them() -> None:
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).bfloat16()
    found, gap = seen(replace(job(model), batch={"input_ids": torch.arange(48).view(2, 24)}))
    assert gap is None
    experts = {name: each for name, each in found.items() if ".experts." in name}
    assert len(experts) == 2
    for each in experts.values():
        assert len(each) in (1, 2, 3, 4)
        assert sum(each) == 48 * 2


class Dropping(Frames):
    """LayerDrop that leaves all blocks out of the first forward, and none of the next."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.frames(x).view(x.shape[0], -1, 8, 32).mean(2)
        for block in self.b:
            x = x if self.forwards == 1 else block(x)
        return self.head(x[:, 0])


def of_fakes(of: Job) -> rows.Rows:
    return fake_forward.with_forward(of, examine(of)).workload.rows


@pytest.mark.parametrize("count", [lambda of: seen(of)[0], of_fakes], ids=["real", "fake"])
def test_a_block_that_layerdrop_leaves_out_has_its_rows(count: Callable[[Job], rows.Rows]) -> None:
    assert count(frames(3, Dropping)) == count(frames(3))


class Reading(Frames):
    """Multiplies by the weight of a layer that it calls too, whose calls are counted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.linear(x, self.frames.weight))


class ReadingAlone(Frames):
    """Multiplies by the weight of a layer that it never calls."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.read = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.linear(x, self.read.weight))


@pytest.mark.parametrize("count", [lambda of: seen(of)[0], of_fakes], ids=["real", "fake"])
def test_a_weight_that_is_read_has_its_rows(count: Callable[[Job], rows.Rows]) -> None:
    assert count(frames(3, Reading)) == count(frames(3))
    assert count(frames(3, ReadingAlone)) == {**count(frames(3)), "read": (16 * 32,)}


class Attending(nn.Module):
    """Reads from more rows than it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[:, :4], x, self.frames(x))[0]


@pytest.mark.parametrize("count", [lambda of: seen(of)[0], of_fakes], ids=["real", "fake"])
def test_the_output_projection_of_torchs_attention_has_the_rows_of_the_queries(
    count: Callable[[Job], rows.Rows],
) -> None:
    of = replace(frames(), model=convert_to_float8_training(Attending().bfloat16()))
    assert count(of) == {"frames": (16 * 32,), "attention.in_proj": (64,), "attention.out_proj": (64,)}


EXPERT_ROWS = (3, 0, 5)


class Experts(nn.Module):
    """Three experts of one weight, in the ways in which models multiply by it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up = way, nn.Parameter(torch.randn(len(EXPERT_ROWS), 32, 16, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "loop":
            parts = x.split(EXPERT_ROWS)
            return torch.cat([nn.functional.linear(each, self.up[i]) for i, each in enumerate(parts)])
        if self.way == "loop of products":
            return torch.cat([each @ self.up[i].t() for i, each in enumerate(x.split(EXPERT_ROWS))])
        if self.way == "batched":
            return torch.bmm(x.expand(3, -1, -1), self.up.transpose(1, 2))
        ends = torch.tensor(EXPERT_ROWS).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("loop", [3, 0, 5]),
        ("loop of products", [3, 0, 5]),
        ("grouped", [3, 0, 5]),
        ("batched", [8, 8, 8]),
    ],
)
def test_the_rows_of_every_expert(way: str, expected: list[int]) -> None:
    experts = Experts(way)
    other = nn.Parameter(torch.randn(3, 4, 4))
    seen = rows.Products([], [experts.up])
    with torch.no_grad(), seen:
        torch.bmm(other, other)
        experts(torch.randn(8, 16, dtype=torch.bfloat16))
    assert seen.of_experts(experts.up) == expected
    assert seen.of_experts(other) == []
