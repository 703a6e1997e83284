"""ENV001 on real TrainingArguments and Accelerators: who made FP8 into something else."""

from __future__ import annotations

import re
from importlib import metadata

import msgspec
import pytest

from fp8doctor.analysis.by_accelerate import ALL_GATHER, ORDINARY
from fp8doctor.analysis.fp8_request import asked_by_environment, fp8_was_asked_for
from fp8doctor.checks.environment.fp8_request_overridden import FIRES
from fp8doctor.code_snippets import settings
from fp8doctor.facts import (
    NOT_RECORDED,
    Accelerate,
    Environment,
    Facts,
    Gpu,
    Linear,
    Network,
    Package,
    TrainerArguments,
)
from tests.checks.environment.live import facts_of, finding_of, launched, outcome_of

ARGUMENTS = """
from transformers import TrainingArguments
trainer = TrainingArguments(output_dir="out", use_cpu=True, report_to=[]{})
"""
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}


def changed(facts: Facts, **of_training: object) -> Facts:
    return msgspec.structs.replace(facts, training=msgspec.structs.replace(facts.training, **of_training))


def with_versions(facts: Facts, **versions: Package) -> Facts:
    return msgspec.structs.replace(
        facts,
        software=msgspec.structs.replace(facts.software, packages={**facts.software.packages, **versions}),
    )


def test_bf16_of_training_arguments_beats_the_variable() -> None:
    finding = finding_of("ENV001", facts_of(ARGUMENTS.format(", bf16=True"), **FP8))
    assert finding is not None
    assert (
        finding.title
        == "FP8 was asked for (ACCELERATE_MIXED_PRECISION=fp8), but TrainingArguments(bf16=True) made it bf16"
    )
    assert finding.severity == "error"
    assert finding.evidence == {
        "asked_by": "ACCELERATE_MIXED_PRECISION=fp8",
        "precision": "bf16",
        "overridden_by": "TrainingArguments(bf16=True)",
        "accelerate": metadata.version("accelerate"),
        "transformers": metadata.version("transformers"),
    }
    assert finding.treatment is not None
    assert finding.treatment.code.splitlines()[-1] == "args = TrainingArguments(..., bf16=False, fp16=False)"


def test_the_treatment_makes_it_silent() -> None:
    assert (
        outcome_of("ENV001", facts_of(ARGUMENTS.format(", bf16=False, fp16=False"), **FP8)).outcome
        == "healthy"
    )


def test_a_variable_set_after_training_arguments_comes_too_late() -> None:
    late = ARGUMENTS.format("") + 'os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"\n'
    finding = finding_of("ENV001", facts_of(late))
    assert finding is not None
    assert "TrainingArguments, created before the variable was set, made it no" in finding.title
    assert finding.treatment is not None
    assert re.search(
        r'(?s)environ\["ACCELERATE_MIXED_PRECISION"\] = "fp8".*TrainingArguments', finding.treatment.code
    )


def test_an_accelerators_argument_beats_the_variable() -> None:
    finding = finding_of(
        "ENV001",
        facts_of(
            'from accelerate import Accelerator\nAccelerator(mixed_precision="bf16", cpu=True)\n', **FP8
        ),
    )
    assert finding is not None
    assert (
        finding.title == "FP8 was asked for (ACCELERATE_MIXED_PRECISION=fp8), but Accelerator() made it bf16"
    )
    assert finding.treatment is not None
    assert f"AORecipeKwargs(config={ORDINARY})" in finding.treatment.code


def test_an_accelerator_that_reads_the_variable_is_healthy() -> None:
    assert (
        outcome_of(
            "ENV001", facts_of("from accelerate import Accelerator\nAccelerator(cpu=True)\n", **FP8)
        ).outcome
        == "healthy"
    )


def test_capitals_are_another_word_for_accelerate() -> None:
    facts = facts_of(
        "from accelerate import Accelerator\nAccelerator(cpu=True)\n", ACCELERATE_MIXED_PRECISION="FP8"
    )
    finding = finding_of("ENV001", facts)
    assert finding is not None
    assert "the spelling" in finding.title
    assert finding.treatment is not None
    assert settings(finding.treatment.code) == {"ACCELERATE_MIXED_PRECISION": "fp8", ALL_GATHER: "false"}


def test_without_an_accelerator_nothing_is_decided_yet() -> None:
    outcome = outcome_of("ENV001", facts_of("", **FP8))
    assert (outcome.outcome, outcome.reason) == (
        "not_applicable",
        "no Accelerator or TrainingArguments has set the precision",
    )


def test_nobody_asked() -> None:
    assert outcome_of("ENV001", facts_of(ARGUMENTS.format(", bf16=True"))).outcome == "not_applicable"


