"""Layers and modules: their names in a script, their use of FP8, and their share."""

import json
from collections.abc import Collection, Iterable, Sequence
from keyword import iskeyword

from fp8doctor.cost.layer import OWN_FORWARD
from fp8doctor.cost.matmuls import rows_of, rows_seen, step_tokens
from fp8doctor.facts import Facts, Linear, Network, recorded
from fp8doctor.recipes import stack_of

KEEP_IT_IN_MODULE = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
"""Wrappers that hold the model's attributes behind ``module``; the others hand them on."""

INSIDE = {
    **dict.fromkeys(KEEP_IT_IN_MODULE, "module"),
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""Class of a wrapper -> its attribute that holds what it wraps."""


def in_python(name: str, network: Network) -> str:
    """Write a module as a script does that calls its model ``model``.

    ``model.layers[0].up``, ``model.get_submodule("stages.0.1").norm``. Only a container takes an index; if
    the facts do not say that a module is one, its children are named.
    """
    wrapped = any(each in KEEP_IT_IN_MODULE for each in network.get("wrappers", ()))
    model = written = "model.module" if wrapped else "model"
    path = ""
    for part in filter(None, name.split(".")):
        container = _container(path, network)
        path = f"{path}.{part}".lstrip(".")
        if part.isidentifier() and not iskeyword(part) and container != "ModuleDict":
            written += f".{part}"
        elif container == "list" and part.isdigit():
            written += f"[{part}]"
        elif container == "ModuleDict":
            written += f"[{part!r}]"
        else:
            written = f"{model}.get_submodule({json.dumps(path)})"
    return written


def wrapped_in_python(network: Network) -> str:
    """Write the model inside all of its wrappers, for a line that assigns to it."""
    return ".".join(["model", *(INSIDE[each] for each in network.get("wrappers", ()) if each in INSIDE)])


def _container(name: str, network: Network) -> str | None:
    """Return the kind of container that takes an index or key, as far as it is known."""
    if not name and network.get("kind", "").endswith((".container.Sequential", ".container.ModuleList")):
        return "list"
    found = (each.get("container", "list") for each in network.get("blocks", ()) if each.name == name)
    return next(found, None)


MOST_NAMED = 2
"""Layers that a title names, each with its sides."""


def named(layers: Sequence[Linear], of: int = 0) -> str:
    """Name one or two layers with their sides behind a title, and of more the first.

    Empty if these are all ``of`` the layers, and more than two.
    """
    if len(layers) > MOST_NAMED and len(layers) == of:
        return ""
    shown = [
        f"{each.name} ({each.in_features} x {each.out_features})"
        for each in layers[: MOST_NAMED if len(layers) <= MOST_NAMED else 1]
        if each.get("name") and recorded(each, "in_features") and recorded(each, "out_features")
    ]
    return f"{': ' if len(layers) <= MOST_NAMED else ', such as '}{' and '.join(shown)}" if shown else ""


def layer_label(linear: Linear) -> str:
    """Name a layer's class as users do: ``te.Linear``, ``Linear of Float8Tensor``."""
    name = linear.get("kind", "unknown").rpartition(".")[2]
    if name == "Linear" and (weight := linear.get("weight_class")):
        return f"{name} of {weight.rpartition('.')[2]}"
    return f"{stack_of(linear).prefix}{name}"


FORWARD_IN_FP8 = ("FP8Linear", "FP8GroupedLinear", "FP8Experts", "FP8Expert", "FbgemmFp8Linear")
"""Classes of transformers whose forward quantizes the activations and multiplies in FP8; the backward
dequantizes. Source: transformers 5.23, ``integrations/finegrained_fp8.py`` and ``fbgemm_fp8.py``."""


def stores_fp8(linear: Linear) -> bool:
    """Return whether a layer keeps its weight in FP8 and is not made for training."""
    return linear.use == "storage" and linear.dtype.startswith("float8")


QUANTIZES = "activations_quantized"
"""Feature of a layer that stores FP8 weights and multiplies in FP8, in a forward without a backward."""

OWN_FUNCTION = "own_function"
"""Feature of a layer whose forward was seen to multiply in FP8 in an autograd function of its own."""


def computes_forward_in_fp8(linear: Linear) -> bool:
    """Return whether a layer that stores FP8 weights multiplies in FP8 (forward only)."""
    if not stores_fp8(linear):
        return False
    features = linear.get("features", {})
    if features.get(QUANTIZES) or features.get(OWN_FUNCTION):
        return True
    return linear.stack == "huggingface" and linear.kind.rpartition(".")[2] in FORWARD_IN_FP8


FP8_MULTIPLE = 16
"""Elements that divide both sides of an FP8 weight. Source: torch ``_check_scaled_mm_sizes``, CUDA only."""


def fits_fp8(linear: Linear) -> bool:
    """Return whether an FP8 matmul takes both sides of the layer's weight as they are."""
    return linear.in_features % FP8_MULTIPLE == 0 and linear.out_features % FP8_MULTIPLE == 0


NO_LINEAR = ("torchtune.modules.peft.lora.LoRALinear",)
"""Linear-like classes that do not derive from nn.Linear, next to Conv1D. Source: torchtune 0.6."""


def is_nn_linear(linear: Linear) -> bool:
    """Return whether an unconverted layer is an nn.Linear with a Parameter as weight, or of a derived class.

    torchao's conversion raises on a weight that is computed in each forward.
    """
    if linear.features.get("functional") or linear.features.get("computed_weight"):
        return False
    if linear.role in ("router", "experts"):
        return linear.kind.endswith("Linear")
    return linear.kind not in NO_LINEAR and not linear.kind.endswith(".Conv1D")


def may_be_taken(linear: Linear) -> bool:
    """Return whether a converter without a filter may take this 16- or 32-bit layer, whatever its sides.

    A router may derive from nn.Linear and return more than it does. On a computed weight the converter
    raises, on sides that 16 does not divide the step.
    """
    return linear.use == "none" and (
        linear.role == "router"
        or bool(linear.features.get("computed_weight"))
        or (linear.stack == "torch" and is_nn_linear(linear))
    )


def makes_logits(linear: Linear, network: Network) -> bool:
    known = network.get("vocabulary") is not None
    return known and linear.role == "head" and linear.out_features == network.vocabulary


def would_be_converted(
    linear: Linear, *, roles: Collection[str] = ("body",), rewritten: bool = False, padded: bool = False
) -> bool:
    """Return whether a converter to FP8 takes this layer in 16 or 32 bits.

    It takes every nn.Linear that its filter lets through; the usual filter leaves out sides that 16 does not
    divide, heads, routers, experts and LoRA's matrices. It should take no class with a forward of its own,
    which the converter drops. ``roles`` widens the filter.
    ``rewritten`` adds layers that must become an nn.Linear first: Conv1D, the projections of
    nn.MultiheadAttention, 3-D experts, classes with a forward of their own. ``padded`` adds sides over 16
    that it does not divide yet. Source: ``swap_linear_layers`` in torchao 0.10 to 0.18, ``convert_model`` in
    accelerate 1.15.
    """
    return (
        linear.use == "none"
        and linear.stack == "torch"
        and linear.role in roles
        and linear.adapter != "adapter"
        and (rewritten or not linear.features.get(OWN_FORWARD))
        and (fits_fp8(linear) or (padded and min(linear.in_features, linear.out_features) > FP8_MULTIPLE))
        and (rewritten or is_nn_linear(linear))
    )


def converted(facts: Facts) -> list[Linear]:
    """List the layers that a conversion should take: none whose few rows, as of a condition, would raise."""
    most, every = main_rows(facts) or 0, filter(would_be_converted, facts.network.linears)
    return [each for each in every if all(n >= most or n % FP8_MULTIPLE == 0 for n in rows_seen(each, facts))]


def to_convert(facts: Facts) -> list[Linear]:
    """List the BF16 layers that a conversion takes and an FP8 matmul can multiply."""
    return [each for each in facts.network.linears if is_multiplied(each, rows_of(each, facts))]


def is_multiplied(linear: Linear, rows: int | None) -> bool:
    """Return whether a conversion takes the layer and an FP8 matmul these rows."""
    return would_be_converted(linear) and bool(rows) and (rows or 0) % FP8_MULTIPLE == 0


def nothing_to_convert(network: Network) -> bool:
    """Return whether no Linear of a model without FP8 could train in it, rewritten or padded.

    FP8 multiplies no convolution and no recurrent layer, and is left out of heads, routers and adapters.
    """
    return not network.get("fp8_calls") and all(
        linear.use == "none"
        and not would_be_converted(linear, roles=("body", "experts"), rewritten=True, padded=True)
        for linear in network.linears
    )


def waits_for_linears(facts: Facts) -> bool:
    """Return whether all that a model without FP8 could convert are Conv1D, as in GPT-2 of transformers."""
    plain = all(each.use == "none" for each in facts.network.linears) and not to_convert(facts)
    return plain and any(each.kind.endswith(".Conv1D") for each in facts.network.linears)


def too_small(linear: Linear, *, rowwise: bool) -> bool:
    """Apply torchao's rule, tuned on an H100.

    Source: ``_auto_filter_for_recipe`` in torchao 0.12 to 0.18.
    """
    k, n = linear.in_features, linear.out_features
    if rowwise:
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return k <= 4096 and n <= 1024


def flops_share_pct(linears: Iterable[Linear], facts: Facts) -> float:
    """Sum up the known share of these layers in the model's matmul FLOPs.

    Experts keep the share of a token's visits, because the router decides their rows in every step.
    """
    every = facts.linears()
    tokens = step_tokens(facts) or max((sum(rows_seen(each, facts)) for each in every), default=0) or 1

    def work(linear: Linear) -> float:
        if not recorded(linear, "flops_share_pct") or never_called(linear, facts):
            return 0.0
        seen = () if linear.role == "experts" else rows_seen(linear, facts)
        return (linear.flops_share_pct or 0.0) * (sum(seen) or tokens)

    total = sum(map(work, every))
    return 100 * sum(map(work, linears)) / total if total else 0.0


def never_called(linear: Linear, facts: Facts) -> bool:
    """Return whether a forward that called other layers did not call this one.

    A head, a layer of LoRA's and a projection of attention's may be multiplied without being called: fused
    kernels read their weights.
    """
    counted = facts.get("trial.rows") or facts.get("workload.rows")
    if not counted or linear.name in counted:
        return False
    body = linear.get("role") == "body" and linear.get("adapter", "") is None
    return body and not linear.get("features", {}).get("functional")


def shares_are_known(facts: Facts) -> bool:
    """Return whether the model's matmul FLOPs could be counted: not if nothing tells the experts' visits."""
    return any(recorded(each, "flops_share_pct") for each in facts.network.linears)


def main_rows(facts: Facts) -> int | None:
    """Return the rows per call that most matmul FLOPs have; None if not counted for most of them."""
    work, counted_pct = dict[int, float](), 0.0
    for linear in facts.linears():
        if (seen := rows_seen(linear, facts)) and recorded(linear, "flops_share_pct"):
            counted_pct += linear.flops_share_pct or 0.0
            work[max(seen)] = work.get(max(seen), 0.0) + sum(seen) * (linear.flops_share_pct or 0.0)
    return max(work, key=lambda rows: work[rows], default=None) if counted_pct > 50 else None


def tokens_of(facts: Facts) -> int | None:
    """Count the tokens of a micro-batch; None if they are unknown, or if its rows are no tokens.

    Without a vocabulary the second dimension of an input may be a feature: most layers then see fewer rows.
    """
    tokens, rows = step_tokens(facts), main_rows(facts)
    is_text = facts.get("network.vocabulary") is not None
    return tokens if is_text or rows is None or tokens is None or rows >= tokens else None
