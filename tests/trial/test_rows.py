"""The rows of every layer, seen in one forward of a cut of real models: of a copy, or on fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchao.float8 import convert_to_float8_training
from transformers import T5Config, T5ForConditionalGeneration

from fp8doctor.cost.matmuls import passes, rows_of
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial import conductor
from fp8doctor.trial.layers import fake_forward, rows
from fp8doctor.trial.layers.seen_calls import CallsSeen
from fp8doctor.trial.measure.budget import Budget, TrialRun
from tests.examine.models import qwen3_moe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


CPU = torch.device("cpu")
TOKENS = 48


def job(model: nn.Module) -> Job:
    workload = Workload(
        batch_source="given", batch_size=TOKENS, sequence_length=None, tokens=TOKENS, accumulate=1
    )
    batch = torch.ones(TOKENS, 64, dtype=torch.bfloat16)
    return Job(model=model, target=Target(), workload=workload, batch=batch)


def watched(of: Job) -> Facts:
    run = TrialRun(CPU, Budget(600.0))
    with conductor.left_alone(of, run):
        return rows.watch_copy(of, examine(of), run)


def with_fakes(of: Job) -> Facts:
    return fake_forward.with_forward(of, examine(of))


BOTH_WAYS = pytest.mark.parametrize(
    "count",
    [lambda of: watched(of).workload.rows, lambda of: with_fakes(of).workload.rows],
    ids=["a copy", "fake tensors"],
)


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


class Reading(Frames):
    """Multiplies by the weights of a layer that it calls too, whose calls are counted, and of one that it
    never calls."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__(blocks)
        self.read = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, self.frames.weight)
        return super().forward(nn.functional.linear(x, self.read.weight))


class Attending(nn.Module):
    """Reads from more rows than it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[:, :4], x, self.frames(x))[0]


class Striding(nn.Module):
    """One special block, then two kinds in turn, of which the second sees half the rows."""

    def __init__(self) -> None:
        super().__init__()
        widths = (128, *itertools.islice(itertools.cycle((64, 96)), 6))
        self.b = nn.ModuleList(nn.Sequential(nn.Linear(32, width), nn.Linear(width, 32)) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.b:
            x = x + (block(x) if block[0].out_features != 96 else block(x[:8]).mean())  # type: ignore[index, operator, union-attr]
        return x


class InFp32(nn.Linear):
    """Keeps its weights in BF16, and multiplies in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.float(), self.weight.float()).bfloat16()


def frames(model: nn.Module | None = None) -> Job:
    model = convert_to_float8_training((model or Frames()).bfloat16())
    return replace(job(model), batch=torch.ones(16, 32, 32, dtype=torch.bfloat16))


def in_frames(blocks: int = 3) -> rows.Rows:
    in_blocks = {f"b.{block}.{layer}": (16 * 4,) for block in range(blocks) for layer in range(2)}
    return {"frames": (16 * 32,), "head": (16,), **in_blocks}


