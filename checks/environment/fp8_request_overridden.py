"""Something turned your FP8 request back into BF16

What it finds. You asked for FP8, and an argument, a trainer or a late variable made the run BF16.

Why it matters. Several settings decide the precision, and the last one wins without a warning.
`TrainingArguments(bf16=True)` beats the environment: transformers up to 4.57 rewrites the variable; from 5.0
on the variable stays fp8 and the run is BF16. TRL's configs set bf16=True by default. Unsloth's trainers
overwrite the variable. From transformers 5.0 on, a variable set after TrainingArguments comes too late. Every
matmul then runs in BF16 and the step gets no faster, while the launch command says fp8.

Fix. Set the precision in one place, and leave all other flags off.

    args = SFTConfig(output_dir="out")                          # before: TRL turns bf16 on

    from trl import SFTConfig
    args = SFTConfig(output_dir="out", bf16=False, fp16=False)  # after: the launcher's fp8 stands

When to ignore it. If you want BF16 in this run. Then unset the FP8 variable, so nobody is misled.

How it is detected, and limits. fp8doctor compares ACCELERATE_MIXED_PRECISION, and the variables that only
`accelerate launch --mixed_precision fp8` sets, with the precision of Accelerate and of TrainingArguments. It
is silent if the model holds FP8 layers anyway, and if neither an Accelerator nor TrainingArguments exist yet.

References. transformers 4.57.3, 5.0.0, 5.23.0, trl 0.19.0, 1.16.0, unsloth 2026.10.9.
https://github.com/huggingface/transformers/issues/25333 https://github.com/huggingface/trl/issues/3860
https://github.com/hiyouga/LlamaFactory/issues/9500
"""

from __future__ import annotations

from fp8doctor.analysis.by_accelerate import exported, settings
from fp8doctor.analysis.fp8_request import asked_by_environment, precision_of
from fp8doctor.analysis.recipe_support import capability
from fp8doctor.diagnosis.treatments import switched_on
from fp8doctor.facts import Accelerate, Facts, Gpu, Software, TrainerArguments, Value
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import FIRST_WITH_FP8
from fp8doctor.registry import check

LATE_SINCE = 5
"""Major version of transformers from which TrainingArguments reads the variable once, when it is made."""

CONVERTED_ANYWAY = {
    "TE": " Because ACCELERATE_FP8_BACKEND=TE is set too, prepare() still converts the model to Transformer "
    "Engine; only the flags say otherwise.",
    "AO": " Because ACCELERATE_FP8_BACKEND=AO is set too, prepare() will fail: 'NoneType' object has no "
    "attribute 'config'.",
}
"""What ``Accelerator.prepare`` does with a backend but without fp8. Source: accelerate 1.9 to 1.15,
``accelerator.py``."""

TREATMENT = "let-fp8-through"


@check(
    "ENV001",
    "fp8-request-overridden",
    area="environment",
    severity="error",
    explained_by=("GPU001",),
    changes_fp8=True,
)
def fp8_request_overridden(facts: Facts) -> Finding | NotApplicable | None:
    variables = facts.environment.variables
    asked = asked_by_environment(variables)
    if asked is None:
        return NotApplicable(reason="neither the environment nor the launcher asks for FP8")
    precision = precision_of(facts.training.accelerate, facts.training.trainer)
    if precision is None:
        return NotApplicable(reason="no Accelerator or TrainingArguments has set the precision")
    if precision == "fp8":
        return None
    trainer = facts.training.trainer
    if precision == "fp16" and not (trainer and trainer.fp16) and falls_back(facts):
        return NotApplicable(reason="Accelerate fell back to fp16: this GPU has no FP8 tensor cores")
    if any(each.use == "training" for each in facts.linears()):
        return NotApplicable(reason=f"the model holds FP8 layers although the precision is {precision}")
    who, why, treatment = culprit(facts, precision)
    backend = variables.get("ACCELERATE_FP8_BACKEND", "")
    return Finding(
        severity="warning" if backend == "TE" else None,
        title=f"FP8 was asked for ({asked}), but {who} made it {precision}",
        explanation=why + CONVERTED_ANYWAY.get(backend, ""),
        evidence={
            "asked_by": asked,
            "precision": precision,
            "overridden_by": who,
            **versions(facts.software),
        },
        treatment=treatment,
    )


def falls_back(facts: Facts) -> bool:
    """Whether a GPU is here for which Accelerate turns fp8 into fp16."""
    gpus = facts.get("gpus", ())
    return any(gpu.compute_capability and capability(gpu) < FIRST_WITH_FP8 for gpu in gpus)


