"""No GPU to time on

What it finds. This process sees no GPU, or torch cannot use it.

Why it matters. fp8doctor can still read the model: which layers are FP8, what is compiled, shapes and shares
of FLOPs. Without the GPU it cannot know whether a recipe runs there, its clocks and memory, or any time. It
then estimates times in ms from a GPU's datasheet, and says so in each line that depends on them.

Fix. Name the GPU that the job will run on, or run fp8doctor on that machine.

    fp8doctor model.py                    # before: estimated for an H100 SXM

    fp8doctor model.py --assume-gpu L40S  # after

When to ignore it. If you only want to know which layers are FP8 and how the model is set up.

How it is detected, and limits. fp8doctor reads NVML's list of GPUs (`nvidia-smi -L` shows the same), the
variables that hide GPUs, and whether torch was built with CUDA or ROCm. `docs/trial.md` says how far the
estimates were off ("How far off it was").

References. torchao's roofline, and matmuls timed on one H200:
https://github.com/pytorch/ao/blob/main/torchao/testing/training/roofline_utils.py
"""

from __future__ import annotations

from fp8doctor.cost import modelled_gpu
from fp8doctor.facts import Facts, Gpu, recorded
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide GPUs."""


@check("GPU005", "no-gpu", area="device", severity="info")
def no_gpu(facts: Facts) -> Finding | NotApplicable | None:
    hidden = [gpu for gpu in facts.gpus if gpu.get("visible") is False]
    if len(hidden) < len(facts.gpus) and not is_cpu_build(facts):
        return NotApplicable(reason="a GPU is there")
    modelled = modelled_gpu(facts)
    assumed = bool(facts.get("assumed_gpu"))
    what = f"times are estimated for {modelled.name}" if modelled else "no times are estimated"
    source = (
        "Estimated times come from the "
        f"{modelled.source}{'' if assumed else ', because --assume-gpu named no other'}."
        if modelled
        else "fp8doctor knows no datasheet for this GPU."
    )
    return Finding(
        title=f"{missing(facts, hidden)}; {what}",
        explanation=f"{source} Unknown without a GPU: whether this recipe runs there, clocks, free memory, "
        "and the real step time.",
        evidence={
            "gpus": len(facts.gpus),
            "hidden": len(hidden),
            "modelled": modelled.name if modelled else None,
            "modelled_from": modelled.source if modelled else None,
        },
        treatment=way_out(facts, assumed),
    )


def is_cpu_build(facts: Facts) -> bool:
    """Whether torch can use no GPU at all."""
    if not (recorded(facts, "software.cuda") and recorded(facts, "software.hip")):
        return False
    return facts.software.cuda is None and facts.software.hip is None


def way_out(facts: Facts, assumed: bool) -> Treatment | None:
    """Advise a torch that uses the GPU, or naming a GPU to estimate for."""
    if facts.gpus and is_cpu_build(facts):
        return Treatment(
            name="install-cuda-torch",
            summary="install torch built with CUDA",
            code="pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
        )
    if assumed:
        return None
    return Treatment(
        name="assume-gpu",
        summary="name the GPU that the job will run on",
        code="fp8doctor model.py --assume-gpu H200",
    )


def missing(facts: Facts, hidden: list[Gpu]) -> str:
    """Say that there is no GPU, or what hides it."""
    if len(hidden) < len(facts.gpus):
        return f"torch {facts.software.torch} is built without CUDA and does not use the {facts.gpus[0].name}"
    if not hidden:
        return "No GPU here"
    variables = facts.variables()
    by = next((f"{name}={variables[name]!r}" for name in MASKS if name in variables), None)
    count = "The only GPU is" if len(hidden) == 1 else f"All {len(hidden)} GPUs are"
    return f"{count} hidden by {by}" if by else f"{count} hidden from this process"


SICK = example(variables={}, gpus=())
HEALTHY = example(variables={}, gpus=(Gpu(name="NVIDIA H200", visible=True),))
