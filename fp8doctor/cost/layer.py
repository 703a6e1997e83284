"""One layer in a step: its matmuls, its casts and the work next to it, in BF16 and in FP8.

Casts take the bytes that they move at the bandwidth of a copy, or their launches if those are few."""

from math import ceil
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.cost.matmuls import (
    KERNEL_LAUNCH_MS,
    NoNumbers,
    gemms,
    is_grouped,
    matmuls_ms,
    one_by_one,
    routed_rows,
)
from fp8doctor.facts import Facts, Family, Linear
from fp8doctor.facts.network import GATHERED_AS
from fp8doctor.gpus import MEMORY_EFFICIENCY, GpuSpec, gpu_spec, memory_ms
from fp8doctor.recipes import (
    RECIPES,
    STACKS,
    TORCHAO,
    TRANSFORMER_ENGINE,
    Recipe,
    default_recipe,
    named,
    recipe_of,
    runs_on,
    stack_of,
)

OWN_FORWARD = "own_forward"
"""Feature of a layer that is FP8, or an nn.Linear, by descent and computes what it wants."""

RECOMPUTED = {"between": 1 / 3, "casts": 0.1}
"""Share that a checkpointed block runs a second time. Between Linears: assumed. Casts: checkpointing all 24
blocks of a decoder of width 1024 costs 14.6 ms in FP8 and 21.5 in BF16, of which 9 are the matmuls; backward,
which casts again, shares the rest. Transformer Engine casts input and weight again, and no gradient: 4.48
instead of 2.39 ms in blocks of width 4096 with 1,024 rows, where their share of all that is cast gives 4.50.
Held out, it gives 2.01 for the 2.06 ms of h200-te_own_checkpoint."""

MOST_ROWS_CAST_EAGERLY = 65_536
"""Rows up to which these bytes are taken to hold: they were measured with up to 16,384, and four times that
is a convention of this tool. With 1,048,576 rows of 256 features the transposed copy writes a mebibyte apart
and takes 110 bytes per element by itself: 24.8 ms of casts where these give 15.4 (h200-cast_heavy_layer)."""

BIAS_BYTES = {"16bit": 7.8, "fp8": 24.4}
"""Effective bytes per output element of a compiled Linear with a bias, next to the others: its gradient is a
sum over all rows, for which the fused kernels in front of it compute their part again, and torchao adds it
outside of the matmul. 5.0 and 15.7 ms in a compiled ViT-L of 12608 rows (h200-vit_large); a decoder with GELU
and without biases has nothing of it (h100-gpt_124m_whole)."""

WEIGHT_CAST_BYTES = 12.0
"""Bytes per fp32 weight under BF16 autocast: the cast in the forward reads 4 and writes 2, that of its
gradient the reverse. Counted, not fitted."""

FP32_ADAPTER_BYTES = 29.5
"""Effective bytes per input and output element of an adapter that multiplies in fp32, its three matmuls
together: 4.9 ms for 14 adapters of rank 16 with 8192 rows (h200-lora_fp32), without tensor cores and in tiles
wider than their rank."""

BETWEEN_BYTES = {"eager": 11.2, "eager transformers": 32.0, "eager adapter": 21.0, "compiled": 6.9}
"""Effective bytes per input and output element of the Linears next to it, forward and backward: kernel time
of decoders without matmuls, attention, optimizer and loss, uncompiled 24.0 ms at width 1024 and 7.5 at 4096,
compiled 12.9 and, in a Llama 8B, 19.1. Uncompiled blocks of transformers compute norms and rotary embeddings
in fp32. Adapters: fitted to the BF16 step of a Llama 8B with rank 8 and 32 (354 and 345 ms). transformers
5.17."""


def between_ms(linear: Linear, rows: int, gpu: GpuSpec, how: str) -> float:
    """Model the share of one call of a Linear; ``how`` is a key of `BETWEEN_BYTES`."""
    if linear.role == "head":
        return 0.0
    if how != "compiled" and linear.get("adapter") == "adapter":
        how = "eager adapter"
    wide = 2 if linear.multiplies_in == "float32" and how != "eager transformers" else 1
    return wide * memory_ms(BETWEEN_BYTES[how] * rows * (linear.in_features + linear.out_features), gpu)


def uncompiled(facts: Facts) -> str:
    of_transformers = any(each.get("kind", "").startswith("transformers.") for each in facts.blocks())
    return "eager transformers" if of_transformers else "eager"


def recipe_on(linear: Linear, gpu: GpuSpec) -> str | None:
    """Return how a layer scales, by its record, else by its stack's default.

    None for a layer that ran in BF16.
    """
    if linear.recipe is not None or linear.engaged is False or gpu.fp8_tflops is None:
        return linear.recipe
    return default_recipe(stack_of(linear), gpu.capability)


def is_known(linear: Linear, gpu: GpuSpec | None) -> bool:
    """Return whether an FP8 layer's casts were measured on a GPU for its recipe."""
    recipe = recipe_of(linear)
    runs = gpu is None or not gpu.fp8_tflops or runs_on(recipe, gpu.capability)
    return runs and recipe.cast_bytes is not None