def culprit(facts: Facts, precision: str) -> tuple[str, str, Treatment]:
    """Tell who overrode the request, how, and what to write instead."""
    packages, trainer = facts.software.packages, facts.training.trainer
    transformers = packages["transformers"].version if "transformers" in packages else None
    if precision.lower() == "fp8":
        return (
            "the spelling",
            "Accelerate accepts fp8 in lower case only. Accelerator trains without mixed precision; a "
            "Trainer of transformers 5 fails.",
            _treatment(
                "spell the precision in lower case", exported(facts, ACCELERATE_MIXED_PRECISION="fp8")
            ),
        )
    if "unsloth" in packages and packages["unsloth"].imported:
        return (
            f"Unsloth {packages['unsloth'].version}",
            "Its patched trainers set bf16 and ACCELERATE_MIXED_PRECISION themselves when you create them.",
            _treatment(
                "ask Unsloth for FP8 (full fine-tuning, 2026.10 or newer): its trainers accept no other way",
                "FastLanguageModel.from_pretrained(name, full_finetuning=True, "
                "float8_training=Float8LinearConfig())",
            ),
        )
    if trainer and (by_trainer := culprit_of_trainer(facts, trainer, transformers)):
        return by_trainer
    return (
        "Accelerator()",
        f"Its argument mixed_precision={precision!r} beats the environment, or you created it before you "
        "set the variable.",
        _treatment(
            "let the Accelerator read the environment, or pass it fp8",
            switched_on(facts),
        ),
    )


def culprit_of_trainer(
    facts: Facts, trainer: TrainerArguments, transformers: str | None
) -> tuple[str, str, Treatment] | None:
    """Tell the same of a Trainer's arguments; None where they override nothing."""
    if trainer.bf16 or trainer.fp16:
        name, flag = trainer.kind.rpartition(".")[2], "fp16" if trainer.fp16 else "bf16"
        default = (
            f" TRL's configs, such as {name}, turn bf16 on unless you write bf16=False."
            if trainer.kind.startswith("trl.")
            else ""
        )
        rewritten = (
            ""
            if facts.environment.variables.get("ACCELERATE_MIXED_PRECISION") == "fp8"
            else " It also rewrote ACCELERATE_MIXED_PRECISION."
        )
        return (
            f"{name}({flag}=True)",
            f"In transformers {transformers} the flags beat the environment, without a "
            f"warning.{rewritten}{default}",
            _treatment(
                "switch both flags off, so the launcher decides",
                arguments(name, facts),
            ),
        )
    if trainer.mixed_precision == "no" and int((transformers or "0").partition(".")[0]) >= LATE_SINCE:
        name = trainer.kind.rpartition(".")[2]
        return (
            f"{name}, created before the variable was set,",
            f"transformers {transformers} reads ACCELERATE_MIXED_PRECISION once, when you create {name}.",
            _treatment(
                "set the variable first",
                arguments(name, facts, ACCELERATE_MIXED_PRECISION="fp8"),
            ),
        )
    return None


def arguments(name: str, facts: Facts, **variables: str) -> str:
    """Write a Trainer's arguments that leave the precision to the variables, set before them."""
    needed = settings(facts, **variables).items()
    lines = [f'os.environ["{variable}"] = "{value}"' for variable, value in needed]
    return "\n".join([*lines, f"args = {name}(..., bf16=False, fp16=False)"])


def _treatment(summary: str, code: str) -> Treatment:
    return Treatment(name=TREATMENT, summary=summary, code=code)


def versions(software: Software) -> dict[str, Value | tuple[Value, ...]]:
    """List versions of the packages that decide about precision."""
    return {
        name: software.packages[name].version
        for name in ("accelerate", "transformers", "trl", "unsloth")
        if name in software.packages
    }


def _launched(bf16: bool) -> Facts:
    kind = "transformers.training_args.TrainingArguments"
    precision = "bf16" if bf16 else "fp8"
    return example(
        packages={"transformers": "5.23.0", "accelerate": "1.15.0"},
        variables={"ACCELERATE_MIXED_PRECISION": "fp8"},
        gpus=(Gpu(name="NVIDIA H100 80GB HBM3", compute_capability="9.0"),),
        accelerate=Accelerate(mixed_precision=None, distributed="NO"),
        trainer=TrainerArguments(kind=kind, bf16=bf16, fp16=False, mixed_precision=precision),
    )


FIRES = _launched(bf16=True)
SILENT = _launched(bf16=False)
