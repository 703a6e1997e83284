"""FSDP2 gathers BF16 weights for FP8 layers

FSDP2 collects a block's weights before its forward and again before its backward. A tensorwise Float8Linear
then casts them to FP8. Sent as FP8 they are half the bytes, and each shard is cast once. Each weight needs
its scale before it is sent: without `precompute_float8_dynamic_scale_for_fsdp`, each does its own tiny
all-reduce, and the computation waits for every one. On one H200 a step took 65.3 ms with it and 70.5 ms
without (`h200-fsdp2`, `h200-fsdp2_no_precompute`).

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)                 # before

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config)  # after; then fully_shard(model)

Call `precompute_float8_dynamic_scale_for_fsdp(model)` after each `optimizer.step()`; Accelerate does. Without
FSDP2 the flag gives nothing and wraps every weight in a tensor subclass, which costs host time and can make
saving fail. Accelerate sets it by default, even on one GPU; switch it off with
ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false. Ignore it if `fully_shard` still follows. With one scale
per row FSDP2 must send BF16; this is not reported. Transformer Engine's layers are gathered in FP8 if the
model was built under `quantized_model_init`; the optimizer then needs master weights.
https://docs.pytorch.org/ao/main/workflows/training.html
https://pytorch.org/blog/training-using-float8-fsdp2/
https://github.com/NVIDIA/TransformerEngine/issues/1188
"""

from fp8doctor import kit

FLAG = "enable_fsdp_float8_all_gather"
PRECOMPUTE = "precompute_float8_dynamic_scale_for_fsdp"

PRIMARY = "primary_weights_in_fp8"
QUANTIZED = kit.Treatment(
    name="quantized-weights",
    summary="build the model under quantized_model_init, with masters in the optimizer",
    code="with te.quantized_model_init(recipe=recipe):   # as in te.autocast; fp8_model_init before 2.9\n"
    "    model = build_model()   # then fully_shard(model): Transformer Engine >= 2.10\n"
    "optimizer = te.optimizers.FusedAdam(model.parameters(), master_weights=True)   # >= 2.11",
)


