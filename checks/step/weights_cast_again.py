"""Every micro-batch casts the weights again

Weights change once per optimizer step, so the micro-batches of a step can share their FP8 copies.
Transformer Engine keeps them if `is_first_microbatch` says which micro-batch is the first. Without it,
or with True in each of them, every micro-batch casts every weight.

    for batch in micro_batches:                                            # before
        loss = model(batch)

    for number, batch in enumerate(micro_batches):                         # after
        loss = model(batch, is_first_microbatch=number == 0)               # and to each layer

The kept copies take one byte per weight, two on GPUs such as H100 and RTX 4090. With Transformer Engine
1.6 and 1.7, leave the argument out: from the second micro-batch on their results were wrong.

Ignore it if your script sets the argument outside of the step that fp8doctor watched.
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
https://github.com/NVIDIA-NeMo/Automodel/issues/2282
https://github.com/NVIDIA/Megatron-LM/issues/629
"""

from fp8doctor import kit


@kit.check("STP008", "weights-cast-again", severity="warning", changes_fp8=True)
def weights_cast_again(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    keeping = [linear for linear in facts.network.fp8 if kit.memory.keeps_copies(linear)]
    count = kit.cost.micro_batches(facts)
    if not keeping or count < 2:
        return kit.NotApplicable(reason="no step with several micro-batches in Transformer Engine")
    told = facts.training.first_microbatch
    if told and (len(told) < 2 or not all(told)):
        return None
    layers = kit.plural(len(keeping), "layer")
    return kit.Finding(
        title=f"Each of {count} micro-batches casts the weights of {layers} again",
        explanation=f"is_first_microbatch {'is True' if told else 'is not passed'} in each micro-batch that "
        "was watched. The optimizer changes weights once per step, so one cast is enough.",
        evidence={"micro_batches": count, "watched": len(told)},
        treatment=kit.Treatment(
            name="first-microbatch",
            summary="pass is_first_microbatch=True in the first micro-batch only",
            code="for number, batch in enumerate(micro_batches):\n"
            "    loss = model(batch, is_first_microbatch=number == 0)   # pass it on to each of these layers",
            kind="sketch",
        ),
    )


def _four_micro_batches(*told: bool) -> kit.Facts:
    layers = (kit.float8(stack="transformer_engine", recipe="current"),)
    return kit.example(linears=layers, accumulate=4, first_microbatch=told)


FIRES = _four_micro_batches(True, True)
SILENT = _four_micro_batches(True, False)
