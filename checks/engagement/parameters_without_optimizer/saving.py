"""Converted weights that no checkpoint takes."""

from __future__ import annotations

from fp8doctor import kit

ALL_GATHER_WEIGHT = "WeightWithDynamicFloat8CastTensor"
"""torchao's wrapper for FSDP's float8 all-gather. Source: ``torchao/float8/fsdp_utils.py``, 0.10 to 0.18."""

WITHOUT_STORAGE = (
    *(ALL_GATHER_WEIGHT, "ScaledGroupedMMTensor"),
    *("MXFP8TrainingWeightWrapperTensor", "Float8TrainingWeightWrapperTensor"),
)
"""torchao's wrappers whose storage, for which safetensors asks, is an error. Run in 0.18."""

UNWRAP = kit.Treatment(
    name="save-unwrapped",
    summary="save the tensors inside the wrappers",
    code="# torchao 0.17 and 0.18\n"
    'plain = {name: getattr(tensor, "_data", tensor) for name, tensor in model.state_dict().items()}\n'
    "model.save_pretrained(folder, state_dict=plain)",
)


@kit.check("MOD007", "cannot-be-saved", severity="error", was="MOD010", **kit.WRONG_FP8_STEP)
def cannot_be_saved(facts: kit.Facts) -> kit.Finding | None:
    if is_sharded(facts):  # FSDP gathers weights into ordinary tensors first
        return None
    trained = [each for each in facts.network.fp8 if each.adapter != "base"]
    layers = [each for each in trained if kind_of(each) in WITHOUT_STORAGE]
    writer = writer_of(facts) if layers else None
    if writer is None:
        return None
    kind = kind_of(layers[0])
    return kit.Finding(
        severity="warning" if writer.startswith("Accelerate") else None,
        title=f"{kit.plural(len(layers), 'FP8 layer')} cannot be saved: their weights are {kind}"
        f"{kit.named(layers, len(trained))}",
        explanation=f"{writer} fails on them: they have no storage of their own.",
        evidence={"layers": len(layers), "weight_class": layers[0].weight_class, "writer": writer},
        treatment=kit.treatments.ORDINARY_WEIGHTS if kind == ALL_GATHER_WEIGHT else UNWRAP,
    )


def is_sharded(facts: kit.Facts) -> bool:
    return any("FSDP" in each or "FullySharded" in each for each in facts.get("network.wrappers", ()))


def kind_of(linear: kit.Linear) -> str:
    return (linear.weight_class or "").rpartition(".")[2]


def writer_of(facts: kit.Facts) -> str | None:
    """Name what writes this job's checkpoints with safetensors; None if nothing shows it."""
    if facts.training.trainer:
        return "A Trainer's checkpoint, which uses safetensors,"
    if facts.network.save_pretrained:
        return "save_pretrained, which writes safetensors,"
    prepared = facts.training.accelerate and facts.training.accelerate.prepared
    return "Accelerate's save_state, which writes safetensors by default," if prepared else None