def test_the_launcher_is_recognized_although_the_variable_was_rewritten() -> None:
    """transformers up to 4.57 writes bf16 into the variable; what the launcher wrote beside it stays."""
    variables = {**launched("--mixed_precision", "fp8"), "ACCELERATE_MIXED_PRECISION": "bf16"}
    facts = changed(
        msgspec.structs.replace(FIRES, environment=Environment(variables=variables)),
        trainer=TrainerArguments(
            kind="transformers.training_args.TrainingArguments", bf16=True, fp16=False, mixed_precision=None
        ),
    )
    finding = finding_of(
        "ENV001", with_versions(facts, transformers=Package(version="4.57.3", imported=True))
    )
    assert finding is not None
    assert finding.title.startswith("FP8 was asked for (accelerate launch --mixed_precision fp8)")
    assert "In transformers 4.57.3" in finding.explanation
    assert "also rewrote ACCELERATE_MIXED_PRECISION" in finding.explanation


@pytest.mark.parametrize(
    "arguments", [("--mixed_precision", "bf16"), ("--mixed_precision", "bf16", "--fp8_backend", "te"), ()]
)
def test_a_launch_without_fp8_asks_for_none(arguments: tuple[str, ...]) -> None:
    assert asked_by_environment(launched(*arguments)) is None


def test_a_launch_with_fp8_asks_for_it() -> None:
    variables = launched("--mixed_precision", "fp8")
    assert asked_by_environment(variables) == "ACCELERATE_MIXED_PRECISION=fp8"
    del variables["ACCELERATE_MIXED_PRECISION"]
    assert asked_by_environment(variables) == "accelerate launch --mixed_precision fp8"
    assert (
        fp8_was_asked_for(Facts(environment=Environment(variables=variables)))
        == "accelerate launch --mixed_precision fp8"
    )


def test_one_recipe_variable_set_by_hand_is_no_launcher() -> None:
    assert asked_by_environment({"ACCELERATE_FP8_FORMAT": "E4M3"}) is None


def test_trl_is_named() -> None:
    config = TrainerArguments(
        kind="trl.trainer.sft_config.SFTConfig", bf16=True, fp16=False, mixed_precision="bf16"
    )
    finding = finding_of(
        "ENV001", with_versions(changed(FIRES, trainer=config), trl=Package(version="1.16.0", imported=True))
    )
    assert finding is not None
    assert "SFTConfig(bf16=True)" in finding.title
    assert "TRL's configs, such as SFTConfig, turn bf16 on" in finding.explanation
    assert finding.evidence["trl"] == "1.16.0"


def test_unsloth_is_named() -> None:
    finding = finding_of("ENV001", with_versions(FIRES, unsloth=Package(version="2026.10.9", imported=True)))
    assert finding is not None
    assert "Unsloth 2026.10.9 made it bf16" in finding.title
    assert finding.treatment is not None
    assert "float8_training" in finding.treatment.code


@pytest.mark.parametrize(
    ("backend", "severity", "said"),
    [
        ("TE", "warning", "still converts the model to Transformer Engine"),
        ("AO", "error", "prepare() will fail"),
    ],
)
def test_a_named_backend_changes_what_happens(backend: str, severity: str, said: str) -> None:
    variables = {**FIRES.environment.variables, "ACCELERATE_FP8_BACKEND": backend}
    finding = finding_of(
        "ENV001", msgspec.structs.replace(FIRES, environment=Environment(variables=variables))
    )
    assert finding is not None
    assert finding.severity == severity
    assert said in finding.explanation


def test_fp8_layers_that_are_there_prove_that_the_request_was_not_lost() -> None:
    facts = msgspec.structs.replace(FIRES, network=Network(linears=(Linear(name="up", use="training"),)))
    assert outcome_of("ENV001", facts).outcome == "not_applicable"


def test_accelerates_own_fallback_is_not_an_override() -> None:
    old = msgspec.structs.replace(FIRES, gpus=(Gpu(name="NVIDIA A100-SXM4-80GB", compute_capability="8.0"),))
    fallen = changed(old, trainer=None, accelerate=Accelerate(mixed_precision="fp16", distributed="NO"))
    assert outcome_of("ENV001", fallen).outcome == "not_applicable"
    assert outcome_of("ENV001", msgspec.structs.replace(fallen, gpus=())).outcome == "sick"


def test_under_deepspeed_the_state_says_no_for_everything_but_fp8() -> None:
    finding = finding_of(
        "ENV001", changed(FIRES, accelerate=Accelerate(mixed_precision="no", distributed="DEEPSPEED"))
    )
    assert finding is not None
    assert finding.evidence["precision"] == "bf16"
    assert (
        outcome_of(
            "ENV001", changed(FIRES, accelerate=Accelerate(mixed_precision="fp8", distributed="DEEPSPEED"))
        ).outcome
        == "healthy"
    )


def test_without_training_facts_it_is_unknown() -> None:
    assert outcome_of("ENV001", msgspec.structs.replace(FIRES, training=NOT_RECORDED)).outcome == "unknown"