CAST_TB_S = 0.0272
"""Most that a multiprocessor of Hopper moves in torchao's casts: in 19 variants that an H100 and an H200
recorded they took 1.18 times as long on the H100 (median), whose memory is 1.43 times as slow. No speedup
gave this number; with it, recorded ones on H100s are 6 % too low in rowwise, not 12 %, and 1 % in tensorwise,
not 5 % (medians of 11 and 22 jobs)."""


def casts_beside_h200(gpu: GpuSpec) -> float:
    """Return the time of torchao's casts / that of their bytes, which were measured on an H200.

    Of other GPUs than Hopper's nothing is known: their casts take the time of their bytes.
    """
    if gpu.capability[0] != 9:
        return 1.0
    full, h200 = MEMORY_EFFICIENCY * gpu.memory_tb_s, gpu_spec("H200")
    spare = MEMORY_EFFICIENCY * h200.memory_tb_s / (CAST_TB_S * h200.multiprocessors)
    return full / min(full, CAST_TB_S * gpu.multiprocessors) / spare


def layer_casts_ms(
    recipe: Recipe, m: float, k: int, n: int, gpu: GpuSpec, *, compiled: bool, weights: float = 1.0
) -> float:
    """Model the casts of one layer in one step. Raises `NoNumbers` if its recipe was not measured.

    They are of input (M, K), weight (K, N) and gradient (M, N), or of a share of the weight. Uncompiled, the
    measurement of the stack's first recipe stands for all.
    """
    stack = STACKS.get(recipe.stack)
    needs_compile = recipe.only_compiled and not compiled
    runs = not gpu.fp8_tflops or runs_on(recipe, gpu.capability)
    each = recipe.cast_bytes
    if stack and each and not (compiled or stack.own_kernels):
        each = stack.eager_cast_bytes
    if each is None or stack is None or needs_compile or not runs:
        where = "in layers that are not compiled" if needs_compile else f"on {gpu.name}"
        raise NoNumbers(f"nobody measured the casts of the recipe {recipe.name} {where}")
    moving = memory_ms(each.activation * m * (k + n) + each.weight * weights * k * n, gpu)
    moving *= casts_beside_h200(gpu) if stack is TORCHAO else 1.0
    least = stack.compiled.kernels * KERNEL_LAUNCH_MS if compiled and not stack.own_kernels else 0.0
    return max(moving, least)


def casts_of(
    linear: Linear, recipe: Recipe, rows: int, gpu: GpuSpec, *, compiled: bool = True, weights: float = 1.0
) -> float:
    """Model the casts around a layer, or around one of its experts. Raises `NoNumbers`.

    Nothing is cast for the weight gradient of a frozen layer, unless its stack computes it in vain.
    """
    k, n, stack, grouped = linear.in_features, linear.out_features, stack_of(linear), is_grouped(linear)
    in_vain = not compiled and stack.frozen_gradient
    m = rows * recipe.frozen_cast_share if linear.requires_grad is False and not in_vain else rows
    if grouped and recipe.grouped_cast_bytes is not None:
        moving = memory_ms(recipe.grouped_cast_bytes * (m * (k + n) + weights * k * n), gpu)
        return moving + recipe.grouped_scales_ms * rows
    if grouped and not stack.own_kernels:
        raise NoNumbers(f"nobody measured the casts of the recipe {recipe.name} in experts on {gpu.name}")
    casts = layer_casts_ms(recipe, m, k, n, gpu, compiled=compiled or grouped, weights=weights)
    return casts + grouped * stack.compiled.kernels * KERNEL_LAUNCH_MS


class Call(Struct, frozen=True):
    """A layer as one GPU computes it in a micro-batch."""

    linear: Linear
    rows: int
    """Of one call; of experts, over all of them."""
    count: int = 1
    recomputed: float = 0.0
    """Share of its matmuls and casts that the backward repeats."""
    weights_cast: float = 1.0
    """Share of its weights that is cast."""
    sides: tuple[float, float] | None = None
    """Features of input and output whose neighbouring work is this GPU's; None for all of the layer's."""
    fp32: bool = False
    """It multiplies in fp32, as PEFT's adapters do without autocast."""


def _unknown_form(call: Call, *, autocast: bool) -> str:
    """Say which setting of a layer the model does not know; empty without one."""
    linear = call.linear
    features = linear.get("features", {})
    in_fp32 = linear.multiplies_in == "float32" and linear.adapter != "adapter" and not autocast
    eager = linear.compiled is None and linear.use == "training" and stack_of(linear).fuses_casts
    forms = (
        (features.get("emulate"), "FP8 is emulated"),
        (
            linear.use != "none" and features.get(OWN_FORWARD),
            "FP8 layers have a forward of their own that does other work",
        ),
        (features.get("fp8_attention"), "the recipe runs attention in FP8 too"),
        (linear.use == "storage", "it stores weights in low precision"),
        (linear.multiplies_in == "float64", f"{linear.name} multiplies in float64"),
        (eager and call.rows > MOST_ROWS_CAST_EAGERLY, f"{linear.name} casts {call.rows:,} rows, uncompiled"),
        (in_fp32, "weights are in fp32, and no autocast is on"),
    )
    return next((words for holds, words in forms if holds), "")


