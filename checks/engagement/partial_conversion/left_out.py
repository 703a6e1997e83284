"""Why a conversion leaves a layer out: the first reason that holds, and its fix."""

from collections.abc import Callable
from typing import NamedTuple

from fp8doctor import kit


class Reason(NamedTuple):
    """Why a conversion left a layer out, and the fix."""

    holds: Callable[[kit.Linear], bool]
    said: str
    """Completes "14 layers ..."."""
    name: str
    summary: str
    code: str


def is_stacked(linear: kit.Linear) -> bool:
    """Whether these are 3-D weights of experts."""
    return linear.role == "experts" and linear.gemms > 1


REST = Reason(
    lambda _: True,
    "were left out by the conversion",
    "convert-the-rest",
    "convert the other layers that FP8 can take, before torch.compile wraps them",
    "wanted = lambda module, name: not (module.in_features % 16 or module.out_features % 16 or "
    "name.endswith('lm_head'))\nconvert_to_float8_training(model, module_filter_fn=wanted)",
)

REASONS = (
    Reason(
        lambda linear: linear.kind.endswith(".Conv1D"),
        "are Conv1D, which no converter accepts as a Linear",
        kit.treatments.CONV1D.name,
        kit.treatments.CONV1D.summary,
        kit.treatments.CONV1D.code,
    ),
    Reason(
        lambda linear: is_stacked(linear) and linear.features.get("grouped_gemm") is False,
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
        lambda linear: not kit.layers.would_be_converted(linear),
        "are no plain nn.Linear: attention's own projections, a class with its own forward, or a computed "
        "weight",
        "plain-linears",
        "compute the product in a plain nn.Linear, convert it, and do other work around it",
        "y = self.linear(x) * self.scale   # self.linear = nn.Linear(...), which is converted",
    ),
    REST,
)
