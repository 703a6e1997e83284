"""The numerics of each FP8 layer: against computations of their own, on planted outliers, and never on
made-up weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8doctor import registry
from fp8doctor.facts import Facts, LayerNumerics, Target, Trial, Unrecorded, Workload
from fp8doctor.facts.paths import path_of
from fp8doctor.loading.job import Job
from fp8doctor.trial.layers import numerics
from fp8doctor.trial.layers.numerics import (
    UNEVEN,
    Casts,
    Difference,
    layer_numerics,
    synthetic,
    unevenness,
    with_numerics,
)
from fp8doctor.trial.measure.bench import Bench
from tests import prototypes
from tests.checks.trials import tried
from tests.stand_ins import transformer_engine

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
WIDTH = 64
NEVER = float("inf")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(nn.functional.silu(self.up(self.norm(x)))))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WithOutlier(Block):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        largest = torch.zeros_like(x)
        largest[0, 0] = 1e7
        return x + largest


class Checkpointed(Block):
    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class CheckpointedAnew(Checkpointed):
    reentrant = False


def as_trained(model: nn.Module) -> nn.Module:
    """Weights with the structure that training gives them: rows of different size."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.mul_(torch.rand(module.out_features, 1, generator=generator) * 2 + 0.1)
    return model


def stack(*kinds: type[Block]) -> nn.Module:
    torch.manual_seed(0)
    return as_trained(nn.Sequential(*(kind() for kind in kinds))).bfloat16()


def fp8(model: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def batch() -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()


def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return (output.float() - 1).square().mean()


def job(model: nn.Module, **settings: Any) -> Job:
    return Job(
        **{
            "model": model,
            "target": Target(),
            "workload": Workload(accumulate=1, batch_source="given"),
            "batch": batch(),
            "loss": loss,
            **settings,
        }
    )


def measured(model: nn.Module, **settings: Any) -> dict[str, LayerNumerics]:
    bench = Bench(job(model, **settings), [], CPU)
    return {each.name: each for each in layer_numerics(bench, NEVER)}


def in_decibels(reference: torch.Tensor, result: torch.Tensor) -> float:
    return float(
        10
        * torch.log10(
            reference.double().square().sum() / (reference.double() - result.double()).square().sum()
        )
    )


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as FP8 with one scale holds it, in fp32."""
    scale = torch.finfo(dtype).max / x.double().abs().max()
    return ((x.double() * scale).float().to(dtype).double() / scale).float()


def test_sqnr_is_what_fp32_gives() -> None:
    """The same step in plain BF16, and every operand rounded here, multiplied in fp32."""
    model = stack(Block, Block)
    caught: dict[str, dict[str, torch.Tensor]] = {}
    plain = copy.deepcopy(model)
    names = {module: name for name, module in plain.named_modules()}

    def catch(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        of = caught[names[module]] = {"w": module.weight.detach(), "x": inputs[0].detach()}  # type: ignore[operator]
        output.register_hook(lambda gradient: of.update(g=gradient))  # type: ignore[no-untyped-call]

    for module in names:
        if isinstance(module, nn.Linear):
            module.register_forward_hook(catch)
    loss(plain(batch()), None).backward()
    found = measured(fp8(model))
    assert list(found) == ["0.up", "0.down", "1.up", "1.down"]
    for name, layer in found.items():
        x, w, g = (caught[name][key] for key in "xwg")
        x8, w8, g8 = (
            rounded(x, torch.float8_e4m3fn),
            rounded(w, torch.float8_e4m3fn),
            rounded(g, torch.float8_e5m2),
        )
        output = in_decibels(x @ w.T, (x8 @ w8.T).bfloat16())
        rows = [in_decibels(one, other) for one, other in zip(x @ w.T, (x8 @ w8.T).bfloat16(), strict=True)]
        assert layer.output_sqnr_db == pytest.approx(output, abs=0.05)
        assert layer.typical_output_sqnr_db == pytest.approx(sorted(rows)[len(rows) // 2], abs=0.3)
        assert layer.input_gradient_sqnr_db == pytest.approx(
            in_decibels(g @ w, (g8 @ w8).bfloat16()), abs=0.05
        )
        assert layer.weight_gradient_sqnr_db == pytest.approx(
            in_decibels(g.T @ x, (g8.T @ x8).bfloat16()), abs=0.05
        )
        assert layer.saturated_pct == 0
        assert layer.non_finite == 0
        assert 24 < layer.output_sqnr_db < 33  # type: ignore[operator]


def test_an_outlier_costs_the_other_rows() -> None:
    tensorwise = measured(fp8(stack(Block, WithOutlier, Block)))["1.down"]
    assert tensorwise.output_sqnr_db is not None
    assert tensorwise.typical_output_sqnr_db is not None
    assert tensorwise.output_sqnr_db > 25, "the row of the outlier owns the power"
    assert tensorwise.typical_output_sqnr_db < 1
    assert tensorwise.flushed_pct == pytest.approx(100 * (64 * 128 - 1) / (64 * 128), abs=2)
    rowwise = measured(fp8(stack(Block, WithOutlier, Block), "rowwise"))["1.down"]
    assert rowwise.typical_output_sqnr_db is not None
    assert rowwise.typical_output_sqnr_db > 25


def test_a_weight_gradient_in_bf16_has_no_error() -> None:
    layer = measured(fp8(stack(Block), "rowwise_with_gw_hp"))["0.up"]
    assert layer.weight_gradient_sqnr_db is None
    assert layer.input_gradient_sqnr_db is not None


def test_a_frozen_weight_has_no_gradient() -> None:
    model = fp8(stack(Block))
    model[0].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    layer = measured(model)["0.up"]
    assert layer.output_sqnr_db is not None
    assert layer.weight_gradient_sqnr_db is None


def test_compiled_layers_are_measured_eagerly() -> None:
    plain, model = measured(fp8(stack(Block, Block))), fp8(stack(Block, Block))
    for block in model:  # type: ignore[attr-defined]
        block.compile(backend="aot_eager")
    assert measured(model) == plain
    assert measured(torch.compile(fp8(stack(Block, Block)), backend="aot_eager")) == plain


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedAnew])
def test_checkpointing(kind: type[Block]) -> None:
    plain, found = measured(fp8(stack(Block, Block)))["1.down"], measured(fp8(stack(Block, kind)))["1.down"]
    assert found == plain


def test_torchaos_weights_that_compute_in_mx() -> None:
    from torchao.quantization import quantize_

    model = stack(Block)
    quantize_(
        model, prototypes.mxfp8("MXFP8_EMULATED_RCEIL"), filter_fn=lambda module, name: name.endswith("up")
    )
    layer = measured(model)["0.up"]
    assert layer.output_sqnr_db is not None
    assert 20 < layer.output_sqnr_db < 35
    assert layer.saturated_pct == 0


class Stale(Float8Linear):
    """A stand-in for delayed scaling, which current torchao no longer has: the scale of an input half as
    large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 448 / (x.detach().abs().max() / 2)
        clipped = (x * scale).clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn)
        return super().forward(clipped.to(x.dtype) / scale)


