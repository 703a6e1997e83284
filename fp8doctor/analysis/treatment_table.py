"""One record per treatment: its words, what carries it out on a copy, and what it does to a modelled job.

Only a user can carry out a treatment without a record."""

from collections.abc import Callable, Iterable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.layers import to_convert
from fp8doctor.cost.matmuls import padded_side
from fp8doctor.cost.step_cost import (
    in_bf16,
    in_fp8,
    with_adapters_in_bf16,
    with_each,
    with_linears_compiled,
    with_recipe,
    with_tokens,
)
from fp8doctor.facts import Facts, Linear
from fp8doctor.facts.arm_names import (
    ArmName,
    change_in_bf16,
    is_conversion,
    keeps_users_compilation,
    recipe_of,
)
from fp8doctor.finding import Treatment
from fp8doctor.recipes import BY_TREATMENT, RECIPES, TORCHAO, Recipe, named

KEEP_IN_BF16 = "keep-in-bf16"
PAD_VOCABULARY = "pad-vocabulary"
COMPILE_LAYERS = "compile-layers"
STAY_IN_BF16 = "stay-in-bf16"
BASE_FIRST = "convert-base-first"
MORE_TOKENS = "more-tokens"
CHECKPOINTING_OFF = "checkpointing-off"
OPTIMIZER_LAST = "optimizer-last"
COMPILE_BLOCKS = "compile-blocks"
COMPILE_MODEL = "compile-model"
TE_AUTOCAST = "te-autocast"
AUTOCAST_BF16 = "autocast-bf16"
LARGER_BATCH = "larger-batch"
ADAPTERS_TO_BF16 = "adapters-to-bf16"
ON_THIS_GPU = {"bf16": "bf16-on-this-gpu", "fp16": "fp16-on-this-gpu"}
"""Precision -> the treatment that trains in it because the GPU has no FP8."""

COMPILE_STORED = "compile-stored"

_RECIPE = "recipe-"


def changes_recipe(name: str) -> bool:
    return name.startswith(_RECIPE)


def recipe_after(name: str) -> str:
    """Return the torchao recipe that such a treatment changes to."""
    return name.removeprefix(_RECIPE).replace("-", "_")


Change = Callable[[Facts, Treatment], Facts]
"""What a treatment does to the facts of a job, as far as the cost model reads them."""


class TreatmentRecord(Struct, frozen=True):
    """All that is known of one treatment by its name."""

    name: str = ""
    words: str = ""  # name of the change for users; the treatment's own if empty
    runs: str = ""  # ``file.function`` of `fp8doctor.trial.treatments` that carries it out
    family: str = ""  # treatments of one family stand for each other: the later takes the earlier's place
    changes: str = "model"  # ``model`` if it changes the model alone, so a live model can be given it
    helps_bf16_too: bool = False  # BF16 without it is no fair measure of a step that has it
    compiles: bool = False  # it puts compiled regions into the step
    recipe: str | None = None  # the recipe that its FP8 layers have afterwards, if it changes it
    then: Change | None = None  # None if the cost model does not know what it changes
    other_layers: bool = False  # other layers run in FP8 then, or in other shapes, or all stay stored
    to_start: bool = False  # a job of FP8 ends before its first step without it: its backend is not usable
    for_fp8: bool = False  # FP8 pays by it, or it finds out why not: no part of a plan in BF16, if untimed
    for_memory: bool = False  # it frees memory and no time: shown next to the plan

    @property
    def is_an_arm_already(self) -> bool:
        """Whether a baseline carries it out, or a variant of a model without FP8."""
        return self.name == STAY_IN_BF16 or self.family == "convert"


def _compiling(name: str, words: str, runs: str = "forms.compile_it") -> TreatmentRecord:
    return TreatmentRecord(name, words, runs, "compilation", compiles=True, then=_compiled)


def _recipe_change(of: Recipe) -> TreatmentRecord:
    te = of.stack != TORCHAO.name
    runs, changes = ("fp8_recipes.another_te_recipe", "the autocast") if te else ("", "model")
    if of.operands:  # a setting of Float8Linear; other recipes are other layers
        runs = "fp8_recipes.another_recipe"

    return TreatmentRecord(
        of.treatment,
        of.words,
        runs,
        "recipe",
        changes,
        recipe=of.name,
        then=lambda facts, treatment: with_recipe(facts, of.name),
    )


def _conversion(of: Recipe) -> TreatmentRecord:
    return TreatmentRecord(
        f"convert-{of.name}",
        runs="fp8_recipes.convert",
        family="convert",
        recipe=of.name,
        then=lambda facts, treatment: in_fp8(facts, to_convert(facts), of.name),
    )


def _compiled(facts: Facts, treatment: Treatment) -> Facts:
    return with_linears_compiled(facts, yes=True)


def _kept_in_bf16(facts: Facts, treatment: Treatment) -> Facts:
    """Take these layers out of FP8, and LoRA's matrices, as all lines do that convert.

    A job that has no FP8 then is another one, with a fix of its own.
    """
    adapters = (each.name for each in facts.linears() if each.get("adapter") == "adapter")
    kept = in_bf16(facts, {*treatment.layers, *adapters})
    return kept if kept.network.fp8 else facts


