"""Converted weights that no checkpoint takes."""

from __future__ import annotations

from fp8doctor import kit

ALL_GATHER_WEIGHT = "WeightWithDynamicFloat8CastTensor"
"""torchao's wrapper for FSDP's float8 all-gather. Source: ``torchao/float8/fsdp_utils.py``, 0.10 to 0.18."""

UNWRAP = kit.Treatment(
    name="save-unwrapped",
    summary="save the tensors inside the wrappers",
    code="# torchao 0.17 and 0.18\n"
    'plain = {name: getattr(tensor, "_data", tensor) for name, tensor in model.state_dict().items()}\n'
    "model.save_pretrained(folder, state_dict=plain)",
)


@kit.check("MOD007", "cannot-be-saved", severity="error", was="MOD010", **kit.WRONG_FP8_STEP)
def cannot_be_saved(facts: kit.Facts) -> kit.Finding | None:
    trained = [each for each in facts.network.fp8 if each.adapter != "base"]
    for saved in facts.network.saving if trained else ():
        layers = [each for each in trained if each.weight_class == saved.weight_class]
        writer = failing_writer(saved, facts)
        if layers and writer:
            kind = saved.weight_class.rpartition(".")[2]
            fix = None if saved.pickle_error else UNWRAP
            error = saved.pickle_error or saved.storage_error or ""
            return kit.Finding(
                severity="warning" if writer.startswith("Accelerate") else None,
                title=f"{kit.plural(len(layers), 'FP8 layer')} cannot be saved: their weights are {kind}"
                f"{kit.named(layers, len(trained))}",
                explanation=f"{writer} fails on them (tried on {saved.tried}): {error.rstrip('.')}.",
                evidence={"layers": len(layers), "weight_class": saved.weight_class, "writer": writer},
                treatment=kit.treatments.ORDINARY_WEIGHTS if kind == ALL_GATHER_WEIGHT else fix,
            )
    return None


def failing_writer(saved: kit.facts.SavedWeight, facts: kit.Facts) -> str | None:
    """Name the writer of this job's checkpoints that fails; None if it works or nothing shows which it is."""
    if saved.pickle_error or not saved.storage_error:
        return "torch.save" if saved.pickle_error else None
    if facts.training.trainer:
        return "A Trainer's checkpoint, which uses safetensors,"
    if facts.network.save_pretrained:
        return "save_pretrained, which writes safetensors,"
    prepared = facts.training.accelerate and facts.training.accelerate.prepared
    return "Accelerate's save_state, which writes safetensors by default," if prepared else None
