"""One record for each FP8 implementation (a stack), and for each of its recipes: how tensors are scaled."""

from collections.abc import Iterable
from functools import cache, partial
from typing import Literal, NamedTuple

from msgspec import Struct

from fp8doctor.facts import Linear

VersionNumbers = tuple[int, ...]
FIRST_WITH_FP8 = (8, 9)
"""Ada. Source: ``_scaled_mm_allowed_device`` in torch, ``check_cuda_fp8_capability`` in accelerate 1.15."""


class CastBytes(NamedTuple):
    """Effective bytes per element of a step's casts, see `fp8doctor.cost.layer`."""

    activation: float  # per element of the input and the output gradient
    weight: float


class Launch(NamedTuple):
    """Launches that an FP8 layer adds to a step, counted and measured."""

    kernels: int = 0
    host_ms: float = 0.0


class Recipe(Struct, frozen=True, kw_only=True):
    """The known properties of one recipe of one stack."""

    stack: str
    name: str  # as in `Linear.recipe`
    words: str = ""  # name for users; ``name`` if empty
    classes: tuple[str, ...] = ()  # classes of the library for it: layers or configurations
    config: str = ""  # Python expression that builds its configuration
    operands: tuple[str, ...] = ()  # how torchao scales each operand, in the order of `stacks.torchao.CASTS`
    granularity: Literal["", "tensor", "row", "block"] = ""  # elements that share one scale; empty if unknown
    first: VersionNumbers = FIRST_WITH_FP8  # lowest CUDA compute capability
    below: VersionNumbers | None = None  # first compute capability on which it no longer runs
    cuda: VersionNumbers = (0,)  # lowest CUDA version
    torch_on_ada: VersionNumbers = (0,)  # lowest torch on compute capability 8.9
    # First version with `config`. Source: wheels of torchao 0.8 to 0.17, Transformer Engine 2.1 to 2.3.
    since: str = "0"
    # Elements that must divide both sides of a weight. Source: torch ``_check_scaled_mm_sizes``. Transformer
    # Engine requires 16 in and 8 out for a forward, and 16 for both in the backward.
    multiple: int = 16
    mark: str = ""  # part of the class names of layers and weights with this scaling
    pads_tokens: bool = False  # no FP8 matmul needs a multiple of tokens
    whole_blocks: bool = False  # it only quantizes whole blocks of tokens, even if the weight is frozen
    weight_gradient_in_16_bits: bool = False
    cast_bytes: CastBytes | None = None  # of a compiled layer, or of its own kernels; None if not measured
    matmul_times: float = 1.0  # time of its matmuls / those with one scale per tensor, at the same peak rate
    in_fp4: bool = False
    frozen_cast_share: float = 1.0  # cast bytes of an activation in a frozen layer / in a trained one
    only_compiled: bool = False  # its casts were measured only in compiled layers
    drops_bias: bool = False  # its layers drop their bias silently, so it excludes layers with a bias
    grouped_cast_bytes: float | None = None  # bytes per element that experts' casts move, each operand
    grouped_scales_ms: float = 0.0  # time per row to reorder the scales of its groups
    treatment: str = ""  # name of the treatment that changes to it
    converts: bool = False  # the trial converts a model without FP8 with it


class Stack(Struct, frozen=True, kw_only=True):
    """The properties of one FP8 implementation, except how its layers are recognized."""

    name: str  # as `Linear.stack` has it
    words: str = ""  # its name for users; ``name`` if empty
    prefix: str = ""  # prefix of its layers' class: ``te.``
    fuses_casts: bool = False  # the compiler fuses the casts of its layers, so they need compilation
    own_kernels: bool = False  # it casts in kernels of its own, compiled or not
    under_autocast: bool = False  # its layers run in FP8 only under its autocast
    keeps_copies: bool = False  # it keeps FP8 copies next to its weights
    converter: str = "convert_to_float8_training"  # empty if its layers are built as such
    converter_import: str = ""  # line that imports it, if it is not torchao's
    layer: str = ""  # class that stands for all of its layers in a sentence; empty for their own
    eager_cast_bytes: CastBytes | None = None  # effective bytes of all casts of one uncompiled layer
    eager: Launch = Launch()
    compiled: Launch = Launch()
    forward_tokens: int | None = None  # must divide the tokens of a frozen layer; None if its recipe decides
    cuda_on_ada: VersionNumbers = (0,)  # lowest CUDA version on compute capability 8.9
    # Lowest compute capability -> the recipe of layers that are given none, the highest first.
    defaults: tuple[tuple[VersionNumbers, str], ...] = ()
    frozen_gradient: bool = False  # uncompiled, it computes a frozen weight's gradient and throws it away

    @property
    def in_words(self) -> str:
        return self.words or self.name


