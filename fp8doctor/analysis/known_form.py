"""The job as the cost model can estimate it: what it has no numbers for, as its fix makes it."""

from __future__ import annotations

from msgspec.structs import replace

from fp8doctor.analysis.fp8_request import accelerate_of_model, lacks_autocast
from fp8doctor.cost.cast_cost import capability_of
from fp8doctor.cost.matmul_counts import unseen_recompute
from fp8doctor.cost.step_cost import with_linears
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.gpus import GpuSpec, has_datasheet, modelled_gpu
from fp8doctor.recipes import TORCHAO, recipe_of, runs_on

IN_KNOWN_FORM = "once its layers and its autocast are those that the fix gives"


def in_known_form(facts: Facts) -> tuple[Facts, str]:
    """Replace what the cost model has no numbers for by what its fix puts there, and say so if anything is.

    FP8 and BF16 get the same autocast.
    """
    gpu = modelled_gpu(facts) if has_datasheet(facts) else None
    linears = [_known(each, gpu) for each in facts.network.linears]
    changed = linears != list(facts.network.linears)
    facts = with_linears(facts, linears)
    in_fp32 = any(each.multiplies_in == "float32" and each.adapter != "adapter" for each in linears)
    if in_fp32 and facts.get("training.autocast") != "bfloat16" and recorded(facts, "training"):
        facts = replace(facts, training=replace(facts.training, autocast="bfloat16"))
        changed = True
    return facts, IN_KNOWN_FORM if changed else ""


def _known(linear: Linear, gpu: GpuSpec | None) -> Linear:
    """Store its weights in BF16, or run it in a recipe that this GPU has, not emulated."""
    if linear.use == "storage":
        return replace(linear, use="none", stack="torch", dtype="bfloat16", features={})
    if linear.use != "training" or linear.stack != TORCHAO.name:
        return linear
    if linear.features.get("emulate"):
        linear = replace(linear, features={**linear.features, "emulate": False})
    own = linear.get("recipe") == "custom"
    lacks = own or (gpu is not None and not runs_on(recipe_of(linear), capability_of(gpu)))
    return replace(linear, recipe="tensorwise") if lacks else linear


def runs_in_fp32(facts: Facts) -> bool:
    """Return whether most of the Linears' weights surely multiply in fp32.

    Accelerate brings an autocast of its own. Raises `Unrecorded` if the Linears were not read.
    """
    if accelerate_of_model(facts) or not lacks_autocast(facts):
        return False
    linears = facts.network.linears
    fp32 = sum(each.parameters for each in linears if each.multiplies_in == "float32")
    return 2 * fp32 > sum(each.parameters for each in linears)


def engaged(facts: Facts) -> Facts:
    """Let every FP8 layer run in FP8."""
    linears = (
        replace(each, engaged=None) if each.use == "training" else each for each in facts.network.linears
    )
    return with_linears(facts, linears)


def with_seen_recompute(facts: Facts) -> Facts:
    """Let a forward that calls ``checkpoint`` recompute every layer below it, but no head.

    Which of them it recomputes is not known without a run. FP8 and BF16 do it alike.
    """
    if (module := unseen_recompute(facts)) is None:
        return facts
    below = f"{module}." if module else ""
    linears = (
        replace(each, checkpointed=module)
        if each.name.startswith(below) and each.role != "head" and not recorded(each, "checkpointed")
        else replace(each, checkpointed=None)
        if not recorded(each, "checkpointed")
        else each
        for each in facts.network.linears
    )
    return with_linears(facts, linears)
