"""FSDP2 gathers BF16 weights for FP8 layers

What it finds. FSDP2 gathers the weights of tensorwise Float8Linears in BF16, or the FP8 all-gather is
switched on although nothing shards the model.

Why it matters. FSDP2 collects a block's weights before its forward and again before its backward. A
tensorwise Float8Linear then casts them to FP8. Sent as FP8 they are half the bytes, and each shard is cast
once. On eight H100, torchao reports 25% more throughput for Llama 3 8B with it. Without FSDP2 the flag gives
nothing and wraps every weight in a tensor subclass: slower without compilation, and a checkpoint may fail
("invalid python storage").

Fix. Set the flag at conversion, before `fully_shard`, and compute the scales after each step (DST002).
Accelerate sets it by default, even on one GPU; switch it off with
ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false.

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)                 # before

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config)  # after

When to ignore it. With one scale per row FSDP2 must send BF16; this is not reported. If `fully_shard` still
follows, the unused flag is right.

How it is detected, and limits. fp8doctor reads the flag of each layer and which weights FSDP2 shards. It does
not time the communication.

References. torchao 0.18 (`fsdp_utils.py`) and accelerate 1.15 (`AORecipeKwargs`); a Trainer's save failed on
one H200. https://docs.pytorch.org/ao/main/workflows/training.html
https://pytorch.org/blog/training-using-float8-fsdp2/
"""

from __future__ import annotations

from fp8doctor.analysis.by_accelerate import ALL_GATHER
from fp8doctor.analysis.fp8_request import may_have_converted
from fp8doctor.diagnosis.treatments import convert_again
from fp8doctor.facts import Accelerate, Distributed, Facts, Linear
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Severity, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

FLAG = "enable_fsdp_float8_all_gather"

ON = "config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)"

OFF = "Float8LinearConfig(enable_fsdp_float8_all_gather=False)"


@check(
    "DST001",
    "fp8-all-gather-off",
    area="distributed",
    severity="warning",
    changes_fp8=True,
)
def fp8_all_gather_off(facts: Facts) -> Finding | NotApplicable | None:
    tensorwise = [
        each
        for each in facts.network.linears
        if each.stack == "torchao" and each.recipe == "tensorwise" and FLAG in each.features
    ]
    if not tensorwise:
        return NotApplicable(reason="no tensorwise Float8Linear in the model")
    distributed = facts.training.distributed
    sharded = set(distributed.fsdp2_linears) if distributed else set()
    in_bf16 = [linear for linear in tensorwise if linear.name in sharded and not linear.features[FLAG]]
    for_nothing = [linear for linear in tensorwise if linear.features[FLAG]] if not sharded else []
    if in_bf16 and distributed:
        return gathered_in_bf16(in_bf16, len(tensorwise), distributed.shards or 1, facts)
    if for_nothing:
        return wrapped_for_nothing(for_nothing, facts)
    return None if distributed else NotApplicable(reason="one process")


def gathered_in_bf16(linears: list[Linear], of: int, shards: int, facts: Facts) -> Finding:
    gib = sum(linear.parameters for linear in linears) * 2 / 2**30
    return Finding(
        severity=None if shards > 1 else "info",
        title=f"FSDP2 gathers the weights of {len(linears)} of {of} FP8 Linears in BF16",
        explanation=f"Each of {shards} processes collects {gib:.2g} GiB in BF16 before the forward and again "
        "before the backward, and casts them afterwards. "
        + ("Sent as FP8 they are half." if shards > 1 else "With one process nothing is sent yet."),
        evidence={
            "linears": len(linears),
            "tensorwise_fp8_linears": of,
            "shards": shards,
            "gathered_gib": gib,
            "first": linears[0].name,
        },
        treatment=Treatment(
            name="float8-all-gather",
            summary="convert with enable_fsdp_float8_all_gather=True, before fully_shard",
            code=with_flag(facts),
        ),
    )


def with_flag(facts: Facts) -> str:
    """Write the lines that convert with the flag; Accelerate (1.15) computes the scales by itself."""
    lines = f"{ON}\n{convert_again(facts, config='config')}"
    if may_have_converted(facts):
        return lines
    return (
        f"{lines}     # before fully_shard(model)\n"
        "# and after every optimizer.step(): precompute_float8_dynamic_scale_for_fsdp(model)"
    )


def wrapped_for_nothing(linears: list[Linear], facts: Facts) -> Finding:
    """Report the flag without FSDP2: information until the model is surely ready to train."""
    training = facts.training
    by_accelerate = bool(training.accelerate and training.accelerate.prepared)
    ready = by_accelerate or bool(training.gradients_seen) or bool(training.optimizer_stepped)
    severity: Severity | None = None if ready else "info"
    return Finding(
        severity=severity,
        title=f"{plural(len(linears), 'FP8 Linear')} {'is' if len(linears) == 1 else 'are'} wrapped for "
        "FSDP2's all-gather, but nothing is sharded",
        explanation="Without FSDP2 the flag gives nothing. Each weight is a tensor subclass, which costs "
        "host "
        "time and can make saving fail." + ("" if ready else " It is right if fully_shard follows."),
        evidence={
            "wrapped_linears": len(linears),
            "prepared_by_accelerate": by_accelerate,
            "first": linears[0].name,
        },
        treatment=Treatment(
            name="no-float8-all-gather",
            summary="switch the flag off if FSDP2 does not shard the model",
            code=f"export {ALL_GATHER}=false"
            if may_have_converted(facts)
            else convert_again(facts, config=OFF),
        ),
    )


def _sharded(flag: bool) -> Facts:
    layer = float8("up", features={FLAG: flag})
    accelerate = Accelerate(mixed_precision="fp8", prepared=True)
    distributed = Distributed(fsdp2_linears=("up",), shards=8)
    return example(linears=(layer,), distributed=distributed, accelerate=accelerate)


FIRES = _sharded(flag=False)
SILENT = _sharded(flag=True)
