"""Why the cost model has no speedup for a job."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.fp8_request import trains_in_16_bits
from fp8doctor.analysis.layers import FP8_MULTIPLE, nothing_to_convert
from fp8doctor.analysis.modelled_speedup import (
    may_be_compiled_by_unsloth,
    modelled_bf16,
    modelled_speedup,
    to_convert,
    waits_for_te,
)
from fp8doctor.cost import routed_rows, rows_of
from fp8doctor.cost.cast_cost import casts_too_many_rows, is_known
from fp8doctor.cost.step_cost import (
    OWN_FORWARD,
    consists_of_linears,
    modelled_step,
    with_linears,
)
from fp8doctor.facts import Facts, recorded
from fp8doctor.gpus import has_datasheet, modelled_gpu


class NoEstimate(Struct, frozen=True):
    """Why the cost model has no speedup."""

    reason: str
    """Begins in lower case, without a full stop."""
    more: str = ""
    """Sentences about it: what to do, or what is known."""

    def of(self, step: str = "") -> str:
        """Write its sentences; ``step`` says of which step."""
        return f"No estimate{step}: {self.reason}. {self.more}".rstrip()


def unknown_part(facts: Facts) -> NoEstimate:
    """Say which part of a step, or of its conversion, the cost model has no numbers for."""
    gpu = modelled_gpu(facts) if has_datasheet(facts) else None
    fp8, linears = facts.network.fp8, facts.network.linears
    if gpu is None:
        return NoEstimate("fp8doctor has no datasheet of this GPU", "Name another with --assume-gpu.")
    if gpu.fp8_tflops is None:
        return NoEstimate(f"{gpu.name} has no FP8 tensor cores")
    if nothing_to_convert(facts.network):
        return NoEstimate(
            "a conversion to FP8 takes none of its layers",
            "It takes only Linears, and no head, router or LoRA matrix.",
        )
    if not consists_of_linears(facts.network):
        return NoEstimate("most parameters are outside of Linears, and the cost model has only those")
    if any(linear.get("features", {}).get(OWN_FORWARD) for linear in fp8):
        without = modelled_speedup(_as_plain_fp8(facts))
        most = f"Without it FP8 would run at {without.best:.2f}x the speed of BF16." if without else ""
        return NoEstimate("FP8 layers have a forward of their own that does other work", most)
    if trains_in_16_bits(facts) and not fp8:
        return NoEstimate("Unsloth has no FP8 training for LoRA")
    rows = [(each, rows_of(each, facts)) for each in linears]
    if not all(seen for _, seen in rows):
        return NoEstimate("the batch is unknown", HOW_TO_GIVE.get(facts.get("target.kind"), OF_A_FILE))
    if facts.get("training.use_cache") and any(each.compiled is not None for each in fp8):
        return NoEstimate("with a KV cache, the compiled blocks may not be what runs")
    if many := [seen for each, seen in rows if seen and casts_too_many_rows(each, seen)]:
        return NoEstimate(
            f"casts of {max(many):,} rows that are not compiled are far from any that were measured"
        )
    if any(linear.role == "experts" and not routed_rows(linear, facts) for linear in linears):
        return NoEstimate("nothing says how many experts a token visits")
    if not fp8 and not to_convert(facts):
        return NoEstimate(
            "no Linear of this model can be converted",
            f"FP8 needs sides and rows that are multiples of {FP8_MULTIPLE}.",
        )
    if (
        may_be_compiled_by_unsloth(facts)
        and (step := modelled_step(facts))
        and (best := modelled_bf16(facts))
    ):
        return NoEstimate(
            "Unsloth compiles blocks itself, and fp8doctor did not see if it did",
            f"Not compiled, FP8 would run at {best.step_ms / step.step_ms:.2f}x the speed of BF16.",
        )
    if waits_for_te(facts):
        return NoEstimate("the host time for recomputing Transformer Engine's layers is not known")
    recipes = {
        each.recipe or "unknown" for each in fp8 if recorded(each, "recipe") and not is_known(each, gpu)
    }
    if recipes:
        return NoEstimate(
            f"nobody measured the casts of the recipe {', '.join(sorted(recipes))} on {gpu.name}"
        )
    return NoEstimate("the cost model does not know this form of the step")


def _as_plain_fp8(facts: Facts) -> Facts:
    """Take away what FP8 layers with a forward of their own compute next to the matmul."""
    linears = (
        replace(each, features={**each.features, OWN_FORWARD: False})
        if OWN_FORWARD in each.features
        else each
        for each in facts.network.linears
    )
    return with_linears(facts, tuple(linears))


OF_A_FILE = "Give one: --batch and --seq, or example_batch()."
HOW_TO_GIVE = {"live": "Pass one to inspect_model.", "script": "No batch was seen in the watched steps."}
"""Kind of target -> how fp8doctor learns of a batch."""
