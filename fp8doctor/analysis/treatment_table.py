"""One record per treatment: its words, traits, code and function; without torch.

`TREATMENTS` holds the treatments that the trial can carry out. Checks may name others, which only a user can
carry out: findings that name the same one share a step of the plan."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from fp8doctor.facts.arm_names import (
    ArmName,
    change_in_bf16,
    is_conversion,
    keeps_users_compilation,
    recipe_of,
)
from fp8doctor.recipes import BY_TREATMENT, RECIPES, TORCHAO, Recipe, named

CONVERT_BASE_FIRST = "convert-base-first"
KEEP_IN_BF16 = "keep-in-bf16"
COMPILE_LAYERS = "compile-layers"
STAY_IN_BF16 = "stay-in-bf16"
MORE_TOKENS = "more-tokens"
CHECKPOINTING_OFF = "checkpointing-off"
OPTIMIZER_LAST = "optimizer-last"
COMPILE_BLOCKS = "compile-blocks"
COMPILE_MODEL = "compile-model"
TE_AUTOCAST = "te-autocast"
AUTOCAST_BF16 = "autocast-bf16"
LARGER_BATCH = "larger-batch"
ON_THIS_GPU = {"bf16": "bf16-on-this-gpu", "fp16": "fp16-on-this-gpu"}
"""Precision -> the treatment that trains in it because the GPU has no FP8."""

OTHER_LAYERS = frozenset(
    {
        *ON_THIS_GPU.values(),
        KEEP_IN_BF16,
        "convert-before-compile",
        "convert-before-lora",
        "convert-before-parametrizing",
        "convert-experts",
        "convert-the-rest",
        "convert-with-torchao",
        "experts-by-grouped-gemm",
        "name-backend-and-precision",
        "one-precision",
        "own-filter",
        "own-projections",
        "pad-dimensions",
        "pad-token-groups",
        "pad-tokens",
    }
)
"""Treatments that change which layers run in FP8, or their shapes."""

TO_START = frozenset({"install-fp8-backend", "name-backend-and-precision", "spell-backend"})
"""Treatments without which a job of FP8 ends before its first step: its backend is not usable."""

FOR_FP8 = frozenset({MORE_TOKENS, LARGER_BATCH, "look-at-the-trace"})
"""Treatments that make FP8 pay, or find out why it does not: without a time no part of a plan in BF16."""

_RECIPE = "recipe-"


def changes_recipe(name: str) -> bool:
    """Return whether the treatment changes torchao's recipe."""
    return name.startswith(_RECIPE)


def recipe_after(name: str) -> str:
    """Return the torchao recipe that such a treatment changes to."""
    return name.removeprefix(_RECIPE).replace("-", "_")


class TreatmentRecord(Struct, frozen=True, kw_only=True):
    """All that is known of one treatment by its name.

    Functions are named, not imported, because nothing here may import torch; a test resolves every name. A
    function of a treatment that changes the recipe is also given the treatment's name.
    """

    name: str = ""
    words: str = ""
    """Name of the change for users; the treatment's own if empty."""
    family: str = ""
    """Treatments of one family stand for each other: the later one takes the place of the earlier."""
    compiles: bool = False
    """It puts compiled regions into the step."""
    recipe: str | None = None
    """The recipe that its FP8 layers have afterwards, if it changes it."""
    helps_bf16_too: bool = False
    """It is none of FP8's own: BF16 without it is no fair measure of a step that has it."""
    is_an_arm_already: bool = False
    """A baseline carries it out, or a variant of a model without FP8."""
    changes: str = "model"
    """``model`` if it changes the model alone, so a live model can be given it; else what it changes."""
    tokens_ratio: float = 1.0
    """Tokens of the step that it makes / tokens before."""
    runs: str = ""
    """``file.function`` of `fp8doctor.trial.treatments` that carries it out."""
    lines: str = ""
    """Function of `fp8doctor.diagnosis.treatments` that writes it as code; empty if only checks do."""
    tried_if: str = ""
    """Function of `fp8doctor.trial.explorations` that decides whether to try it without a finding."""
    saves: float = 0.1
    """Share of the step that it saved where it gained (H200, torch 2.11), for a step that cannot be modelled.
    Only the order counts."""


