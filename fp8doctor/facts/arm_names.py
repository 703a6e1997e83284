"""Names of variants, and the reasons why a variant or trial has no number."""

from enum import StrEnum


class ArmName(StrEnum):
    """Variants that several packages know by name; others are called after their treatment or recipe."""

    AS_IS = "as_is"
    BF16 = "bf16"
    BF16_COMPILED = "bf16_compiled"
    """Block by block, or whole if there are no blocks, with the compiler's own settings."""
    BF16_AS_COMPILED = "bf16_as_compiled"
    """As the user compiles the job, if that is another form than `BF16_COMPILED`."""
    BF16_WHOLE = "bf16_whole"
    """As one graph, if that is another form than both."""
    PRESCRIBED = "prescribed"
    """Everything together that findings proposed."""
    SELF_CHECK = "bf16_again"
    """A replica of another variant, to check the timing against: of eager BF16, else of the step as it is."""
    WITHOUT_ADAPTERS = "without_adapters"
    """In older reports: a measurement of the adapters' share."""
    BF16_WITHOUT_CHECKPOINTING = "bf16_without_checkpointing"
    BF16_CUDA_GRAPHS = "bf16_cuda_graphs"
    """In older reports: block by block, with the kernels of every block recorded."""
    BF16_PRESCRIBED = "bf16_prescribed"
    """BF16 with the changes of the prescription that help it too."""


COMPILED_BF16 = (ArmName.BF16_COMPILED, ArmName.BF16_AS_COMPILED, ArmName.BF16_WHOLE)
BF16_BASELINES = (ArmName.BF16, *COMPILED_BF16)
"""The forms of BF16 that the user could write; the fastest of them is the best BF16."""

BASELINES = (ArmName.AS_IS, *BF16_BASELINES)

_BF16_WITH = "bf16_with_"
_CONVERSION = "float8_"
_AS_COMPILED = "_as_compiled"
NO_CHECKPOINTING = "_without_checkpointing"
_WITHDRAWN = ("_first", "cuda-graphs", "cuda_graphs")


def bf16_with(treatment: str) -> str:
    """Name BF16 with a change that no finding proposed, and with the proposed ones that help it too."""
    return _BF16_WITH + treatment


def change_in_bf16(name: str) -> str:
    """Return the change after which `bf16_with` names a variant; empty for any other."""
    return name.removeprefix(_BF16_WITH) if name.startswith(_BF16_WITH) else ""


def is_in_bf16(name: str) -> bool:
    """Return whether the variant has no FP8; treatments that are called after BF16 change a step in FP8."""
    others = (ArmName.BF16_WITHOUT_CHECKPOINTING, ArmName.BF16_CUDA_GRAPHS, ArmName.BF16_PRESCRIBED)
    return name in (*BF16_BASELINES, ArmName.SELF_CHECK, *others) or name.startswith(_BF16_WITH)


def conversion_to(recipe: str, *, as_compiled: bool = False) -> str:
    """Name the variant that converts a model without FP8, compiled as it is or not."""
    return _CONVERSION + recipe + (_AS_COMPILED if as_compiled else "")


def is_conversion(name: str) -> bool:
    """Return whether the variant converts a model without FP8."""
    return name.startswith(_CONVERSION)


def recipe_of(conversion: str) -> str:
    return conversion.removeprefix(_CONVERSION).removesuffix(NO_CHECKPOINTING).removesuffix(_AS_COMPILED)


def keeps_users_compilation(name: str) -> bool:
    """Return whether the variant keeps the user's own compile marks."""
    return name.endswith(_AS_COMPILED)


def is_withdrawn(*names: str) -> bool:
    """Return whether only older reports have one of these: a variant that was replaced, or CUDA graphs."""
    return any(name == ArmName.WITHOUT_ADAPTERS or name.endswith(_WITHDRAWN) for name in names)


class Reason(StrEnum):
    """Why a variant, or the trial, has no number. Its sentence is for people."""

    NO_BATCH = "no_batch"
    NOT_REPLICABLE = "not_replicable"
    STEP_RAISES = "step_raises"
    """The job's own training step raises."""
    RECOMPUTE_DIFFERS = "recompute_differs"
    """The job's own training step raises CheckpointError."""
    TIMING_RAISES = "timing_raises"
    """A variant that had run before raises while all are timed."""
    OUT_OF_MEMORY = "out_of_memory"
    DOES_NOT_FIT = "does_not_fit"
    """It takes more memory than the GPU has: as predicted, or seen next to one other variant alone."""
    TOOK_PROCESS_DOWN = "took_process_down"
    """It ended the process or the GPU's context, or hung."""
    NO_TIME_LEFT = "no_time_left"
    NOT_EXPECTED_TO_FIT = "not_expected_to_fit"
    """The budget was not used up, and what the variant was expected to take was more than its rest."""
    NOT_APPLICABLE = "not_applicable"
    """The treatment does not apply to this model, or cannot be carried out here."""
    RAISES = "raises"
    """Building, warming up or proving the variant raises."""
    NO_FP8_GEMM = "no_fp8_gemm"
    FP8_UNSEEN = "fp8_unseen"
    """Nothing here shows FP8 matmuls of this stack."""
    FP8_IN_BF16 = "fp8_in_bf16"
    NOTHING_COMPILED = "nothing_compiled"
    STILL_COMPILING = "still_compiling"


OWN_STEP_FAILED = (Reason.STEP_RAISES, Reason.RECOMPUTE_DIFFERS)
"""Reasons of a trial whose model could be copied and whose own step raises."""

LEFT_OUT_FOR_TIME = (Reason.NO_TIME_LEFT, Reason.NOT_EXPECTED_TO_FIT)