TORCHAO = Stack(
    name="torchao",
    fuses_casts=True,
    frozen_gradient=True,
    # Each operand is cast twice, once for each layout: 282.7 ms in a decoder of width 1024 (16384 tokens) and
    # 589.1 in a Llama 8B (4096 tokens), mostly of weights, whose transposed copies read along the wrong axis.
    eager_cast_bytes=CastBytes(124.0, 174.0),
    eager=Launch(83, 1.65),  # (113.5 - 22.7) / 55 ms with torchao 0.18
    compiled=Launch(9, 0.14),  # 8.7 and 9.2 kernels; (20.85 - 12.93) / 55 ms
)

TRANSFORMER_ENGINE = Stack(
    name="transformer_engine",
    words="Transformer Engine",
    prefix="te.",
    own_kernels=True,
    under_autocast=True,
    keeps_copies=True,
    converter="",
    layer="te.Linear",
    eager=Launch(6, 0.39),  # (44.7 - 22.2) / 57 ms with Transformer Engine 2.20
    compiled=Launch(6, 0.39),
    # No matmul of a frozen te.Linear has the tokens inside: assert_dim_for_fp8_exec.
    forward_tokens=8,
    cuda_on_ada=(12, 1),  # and cuBLASLt: check_fp8_support in Transformer Engine 1.0 to 2.20
    # get_default_fp8_recipe in Transformer Engine 2.20
    defaults=(((12, 0), "current"), ((10, 0), "mxfp8"), ((0, 0), "delayed")),
)

# All of nanochat was measured on one H100 with torch 2.11, November 2026, in steps of two decoders of width
# 1024 (16384 tokens) and 4096 (8192 and 2048 tokens), each next to its BF16 twin; within 7%.
NANOCHAT = Stack(
    name="nanochat",
    fuses_casts=True,
    frozen_gradient=True,
    converter_import="from nanochat.fp8 import convert_to_float8_training",
    eager_cast_bytes=CastBytes(75.0, 80.0),  # 49.1, 40.8 and 18.2 ms: it casts each operand once
    eager=Launch(45, 0.97),  # (42.3 - 7.4) / 36 ms at width 512 with 1024 tokens, paced by the host
    compiled=Launch(8, 0.20),  # (13.8 - 6.6) / 36 ms
)

STACKS = {each.name: each for each in (TORCHAO, TRANSFORMER_ENGINE, NANOCHAT)}

_MX = 32  # elements that share a scale. Source: OCP Microscaling Formats specification 1.0
_BLOCK = 128  # the same. Source: torchao 0.18 ``blockwise_fp8_training``, ``nvfp4_training``

_of_torchao = partial(Recipe, stack="torchao", since="0.9")
_of_te = partial(Recipe, stack="transformer_engine")