def _recipe_change(of: Recipe) -> TreatmentRecord:
    torchao = of.stack == TORCHAO.name
    return TreatmentRecord(
        name=of.treatment,
        words=of.words,
        family="recipe",
        recipe=of.name,
        changes="model" if torchao else "the autocast",
        runs="fp8_recipes.another_recipe" if torchao else "fp8_recipes.another_te_recipe",
        lines="recipe" if torchao else "te_recipe",
        tried_if="other_recipe" if torchao else "other_te_recipe",
    )


_ALL = (
    TreatmentRecord(
        name=TE_AUTOCAST,
        words="switched on",
        changes="the autocast",
        runs="fp8_recipes.te_autocast",
        lines="te_autocast",
        tried_if="te_is_idle",
        saves=0.5,
    ),
    TreatmentRecord(
        name="cache-off",
        words="no KV cache",
        runs="switches.cache_off",
        lines="no_cache",
        tried_if="caches",
        saves=0.5,
    ),
    TreatmentRecord(
        name=AUTOCAST_BF16,
        words="BF16 autocast",
        family="precision",
        helps_bf16_too=True,
        changes="the autocast",
        runs="bf16.autocast_bf16",
        lines="autocast_bf16",
        tried_if="in_fp32",
        saves=0.4,
    ),
    TreatmentRecord(
        name="bf16-parameters",
        words="BF16 weights",
        family="precision",
        helps_bf16_too=True,
        runs="bf16.bf16_parameters",
        lines="bf16_parameters",
        tried_if="in_fp32",
        saves=0.4,
    ),
    TreatmentRecord(
        name=CHECKPOINTING_OFF,
        words="no checkpointing",
        helps_bf16_too=True,
        runs="switches.checkpointing_off",
        lines="checkpointing_off",
        tried_if="checkpoints",
        saves=0.17,
    ),
    TreatmentRecord(
        name=KEEP_IN_BF16,
        words="some layers in BF16",
        family="bf16",
        runs="bf16.keep_in_bf16",
        lines="keep_losing_in_bf16",
        tried_if="some_lose",
    ),
    *map(_recipe_change, BY_TREATMENT.values()),
    TreatmentRecord(
        name="fused-optimizer",
        words="fused optimizer",
        helps_bf16_too=True,
        changes="the optimizer",
        runs="switches.fused_optimizer",
        lines="fused_optimizer",
        tried_if="optimizer_is_unfused",
        saves=0.02,
    ),
    TreatmentRecord(
        name=COMPILE_BLOCKS,
        words="compiled",
        family="compilation",
        compiles=True,
        runs="compilation.compile_it",
        lines="compile_blocks",
        tried_if="blocks_may_gain",
        saves=0.01,  # Transformer Engine gains 1.1x; elsewhere it saves compile time only
    ),
    TreatmentRecord(
        name=COMPILE_MODEL,
        words="compiled whole",
        family="compilation",
        compiles=True,
        runs="compilation.compile_it",
        lines="compile_model",
    ),
    TreatmentRecord(
        name=COMPILE_LAYERS,
        words="layers compiled",
        family="compilation",
        compiles=True,
        runs="compilation.compile_layers",
    ),
    *(
        TreatmentRecord(
            name=f"convert-{each.name}",
            family="convert",
            recipe=each.name,
            is_an_arm_already=True,
            runs="fp8_recipes.convert",
        )
        for each in RECIPES.values()
        if each.converts
    ),
    TreatmentRecord(
        name=STAY_IN_BF16,
        family="bf16",
        is_an_arm_already=True,
        runs="bf16.stay_in_bf16",
        lines="stay_in_bf16",
    ),
    TreatmentRecord(
        name="adapters-to-bf16",
        words="BF16 adapters",
        helps_bf16_too=True,
        runs="bf16.adapters_to_bf16",
    ),
    TreatmentRecord(
        name="attention-sdpa",
        words="fused attention",
        helps_bf16_too=True,
        runs="switches.attention_sdpa",
    ),
    TreatmentRecord(
        name="fused-attention-on",
        words="fused attention",
        helps_bf16_too=True,
        changes="settings of torch",
        runs="switches.fused_attention_on",
    ),
    TreatmentRecord(
        name=LARGER_BATCH,
        words="larger batch",
        helps_bf16_too=True,
        changes="the batch",
        tokens_ratio=2.0,
        runs="switches.larger_batch",
    ),
)

