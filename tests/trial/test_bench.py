"""Cuts from the model file's own function, and what is done when the memory is short."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.facts import Arm, Target, Trial, Workload
from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.trial.copies.step import Variant, VariantPlan, optimizer_for, training_step
from fp8doctor.trial.measure import bench
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.planning import as_it_is
from fp8doctor.trial.treatments.forms import compile_blocks
from tests.trial.conducted import conduct
from tests.trial.decoder import BF16, Decoder, on_model
from tests.trial.planted import failing

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rounds")]

AS_IS = VariantPlan("as_is", as_it_is)


def mean(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().mean()


def of_tokens(model: nn.Module, **settings: Any) -> Job:
    """A job that trains the model on eight tokens."""
    usual = {"batch": torch.randint(0, 96, (1, 8)), "loss": mean}
    return Job(model, Target(), Workload(accumulate=1), **{**usual, **settings})


def trial(*arms: VariantPlan, model: nn.Module, **settings: Any) -> Trial:
    run = TrialRun(torch.device("cpu"), Budget(30))
    return conduct(of_tokens(model, **settings), ["blocks"], arms or (AS_IS,), run)


def on_meta(blocks: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(blocks)


def kept(arm: Arm) -> list[int]:
    return [cut.blocks["blocks"] for cut in arm.cuts]


def test_a_model_without_weights_is_cut_by_its_own_function() -> None:
    result = trial(model=on_meta(80), rebuild=lambda layers: (Decoder(layers), None))
    assert result.blocks == {"blocks": 80}
    assert kept(result.arms[0]) == [4, 12]


def changed(layers: int, change: Callable[[Decoder], object]) -> Decoder:
    model = Decoder(layers)
    change(model)
    return model


@pytest.mark.parametrize(
    "rebuild",
    [
        lambda layers: Decoder(layers // 2),
        lambda layers: Decoder(layers + 1),
        lambda layers: Decoder(layers, width=64),
        lambda layers: changed(layers, lambda model: model.blocks[2].requires_grad_(False)),
        lambda layers: changed(layers, lambda model: setattr(model, "head", nn.Linear(64, 64))),
    ],
    ids=["fewer blocks", "more blocks", "other blocks", "a frozen block", "another head"],
)
def test_a_function_that_does_not_make_the_cut_is_refused(rebuild: Callable[[int], nn.Module]) -> None:
    refused = trial(model=on_meta(80), rebuild=lambda layers: (rebuild(layers), None))
    assert refused.arms == ()
    assert "is not as" in (refused.reason or "")


def test_without_a_function_that_makes_the_cut_a_model_with_weights_is_cut() -> None:
    assert trial(model=Decoder(26), rebuild=lambda layers: (Decoder(1), None)).arms[0].tried


class Large(Decoder):
    """A memory that holds a step of so many blocks."""

    room = 80

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(self.blocks) > self.room:
            raise torch.OutOfMemoryError("planted")
        return super().forward(tokens)


@pytest.mark.parametrize(("room", "expected"), [(6, [2, 6]), (3, [1, 3])])
def test_cuts_become_smaller_until_both_fit(
    room: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Large, "room", room)
    with torch.device("meta"):
        model = Large(80)
    assert kept(trial(model=model, rebuild=lambda layers: (Large(layers), None)).arms[0]) == expected


def test_others_are_timed_if_the_step_as_it_is_does_not_fit_in_the_smallest_models() -> None:
    as_is = replace(failing(torch.OutOfMemoryError("planted")), name="as_is")
    result = trial(as_is, BF16, model=Decoder(3))
    assert [arm.why for arm in result.arms] == [Reason.OUT_OF_MEMORY, None]
    assert result.arms[1].tried


def test_the_learning_rate_is_not_zero_and_moves_no_weight() -> None:
    model = Decoder(3).bfloat16()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = optimizer_for(Job(model=model, target=Target(), workload=Workload()), model.parameters(), {})
    assert all(0 < group["lr"] <= 1e-12 for group in optimizer.param_groups)
    for _ in range(3):
        mean(model(torch.randint(0, 96, (1, 8))), torch.empty(0)).backward()
        optimizer.step()
    moved = [(one - other).abs().max() for one, other in zip(model.parameters(), before, strict=True)]
    assert max(moved) <= 1e-11


def test_a_fix_can_hold_for_the_backward_and_the_update_too() -> None:
    held, seen = list[bool](), list[bool]()

    @contextmanager
    def throughout() -> Iterator[None]:
        held.append(True)
        yield
        held.clear()

    model = nn.Linear(8, 8)
    of, optimizer = Job(model, Target(), Workload(accumulate=2)), torch.optim.SGD(model.parameters())
    model.weight.register_hook(lambda _: seen.extend(held))
    optimizer.register_step_pre_hook(lambda *_: seen.extend(held))
    variant = Variant(model, torch.ones(2, 8), throughout=throughout)
    training_step(of, variant, optimizer, torch.device("cpu"))()
    assert (held, seen) == ([], [True, True, True])


def test_nothing_of_the_replicas_outlives_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[weakref.ref[nn.Parameter]] = []

    def recorded(job: Job, parameters: Iterable[nn.Parameter], memo: Any) -> torch.optim.Optimizer:
        kept = list(parameters)
        weights.extend(map(weakref.ref, kept))
        return optimizer_for(job, kept, memo)

    monkeypatch.setattr(bench, "optimizer_for", recorded)
    assert trial(AS_IS, BF16, model=Decoder(3)).arms[0].tried
    assert weights
    assert [weight() for weight in weights if weight() is not None] == []


class InLists(nn.Module):
    """Blocks without a forward of their own, as in vit_pytorch."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 8)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for first, second in self.blocks:  # type: ignore[misc]
            x = second(first(x))
        return x


def test_blocks_that_are_lists_are_cut() -> None:
    of = bench.Bench(of_tokens(InLists(26)), ["blocks"], TrialRun(torch.device("cpu"), Budget(600)))
    assert [len(base.blocks) for base in of.bases] == [4, 12]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mark", "as_one"),
    [
        (lambda model: model.blocks[0].compile(), False),
        (lambda model: model.blocks.compile(), False),  # which nobody calls
        (lambda model: model.compile(), True),
    ],
    ids=["a block", "a ModuleList", "the model"],
)
def test_one_graph_holds_several_blocks_where_what_holds_them_is_compiled(
    mark: Callable[[nn.Module], None], as_one: bool
) -> None:
    model = Decoder(2)
    mark(model)
    assert bench.one_graph(model, ["blocks"]) is as_one


@pytest.mark.parametrize("lists", [["blocks"], []], ids=["blocks", "one graph"])
def test_blocks_are_compiled_once_for_all_cuts_and_one_graph_for_each(lists: list[str]) -> None:
    of = bench.Bench(of_tokens(Decoder(26)), ["blocks"], TrialRun(torch.device("cpu"), Budget(600)))
    attempt = Attempt(VariantPlan("compiled", on_model(compile_blocks, lists=lists, backend="aot_eager")))
    before = frames_compiled()
    of.build(attempt)
    frames = frames_compiled() - before
    of.close()
    assert attempt.no_number is None
    shallow, deep = (ready.compiled for ready in attempt.ready)
    assert frames == deep["graphs"] + (0 if lists else shallow["graphs"])
    assert bool(lists) is (shallow["graphs"] == frames)
    assert (shallow["recompilations"], deep["recompilations"], shallow["left_eager"]) == (0, 0, ())
