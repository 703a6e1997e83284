"""LoRA over a base stored in FP8: its memory is that of what runs, wherever the adapters are held."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8doctor.analysis.conversion import conversion
from fp8doctor.analysis.layers import OWN_FUNCTION, computes_forward_in_fp8
from fp8doctor.analysis.memory import fit
from fp8doctor.api import inspect_model
from fp8doctor.examine import examine
from fp8doctor.report import Report
from fp8doctor.trial.layers.rows import watch_copy
from fp8doctor.trial.measure.budget import Budget, TrialRun
from tests.examine.models import network
from tests.looked import looked
from tests.trial.test_rows import CPU, job

WIDTH, LAYERS, ROWS = 2048, 8, 4096


class Adapter(nn.Module):
    """kohya's LoRA: it calls the layer's forward, and holds the layer only if it is ``nested``."""

    def __init__(self, layer: nn.Linear, *, nested: bool) -> None:
        super().__init__()
        self.lora_down = nn.Linear(layer.in_features, 16, bias=False)
        self.lora_up = nn.Linear(16, layer.out_features, bias=False)
        if nested:
            self.base_layer = layer
        else:
            self.org_forward = layer.forward
            layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        base = getattr(self, "base_layer", None) or self.org_forward
        return base(x) + self.lora_up(self.lora_down(x.float())).to(x.dtype)


class Block(nn.Module):
    """A layer that sees one row a sample, and an MLP that sees all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.modulation(x[:, :1]) + self.down(nn.functional.gelu(self.up(x)))


class Transformer(nn.Module):
    """Checkpointed blocks, whose Linears are stored in FP8 or kept in BF16, with adapters."""

    def __init__(self, *, nested: bool, stored: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS)).bfloat16().requires_grad_(False)
        beside = nn.Module()
        for name, layer in [each for each in self.blocks.named_modules() if isinstance(each[1], nn.Linear)]:
            if stored:
                weight = layer.weight.to(torch.float8_e4m3fn)
                layer.weight = nn.Parameter(weight, requires_grad=False)
            adapter = Adapter(layer, nested=nested)
            if nested:
                holder, _, last = name.rpartition(".")
                setattr(self.blocks.get_submodule(holder), last, adapter)
            else:
                beside.add_module(f"lora_unet_{name.replace('.', '_')}", adapter)
        self.network = beside

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def seen(**kind: bool) -> Report:
    with torch.device("meta"):
        model, batch = Transformer(**kind), torch.zeros(1, ROWS, WIDTH, dtype=torch.bfloat16)
    return looked(model, batch, assume_gpu="rtx4090", autocast=torch.bfloat16)


def peak(report: Report) -> Any:
    found = fit(report.facts)
    assert found is not None
    return found.now


@pytest.mark.parametrize("stored", [True, False])
def test_adapters_next_to_the_model_run_where_their_layers_do(stored: bool) -> None:
    beside, nested = (seen(nested=nested, stored=stored) for nested in (False, True))
    assert peak(beside).gib == pytest.approx(peak(nested).gib, rel=0.01)
    assert peak(beside).fixed == peak(nested).fixed
    work = [
        [e.flops_per_token for e in of.facts.linears() if e.adapter != "adapter"] for of in (beside, nested)
    ]
    assert work[0][1:] == work[1][1:]
    lines = [conversion(of.facts).splitlines() for of in (beside, nested)]
    assert len(lines[0]) == len(lines[1]) + 1  # of a conversion that would drop the adapters
    assert [each.name for each in beside.facts.network.blocks] == ["blocks"]
    layers = {each.layer for each in beside.facts.linears() if each.adapter == "adapter"}
    assert layers == {each.name for each in beside.facts.linears() if each.name.startswith("blocks.")}