TREATMENTS = {each.name: each for each in _ALL}
"""Every treatment that the trial can carry out, by its name; those tried unasked in the order of preference.

Compiling counts as FP8's own: every BF16 variant is compiled if that is faster, without a cache then.
"""

FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Classes of ``torch.optim`` that take ``fused``, on CPU and CUDA alike. Source: torch 2.6 to 2.13."""


def traits(name: str) -> TreatmentRecord:
    """Look up a treatment; one that only a user can carry out has only its name."""
    return TREATMENTS.get(name) or TreatmentRecord(name=name)


def in_words(name: str) -> str:
    """Name the change as a user calls it."""
    return traits(name).words or name.replace("-", " ")


def family(name: str) -> str:
    """Look up the family of a treatment; its own name if it stands alone."""
    return traits(name).family or name


def that_help_bf16_too(names: Iterable[str]) -> frozenset[str]:
    """Keep those of these treatments that are none of FP8's own."""
    return frozenset(name for name in names if traits(name).helps_bf16_too)


AS_YOU_RUN_IT, AS_COPIED = "as you run it", "as is (copy)"
"""Words for the step as it is: of a job that the trial ran itself, and of a watched script's copy."""

VARIANTS: dict[str, str] = {
    ArmName.BF16: "BF16",
    ArmName.BF16_COMPILED: "BF16 compiled",
    ArmName.BF16_AS_COMPILED: "BF16, your torch.compile",
    ArmName.BF16_WHOLE: "BF16 compiled whole",
    ArmName.BF16_WITHOUT_CHECKPOINTING: "BF16, no checkpointing",
    ArmName.BF16_PRESCRIBED: "BF16 with the same fixes",
    ArmName.SELF_CHECK: "the same step again",
    ArmName.WITHOUT_ADAPTERS: "FP8 without adapters",
    "as_is_compiled": "FP8 compiled",
}
"""Name of a variant -> what a user calls it; `variant` knows the others."""


def variant(name: str, fp8: bool, *, own: str = AS_YOU_RUN_IT, change: str = "") -> str:
    """Name a variant of the step; ``fp8`` says whether the job as it is trains in FP8.

    ``own`` are words for the step as it is, ``change`` other words for the treatment.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    if name == ArmName.AS_IS:
        return f"FP8 {own}" if fp8 else own
    if name == ArmName.PRESCRIBED:
        return "FP8 with all fixes"
    if found := change_in_bf16(name):
        return f"BF16, {in_words(found)}"
    if is_conversion(name):
        way = ", your torch.compile" if keeps_users_compilation(name) else " compiled"
        return f"FP8 {recipe_in_words(recipe_of(name))}{way}"
    if changes_recipe(name):
        words = recipe_in_words(recipe_after(name))
        return words if "FP8" in words else f"FP8 {words}"
    if name in BY_TREATMENT:
        return f"FP8, {BY_TREATMENT[name].words}"
    return f"{'FP8' if fp8 else own}, {change or in_words(name)}"


def recipe_in_words(name: str) -> str:
    """Name a recipe as a user calls it."""
    return named(name).words or name


def variant_in_a_sentence(name: str) -> str:
    """Name a variant while it is worked on, where nothing but its name is at hand."""
    return variant(name, fp8=False, own=f"the step {AS_YOU_RUN_IT}")