_TORCHAO = (
    _of_torchao(
        name="tensorwise",
        config='Float8LinearConfig.from_recipe_name("tensorwise")',
        operands=("tensorwise e4m3",) * 4 + ("tensorwise e5m2",) * 2,
        granularity="tensor",
        # Kernel time of two compiled decoders less that of their BF16 twins, all but matmuls, attention and
        # optimizer: 21.0 ms at width 1024, 10.0 at 4096, 47.6 in a Llama 8B, for which these give 49.8.
        cast_bytes=CastBytes(9.0, 17.0),
        frozen_cast_share=5.0 / 9.0,
        treatment="recipe-tensorwise",
        converts=True,
    ),
    _of_torchao(
        name="rowwise",
        config='Float8LinearConfig.from_recipe_name("rowwise")',
        operands=("axiswise e4m3",) * 6,
        granularity="row",
        torch_on_ada=(2, 7),  # pytorch/pytorch #144348
        # What a layer takes longer than with tensorwise, 2.24 ms in a Llama 8B (4096 tokens) and 5.43 in a
        # 70B (2048 tokens), scaling the gradients after their matmul included.
        cast_bytes=CastBytes(25.0, 37.0),
        frozen_cast_share=6.4 / 25.0,  # what rowwise_with_gw_hp moves, which casts once in any case
        # 2.93, 2.16, 1.41, 1.38, 2.13 and 5.51 ms: 14.1 to 20.8 bytes, the median (h200_grouped)
        grouped_cast_bytes=15.4,
        treatment="recipe-rowwise",
    ),
    _of_torchao(
        name="rowwise_with_gw_hp",
        config='Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")',
        words="rowwise with BF16 weight gradients",
        operands=(
            "axiswise e4m3",
            "disabled",
            "axiswise e4m3",
            "tensorwise e4m3",
            "axiswise e4m3",
            "disabled",
        ),
        granularity="row",
        torch_on_ada=(2, 7),  # pytorch/pytorch #144348
        weight_gradient_in_16_bits=True,
        pads_tokens=True,
        # A decoder of width 1024 takes 2.9 ms a step more than with tensorwise. The weight is cast once as in
        # tensorwise and once as in rowwise, and its gradient is not scaled: half way.
        cast_bytes=CastBytes(6.4, 25.0),
        treatment="recipe-rowwise-with-gw-hp",
        # Beside rowwise, both compiled: 53.8 and 63.2 ms, 72.5 and 86.9, 90.4 and 94.3 (eight_jobs, H200).
        converts=True,
    ),
    _of_torchao(
        name="mxfp8",
        mark="mx",
        words="MXFP8 block scaling",
        classes=("MXFP8Linear",),
        config="MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_RCEIL)",
        since="0.17",
        granularity="block",
        first=(10, 0),
        below=(11, 0),
        cuda=(12, 8),
        multiple=_MX,
        # Grouped: torchao 0.15 prototype/moe_training/README.md, a B200. A Llama 3 8B takes 1.080 times as
        # long as with tensorwise (8192 tokens, eight B200, torchao 0.13 docs), all of it counted as casts.
        cast_bytes=CastBytes(16.8, 16.8),
        only_compiled=True,
        frozen_cast_share=0.5,  # roofline_utils: three bytes for each of two layouts
        drops_bias=True,  # 0.17 and 0.18; MOD007
        treatment="recipe-mxfp8",
        grouped_cast_bytes=9.2,
        grouped_scales_ms=3.4e-6,
    ),
    _of_torchao(
        name="nvfp4",
        mark="nvfp4",
        words="NVFP4",
        classes=("NVFP4Linear",),
        granularity="block",
        first=(10, 0),
        multiple=_BLOCK,
    ),
    _of_torchao(
        name="blockwise",
        mark="block",
        words="block scaling",
        classes=("Float8BlockwiseLinear",),
        granularity="block",
        first=(9, 0),
        multiple=_BLOCK,
    ),
)
"""Requirements: torchao 0.18 (``mxfp8/quant.py``, ``blockwise_fp8_training/linear.py``). Casts are all of one
step together, compiled, next to the kernels that they are fused with."""

_TRANSFORMER_ENGINE = (
    _of_te(
        name="delayed",
        words="delayed scaling",
        granularity="tensor",
        classes=("DelayedScaling",),
        config="DelayedScaling()",
        cast_bytes=CastBytes(4.7, 4.7),  # 0.435 ms at (16384, 4096, 16384)
        frozen_cast_share=3.0 / 4.7,
        treatment="te-delayed",
    ),
    _of_te(
        name="current",
        words="current scaling",
        granularity="tensor",
        classes=("Float8CurrentScaling",),
        config="Float8CurrentScaling()",
        since="2.2",
        cast_bytes=CastBytes(6.8, 6.8),  # 0.638 ms at (16384, 4096, 16384)
        frozen_cast_share=5.0 / 6.8,
        treatment="te-current",
    ),
    _of_te(
        name="blockwise",
        mark="block",
        words="block scaling",
        classes=("Float8BlockScaling",),
        config="Float8BlockScaling()",
        since="2.3",
        granularity="block",
        first=(9, 0),
        cuda=(12, 9),
        # 0.198, 0.373 and 0.907 ms for 8192 rows of 2048 x 8192, 4096 x 14336 and 8192 x 28672; their matmuls
        # took 0.81, 2.66 and 10.43 ms where those with one scale per tensor are modelled as 0.62, 2.02 and
        # 8.12 (h100_grid).
        cast_bytes=CastBytes(5.5, 5.5),
        frozen_cast_share=3.0 / 5.5,
        matmul_times=1.3,
        treatment="te-block",
    ),
    _of_te(
        name="mxfp8",
        mark="mx",
        words="MXFP8 block scaling",
        classes=("MXFP8BlockScaling",),
        config="MXFP8BlockScaling()",
        since="2.0",
        granularity="block",
        first=(10, 0),
        below=(12, 0),
        multiple=_MX,
        # 0.0523 ms for 8192 x 8192 on a B200 (ROCm/TransformerEngine#598); it writes the scales in order.
        cast_bytes=CastBytes(5.4, 5.4),
        frozen_cast_share=3.0 / 5.4,
        matmul_times=1.05,  # 171.9 and 163.5 ms, see the end of this table
        grouped_cast_bytes=5.4,
        whole_blocks=True,
        treatment="te-mxfp8",
    ),
    _of_te(
        name="nvfp4",
        mark="nvfp4",
        words="NVFP4",
        classes=("NVFP4BlockScaling",),
        granularity="block",
        first=(10, 0),
        below=(11, 0),
        # What two forwards took longer than their matmuls, 0.22 ms for 197 million elements: it reads twice
        # and turns the activations (Hadamard), for which 5.1 are counted.
        cast_bytes=CastBytes(7.7, 7.7),
        frozen_cast_share=4.6 / 7.7,
        matmul_times=1.66,  # 90.3 and 163.5 ms at three times the peak
        in_fp4=True,
        whole_blocks=True,
    ),
    _of_te(name="custom", classes=("CustomRecipe",)),
)
"""Requirements: ``check_mxfp8_support``, ``check_fp8_block_scaling_support`` and ``check_nvfp4_support`` in
Transformer Engine 2.20; whole blocks: 2.19 ``quantizer.cpp:1514 and 1982``. It pads its blocks, so 16 divides
enough. MXFP8 and NVFP4 rest on one table each: 288 matmuls of a 5B model whose operands were quantized before
took 314.4 ms in BF16, 163.5 with one scale per tensor, 171.9 in MXFP8 and 90.3 in NVFP4. Source: Transformer
Engine d0067d0 ``docs/examples/gemm_profiling``, a B300, 15,872 rows.
"""

