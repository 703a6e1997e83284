"""A checkpoint of the converted model cannot be written

What it finds. The converted weights are tensor subclasses that torch.save or safetensors cannot write.

Why it matters. The job trains and fails at its first checkpoint, after hours of GPU time. Some FP8
conversions put a wrapper around every weight, which has no storage address of its own. The safetensors format
needs it, and `save_pretrained`, a Trainer's checkpoints and Accelerate's `save_state` all write safetensors.
Accelerate's torchao path wraps every converted weight for FSDP's float8 all-gather, even on one GPU.

Fix. Switch the wrapping off if you do not use FSDP (Accelerate 1.15, torchao 0.18).

    # before: Accelerate wraps the weights
    accelerate launch --mixed_precision fp8 train.py

    # after
    export ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false
    accelerate launch --mixed_precision fp8 train.py

When to ignore it. If you never save this model, or your own code saves the tensors inside the wrappers.

How it is detected, and limits. For the smallest weight of each class, fp8doctor runs `torch.save` of its
`state_dict` entry in memory and asks for its storage address. It then reports what this job would save with:
a Trainer, `save_pretrained` or Accelerate. With Accelerate alone it is a warning, because you can ask
Accelerate for another format. Other ways of saving are not tried.

References. With accelerate 1.15, transformers 5.23 and torchao 0.18, a Trainer stops at its first checkpoint:
"Attempted to access the data pointer on an invalid python storage". MXFP8 and FP8 training weights of
torchao.prototype do the same.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/fsdp_utils.py
https://github.com/huggingface/safetensors/blob/v0.8.0/bindings/python/py_src/safetensors/torch.py
"""

from __future__ import annotations

from fp8doctor.analysis.layers import named
from fp8doctor.diagnosis.treatments import ORDINARY_WEIGHTS
from fp8doctor.facts import Facts, SavedWeight
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

ALL_GATHER_WEIGHT = "WeightWithDynamicFloat8CastTensor"
"""torchao's wrapper for FSDP's float8 all-gather. Source: ``torchao/float8/fsdp_utils.py``, 0.10 to 0.18."""

ACCELERATES = "Accelerate's save_state or save_model, which write safetensors by default,"


UNWRAP = Treatment(
    name="save-unwrapped",
    summary="save the tensors inside the wrappers",
    code='plain = {name: getattr(tensor, "_data", tensor) for name, tensor in model.state_dict().items()}   '
    "# torchao 0.17 and 0.18\n"
    "model.save_pretrained(folder, state_dict=plain)",
)


@check(
    "MOD010",
    "cannot-be-saved",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def cannot_be_saved(facts: Facts) -> Finding | NotApplicable | None:
    trained = facts.network.fp8
    if not trained:
        return NotApplicable(reason="no layer is set up for FP8 training")
    for saved in facts.network.saving:
        layers = [
            each for each in trained if each.weight_class == saved.weight_class and each.adapter != "base"
        ]
        writer = fails_in(saved, facts)
        if layers and writer:
            kind = saved.weight_class.rpartition(".")[2]
            return Finding(
                severity="warning" if writer == ACCELERATES else None,
                title=f"{plural(len(layers), 'FP8 layer')} cannot be saved: their weights are {kind}"
                f"{named(layers, len(trained))}",
                explanation=f"{writer} fails on them (tried on {saved.tried}): "
                f"{saved.pickle_error or saved.storage_error}",
                evidence={
                    "layers": len(layers),
                    "weight_class": saved.weight_class,
                    "torch_save": saved.pickle_error,
                    "safetensors": saved.storage_error,
                },
                treatment=ORDINARY_WEIGHTS
                if kind == ALL_GATHER_WEIGHT
                else None
                if saved.pickle_error
                else UNWRAP,
            )
    return None


def fails_in(saved: SavedWeight, facts: Facts) -> str | None:
    """Name the writer of this job's checkpoints that fails; None if it works or nothing shows which it is."""
    if saved.pickle_error:
        return "torch.save"
    if saved.storage_error is None:
        return None
    if facts.training.trainer:
        return "A Trainer's checkpoint, which uses safetensors,"
    if facts.network.save_pretrained:
        return "save_pretrained, which writes safetensors,"
    return ACCELERATES if facts.training.accelerate and facts.training.accelerate.prepared else None


def _prepared(error: str | None) -> Facts:
    kind = f"torchao.float8.fsdp_utils.{ALL_GATHER_WEIGHT}"
    saved = SavedWeight(weight_class=kind, tried="up.weight", pickle_error=None, storage_error=error)
    model = {"linears": (float8(weight_class=kind),), "saving": (saved,), "save_pretrained": True}
    return example(**model, trainer=None, accelerate=None)


FIRES = _prepared("RuntimeError: Attempted to access the data pointer on an invalid python storage.")
SILENT = _prepared(None)
