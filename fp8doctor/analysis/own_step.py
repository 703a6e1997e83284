"""What was seen of the job's own step: whether it ran, in FP8, and with finite numbers."""

from typing import NamedTuple

from fp8doctor.analysis.layers import stores_fp8
from fp8doctor.analysis.significance import interval
from fp8doctor.analysis.treatment_table import AS_COPIED, AS_YOU_RUN_IT
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, Reason
from fp8doctor.facts.no_number import why_of
from fp8doctor.recipes import stack_of


def as_is(facts: Facts) -> Arm | None:
    """Find the step as it is in the trial, timed or not."""
    return next((arm for arm in facts.arms() if arm.get("name") == ArmName.AS_IS), None)


def watched(facts: Facts) -> Arm | None:
    """Write a script's watched steps, of any clock, as the variant ``as_is``; None if none was seen."""
    seen = facts.get("observed")
    if seen is None or not seen.get("steps_ms"):
        return None
    found = interval(seen.steps_ms)
    return Arm(
        name=ArmName.AS_IS,
        tried=True,
        step_ms=found.value,
        low_ms=found.low,
        high_ms=found.high,
        rounds_ms=seen.steps_ms,
        graphs_run=seen.get("graphs_run", NOT_RECORDED),
        fp8_gemms=seen.get("fp8_gemms", NOT_RECORDED),
        peak_gib=seen.get("peak_gib", NOT_RECORDED),
        breakdown=seen.get("breakdown", NOT_RECORDED),
    )


def ran_on_a_gpu(facts: Facts) -> bool:
    """Return whether the step as it is ran on a GPU, so does not raise."""
    if facts.get("observed.clock") == "cuda" and facts.observed.steps_ms:
        return True
    arm = as_is(facts)
    return bool(arm and arm.get("step_ms") is not None and facts.get("trial.device", "cpu") != "cpu")


def compiles_any(facts: Facts) -> bool:
    """Return whether the user compiles any Linear, not only a library some functions of its own."""
    return any(each.get("compiled") is not None for each in facts.linears())


def own_words(facts: Facts) -> str:
    """Choose words for the step as it is: timed copies of a watched script's step are not how it runs."""
    copied = facts.get("observed.steps_ms") and any(each.tried for each in facts.arms())
    return AS_COPIED if copied else AS_YOU_RUN_IT


def watched_job(facts: Facts) -> str:
    """Name the watched job: a script, or a training that a callback watched."""
    return "the training" if facts.get("target.kind") == "live" else "the script"


def ran_in_fp8(facts: Facts) -> bool | None:
    """Return whether a step, watched or timed, ran any FP8 matmul; None if no step shows it.

    Emulated FP8 has none. A layer that notes itself that it ran in FP8 may have kernels of unknown names.
    """
    counted, timed = facts.get("observed.fp8_gemms"), as_is(facts)
    fp8 = [each for each in facts.network.fp8 if not each.get("features", {}).get("emulate")]
    if counted == 0 and fp8 and not any(each.get("engaged") for each in fp8):
        return False
    if timed and why_of(timed) is Reason.NO_FP8_GEMM:
        return False
    return True if counted or (timed and timed.tried and timed.get("fp8_gemms")) else None


def outside_autocast(facts: Facts) -> bool:
    """Return whether no FP8 autocast is open and all FP8 layers, Transformer Engine's, need one.

    Raises `Unrecorded` if the step could not be read.
    """
    own = all(stack_of(each).under_autocast and each.engaged is None for each in facts.network.fp8)
    return own and facts.training.fp8_autocast is False


class FiniteSteps(NamedTuple):
    """What of the job's own step, watched or timed, was not finite, and whether BF16 is; None if unknown."""

    now: tuple[str, ...] | None
    """``loss``, ``gradients``; empty if finite."""
    bf16: bool | None
    """With the same weights and batch, in every form: the job's own step if the model holds no FP8."""


def finite_steps(facts: Facts) -> FiniteSteps:
    now: tuple[str, ...] | None = None
    if found := facts.get("not_finite"):
        now = (found.what,)
    elif losses := facts.get("observed.losses"):
        now = ("loss",) if None in losses else ()
    for each in _not_finite(facts, ArmName.AS_IS):
        now = tuple(dict.fromkeys((*(now or ()), *each)))
    bf16 = [not each for each in _not_finite(facts, *BF16_BASELINES)]
    if now is not None and recorded(facts, "network.linears"):
        network = facts.network
        fp8 = any(each.use in ("training", "unknown") or stores_fp8(each) for each in network.linears)
        if not (fp8 or network.get("float8_parameters") or network.get("fp8_calls")):
            bf16.append(not now)
    return FiniteSteps(now, all(bf16) if bf16 else None)


def _not_finite(facts: Facts, *names: str) -> list[tuple[str, ...]]:
    """List what was not finite in the variants of these names that the trial looked at."""
    found = (each.get("non_finite") for each in facts.arms() if each.name in names and each.tried)
    return [each for each in found if each is not None]