_NANOCHAT = Recipe(
    stack="nanochat",
    name="tensorwise",
    granularity="tensor",
    cast_bytes=CastBytes(7.2, 10.0),  # 4.26, 4.31 and 1.97 ms
    frozen_cast_share=5.0 / 7.2,
)

RECIPES = {(each.stack, each.name): each for each in (*_TORCHAO, *_TRANSFORMER_ENGINE, _NANOCHAT)}
"""Every recipe, by its stack and its name. Frozen shares: without a weight gradient, input and gradient are
written once, as they lie: two reads of 2 bytes and a write of 1, one read less with delayed scales."""

UNKNOWN = Recipe(stack="", name="")

BY_TREATMENT = {each.treatment: each for each in RECIPES.values() if each.treatment}
"""Treatment -> the recipe that it changes to."""

FASTEST = ("recipe-tensorwise", "te-delayed")
"""Faster than other recipes of their stacks in all steps that the GPU set the pace of: tensorwise than
rowwise in 34 by 1.01x to 1.5x, delayed than current scaling in 12 by 1.01x to 1.16x. They decide."""


def stack_of(linear: Linear) -> Stack:
    return STACKS.get(linear.stack) or Stack(name=linear.stack)


def recipe_of(linear: Linear) -> Recipe:
    """Look up a layer's recipe, by its name alone in a layer without a stack; an empty one if not known."""
    found = RECIPES.get((linear.stack, linear.recipe or ""))
    return found or (UNKNOWN if linear.stack in STACKS else named(linear.recipe))


def low_precision(linears: Iterable[Linear]) -> str:
    """Name the format that these layers train in; FP8 if it is mixed, or not known."""
    training = (each for each in linears if each.get("use") == "training")
    recipes = (RECIPES.get((each.get("stack", ""), each.get("recipe") or ""), UNKNOWN) for each in training)
    found = {{"mx": "MXFP8", "nvfp4": "NVFP4"}.get(each.mark, "FP8") for each in recipes}
    return found.pop() if len(found) == 1 else "FP8"


@cache
def named(name: str | None) -> Recipe:
    """Look up a recipe by its name alone; those with measured casts come first."""
    alike = [each for each in RECIPES.values() if each.name == name]
    return next((each for each in alike if each.cast_bytes), alike[0] if alike else UNKNOWN)


def of_stack(stack: str) -> tuple[Recipe, ...]:
    return tuple(each for each in RECIPES.values() if each.stack == stack)


def by_class(stack: str) -> dict[str, str]:
    return {kind: each.name for each in of_stack(stack) for kind in each.classes}


def runs_on(recipe: Recipe, capability: VersionNumbers) -> bool:
    return capability >= recipe.first and (recipe.below is None or capability < recipe.below)


def default_recipe(stack: Stack, capability: VersionNumbers) -> str | None:
    return next((recipe for first, recipe in stack.defaults if capability >= first), None)


def default_of(stack: str) -> Recipe:
    return of_stack(stack)[0]
