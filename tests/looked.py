"""What ``fp8doctor model.py --no-trial`` reports of a model: its worker runs a forward on fake tensors, which
``inspect_model`` does not."""

from typing import Any

from msgspec.structs import replace

from fp8doctor import api
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.examine import examine
from fp8doctor.gpus import gpu_spec
from fp8doctor.report import Report
from fp8doctor.trial import with_forward

UNGIVEN = dict.fromkeys(("loss", "optimizer", "training_step", "autocast")) | {"accumulate": 1}


def looked(model: Any, batch: Any = None, *, assume_gpu: str | None = None, **given: Any) -> Report:
    job = api._job(model, batch, **{**UNGIVEN, **given})
    facts = with_forward(job, examine(job))
    gpu = assume_gpu and gpu_spec(assume_gpu).name
    return Report.of(diagnose(replace(facts, assumed_gpu=gpu)))