@kit.check("DST001", "fp8-all-gather-off", severity="warning", changes_fp8=True)
def fp8_all_gather_off(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    fp8 = [each for each in facts.network.linears if each.stack == "torchao" and FLAG in each.features]
    tensorwise = [each for each in fp8 if each.recipe == "tensorwise"]
    distributed = facts.training.distributed
    sharded = set(distributed.fsdp2_linears) if distributed else set()
    in_te = [each for each in facts.network.fp8 if each.name in sharded and PRIMARY in each.features]
    if distributed and (whole := [each for each in in_te if not each.features[PRIMARY]]):
        return gathered_in_bf16(whole, distributed.shards or 1, QUANTIZED)
    if not tensorwise:
        return kit.NotApplicable(reason="no tensorwise Float8Linear in the model")
    in_bf16 = [linear for linear in tensorwise if linear.name in sharded and not linear.features[FLAG]]
    wrapped = [linear for linear in tensorwise if linear.features[FLAG]]
    if in_bf16 and distributed:
        return gathered_in_bf16(in_bf16, distributed.shards or 1, all_gather(facts))
    if wrapped and not sharded:
        return wrapped_for_nothing(wrapped, facts)
    return None if distributed else kit.NotApplicable(reason="one process")


def all_gather(facts: kit.Facts) -> kit.Treatment:
    lines = f"config = Float8LinearConfig({FLAG}=True)\n{kit.conversion.conversion(facts, config='config')}"
    if not kit.fp8_request.may_have_converted(facts):  # Accelerate (1.15) computes the scales by itself
        lines += "     # before fully_shard(model)\n"
        lines += f"# and after every optimizer.step(): {PRECOMPUTE}(model)"
    summary = f"convert with {FLAG}=True, before fully_shard"
    return kit.Treatment(name="float8-all-gather", summary=summary, code=lines)


def gathered_in_bf16(linears: list[kit.Linear], shards: int, fix: kit.Treatment) -> kit.Finding:
    gib = sum(linear.parameters for linear in linears) * 2 / 2**30
    kept = sum(each.parameters for each in linears if kit.memory.compiler_keeps(each)) / 2**30
    price = f" Compiled blocks then keep up to {kept:.2g} GiB of it until the backward." if kept else ""
    return kit.Finding(
        severity=None if shards > 1 and fix is not QUANTIZED else "info",
        title=f"FSDP2 gathers the weights of {kit.plural(len(linears), 'FP8 Linear')} in BF16",
        explanation=f"Each of {shards} processes collects {gib:.2g} GiB in BF16 before the forward and again "
        f"before the backward, and casts them afterwards. Sent as FP8 they are half.{price}",
        evidence={"linears": len(linears), "shards": shards, "gathered_gib": gib, "first": linears[0].name},
        treatment=fix,
    )


def wrapped_for_nothing(linears: list[kit.Linear], facts: kit.Facts) -> kit.Finding:
    """Report the flag without FSDP2: information until the model is surely ready to train."""
    training, prepared = facts.training, kit.fp8_request.was_prepared(facts)
    ready = prepared or bool(training.gradients_seen) or bool(training.optimizer_stepped)
    fix = kit.treatments.ORDINARY_WEIGHTS
    if not kit.fp8_request.may_have_converted(facts):
        code = kit.conversion.conversion(facts, config=f"Float8LinearConfig({FLAG}=False)")
        words = "switch the flag off: nothing shards the model"
        fix = kit.Treatment(name="no-float8-all-gather", summary=words, code=code)
    return kit.Finding(
        severity=None if ready else "info",
        title=f"FSDP2's FP8 all-gather wraps {kit.plural(len(linears), 'Linear')}, and nothing is sharded",
        explanation="Without FSDP2 the flag gives nothing. Each weight is a tensor subclass, which costs "
        f"host time and can make saving fail.{'' if ready else ' It is right if fully_shard follows.'}",
        evidence={"wrapped": len(linears), "prepared_by_accelerate": prepared, "first": linears[0].name},
        treatment=fix,
    )


@kit.check("DST001", "scale-precompute-missing", severity="warning", changes_fp8=True, was="DST002")
def scale_precompute_missing(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    distributed = facts.training.distributed
    sharded = distributed.fsdp2_linears if distributed else ()
    linears = [each for each in facts.network.linears if each.name in sharded]
    gathered = [each for each in linears if each.features.get("float8_all_gather_weight")]
    if not gathered:
        return kit.NotApplicable(reason="FSDP2 gathers no weight in FP8")
    without = [linear for linear in gathered if not linear.features.get("precomputed_scale")]
    if not without:
        return None
    stepped = bool(facts.training.optimizer_stepped)
    yet = "The optimizer took a step, but nothing computed the scales after it."
    if not stepped:
        yet = "fp8doctor saw no optimizer step yet, after which the scales are computed."
    return kit.Finding(
        severity=None if stepped else "info",
        title=f"{len(without)} of {len(gathered)} weights gathered in FP8 have no precomputed scale",
        explanation="Each reduces its own scale before its all-gather, in each forward and again in each "
        f"backward. {yet}",
        evidence={"without_scale": len(without), "gathered": len(gathered), "optimizer_stepped": stepped},
        treatment=kit.Treatment(
            name="precompute-scales",
            summary="compute all scales in one call after each optimizer step",
            code=f"from torchao.float8 import {PRECOMPUTE}\n"
            f"{PRECOMPUTE}(model)   # after every optimizer.step()",
        ),
    )


def _sharded(flag: bool, precomputed: bool) -> kit.Facts:
    scaled = {"float8_all_gather_weight": flag, "precomputed_scale": precomputed}
    layers = (kit.float8("up", features={FLAG: flag, **scaled}),)
    distributed = kit.facts.Distributed(fsdp2_linears=("up",), shards=8)
    of_job = {"accelerate": None, "optimizer_stepped": True, "gradients_seen": True}
    return kit.example(linears=layers, distributed=distributed, **of_job)


FIRES = (_sharded(flag=False, precomputed=False), _sharded(flag=True, precomputed=False))
SILENT = _sharded(flag=True, precomputed=True)