def test_what_a_stale_scale_clips() -> None:
    model = fp8(stack(Block))
    caught: list[torch.Tensor] = []
    model[0].norm.register_forward_hook(lambda _, __, output: caught.append(output.detach()))  # type: ignore[index, union-attr]
    model(batch())
    healthy = measured(model)["0.up"]
    model[0].up.__class__ = Stale  # type: ignore[index, union-attr]
    layer = measured(model)["0.up"]
    x = caught[0]
    scale = 448 / (x.abs().max() / 2)
    assert layer.saturated_pct == pytest.approx(
        100 * float(((x * scale).abs() > 464).float().mean()), rel=1e-6
    )
    assert layer.saturated_pct is not None
    assert layer.saturated_pct > 0.1
    assert layer.output_sqnr_db < healthy.output_sqnr_db - 3  # type: ignore[operator]


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_shares_of_one_cast(dtype: torch.dtype, largest: float) -> None:
    half = largest * torch.finfo(dtype).tiny * torch.finfo(dtype).eps / 4 / largest
    with Casts() as casts:
        torch.tensor([0.0, 0.0, half, 1.0, largest, largest * 1.03, largest * 2, -largest * 2]).clamp(
            -largest, largest
        ).to(dtype)
    assert casts.largest_pct() == pytest.approx((25.0, 100 / 6))


def test_a_difference() -> None:
    reference = torch.tensor([[1.0, 1.0], [0.0, 0.0], [10.0, 10.0], [2.0, 2.0]])
    result = reference + torch.tensor([[0.1, 0.1], [0.0, 0.0], [0.1, 0.1], [0.1, 0.1]])
    difference = Difference.of(reference, result)
    assert difference.sqnr_db == pytest.approx(10 * torch.log10(torch.tensor(210 / 0.06)).item(), abs=0.01)
    assert difference.typical_sqnr_db == pytest.approx(26.02, abs=0.01)
    assert Difference.of(reference, reference) == Difference(None, None, 0)
    assert Difference.of(reference, torch.full_like(reference, torch.nan)) == Difference(None, None, 8)
    assert Difference.of(torch.full_like(reference, torch.nan), result).non_finite == 0


