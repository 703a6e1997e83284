"""What is known of a treatment by its name, for whoever ranks, times or compares; without torch.

`TREATMENTS` holds those that `fp8doctor.trial.treatments` carries out, `BY_HAND` those that only a user can.
The lines of a treatment stand in the check that names it, or in `fp8doctor.diagnosis.treatments`.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from fp8doctor.analysis.recipe_support import TE_RECIPES

CONVERT_BASE_FIRST = "convert-base-first"
KEEP_IN_BF16 = "keep-in-bf16"
COMPILE_LAYERS = "compile-layers"
STAY_IN_BF16 = "stay-in-bf16"
MORE_TOKENS = "more-tokens"
QUIET_HOST = "quiet-host"
CHECKPOINTING_OFF = "checkpointing-off"
COMPILE_BLOCKS = "compile-blocks"
COMPILE_MODEL = "compile-model"
CUDA_GRAPHS = "cuda-graphs"
TE_AUTOCAST = "te-autocast"
AUTOCAST_BF16 = "autocast-bf16"
LARGER_BATCH = "larger-batch"
ON_THIS_GPU = {"bf16": "bf16-on-this-gpu", "fp16": "fp16-on-this-gpu"}
"""Precision -> the treatment that trains in it because the GPU has no FP8."""

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""As ``Float8LinearConfig.from_recipe_name`` of torchao calls them."""

_RECIPE = "recipe-"


def recipe_change(recipe: str) -> str:
    """The name of the treatment that changes torchao's recipe to this one."""
    return _RECIPE + recipe.replace("_", "-")


def changes_recipe(name: str) -> bool:
    """Whether the treatment changes torchao's recipe."""
    return name.startswith(_RECIPE)


def recipe_after(name: str) -> str:
    """The recipe of torchao that such a treatment changes to."""
    return name.removeprefix(_RECIPE).replace("-", "_")


class Traits(Struct, frozen=True):
    """What one treatment does to a step, beside what its name says."""

    family: str = ""
    """Treatments of one family stand for each other: the later one takes the place of the earlier."""
    compiles: bool = False
    """It puts compiled regions into the step."""
    recipe: str | None = None
    """The recipe that its FP8 layers have afterwards, where it changes it."""
    helps_bf16_too: bool = False
    """It is none of FP8's own: BF16 without it is no fair measure of a step that has it."""
    is_an_arm_already: bool = False
    """A baseline carries it out, or an arm of a model without FP8."""


TREATMENTS = {
    COMPILE_BLOCKS: Traits("compilation", compiles=True),
    COMPILE_MODEL: Traits("compilation", compiles=True),
    COMPILE_LAYERS: Traits("compilation", compiles=True),
    CUDA_GRAPHS: Traits("compilation", compiles=True, helps_bf16_too=True),
    **{recipe_change(recipe): Traits("recipe", recipe=recipe) for recipe in TORCHAO_RECIPES},
    "convert-tensorwise": Traits("convert", recipe="tensorwise", is_an_arm_already=True),
    "convert-rowwise": Traits("convert", recipe="rowwise", is_an_arm_already=True),
    KEEP_IN_BF16: Traits("bf16"),
    STAY_IN_BF16: Traits("bf16", is_an_arm_already=True),
    TE_AUTOCAST: Traits(),
    **{name: Traits("recipe", recipe=each.recipe) for name, each in TE_RECIPES.items()},
    "cache-off": Traits(),
    AUTOCAST_BF16: Traits("precision", helps_bf16_too=True),
    "bf16-parameters": Traits("precision", helps_bf16_too=True),
    CHECKPOINTING_OFF: Traits(helps_bf16_too=True),
    "adapters-to-bf16": Traits(helps_bf16_too=True),
    "fused-optimizer": Traits(helps_bf16_too=True),
    "attention-sdpa": Traits(helps_bf16_too=True),
    "fused-attention-on": Traits(helps_bf16_too=True),
    LARGER_BATCH: Traits(helps_bf16_too=True),
}
"""Compiling counts as FP8's own: every BF16 arm is compiled where that is faster, without a cache then."""

BY_HAND = frozenset(
    (
        "allow-in-graph",
        "assume-gpu",
        "bf16-on-this-gpu",
        "biases-in-float8",
        "call-converted-layers",
        "call-fused-attention",
        "call-compiled-object",
        "cheaper-adapters",
        "compile-baseline",
        "contiguous-position-bias",
        "conv1d-to-linear",
        "convert",
        CONVERT_BASE_FIRST,
        "convert-before-compile",
        "convert-before-lora",
        "convert-before-parametrizing",
        "convert-experts",
        "convert-first",
        "convert-the-rest",
        "convert-with-torchao",
        "copy-beside-the-work",
        "default-backend",
        "default-stance",
        "enable-dynamo",
        "even-ranks",
        "expandable-segments",
        "experts-by-grouped-gemm",
        "float8-all-gather",
        "fp16-on-this-gpu",
        "fp8-weights",
        "free-the-gpu",
        "freeze-again",
        "hide-communication",
        "install-cuda-torch",
        "install-cutedsl",
        "install-fp8-backend",
        "keep-subclasses",
        "keep-values-on-gpu",
        "less-memory",
        "let-fp8-through",
        "log-outside-graph",
        "look-after-prepare",
        "look-at-the-trace",
        MORE_TOKENS,
        "name-backend-and-precision",
        "no-float8-all-gather",
        "one-precision",
        "optimizer-last",
        "own-amax",
        "own-backward",
        "own-filter",
        "own-projections",
        "pad-dimensions",
        "pad-to-few-lengths",
        "pad-token-groups",
        "pad-tokens",
        "pad-vocabulary",
        "precompute-scales",
        "prepare-data-ahead",
        "product-in-bf16",
        QUIET_HOST,
        "raise-recompile-limit",
        "real-fp8-kernel",
        "real-mx-kernel",
        "recipe-that-fits",
        "safe-recipe",
        "save-unwrapped",
        "say-why-not-fused",
        "select-without-branch",
        "selective-checkpointing",
        "show-compile-errors",
        "show-graph-breaks",
        "size-as-named",
        "smaller-optimizer-state",
        "spell-backend",
        "switches-off",
        "te-checkpoint",
        "tie-again",
        "traceable-te",
        "train-in-fp8",
        "unset-torch-compile-disable",
        "unset-torchdynamo-disable",
        "use-compiled-object",
        "use-settings-that-are-read",
    )
)
"""Treatments that nothing carries out. Findings that name the same one share a step of the plan."""

UPGRADE = "upgrade-"
"""How treatments by hand begin that name the packages to upgrade."""


FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Classes of ``torch.optim`` that take ``fused``, on CPU and CUDA alike. Source: torch 2.6 to 2.13."""


def traits(name: str) -> Traits:
    """Look up the traits of a treatment; none where nothing is known of it."""
    return TREATMENTS.get(name, Traits())


def family(name: str) -> str:
    """Look up the family of a treatment; its own name where it stands alone."""
    return traits(name).family or name


def that_help_bf16_too(names: Iterable[str]) -> frozenset[str]:
    """Keep those of these treatments that are none of FP8's own."""
    return frozenset(name for name in names if traits(name).helps_bf16_too)


def is_known(name: str) -> bool:
    """Whether a check may name this treatment."""
    return name in TREATMENTS or name in BY_HAND or name.startswith(UPGRADE)
