"""What torch.compile has to cover for FP8 to be fast, and the lines that cover it: one answer for every check that asks."""

from __future__ import annotations

from fp8doctor.facts import Blocks, Linear, Network
from fp8doctor.finding import Treatment
from fp8doctor.overview import in_python

NEEDS_COMPILE = ("Float8Linear", "MXLinear", "MXFP8Linear")
"""Classes whose casts only the compiler fuses, by class name; torchao 0.10 to 0.18."""

BESIDE_AT_MOST = 4
"""Layers outside the blocks, such as a head, that are compiled one by one; with more of them the whole model is. A choice
of length: every one is a line of the treatment."""


def needs_compile(linear: Linear) -> bool:
    """Whether torch.compile decides this layer's speed."""
    if linear.stack != "torchao" or linear.use != "training":
        return False
    wrapper = (linear.weight_class or "").rpartition(".")[2]
    return linear.kind.rpartition(".")[2] in NEEDS_COMPILE or wrapper.endswith("TrainingWeightWrapperTensor") or wrapper == "ScaledGroupedMMTensor"


def compile_treatment(network: Network, uncovered: list[Linear]) -> Treatment:
    """Compile the lists of blocks that hold these layers, and the few of them beside the blocks; else the whole model."""
    lists = [each for each in network.blocks if any(is_inside(linear, each) for linear in uncovered)]
    beside = [linear for linear in uncovered if not any(is_inside(linear, each) for each in lists)]
    if not lists or len(beside) > BESIDE_AT_MOST:
        return Treatment(name="compile-model", summary="compile the model", code="model.compile()")
    lines = [f"for block in {blocks_in_python(each, network)}:\n    block.compile()" for each in lists]
    lines += [f"{in_python(linear.name, network)}.compile()" for linear in beside]
    return Treatment(name="compile-blocks", summary="compile block by block, after the conversion to FP8", code="\n".join(lines))


def is_inside(linear: Linear, blocks: Blocks) -> bool:
    """Whether a layer is in one of these blocks; the list without a name is the model itself."""
    return not blocks.name or linear.name.startswith(f"{blocks.name}.")


def blocks_in_python(blocks: Blocks, network: Network) -> str:
    """What a loop over the blocks goes through."""
    return in_python(blocks.name, network) + (".values()" if blocks.container == "ModuleDict" else "")
