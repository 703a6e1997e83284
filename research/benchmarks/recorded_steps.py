"""Trials recorded on an H200, and the same modelled from their facts as if nothing had been timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import OFF, modelled_speedup
from fp8doctor.analysis.significance import EVEN, Number
from fp8doctor.answer.verdict import invalidates
from fp8doctor.cost.step_cost import in_bf16, modelled_step, with_linears_compiled, with_recipe
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES
from tests.recordings import files, name_of, text_of

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
PATIENTS, JOBS = TESTS / "patients" / "recorded", TESTS / "benchmarks" / "recorded"
"""Trials of patients, and of the jobs of `trial_jobs.py`, which no constant comes from."""

CALIBRATED = (
    "decoder_468m",
    "decoder_468m_compiled",
    "llama_8b_float8",
    "llama_8b_lora_r32",
    "llama_8b_lora_r8",
    "lora_fp32",
    "te_checkpointed_inside",
    "vit_large",
)
"""Recorded patients of whose times some went into constants of `fp8doctor.cost`. The others are held out."""


@dataclass(frozen=True)
class Recorded:
    """One arm of a trial that was recorded on an H200, and the same modelled from the facts of that
    recording."""

    patient: str
    arm: str
    ms: float
    modelled_ms: float
    gemms: tuple[float, float] | None
    """Measured and modelled; None where the arm was not profiled."""
    between: tuple[float, float] | None
    """The same of casts, loss and what else is neither GEMM nor attention nor optimizer: compiled, casts are
    fused with it."""

    @property
    def error(self) -> float:
        return self.modelled_ms / self.ms - 1

    @property
    def use(self) -> str:
        return use(self.patient)


@dataclass(frozen=True)
class Told:
    """Best BF16 / FP8 as it is: what the trial measured, and what would have been told without it."""

    patient: str
    measured: float
    modelled: float | None
    """None where nothing would have been told."""
    may_be_off: float
    """Share that was said with it, the bound of its error."""
    reliable: bool
    """Whether the trial relied on its own times; one that did not holds nothing."""

    @property
    def use(self) -> str:
        return use(self.patient)

    @property
    def is_held(self) -> bool:
        return self.modelled is not None and self.reliable

    @property
    def error(self) -> float:
        return (self.modelled or 0.0) / self.measured - 1

    @property
    def sign(self) -> str:
        """Whether faster and slower were told apart: ``even`` beside one that is, ``untold`` where what was
        told is closer to 1 than it may be off."""
        if self.modelled is None:
            return ""
        if abs(self.measured - 1) < EVEN:
            return "even"
        if (self.measured > 1) == (self.modelled > 1):
            return "right"
        return "untold" if abs(self.modelled - 1) < self.may_be_off else "wrong"

    @property
    def is_missed(self) -> bool:
        return self.is_held and (abs(self.error) > self.may_be_off or self.sign == "wrong")


def use(patient: str) -> str:
    """What the patient is to the constants."""
    return "calibrated" if patient in CALIBRATED else "held out"


GEMMS = ("gemm_fp8", "gemm_16bit", "gemm_fp32")
BETWEEN = ("cast", "pointwise", "norm", "copy", "loss")
"""Families of `fp8doctor.facts.Breakdown`."""


def reports(folders: Sequence[Path]) -> Iterator[tuple[str, Facts, dict[str, Arm]]]:
    """Every timed model of the folders: its name, its facts, and the arms that were timed."""
    for path in (path for folder in folders for path in files(folder)):
        if "facts" not in json.loads(text_of(path)):
            continue
        facts = read_saved(path)[0]
        if recorded(facts, "trial.arms") and facts.trial.gpu and "H200" in facts.trial.gpu:
            yield (
                f"{'job ' if path.parent == JOBS else ''}{name_of(path).removeprefix('h200-')}",
                facts,
                {arm.name: arm for arm in facts.trial.arms if arm.tried and arm.step_ms},
            )


def recorded_arms(folders: Sequence[Path] = (PATIENTS, JOBS)) -> Iterator[Recorded]:
    """The arms that are variants of the whole model, where the model has a number for them."""
    for patient, facts, arms in reports(folders):
        for arm in arms.values():
            variant = as_facts(facts, arm)
            one = modelled_step(replace(variant, assumed_gpu="H200")) if variant else None
            if one is None or not arm.step_ms:
                continue
            parts = arm.breakdown.families_ms if recorded(arm, "breakdown") and arm.breakdown else None
            gemms, between = (
                (
                    sum(parts.get(each, 0.0) for each in names),
                    sum(one.families_ms.get(each, 0.0) for each in names),
                )
                if parts
                else None
                for names in (GEMMS, BETWEEN)
            )
            yield Recorded(patient, arm.name, arm.step_ms, one.step_ms, gemms, between)


def told(folders: Sequence[Path] = (PATIENTS, JOBS)) -> Iterator[Told]:
    """Every timed model with FP8, without what its trial found."""
    for patient, facts, arms in reports(folders):
        best = min((arms[name].step_ms or 0.0 for name in BF16_BASELINES if name in arms), default=None)
        if (
            best is None
            or "as_is" not in arms
            or all(linear.use != "training" for linear in facts.network.linears)
        ):
            continue
        untimed = without_trial(facts)
        says = modelled_speedup(untimed) if not any(map(invalidates, diagnose(untimed).findings)) else None
        yield Told(
            patient,
            best / (arms["as_is"].step_ms or 0.0),
            says.now.value if says and says.now else None,
            off(says.now) if says and says.now else OFF,
            facts.trial.reliable,
        )


def off(estimate: Number) -> float:
    """The margin of an estimate without a watched step."""
    return estimate.value / estimate.low - 1


def without_trial(facts: Facts) -> Facts:
    """Take out what was timed, but not the rows that the trial counted: without one a forward on fake tensors
    counts them."""
    rows = facts.trial.rows if recorded(facts, "trial.rows") else {}
    workload = facts.workload if recorded(facts, "workload.rows") else replace(facts.workload, rows=rows)
    return replace(facts, trial=NOT_RECORDED, workload=workload)


COMPILED_BY = {"compile-blocks", "compile-layers"}
"""Treatments after which every Linear but the head is compiled."""


def as_facts(facts: Facts, arm: Arm) -> Facts | None:
    """What the arm ran; None for arms whose change the facts cannot express."""
    if arm.name == "as_is":
        return facts
    if arm.name in ("bf16", "bf16_compiled"):
        return with_linears_compiled(in_bf16(facts), yes=arm.name == "bf16_compiled")
    recipes = {
        "recipe-tensorwise": "tensorwise",
        "recipe-rowwise": "rowwise",
        "recipe-rowwise-with-gw-hp": "rowwise_with_gw_hp",
    }
    treatments = set(arm.treatments)
    for base in facts.trial.arms:
        treatments |= set(base.treatments) if base.name == arm.base else set()
    if not treatments or not treatments <= {*recipes, *COMPILED_BY}:
        return None
    if treatments & COMPILED_BY:
        facts = with_linears_compiled(facts, yes=True)
    for name in treatments & recipes.keys():
        facts = with_recipe(facts, recipes[name])
    return facts
