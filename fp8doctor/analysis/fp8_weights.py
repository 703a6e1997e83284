"""FP8 copies of weights, and Transformer Engine's weights in FP8 alone."""

from collections.abc import Iterable, Sequence

from fp8doctor.cost.matmul_counts import gemms
from fp8doctor.facts import Arm, Facts, Gpu, Linear, recorded
from fp8doctor.finding import Treatment
from fp8doctor.gpus import GpuSpec
from fp8doctor.recipes import TRANSFORMER_ENGINE, of_stack, stack_of

MASTER_BYTES = 11.0
"""Bytes of optimizer state for a trainable parameter above which fp32 master weights are among it: Adam keeps
12 with them, 8 in fp32 without."""

NEEDS_TRANSPOSED = ("8.9", "9.0", "12.0", "12.1")
"""Compute capabilities whose FP8 matmuls take one layout only. Source: ``is_non_tn_fp8_gemm_supported`` in
``pytorch/utils.py`` of Transformer Engine 2.20; NVIDIA/TransformerEngine #1880."""


def copies_on(gpu: Gpu | GpuSpec | None) -> int:
    """Count the FP8 copies of a weight: two if the GPU, or none is known, needs a transposed one."""
    return 2 if gpu is None or gpu.compute_capability in NEEDS_TRANSPOSED else 1


def keeps_copies(linear: Linear) -> bool:
    return stack_of(linear).keeps_copies and not linear.get("features", {}).get("primary_weights_in_fp8")


def keeps_transposed(linear: Linear) -> bool:
    """Return whether a compiled block keeps the transposed copy of a weight that FSDP2 gathers in FP8.

    FSDP2 frees the gathered weight after the forward, but not that copy. Seen in the saved tensors of a Llama
    (torch 2.13, torchao 0.18, a CPU): 79% of the blocks' weights, none of them if the blocks are checkpointed
    or FSDP2 gathers BF16. ``force_recompute_fp8_weight_in_bwd`` changes nothing.
    """
    return bool(linear.get("features", {}).get("float8_all_gather_weight")) and compiler_keeps(linear)


def compiler_keeps(linear: Linear) -> bool:
    """Return whether compiled code decides what the forward of this layer keeps."""
    return linear.compiled is not None and linear.get("checkpointed") is None


def copies_gib(facts: Facts, layers: Iterable[Linear]) -> float:
    """Sum up the FP8 copies of Transformer Engine's weights, and of those that FSDP2 gathers in FP8."""
    copies = copies_on(next((gpu for gpu in facts.get("gpus", ()) if gpu.visible), None))
    return (
        sum(
            (copies * keeps_copies(each) + keeps_transposed(each))
            * each.in_features
            * each.out_features
            * gemms(each)
            for each in layers
        )
        / 2**30
    )


def holds_master_weights(timed: Arm, facts: Facts) -> bool:
    """Return whether the optimizer holds fp32 master weights, by its state's size."""
    memory = timed.get("memory")
    trained = facts.get("network.trainable_parameters", 0)
    return memory is not None and trained > 0 and memory.optimizer_gib * 2**30 > MASTER_BYTES * trained


def frozen_fp8_weights(layers: Sequence[Linear]) -> Treatment:
    """Keep frozen weights in FP8 only: without updates they need no master weights."""
    return Treatment(
        name="fp8-weights",
        summary="keep the frozen weights in FP8 alone",
        code=f"{_quantized_model_init(layers)}:   # te.fp8_model_init before Transformer Engine 2.9\n"
        "    model = build_model()",
    )


def trained_fp8_weights(layers: Sequence[Linear], facts: Facts) -> Treatment:
    """Keep trained weights in FP8, and their fp32 master weights in the optimizer."""
    optimizer = facts.get("training.optimizer")
    adam = ", adam_w_mode=False" if optimizer and optimizer.endswith(".Adam") else ""
    return Treatment(
        name="fp8-weights",
        summary="keep the weights in FP8 and their fp32 master weights in the optimizer; with an ordinary "
        "optimizer the model stops learning",
        code='kept = ("lr", "betas", "eps", "weight_decay")\n'
        "settings = {name: optimizer.defaults[name] for name in kept}\n"
        f"{_quantized_model_init(layers, ', preserve_high_precision_init_val=True')}:"
        "   # te.fp8_model_init before Transformer Engine 2.9\n"
        "    model = build_model()\n"
        "trained = [parameter for parameter in model.parameters() if parameter.requires_grad]\n"
        f"optimizer = te.optimizers.FusedAdam(trained, master_weights=True{adam}, **settings)\n"
        "for parameter in trained:\n"
        '    if hasattr(parameter, "get_high_precision_init_val"):\n'
        "        master = parameter.get_high_precision_init_val()   # after a checkpoint: its BF16 weight\n"
        "        optimizer.initialize_state(parameter, False)\n"
        '        optimizer.set_scaled_state(parameter, "master_param", master.to(parameter.device).float())\n'
        "        parameter.clear_high_precision_init_val()",
    )


def _quantized_model_init(layers: Sequence[Linear], settings: str = "") -> str:
    recipes = {linear.recipe for linear in layers if recorded(linear, "recipe")}
    config = next((each.config for each in of_stack(TRANSFORMER_ENGINE.name) if {each.name} == recipes), "")
    recipe = f", recipe={config}" if config else ""
    return f"with te.quantized_model_init(enabled=True{recipe}{settings})"
