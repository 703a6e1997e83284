"""Why a conversion leaves a layer out: the first reason that holds, and its fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fp8doctor import kit

TE_WRAPPER = "accelerate.utils.transformer_engine.contextual_fp8_autocast"
"""The wrapper that Accelerate puts around a forward after its Transformer Engine conversion (1.2 to 1.15)."""


class Reason(NamedTuple):
    """Why a conversion left a layer out, and the fix."""

    holds: Callable[[kit.Linear, list[kit.Linear], kit.Facts], bool]
    """Called with the layer and the FP8 layers."""
    said: str
    """Completes "14 layers ..."."""
    name: str
    summary: str
    code: str = (
        "wanted = lambda module, name: not (module.in_features % 16 or module.out_features % 16 or "
        "name.endswith('lm_head'))\nconvert_to_float8_training(model, module_filter_fn=wanted)"
    )
    by_name: bool = False
    """Whether a filter with the names of this model's layers is the better line."""


def is_stacked(linear: kit.Linear, *_: object) -> bool:
    """Whether these are 3-D weights of experts."""
    return linear.role == "experts" and linear.gemms > 1


def is_behind_a_stop(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether Accelerate converted to Transformer Engine, which stops at the first unaligned sibling."""
    return any(link.startswith(TE_WRAPPER) for link in facts.training.forward_chain)


def is_wrapped(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether a ``torch.compile`` wrapper stands in this layer's true name, and in that of no FP8 layer."""
    wrappers = [mark.name for mark in facts.training.compile_marks if mark.form == "wrapped"]
    above = [name for name in wrappers if kit.compile_coverage.is_below(linear, name)]
    covered = any(kit.compile_coverage.is_below(each, name) for each in fp8 for name in wrappers)
    return bool(above) and not covered


def is_an_end(linear: kit.Linear, fp8: list[kit.Linear], facts: kit.Facts) -> bool:
    """Whether this is the first or the last Linear of a model that Accelerate converted with torchao."""
    seen = [
        each
        for each in facts.network.linears
        if not (each.features.get("functional") or each.role == "experts" or each.kind.endswith(".Conv1D"))
    ]
    by_torchao = kit.fp8_request.may_have_converted(facts) and any(each.stack == "torchao" for each in fp8)
    return by_torchao and linear in (seen[0], seen[-1])


REASONS = (
    Reason(
        lambda linear, *_: linear.kind.endswith(".Conv1D"),
        "are Conv1D, which no converter accepts as a Linear",
        kit.treatments.CONV1D.name,
        kit.treatments.CONV1D.summary,
        kit.treatments.CONV1D.code,
    ),
    Reason(
        lambda linear, *_: is_stacked(linear, *_) and linear.features.get("grouped_gemm") is False,
        "are 3-D expert weights in a layout that torchao's grouped matmul does not accept",
        "experts-by-grouped-gemm",
        "store the experts as [experts, out, in] and use torch's grouped matmul: torchao converts such "
        "experts",
        "self.weight = nn.Parameter(weight.transpose(-2, -1).contiguous())   # if it is [experts, in, out]\n"
        "y = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)   # not a loop, not bmm",
    ),
    Reason(
        is_stacked,
        "are 3-D expert weights, which a converter of nn.Linear does not see",
        "convert-experts",
        "convert the experts too by torchao's grouped matmul (a prototype as of 0.18), before the optimizer",
        "quantize_(model, Float8TrainingOpConfig(), filter_fn=lambda module, name: "
        'type(module).__name__ == "{kind}")',
    ),
    Reason(
        lambda linear, *_: bool(linear.features.get("functional")),
        "are projections that nn.MultiheadAttention keeps as parameters",
        "own-projections",
        "write the projections as nn.Linear and call scaled_dot_product_attention",
        "q, k, v = self.in_proj(x).chunk(3, -1)   # in_proj = nn.Linear(width, 3 * width)\n"
        "x = functional.scaled_dot_product_attention(q, k, v)",
    ),
    Reason(
        lambda linear, *_: linear.kind in kit.layers.NO_LINEAR,
        "are of a class that is not nn.Linear",
        "convert-before-lora",
        "convert the plain Linears first, then add LoRA around them",
        "# torchtune's LoRALinear is not nn.Linear: build the model without it, then\n"
        "convert_to_float8_training(model)\nmodel = get_peft_model(model, LoraConfig(...))   # peft",
    ),
    Reason(
        lambda linear, *_: bool(linear.features.get("computed_weight")),
        "compute their weight in each forward (weight_norm, spectral_norm), so torchao's conversion raises",
        "convert-before-parametrizing",
        "convert first, then parametrize the converted layer's weight",
        "convert_to_float8_training(model)\nlayer = weight_norm(model.layer)   # a sketch",
    ),
    Reason(
        lambda linear, *_: bool(linear.features.get("own_forward")),
        "are of a class with its own forward, which a conversion drops",
        "own-forward-around-linear",
        "let the class hold an nn.Linear, and do its other work around that",
        "y = self.linear(x) * self.scale   # self.linear = nn.Linear(...), which is converted",
    ),
    Reason(
        is_behind_a_stop,
        "come after a sibling with unaligned sides, at which Accelerate's conversion stops",
        "convert-with-torchao",
        "make the unaligned sides multiples of 16, or convert with torchao, which skips only the layer "
        "itself",
        "{exported}   # or choose widths divisible by 16 in the model's configuration",
    ),
    Reason(
        is_wrapped,
        "are inside a compiled wrapper, so their names begin with _orig_mod. and an exact-name filter "
        "misses them",
        "convert-before-compile",
        "convert before torch.compile, or remove _orig_mod. from the names in the filter",
        by_name=True,
    ),
    Reason(
        is_an_end,
        "are the first or the last Linear, which Accelerate's torchao path skips",
        "own-filter",
        "convert with your own filter that leaves out only the head",
        by_name=True,
    ),
    Reason(
        lambda *_: True,
        "were left out by the conversion's filter",
        "convert-the-rest",
        "widen the filter: convert the other layers that FP8 can take",
        by_name=True,
    ),
)
BY_CHOICE = [each for each in REASONS if each.name in ("own-forward-around-linear", "convert-the-rest")]