@pytest.mark.parametrize("in_fp8", [True, False])
def test_a_forward_that_was_put_in_place_is_the_layers_own(in_fp8: bool) -> None:
    """A default holds its layer, and kohya's LoRA keeps it as a function. It is unknown until seen."""
    layer, one = nn.Linear(64, 64, bias=False).requires_grad_(False).bfloat16(), torch.ones(())
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(x: Tensor, at: nn.Module = layer) -> Tensor:
        weight, fp8 = at.get_parameter("weight"), torch.float8_e4m3fn
        if not in_fp8:
            return nn.functional.linear(x, weight.to(x.dtype))
        return torch._scaled_mm(x.to(fp8), weight.t(), one, one, out_dtype=x.dtype)

    layer.forward = forward  # type: ignore[assignment]
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), layer)
    model.network = Adapter(layer, nested=False)
    assert network(model).linears[1].use == "unknown"
    report = looked(model, torch.zeros(32, 64, dtype=torch.bfloat16))
    assert (report.verdict.status == "step_raises") is in_fp8
    assert report.facts.network.linears[1].use == "storage"


def test_a_checkpointed_block_keeps_its_input_and_not_that_of_its_first_layer() -> None:
    """Its first layer sees one row; what autograd keeps of the block is what the most rows go into."""
    gib = LAYERS * ROWS * WIDTH * 2 / 2**30
    assert peak(seen(nested=True)).activations > gib
    assert set(seen(nested=True).facts.workload.rows["blocks.0.modulation.base_layer"]) == {1}


class Function(torch.autograd.Function):
    """FP8 in the forward, 16 bits in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return multiplied(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.saved_tensors[0].to(grads[0].dtype), None


class InBothDirections(Function):
    """FP8 in the backward too."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return multiplied(grads[0], ctx.saved_tensors[0].t().contiguous()), None


def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x.to(weight.dtype), weight.t(), one, one, out_dtype=torch.bfloat16)


class InFp8(nn.Linear):
    """A frozen FP8 weight that its forward multiplies in FP8, in a function with a backward or in none."""

    def __init__(self, *, own: bool, device: str = "meta") -> None:
        super().__init__(WIDTH, WIDTH, bias=False, device=device)
        self.weight = nn.Parameter(self.weight.to(torch.float8_e4m3fn), requires_grad=False)
        self.multiply = Function.apply if own else multiplied

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight)


@pytest.mark.parametrize("own", [True, False])
def test_a_forward_in_fp8_is_seen_and_whether_it_has_a_backward(own: bool) -> None:
    first = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="meta")
    model = nn.Sequential(first, InFp8(own=own), InFp8(own=own))
    report = looked(model, torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="meta"), assume_gpu="h100")
    found = next(each for each in report.findings if each.code == "MOD003")
    assert found.evidence["stored_linears"] == sum(map(computes_forward_in_fp8, report.facts.linears())) == 2
    assert (report.verdict.status == "step_raises") is not own


def test_a_function_with_fp8_in_its_backward_is_no_storage() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="meta"), InFp8(own=True))
    model[1].multiply = InBothDirections.apply
    report = looked(model, torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="meta"), assume_gpu="h100")
    assert [each.use for each in report.facts.network.linears] == ["none", "unknown"]
    assert not any(each.code == "MOD003" for each in report.findings)
    assert report.verdict.status == "open"


def test_a_forward_of_its_own_that_nobody_saw_may_be_in_fp8() -> None:
    unseen = inspect_model(nn.Sequential(InFp8(own=True)), trial=False)
    assert [each.use for each in unseen.facts.network.linears] == ["unknown"]
    assert not any(each.code == "MOD003" for each in unseen.findings)


@pytest.mark.parametrize("own", [True, False])
def test_a_trial_sees_it_in_its_first_copy(own: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), InFp8(own=own, device="cpu"))
    of = replace(job(model), batch=torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))
    facts = watch_copy(of, examine(of), TrialRun(CPU, Budget(600.0)))
    assert computes_forward_in_fp8(facts.network.linears[1])
    assert facts.network.linears[1].features.get(OWN_FUNCTION, False) is own