@BOTH_WAYS
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Frames(30), in_frames(30)),
        (Reading(), {**in_frames(), "read": (16 * 32,)}),
        (
            Attending(),
            {"frames": (16 * 32,), "attention.in_proj": (64,), "attention.out_proj": (64,)},
        ),
        (
            Striding(),
            {f"b.{n // 2}.{n % 2}": (8 * 32 if n // 2 in (2, 4, 6) else 16 * 32,) for n in range(14)},
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_every_layer_has_its_own_rows(
    model: nn.Module, expected: rows.Rows, count: Callable[[Job], rows.Rows]
) -> None:
    assert count(frames(model)) == expected


class Distilled(nn.Module):
    """A teacher whose forward has no backward, behind a student that comes first in the tree."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.embedding, self.student = nn.Embedding(16, 32), student
        self.teacher = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        with torch.no_grad():
            wanted = self.teacher(x)
        return (self.student(x) - wanted).pow(2).mean()


@pytest.mark.parametrize("convert", [nn.Sequential, convert_to_float8_training])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layer_without_a_backward_has_the_flops_of_its_forward(
    convert: Callable[[nn.Module], nn.Module], checkpointed: bool
) -> None:
    """A frozen teacher had those of an input gradient too: 37% of a job's FLOPs were said to be in FP8, not
    52%, and of its FP8 matmuls a third was missed (H200)."""

    class Student(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=True) if checkpointed else super().forward(x)

    model = Distilled(Student(nn.Linear(32, 64), nn.Linear(64, 32)))
    batch = torch.arange(16)
    with FlopCounterMode(display=False) as counted:
        model(batch).backward()
    recomputed = 2 * 16 * 2 * 32 * 64 * checkpointed
    of = replace(job(convert(model)), batch=batch)
    for facts in (with_fakes(of), watched(of)):
        linears = facts.network.linears
        assert (
            16 * sum(each.flops_per_token or 0 for each in linears) == counted.get_total_flops() - recomputed
        )
        assert sum(each.flops_share_pct or 0 for each in linears) == pytest.approx(100)
        assert [passes(each) for each in linears] == [3, 3, 1, 1]


@pytest.mark.parametrize(("given", "source"), [(None, "output.loss"), (lambda output, batch: 0, "given")])
def test_an_output_that_has_a_loss_is_said_to_have_it_without_labels_too(given: Any, source: str) -> None:
    """The mean of the output was said of a ViT-MAE and of a CLIP, whose own loss was trained (H200)."""

    class Masked(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(logits=super().forward(x), loss=x.mean())

    model = convert_to_float8_training(Masked(nn.Linear(64, 64)).bfloat16())
    of = replace(job(model), loss=given, workload=Workload(loss_source="given" if given else "mean"))
    assert [each.workload.loss_source for each in (with_fakes(of), watched(of))] == [source] * 2


@BOTH_WAYS
def test_an_encoder_and_a_decoder_see_different_rows(count: Callable[[Job], rows.Rows]) -> None:
    config = T5Config(
        d_model=32,
        d_ff=64,
        d_kv=16,
        num_layers=6,
        num_heads=2,
        vocab_size=64,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = convert_to_float8_training(
        T5ForConditionalGeneration(config).bfloat16(), module_filter_fn=lambda layer, name: name != "lm_head"
    )
    ids = {name: torch.ones(4, size, dtype=torch.long) for name, size in (("input_ids", 16), ("labels", 4))}
    found = count(replace(job(model), batch=ids))
    assert len(found) == 6 * 6 + 6 * 10 + 1
    for name, each in found.items():
        read = any(part in name for part in ("EncDecAttention.k", "EncDecAttention.v"))
        assert each == ((64,) if name.startswith("encoder") or read else (16,)), name


def test_the_experts_of_one_weight_have_the_rows_that_the_router_gave_them() -> None:
    model = qwen3_moe().bfloat16()
    found = watched(replace(job(model), batch={"input_ids": torch.arange(48).view(2, 24)}))
    experts = [each for name, each in found.workload.rows.items() if ".experts." in name]
    assert {sum(each) for each in experts} == {48 * 2}
    assert all(len(each) <= 8 for each in experts)


@BOTH_WAYS
def test_a_model_that_is_the_list_of_its_blocks(count: Callable[[Job], rows.Rows]) -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.SiLU()) for _ in range(6)))
    assert count(frames(blocks)) == {f"{block}.0": (16 * 32,) for block in range(6)}


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
    weights = {"up": experts.up, "other": nn.Parameter(torch.randn(3, 4, 4))}
    products = rows.Products({}, weights, CallsSeen())
    with torch.no_grad(), products:
        torch.bmm(other, other)
        experts(torch.randn(8, 16, dtype=torch.bfloat16))
    assert products.rows() == {"up": tuple(expected)}


@pytest.mark.parametrize(("autocast", "found"), [(None, ("head", "frames")), (torch.bfloat16, ())])
@pytest.mark.parametrize("on_fakes", [True, False])
def test_products_in_fp32_are_named_the_largest_first(
    on_fakes: bool, autocast: torch.dtype | None, found: tuple[str, ...]
) -> None:
    model = Frames()
    model.frames, model.head = InFp32(32, 32, bias=False), InFp32(32, 65536, bias=False)
    batch = torch.ones(16, 32, 32, dtype=torch.bfloat16)
    of = replace(job(model.bfloat16()), batch=batch, autocast=autocast)
    facts = with_fakes(of) if on_fakes else watched(of)
    assert facts.network.fp32_products == found


def test_nothing_is_compiled_and_nothing_of_the_users_is_touched() -> None:
    of = frames()
    of.model.compile(backend=lambda graph, examples: 1 / 0)
    before = {name: value._version for name, value in of.model.state_dict(keep_vars=True).items()}
    assert watched(of).workload.rows == in_frames()
    assert {name: value._version for name, value in of.model.state_dict(keep_vars=True).items()} == before
    assert not any(module._forward_pre_hooks for module in of.model.modules())
    deep = frames(Frames(30))
    assert [dict(cut) for cut in rows.shallow(deep, examine(deep)).cuts] == [{"b": 4}]


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (lambda: frames(), None),
        (lambda: replace(frames(), batch=torch.ones(3, 5, dtype=torch.bfloat16)), "RuntimeError: "),
    ],
    ids=["it runs", "the forward raises"],
)
def test_a_trial_begins_with_the_rows_and_else_takes_the_tokens(
    of: Callable[[], Job], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "timed", lambda *given: given[-1].trial(arms=()))
    made, told = of(), list[Any]()
    found = conductor.time_copies(
        made, examine(made), "cpu", lambda facts: (), Budget(60), lambda doing, part: told.append(part)
    )
    assert found
    assert [part for part in told if part] == ["rows"]
    multiplied = {rows_of(each, found) for each in found.network.linears}
    assert multiplied == ({TOKENS} if reason else {512, 64, 16, TOKENS})
    assert found.gaps.get("workload.rows", "").startswith(reason or "")
    assert ("workload.rows" in found.gaps) is (reason is not None)
