"""Cuts from the model file's own function, and what is done when the memory is short."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fp8doctor.errors import UserError
from fp8doctor.facts import Arm, Target, Trial, Workload
from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.copies.compiling import records_cuda_graphs
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.copies.step import optimizer_for
from fp8doctor.trial.measure import bench, layout, timer
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.evidence import compiled_so_far
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.planning import as_it_is, eager_bf16
from fp8doctor.trial.treatments.compilation import compile_blocks
from fp8doctor.trial.treatments.switches import could_be_fused
from fp8doctor.trial.variant import Variant, VariantPlan
from tests.trial.decoder import CPU, Block, Decoder, job, on_model

pytestmark = pytest.mark.slow

AS_IS = VariantPlan("as_is", as_it_is)
BF16 = VariantPlan("bf16", eager_bf16, fp8=False)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "MOST_ROUNDS", timer.LEAST_ROUNDS)


def mean(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.float().mean()


def of_tokens(model: nn.Module, **settings: Any) -> Job:
    """A job that trains the model on eight tokens."""
    usual = {
        "target": Target(),
        "workload": Workload(accumulate=1),
        "batch": torch.randint(0, 96, (1, 8)),
        "loss": mean,
    }
    return Job(model, **{**usual, **settings})


def trial(
    *arms: VariantPlan,
    model: nn.Module,
    progress: Callable[[str, str | None], None] = lambda text, arm: None,
    **settings: Any,
) -> Trial:
    run = TrialRun(torch.device("cpu"), Budget(30), progress)
    return conduct(of_tokens(model, **settings), ["blocks"], arms or (AS_IS,), run)


def on_meta(blocks: int) -> Decoder:
    with torch.device("meta"):
        return Decoder(blocks)


def kept(arm: Arm) -> list[dict[str, int]]:
    return [dict(cut.blocks) for cut in arm.cuts]


def test_a_model_without_weights_is_cut_by_its_own_function() -> None:
    asked: list[int] = []

    def rebuild(layers: int) -> tuple[nn.Module, None]:
        asked.append(layers)
        return Decoder(layers), None

    result = trial(model=on_meta(80), rebuild=rebuild)
    assert asked == [4, 12]
    assert result.blocks == {"blocks": 80}
    assert kept(result.arms[0]) == [{"blocks": 4}, {"blocks": 12}]
    assert result.arms[0].static_gib == pytest.approx(
        3 * sum(parameter.numel() * 4 for parameter in on_meta(80).parameters()) / 2**30, rel=0.01
    )


def test_the_optimizer_that_was_built_with_the_model_is_rebuilt_with_its_cuts() -> None:
    def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Decoder(layers)
        return model, torch.optim.SGD(model.blocks.parameters(), lr=1.0, momentum=0.9)

    model, optimizer = build(26)
    result = trial(model=model, optimizer=optimizer, rebuild=build)
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    momentum = sum(parameter.numel() * 4 for parameter in model.blocks.parameters())
    assert result.arms[0].static_gib == pytest.approx((whole + momentum) / 2**30, rel=1e-6)


@pytest.mark.gate("half the blocks")
@pytest.mark.parametrize(
    ("rebuild", "reason"),
    [
        (
            lambda layers: (Decoder(layers // 2), None),
            "own cut to 4 blocks cannot be used: it has 2 blocks in blocks",
        ),
        (
            lambda layers: (Decoder(layers, width=64), None),
            "the blocks in blocks are not those of the whole model",
        ),
        (
            lambda layers: (_ for _ in ()).throw(
                UserError("build_model() in model.py raised ValueError: no")
            ),
            "raised ValueError: no",
        ),
    ],
    ids=["half the blocks", "other blocks", "raises"],
)
def test_a_function_that_does_not_make_the_cut_is_refused(
    rebuild: Callable[[int], tuple[nn.Module, None]], reason: str
) -> None:
    refused = trial(model=on_meta(80), rebuild=rebuild)
    assert refused.arms == ()
    assert reason in (refused.reason or "")
    assert trial(model=Decoder(26), rebuild=rebuild).arms[0].tried


def test_a_batch_without_data_is_refused() -> None:
    reason = trial(
        model=on_meta(80),
        batch=torch.empty((1, 8), dtype=torch.int64, device="meta"),
        rebuild=lambda layers: (Decoder(layers), None),
    ).reason
    assert reason == (
        "the batch has no data (meta device or fake tensors); give one, as example_batch() in a model file"
    )


class Memory:
    """A memory for so many blocks' weights; a step with more of them alive raises what CUDA's allocator
    would."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.alive: dict[int, weakref.ref[nn.Parameter]] = {}

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if (
            parameter is not None
            and not parameter.is_meta
            and parameter.dim() == 2
            and parameter.shape[0] == 4 * parameter.shape[1]
        ):
            self.alive[id(parameter)] = weakref.ref(parameter)

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        if sum(each() is not None for each in self.alive.values()) > self.blocks:
            raise torch.OutOfMemoryError("planted")
        return mean(output, batch)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(0)
    handle = register_module_parameter_registration_hook(memory.registered)
    yield memory
    handle.remove()