def layer_ms(call: Call, gpu: GpuSpec, eager_how: str, *, autocast: bool = False) -> dict[Family, float]:
    """Model one call of a layer and its surroundings. Raises `NoNumbers`."""
    linear = call.linear
    fp8, eager = linear.use == "training", linear.compiled is None
    if reason := _unknown_form(call, autocast=autocast):
        raise NoNumbers(reason)
    grouped, count, k, n = is_grouped(linear), gemms(linear), linear.in_features, linear.out_features
    m = ceil(call.rows / count) if grouped else call.rows
    in_one_kernel = count if grouped and not one_by_one(linear) else 1
    recipe = None
    if fp8:
        name = recipe_on(linear, gpu)
        if not name:
            ran = "some FP8 layers ran in BF16" if linear.engaged is False else ""
            raise NoNumbers(ran or f"the recipe of {linear.name} is unknown")
        recipe = RECIPES.get((linear.stack, name))
        if recipe is None:
            raise NoNumbers(f"nobody measured the casts of the recipe {name} on {gpu.name}")
    times = matmuls_ms(m, k, n, gpu, recipe, groups=in_one_kernel)
    cast = casts_of(linear, recipe, m, gpu, compiled=not eager, weights=call.weights_cast) if recipe else 0.0
    in_vain = fp8 and eager and stack_of(linear).frozen_gradient
    trained = linear.requires_grad is not False or in_vain
    in_16bit = times[2] if recipe and trained and recipe.weight_gradient_in_16_bits else 0.0
    gemm = sum(times[: 2 + trained]) - in_16bit + call.recomputed * times[0]
    around = between_ms(linear, m, gpu, eager_how if eager else "compiled")
    if linear.multiplies_in == "float32" and autocast:
        around += memory_ms(WEIGHT_CAST_BYTES * k * n, gpu)
    if not eager and linear.get("bias"):
        apart = fp8 and stack_of(linear).fuses_casts
        around += memory_ms(BIAS_BYTES["fp8" if apart else "16bit"] * m * n, gpu)
    if call.fp32:
        gemm = max(gemm, memory_ms(FP32_ADAPTER_BYTES * m * (k + n), gpu))
    if call.recomputed:
        of_te = (m * k + k * n) / (m * k + k * n + m * n)
        again = of_te if linear.stack == TRANSFORMER_ENGINE.name else RECOMPUTED["casts"]
        cast, around = cast * (1 + call.recomputed * again), around * (1 + RECOMPUTED["between"])
    return {
        "gemm_fp8": count * gemm if fp8 else 0.0,
        "gemm_16bit": count * (in_16bit if fp8 else 0.0 if call.fp32 else gemm),
        "gemm_fp32": count * gemm if call.fp32 else 0.0,
        "cast": count * cast,
        "pointwise": count * around * (sum(call.sides) / (k + n) if call.sides else 1.0),
    }


class LinearCost(NamedTuple):
    """Times of a layer's matmuls, and of its compiled casts, in ms. Of experts, all of them."""

    bf16_ms: float
    fp8_ms: float
    casts_ms: float


def in_plain_bf16(linear: Linear) -> Linear:
    gathered = {name: value for name, value in linear.get("features", {}).items() if name == GATHERED_AS}
    return replace(linear, use="none", stack="torch", recipe=None, features=gathered)


def linear_cost(linear: Linear, rows: int, gpu: GpuSpec) -> LinearCost | None:
    """Model one matmul of a layer, compiled, or all of its experts; None without numbers.

    A layer whose stack does not have its recipe, or that has none, gets the stack that does.
    """
    name = linear.get("recipe") or "tensorwise"
    recipe = RECIPES.get((linear.get("stack", ""), name)) or named(name)
    own = {"use": "training", "stack": recipe.stack, "recipe": recipe.name}
    fp8 = replace(linear, **own, compiled="", bias=False, gemms=gemms(linear) if is_grouped(linear) else 1)
    try:
        plain, ms = (
            layer_ms(Call(each, rows), gpu, "compiled", autocast=True) for each in (in_plain_bf16(fp8), fp8)
        )
    except NoNumbers:
        return None
    return LinearCost(plain["gemm_16bit"], ms["gemm_fp8"] + ms["gemm_16bit"], ms["cast"])


def mxfp8_experts(linear: Linear, facts: Facts, gpu: GpuSpec) -> LinearCost | None:
    """Model trained experts in MXFP8 in one micro-batch; None for others, and for unknown rows."""
    if linear.role != "experts" or recipe_of(linear).name != "mxfp8" or linear.requires_grad is False:
        return None
    rows = routed_rows(linear, facts) if gpu.compute_capability.startswith("10.") else None
    return linear_cost(linear, rows, gpu) if rows else None
