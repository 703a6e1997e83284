"""The output head is no longer tied to the embedding

Looks at: the ties that a transformers model declares, by its configuration and by what its
checkpoint really tied, against the Parameters that are there now. Of any model file that fp8doctor
loads also which weights were still shared when the conversion replaced their layer.

Why it costs time. Tied, embedding and head are one matrix with one gradient. A converter that makes
a new layer and copies the weight turns them into two. Both train, apart from each other, so the
model is another one than was asked for. A vocabulary's worth of parameters, gradients and optimizer
state is added. A checkpoint saves and loads only one of them, so the other is lost.

What to do. Tie again after the conversion, or leave the head out of it.

    model, optimizer = accelerator.prepare(model, optimizer)            # before: two matrices
    accelerator.unwrap_model(model).tie_weights()                       # after: one again

torchao keeps the very same Parameter in the converted layer, so ties survive it, except where the
weight is wrapped for FSDP's float8 all-gather.

Evidence: accelerate 1.15 `convert_model` builds te.Linear and copies the weight; with real TE
2.20 on an H200 a tied Llama went from 74 to 75 parameter tensors.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/transformer_engine.py
https://huggingface.co/docs/transformers/main_classes/model
"""

from __future__ import annotations

from fp8doctor.analysis.layers import in_python
from fp8doctor.facts import Facts, Linear, Network, Training, recorded
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check


@check(
    "MOD008",
    "tied-weights-untied",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def tied_weights_untied(facts: Facts) -> Finding | NotApplicable | None:
    if not any(linear.use == "training" for linear in facts.network.linears):
        return NotApplicable(reason="no FP8 layer in the model")
    declared = facts.network.broken_ties
    conversion = facts.training.conversion if recorded(facts, "training.conversion") else None
    seen = conversion.untied if conversion else ()
    pairs = tuple({frozenset(pair): pair for pair in (*seen, *declared)}.values())
    if not pairs:
        return None
    one, other = pairs[0]
    here, there = (in_python(each, facts.network, unwrapped=True) for each in (one, other))
    return Finding(
        title=f"{one} is no longer tied to {other}"
        + (f", nor {len(pairs) - 1} more" if len(pairs) > 1 else ""),
        explanation=(
            "The conversion replaced a layer whose weight another module still holds"
            if seen
            else "The model declares them as one parameter"
        )
        + ", and now there are two: both train, apart, and a checkpoint keeps one of them.",
        evidence={"untied": len(pairs), "first": one, "was": other, "seen_during_conversion": len(seen)},
        treatment=Treatment(
            name="tie-again",
            summary="tie the weights again after the conversion",
            code=("model.tie_weights()" if declared else f"{here} = {there}")
            + "   # right after the conversion",
        ),
    )


def _llama(*broken: tuple[str, str]) -> Facts:
    head = Linear(name="lm_head", use="training", stack="transformer_engine")
    return Facts(network=Network(linears=(head,), broken_ties=broken), training=Training(conversion=None))


SICK = _llama(("lm_head.weight", "model.embed_tokens.weight"))
HEALTHY = _llama()
