"""What was made up of a job because nobody gave it, why no batch was, and what is left out of a Trainer."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.facts import Facts, Workload, recorded
from fp8doctor.render.header import lacks_batch, steps_are_watched

NO_TRAINED_WEIGHTS = "the weights are"
"""How the reason begins for which layers were not compared on weights that nobody trained.
Source: ``fp8doctor/trial/layers/made_up.py``."""

LOSSES = {"output.loss": "the model's own", "mean": "the mean of the output"}
"""Source of the loss, where nobody gave one -> whose it is."""


def made_up(facts: Facts) -> str:
    """Tell what was made up, why no batch was, and what of a Trainer is left out; empty where all was the
    user's, or no step was asked about."""
    if not recorded(facts, "workload"):
        return ""
    parts = [*_of_the_step(facts.workload), *_weights(facts)]
    without = recorded(facts.workload, "autocast_source") and facts.workload.autocast_source == "none"
    told = [f"Made up: {', '.join(parts)}{'; no autocast' if without else ''}."] if parts else []
    return " ".join([*told, *_no_batch(facts), *_not_the_trainers_loss(facts), *_later(facts)])


def _not_the_trainers_loss(facts: Facts) -> Iterator[str]:
    """Tell whose loss a copy of the step has, where the Trainer has one of its own."""
    work, trainer = facts.workload, facts.trainer()
    used = LOSSES.get(work.loss_source) if recorded(work, "loss_source") else None
    if not used or trainer is None or not recorded(trainer, "own_loss") or not trainer.own_loss:
        return
    watched = recorded(facts, "observed.steps_ms") and bool(facts.observed.steps_ms)
    if not watched or recorded(facts, "trial.arms"):
        yield (
            f"The loss is {used}; the Trainer's ({trainer.own_loss}) is not called: where it is another, "
            "give it as loss(output, batch) or training_step(model, batch)."
        )


def _later(facts: Facts) -> Iterator[str]:
    """Name the checkpointing that a Trainer turns on in ``train()``, which `inspect_model` does not call."""
    known = recorded(facts, "training.trainer") and recorded(facts, "training.checkpointing")
    if not known or (recorded(facts, "target.kind") and facts.target.kind == "script"):
        return
    trainer, found = facts.training.trainer, facts.training.checkpointing
    asked = trainer is not None and recorded(trainer, "checkpointing") and trainer.checkpointing is True
    if asked and all(each.active is False for each in found):
        yield "Without the checkpointing that train() turns on."


def _no_batch(facts: Facts) -> Iterator[str]:
    if lacks_batch(facts.workload) and not steps_are_watched(facts):
        why = (facts.workload.note or "").rstrip(".")
        yield f"{why[:1].upper()}{why[1:]}."


def _of_the_step(workload: Workload) -> Iterator[str]:
    if recorded(workload, "batch_source") and workload.batch_source == "made up":
        yield "the batch"
    if recorded(workload, "loss_source") and workload.loss_source == "mean":
        yield "the loss (the mean of the output)"
    if recorded(workload, "optimizer_source") and workload.optimizer_source == "made up":
        yield "the optimizer (AdamW)"


def _weights(facts: Facts) -> Iterator[str]:
    gaps = facts.trial.gaps if recorded(facts, "trial.gaps") else {}
    if gaps.get("trial.numerics", "").startswith(NO_TRAINED_WEIGHTS):
        yield "the weights (an initialiser's)"
