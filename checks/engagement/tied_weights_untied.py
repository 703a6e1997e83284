"""The output head is no longer tied to the embedding

What it finds. Weights that should be one Parameter, such as embedding and head, became two.

Why it matters. Tied, embedding and head are one matrix with one gradient. A converter that creates a new
layer and copies the weight makes two. They train independently, so it is another model than you asked for.
Parameters, gradients and optimizer state grow by one vocabulary matrix. A checkpoint saves and loads only one
of the two, so the other is lost.

Fix. Tie them again after the conversion, or leave the head out of it.

    model, optimizer = accelerator.prepare(model, optimizer)  # before: two matrices

    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.unwrap_model(model).tie_weights()             # after: one again

When to ignore it. If you want untied weights; then say so in the model's configuration
(`tie_word_embeddings=False`).

How it is detected, and limits. fp8doctor compares the ties that a transformers model declares, in its
configuration and in its checkpoint, with the Parameters that exist now. While it loads a model file, it also
sees which weights were still shared when the conversion replaced their layer. It does not see other ties.
torchao keeps the same Parameter, so ties survive it, except for FSDP's float8 all-gather.

References. accelerate 1.15 `convert_model` creates te.Linear and copies the weight; with TE 2.20 on an H200,
a tied Llama went from 74 to 75 parameter tensors.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/transformer_engine.py
https://huggingface.co/docs/transformers/main_classes/model
"""

from __future__ import annotations

from fp8doctor.analysis.layers import in_python
from fp8doctor.facts import Facts
from fp8doctor.facts.examples import example, float8
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
    if not facts.network.fp8:
        return NotApplicable(reason="no FP8 layer in the model")
    declared = facts.network.broken_ties
    conversion = facts.get("training.conversion")
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
        + ". Now there are two: they train independently, and a checkpoint keeps only one.",
        evidence={"untied": len(pairs), "first": one, "was": other, "seen_during_conversion": len(seen)},
        treatment=Treatment(
            name="tie-again",
            summary="tie the weights again after the conversion",
            code=("model.tie_weights()" if declared else f"{here} = {there}")
            + "   # right after the conversion",
        ),
    )


def _llama(*broken: tuple[str, str]) -> Facts:
    return example(linears=(float8("lm_head"),), broken_ties=broken, conversion=None)


FIRES = _llama(("lm_head.weight", "model.embed_tokens.weight"))
SILENT = _llama()