@pytest.mark.gate("15-expected1")
@pytest.mark.parametrize(("room", "expected"), [(100, (4, 12)), (15, (2, 6)), (7, (1, 3))])
def test_cuts_become_smaller_until_both_fit(memory: Memory, room: int, expected: tuple[int, int]) -> None:
    memory.blocks = room
    result = trial(model=on_meta(80), loss=memory.loss, rebuild=lambda layers: (Decoder(layers), None))
    assert kept(result.arms[0]) == [{"blocks": count} for count in expected]


@pytest.mark.parametrize(("room_gib", "found"), [(1.0, [{}]), (1e-6, [{"blocks": 4}, {"blocks": 12}])])
def test_a_deep_model_is_timed_whole_where_the_memory_is_roomy_for_it(
    room_gib: float, found: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "whole_gib", lambda device: room_gib)
    monkeypatch.setattr(layout, "exceeds", lambda least, room: False)
    deep = job(blocks=26)
    assert [dict(cut.kept) for cut in bench.Bench(deep, ["blocks"], CPU).plan.cuts] == found


@pytest.mark.parametrize("leaves_room", [True, False])
def test_a_deep_model_whose_step_fills_the_gpu_is_cut(
    leaves_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16, or the step without checkpointing, would find no memory at full depth and have a time at the
    cuts."""
    monkeypatch.setattr(layout, "whole_gib", lambda device: 1.0)
    monkeypatch.setattr(layout, "leaves_room", lambda device: leaves_room)
    of = bench.Bench(job(blocks=26), ["blocks"], CPU)
    assert [dict(cut.kept) for cut in of.plan.cuts] == (
        [{}] if leaves_room else [{"blocks": 4}, {"blocks": 12}]
    )
    assert len(of.bases) == len(of.optimizers) == len(of.plan.cuts)


def test_a_memory_too_small_for_any_cut_is_the_reason(memory: Memory) -> None:
    memory.blocks = 3
    result = trial(model=on_meta(80), loss=memory.loss, rebuild=lambda layers: (Decoder(layers), None))
    assert result.reason == "the memory of the GPU is too small for even a cut of the model"


def with_own_weights(variant: Variant) -> Variant:
    """A treatment that takes a second set of weights."""
    for block in variant.model.blocks:  # type: ignore[union-attr]
        block.up.weight = nn.Parameter(block.up.weight.detach().clone())
    return variant


def test_what_does_not_fit_next_to_the_others_says_so_and_the_others_are_timed(memory: Memory) -> None:
    memory.blocks = 8  # three of the user's model, and three for each arm with weights of its own
    heavy = [VariantPlan(name, with_own_weights) for name in ("one", "other")]
    result = trial(AS_IS, BF16, *heavy, model=Decoder(3), loss=memory.loss)
    arms = {arm.name: arm for arm in result.arms}
    assert [name for name, arm in arms.items() if arm.tried] == ["as_is", "bf16", "one"]
    assert arms["other"].why is Reason.OUT_OF_MEMORY
    assert arms["other"].reason == "the GPU has too little memory left for it"


def test_an_optimizer_of_copies_has_no_twin() -> None:
    model = Decoder(1)
    copies = torch.optim.SGD([each.detach().clone() for each in model.parameters()], lr=0.1)
    job = Job(model=model, target=Target(), workload=Workload(), optimizer=copies)
    with pytest.raises(NotReplicable, match="SGD holds none of the parameters that are trained"):
        optimizer_for(job, model.parameters(), {id(each): each for each in model.parameters()})


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


def test_the_optimizer_that_is_made_up_steps_complex_weights() -> None:
    """As those of a Fourier layer; torch fuses no step of them."""
    model = nn.Linear(4, 4, dtype=torch.cfloat)
    made_up = Job(model=model, target=Target(), workload=Workload())
    optimizer = optimizer_for(made_up, model.parameters(), {})
    model(torch.ones(2, 4, dtype=torch.cfloat)).abs().sum().backward()
    optimizer.step()
    assert not could_be_fused(replace(made_up, optimizer=torch.optim.AdamW(model.parameters())))


def test_a_model_without_weights_that_nobody_can_cut_is_refused() -> None:
    assert trial(model=on_meta(4)).reason == "the model has no weights (meta device or fake tensors)"


def test_nothing_of_the_replicas_outlives_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[weakref.ref[nn.Parameter]] = []

    def recorded(
        job: Job, parameters: Iterable[nn.Parameter], memo: Mapping[int, Any]
    ) -> torch.optim.Optimizer:
        kept = list(parameters)
        weights.extend(map(weakref.ref, kept))
        return optimizer_for(job, kept, memo)

    monkeypatch.setattr(layout, "optimizer_for", recorded)
    assert trial(AS_IS, BF16, model=Decoder(3)).arms[0].tried
    assert weights
    assert [weight() for weight in weights if weight() is not None] == []


@pytest.mark.parametrize(
    ("mark", "as_one"),
    [
        (lambda model: None, False),
        (lambda model: model.blocks[0].compile(), False),
        (lambda model: model.head.compile(), False),
        (lambda model: model.blocks.compile(), False),  # which nobody calls
        (lambda model: model.compile(), True),
        (torch.compile, True),
    ],
    ids=["no mark", "a block", "beside the blocks", "a ModuleList", "in place", "wrapped"],
)
def test_one_graph_holds_several_blocks_where_what_holds_them_is_compiled(
    mark: Callable[[nn.Module], nn.Module | None], as_one: bool
) -> None:
    model = Decoder(2)
    wrapped = mark(model)
    job = Job(model=model if wrapped is None else wrapped, target=Target(), workload=Workload())
    assert layout.compiled_as_one(job, ["blocks"]) is as_one


def test_one_graph_holds_the_blocks_of_a_step_that_is_compiled() -> None:
    step = torch.compile(lambda model, batch: model(batch).mean())
    job = Job(model=Decoder(2), target=Target(), workload=Workload(), training_step=step)
    assert layout.compiled_as_one(job, ["blocks"])
    assert not layout.compiled_as_one(job, []), "it has none"


def frames_of(model: nn.Module, lists: list[str], **settings: Any) -> tuple[int, list[Any]]:
    """Frames that were compiled to build an arm whose blocks are, and what is known of its cuts."""
    job = of_tokens(model)
    of = bench.Bench(job, ["blocks"], torch.device("cpu"))
    attempt = Attempt(
        VariantPlan("compiled", on_model(compile_blocks, lists=lists, backend="aot_eager", **settings))
    )
    before = compiled_so_far().frames
    of.build(attempt)
    frames = compiled_so_far().frames - before
    of.close()
    assert attempt.no_number is None
    return frames, [ready.compiled for ready in attempt.ready]


def test_blocks_are_compiled_once_for_all_cuts() -> None:
    frames, (shallow, deep) = frames_of(Decoder(26), ["blocks"])
    assert frames == deep.graphs == shallow.graphs
    assert (shallow.recompilations, shallow.left_eager) == (0, ())


@pytest.mark.nightly
def test_one_graph_is_compiled_anew_for_every_cut() -> None:
    frames, (shallow, deep) = frames_of(Decoder(26), [])
    assert frames == deep.graphs + shallow.graphs
    assert shallow.recompilations == deep.recompilations == 0


def test_blocks_of_a_job_in_one_graph_are_compiled_once_for_all_cuts() -> None:
    model = Decoder(26)
    model.compile(backend="eager")
    job = of_tokens(model)
    blocks = on_model(compile_blocks, lists=["blocks"], backend="eager")
    plan = VariantPlan("compile-blocks", blocks, by_block=True)
    of = bench.Bench(job, ["blocks"], torch.device("cpu"))
    before = compiled_so_far().frames
    of.build(attempt := Attempt(plan))
    frames = compiled_so_far().frames - before
    of.close()
    assert attempt.no_number is None
    assert [ready.compiled.graphs for ready in attempt.ready] == [frames] * 2


class Numbered(Block):
    """A block that is compiled for the number of its model's blocks."""

    blocks = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.blocks == 4 else 2.0)


@pytest.mark.nightly
def test_what_is_compiled_again_for_another_cut_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions for both cuts together would reach the limit at which Dynamo leaves a function eager."""
    model = Decoder(26)
    model.blocks = nn.ModuleList(Numbered(16) for _ in range(26))
    replicate = bench.replicate

    def numbered(*given: Any, **how: Any) -> Any:
        copy, memo = replicate(*given, **how)
        for block in copy.blocks:
            block.blocks = len(copy.blocks)
        return copy, memo

    monkeypatch.setattr(bench, "replicate", numbered)
    _, (shallow, deep) = frames_of(model, ["blocks"])
    assert shallow.graphs == deep.graphs
    assert shallow.recompilations == deep.recompilations == 0


@pytest.mark.parametrize(("mode", "recorded"), [(None, False), ("reduce-overhead", True)])
def test_kernels_that_are_recorded_serve_one_replica_only(mode: str | None, recorded: bool) -> None:
    in_place, wrapped = Decoder(1), torch.compile(Decoder(1), mode=mode)
    in_place.blocks[0].compile(mode=mode)
    assert [records_cuda_graphs(each) for each in (in_place, wrapped)] == [recorded] * 2
