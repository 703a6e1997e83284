"""No GPU to look at

Looks at: the GPUs that NVML lists, which of them CUDA_VISIBLE_DEVICES leaves to this job, and what
torch is built with.

What it means. What is read off the model stands: which layers are FP8, what is compiled, shapes,
shares of FLOPs. What a GPU decides does not: whether this recipe runs there, its clocks and memory,
and every time. Costs in ms are modelled from the datasheet of an H100 SXM, or of the GPU that
`--assume-gpu` names, and every line that rests on them says so.

What to do. Name the GPU the job will run on, or look again on that machine.

    fp8doctor model.py                      # before: modelled for an H100 SXM
    fp8doctor model.py --assume-gpu L40S    # after

Evidence: NVML, the driver's own list (`nvidia-smi -L` shows the same). The model: torchao's
roofline, https://github.com/pytorch/ao/blob/main/torchao/testing/training/roofline_utils.py, and
GEMMs timed on one H200. Its error: `docs/trial.md`, "How far off it was".
"""

from __future__ import annotations

from fp8doctor.cost import modelled_gpu
from fp8doctor.facts import Environment, Facts, Gpu, recorded
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide GPUs."""


@check("GPU005", "no-gpu", area="device", severity="info")
def no_gpu(facts: Facts) -> Finding | NotApplicable | None:
    hidden = [gpu for gpu in facts.gpus if recorded(gpu, "visible") and gpu.visible is False]
    if len(hidden) < len(facts.gpus) and not is_cpu_build(facts):
        return NotApplicable(reason="a GPU is there")
    modelled = modelled_gpu(facts)
    assumed = recorded(facts, "assumed_gpu") and bool(facts.assumed_gpu)
    what = f"costs are modelled for {modelled.name}" if modelled else "no costs are modelled"
    source = (
        f"Modelled times come from the {modelled.source}"
        f"{'' if assumed else ', as no --assume-gpu named another'}."
        if modelled
        else "No datasheet of this GPU is known here."
    )
    return Finding(
        title=f"{missing(facts, hidden)}; {what}",
        explanation=f"{source} Unknown without a GPU: whether this recipe runs there, clocks, free memory, "
        "and what a step really takes.",
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
    """Advise a torch that uses the GPU, or the name of one to model."""
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
    """Say that there is no GPU, or what hides those there are."""
    if len(hidden) < len(facts.gpus):
        return f"torch {facts.software.torch} is built without CUDA and does not use the {facts.gpus[0].name}"
    if not hidden:
        return "No GPU here"
    variables = facts.variables()
    by = next((f"{name}={variables[name]!r}" for name in MASKS if name in variables), None)
    count = "The only GPU is" if len(hidden) == 1 else f"All {len(hidden)} GPUs are"
    return f"{count} hidden by {by}" if by else f"{count} hidden from this process"


SICK = Facts(environment=Environment(variables={}), gpus=())
HEALTHY = Facts(environment=Environment(variables={}), gpus=(Gpu(name="NVIDIA H200", visible=True),))
