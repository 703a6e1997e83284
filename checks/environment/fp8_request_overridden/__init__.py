"""You asked for FP8, and something loses it

Many settings decide about FP8, and each has one reader. The last one that decides the precision wins without
a warning. `TrainingArguments(bf16=True)` beats the environment, TRL's configs set bf16=True by default, and
Unsloth's trainers overwrite the variable. Accelerate compares a backend's name exactly: "te" stops every
`Accelerator()`. It takes the first installed backend if none is named, and converts for any precision if TE
is named. It checks only that a package's folder exists: a backend that cannot be imported fails in `prepare`.

    args = SFTConfig(output_dir="out")                          # before: TRL turns bf16 on

    from trl import SFTConfig
    args = SFTConfig(output_dir="out", bf16=False, fp16=False)  # after: the launcher's fp8 stands

On an H200, torchao taken by its name and not compiled ran at 0.50x of compiled BF16
(`h200-accelerate_torchao_eager`). Ignore it if you want BF16 in this run (then unset the variables), pass
recipes in `kwargs_handlers`, or have no GPU here. Run `fp8doctor env` where the job trains.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py
https://github.com/huggingface/transformers/issues/25333
"""

from fp8doctor import kit

BACKEND = kit.fp8_request.BACKEND

PREPARES = {
    "AO": "stops with \"'NoneType' object has no attribute 'config'\"",
    "TE": "still converts the model to Transformer Engine and trains it in FP8; only the flags say otherwise",
}
"""What ``Accelerator.prepare`` does with a backend but without fp8. Source: accelerate 1.9 to 1.15."""


@kit.check(
    "ENV001",
    "fp8-request-overridden",
    severity="error",
    explained_by=("no-fp8-tensor-cores",),
    changes_fp8=True,
)
def fp8_request_overridden(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    variables, trainer = facts.environment.variables, facts.training.trainer
    asked = kit.fp8_request.asked_by_environment(variables)
    precision = kit.fp8_request.precision_of(facts.training.accelerate, trainer)
    if asked is None or precision is None:
        reason = "no variable or launcher asks for FP8, or nothing has set the precision yet"
        return kit.NotApplicable(reason=reason)
    if precision == "fp8":
        return None
    if any(each.use == "training" for each in facts.linears()):
        return kit.NotApplicable(reason=f"the model holds FP8 layers although the precision is {precision}")
    who, why, summary, code = culprit(facts, precision)
    named = variables.get(BACKEND, "")
    if named in PREPARES:
        why += f" Because {BACKEND}={named} is set too, prepare() {PREPARES[named]}."
    return kit.Finding(
        severity="warning" if named == "TE" else None,
        title=f"FP8 was asked for ({asked}), but {who} made it {precision}",
        explanation=why,
        evidence={"asked_by": asked, "precision": precision, "overridden_by": who},
        treatment=kit.Treatment(name="let-fp8-through", summary=summary, code=code),
    )


def culprit(facts: kit.Facts, precision: str) -> tuple[str, str, str, str]:
    """Tell who overrode the request, how, and what to write instead, in words and code."""
    trainer, unsloth = facts.training.trainer, facts.packages().get("unsloth")
    kind = trainer.kind.rpartition(".")[2] if trainer else ""
    if precision.lower() == "fp8":
        return (
            "the spelling",
            "Accelerate accepts fp8 in lower case only, and trains without mixed precision.",
            "spell the precision in lower case",
            kit.exported(facts, ACCELERATE_MIXED_PRECISION="fp8"),
        )
    if unsloth and unsloth.imported:
        return (
            f"Unsloth {unsloth.version}",
            "Its patched trainers set bf16 and ACCELERATE_MIXED_PRECISION themselves when you create them.",
            "ask Unsloth for FP8 (full fine-tuning, 2026.10 or newer): its trainers accept no other way",
            "FastLanguageModel.from_pretrained(name, full_finetuning=True, "
            "float8_training=Float8LinearConfig())",
        )
    if trainer and (trainer.bf16 or trainer.fp16):
        trl = f" TRL's configs, such as {kind}, turn bf16 on unless you write bf16=False."
        return (
            f"{kind}({'fp16' if trainer.fp16 else 'bf16'}=True)",
            "In transformers the flags beat the environment, without a warning."
            + trl * trainer.kind.startswith("trl."),
            "switch both flags off, so the launcher decides",
            arguments(kind, facts),
        )
    return (
        f"{kind or 'Accelerator'}()",
        f"Its own precision {precision!r} beats the environment, or you created it before you set the "
        "variable.",
        "let the environment decide, or pass fp8",
        arguments(kind, facts, ACCELERATE_MIXED_PRECISION="fp8")
        if trainer
        else kit.conversion.switched_on(facts),
    )


def arguments(kind: str, facts: kit.Facts, **variables: str) -> str:
    """Write a Trainer's arguments that leave the precision to the variables, set before them."""
    settings = kit.fp8_request.settings(facts, **variables)
    lines = [f'os.environ["{name}"] = "{value}"' for name, value in settings.items()]
    return "\n".join([*lines, f"args = {kind}(..., bf16=False, fp16=False)"])


def _job(variables: dict[str, str], *, bf16: bool = False, fp8: bool = False, error: str = "") -> kit.Facts:
    packages = ("transformers", "accelerate", "transformer_engine", "torchao")
    return kit.example(
        packages=dict.fromkeys(packages, "1.9.0"),
        variables=variables,
        backend_imports={"TE": error or None},
        gpus=(kit.Gpu(name="NVIDIA H100 80GB HBM3", compute_capability="9.0"),),
        linears=(kit.float8(stack="transformer_engine"),) * fp8,
        accelerate=kit.facts.Accelerate(
            mixed_precision="bf16" if bf16 else None, distributed="NO", prepared=False
        ),
        trainer=kit.facts.TrainerArguments(
            kind="TrainingArguments", bf16=bf16, fp16=False, mixed_precision="no" if bf16 else "fp8"
        ),
    )


FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}

FIRES = (
    _job(FP8, bf16=True),
    _job(FP8 | {"FP8_BACKEND": "te"}),
    _job(FP8 | {BACKEND: "te"}),
    _job(FP8, error="OSError: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"),
    _job({BACKEND: "TE"}, bf16=True),
    _job({BACKEND: "TE"}, bf16=True, fp8=True),
)
SILENT = _job(FP8 | {BACKEND: "TE"})