def test_transformer_engine_is_measured_under_the_autocast_that_its_step_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = transformer_engine.install(monkeypatch)
    recipes = []

    class Coarse(transformer_engine.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            if self.fp8:
                recipes.append(self.fp8_meta["recipe"])
                return output + output.detach().abs() * 0.1
            return output

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Coarse(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with library.autocast(enabled=True, recipe=wanted):
                return self.inside(x)  # type: ignore[no-any-return]

    Coarse.__module__ = "transformer_engine.pytorch.module.linear"
    wanted, model = transformer_engine.Float8CurrentScaling(), Around()
    model.inside.weight.data = torch.randn(WIDTH, WIDTH) * torch.rand(WIDTH, 1)
    found = measured(model.bfloat16())["inside"]
    assert found.output_sqnr_db == pytest.approx(20.0, abs=0.1)
    assert found.saturated_pct is None, "its casts are in its own kernels"
    assert {type(recipe) for recipe in recipes} == {type(wanted)}


MADE_UP: dict[str, Callable[[], Job]] = {
    "the batch is synthetic": lambda: job(
        fp8(stack(Block)), workload=Workload(accumulate=1, batch_source="made up")
    ),
    "as an initializer draws them": lambda: job(fp8(nn.Sequential(Block(), Block()).bfloat16())),
    "the model file builds what is timed with other weights": lambda: drawn_anew(),
}


def drawn_anew() -> Job:
    class Model(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def rebuild(layers: int) -> tuple[nn.Module, None]:
        return fp8(as_trained(Model(layers)).bfloat16()), None

    return job(rebuild(26)[0], rebuild=rebuild)


@pytest.mark.parametrize("reason", MADE_UP)
def test_made_up_weights_are_not_reported(reason: str) -> None:
    bench = Bench(MADE_UP[reason](), ["blocks"] if "file" in reason else [], CPU)
    trial = with_numerics(Trial(device="cpu", arms=()), bench, NEVER)
    assert reason in trial.gaps["trial.numerics"]
    facts = Facts(trial=trial)
    with pytest.raises(Unrecorded) as missing:
        _ = trial.numerics
    assert reason in registry.why_missing(facts, path_of(missing.value))


def test_weights_without_data() -> None:
    with torch.device("meta"):
        model = fp8(nn.Sequential(Block()))
    assert "meta device" in (synthetic(job(model), fp8(stack(Block)), ["0.up"]) or "")


INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5),
    "normal": lambda weight: nn.init.normal_(weight, std=0.02),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04),
    "orthogonal": nn.init.orthogonal_,
    "zeros": nn.init.zeros_,
}


@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.parametrize("shape", [(64, 64), (512, 96)])
def test_initialised_weights_are_even(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.empty(shape)
    INITIALISERS[name](weight)
    assert unevenness(weight.bfloat16().float()) < UNEVEN


def test_training_makes_weights_uneven() -> None:
    """A small classifier of what only a few of its inputs tell."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        x = torch.randn(128, 64)
        nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert unevenness(model[0].weight.detach()) > UNEVEN


def test_a_model_without_fp8_has_none() -> None:
    assert layer_numerics(Bench(job(nn.Sequential(Block()).bfloat16()), [], CPU), NEVER) == ()


def test_of_many_layers_a_sample_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "MOST_LAYERS", 3)
    names = list(measured(fp8(stack(Block, Block, Block))))
    assert len(names) == 3
    assert names == sorted(names)
    assert names == list(measured(fp8(stack(Block, Block, Block))))


def test_a_layer_that_cannot_be_called_alone_costs_itself() -> None:
    class Odd(Float8Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x.grad_fn).__name__ == "NoneType" and x.requires_grad:
                raise ValueError("only inside the model")
            return super().forward(x)

    model = fp8(stack(Block))
    model[0].up.__class__ = Odd  # type: ignore[index, union-attr]
    assert list(measured(model)) == ["0.down"]


def test_without_time_nothing_is_measured() -> None:
    """Neither before it begins nor within: what was measured by then stays."""
    bench = Bench(job(fp8(stack(Block))), [], CPU)
    before = with_numerics(
        Trial(device="cpu", arms=(), gaps={"trial.shapes": "no GPU"}),
        bench,
        NEVER,
        against="the budget of 3 s was used up before it",
    )
    assert before.gaps == {
        "trial.shapes": "no GPU",
        "trial.numerics": "the budget of 3 s was used up before it",
    }
    within = with_numerics(Trial(device="cpu", arms=()), bench, until=0.0)
    assert within.gaps == {"trial.numerics": "the budget was used up before it"}


def test_a_failure_costs_the_numerics_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(numerics, "layer_numerics", fails)
    facts = tried(fp8(stack(Block)), batch(), "as_is", "bf16")
    assert [arm.tried for arm in facts.trial.arms] == [True, True]
    assert facts.trial.gaps["trial.numerics"] == "it raises RuntimeError: no such kernel"


def test_the_trial_measures_it_last_and_leaves_the_model_alone() -> None:
    model = fp8(stack(Block, Block))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    facts = tried(model, batch(), "as_is", "bf16")
    assert [each.name for each in facts.trial.numerics] == ["0.up", "0.down", "1.up", "1.down"]
    assert facts.trial.harm == ()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in model.modules()
    )
    from torch._dynamo import eval_frame

    assert eval_frame._stance.stance == "default"