def _padded(facts: Facts, treatment: Treatment) -> Facts:
    """Pad the sides of the heads, whose matmuls are then as fast as their size allows."""

    def padded(each: Linear) -> Linear:
        sides = {name: padded_side(getattr(each, name)) for name in ("in_features", "out_features")}
        return replace(each, **sides) if each.role == "head" else each

    return with_each(facts, padded)


BY_HAND = "convert-experts convert-the-rest experts-by-grouped-gemm one-precision pad-dimensions pad-tokens"
LIGHTER = "frozen-weights-in-fp8 mlp-checkpointed optimizer-in-8-bits"
COMPILE_AGAIN = "call-compiled-object default-backend enable-dynamo unset-torchdynamo-disable"

_of_fp8 = partial(TreatmentRecord, other_layers=True)
_of_both = partial(TreatmentRecord, helps_bf16_too=True)

_ALL = (
    TreatmentRecord(
        TE_AUTOCAST,
        "switched on",
        "fp8_recipes.te_autocast",
        changes="the autocast",
        then=lambda facts, treatment: with_each(facts, lambda each: replace(each, engaged=None)),
    ),
    TreatmentRecord("cache-off", "no KV cache", "forms.cache_off"),
    _of_both(AUTOCAST_BF16, "BF16 autocast", "forms.autocast_bf16", "precision", "the autocast"),
    _of_both(
        CHECKPOINTING_OFF,
        "no checkpointing",
        "forms.checkpointing_off",
        then=lambda facts, treatment: with_each(facts, lambda each: replace(each, checkpointed=None)),
    ),
    _of_fp8(KEEP_IN_BF16, "some layers in BF16", "forms.keep_in_bf16", "bf16", then=_kept_in_bf16),
    _of_both("fused-optimizer", "fused optimizer", "forms.fused_optimizer", "", "the optimizer"),
    _compiling(COMPILE_BLOCKS, "compiled"),
    _compiling(COMPILE_MODEL, "compiled whole"),
    _compiling(COMPILE_LAYERS, "layers compiled", "forms.compile_layers"),
    TreatmentRecord(STAY_IN_BF16, "", "forms.stay_in_bf16", "bf16"),
    TreatmentRecord(BASE_FIRST, then=_kept_in_bf16),
    _of_both(
        ADAPTERS_TO_BF16,
        "BF16 adapters",
        "forms.adapters_to_bf16",
        then=lambda facts, treatment: with_adapters_in_bf16(facts),
    ),
    _of_both("attention-sdpa", "fused attention", "forms.attention_sdpa"),
    _of_both(LARGER_BATCH, "larger batch", for_fp8=True),
    _of_both(PAD_VOCABULARY, then=_padded),
    TreatmentRecord(
        MORE_TOKENS, then=lambda facts, treatment: with_tokens(facts, treatment.tokens), for_fp8=True
    ),
    TreatmentRecord("look-at-the-trace", for_fp8=True),
    *(TreatmentRecord(each, for_memory=True) for each in LIGHTER.split()),
    _of_fp8("name-backend-and-precision", to_start=True),
    TreatmentRecord("install-fp8-backend", to_start=True),
    TreatmentRecord("spell-backend", to_start=True),
    *map(_of_fp8, (COMPILE_STORED, *ON_THIS_GPU.values(), *BY_HAND.split(), "plain-linears")),
    *(TreatmentRecord(each, then=_compiled) for each in COMPILE_AGAIN.split()),
    *map(_recipe_change, BY_TREATMENT.values()),
    *(_conversion(each) for each in RECIPES.values() if each.operands),  # rowwise in older reports
)

TREATMENTS = {each.name: each for each in _ALL if each.runs}
"""Every treatment that the trial can carry out, by its name.

Compiling counts as FP8's own: every BF16 variant is compiled if that is faster, without a cache then.
"""

FUSED = ("Adam", "AdamW", "SGD")
"""Classes of ``torch.optim`` with a fused form on CUDA. Source: docstrings of torch 2.6 to 2.13."""


def has_fused_form(optimizer: str) -> bool:
    module, _, name = optimizer.rpartition(".")
    return module.startswith("torch.optim") and name in FUSED


_BY_NAME = {each.name: each for each in _ALL}


def traits(name: str) -> TreatmentRecord:
    """Look up a treatment; most that only a user can carry out have only a name."""
    return _BY_NAME.get(name) or TreatmentRecord(name=name)


def after(facts: Facts, treatments: Iterable[Treatment]) -> Facts:
    """Change a job as these treatments do, as far as the cost model knows; the same object if none does."""
    for each in treatments:
        change = traits(each.name).then
        facts = change(facts, each) if change else facts
    return facts


def in_words(name: str) -> str:
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
}
"""Name of a variant -> what a user calls it; `variant` knows the others."""


def variant(name: str, fp8: bool, *, own: str = AS_YOU_RUN_IT, change: str = "", low: str = "FP8") -> str:
    """Name a variant of the step; ``fp8`` says whether the job as it is trains in FP8.

    ``own`` are words for the step as it is, ``change`` other words for the treatment,
    ``low`` names the job's precision.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    if name == ArmName.AS_IS:
        return f"{low} {own}" if fp8 else own
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
    return f"{low if fp8 else own}, {change or in_words(name)}"


def recipe_in_words(name: str) -> str:
    return named(name).words or name


def variant_in_a_sentence(name: str) -> str:
    """Name a variant while it is worked on, where nothing but its name is at hand."""
    return variant(name, fp8=False, own=f"the step {AS_YOU_RUN_IT}")
