"""A narrow head or router in FP8

What it finds. An output head with few classes, or a router, was converted to FP8 and is slower than in BF16.

Why it matters. A head with a handful of classes and a router with a few dozen experts read all activations to
compute a few columns. Memory bandwidth limits such a matmul, and casting the activations moves more bytes
than the matmul itself. Rounding here also goes straight into the loss or into the choice of experts.

Fix. Leave the layer out of the conversion (torchao 0.18).

    convert_to_float8_training(model)  # before

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "score")  # after

When to ignore it. If only its rounding is reported: a head as wide as a vocabulary can gain speed with enough
tokens, and is only information.

How it is detected, and limits. On a GPU the trial times the layer in BF16 and in FP8 with compiled casts.
Otherwise it is estimated, and must be 25% slower, with 65,536 tokens in a micro-batch too. If the trial timed
the whole step without this layer in FP8 and gained less than that, nothing is reported.

References. torchtitan's configurations leave out `output` and `router.gate`. DeepSeek-V3 keeps output head
and gating in BF16 or FP32 (arXiv 2412.19437, 3.3.1). https://github.com/pytorch/torchtitan
https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

from fp8doctor.analysis.arms import savings
from fp8doctor.analysis.expected_fp8_gemms import kept_in_bf16
from fp8doctor.analysis.layer_gain import gains
from fp8doctor.analysis.layers import makes_logits
from fp8doctor.analysis.losing_layers import APART, acquitted, at_least, basis, in_step, losing_apart, saving
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import plural

GOES_INTO = {"head": "the loss", "router": "the choice of the experts"}


@check("SHP004", "narrow-head", area="shapes", severity="warning", changes_fp8=True)
def narrow_head(facts: Facts) -> Finding | NotApplicable | None:
    kept = kept_in_bf16(facts.network.linears)
    apart = [each for each in facts.network.fp8 if each.role in APART and each.name not in kept]
    if not apart:
        return NotApplicable(reason="no head or router is in FP8")
    wide = [linear for linear in apart if makes_logits(linear, facts.network)]
    if not wide and not gains(facts).keys() & {linear.name for linear in apart}:
        return NotApplicable(reason="its shape, recipe, tokens or GPU datasheet is unknown")
    found, saved = losing_apart(facts), savings(facts).get(KEEP_IN_BF16)
    if not found or acquitted(found.values(), saved):
        return vocabulary_in_fp8(wide[0], facts) if wide else None
    layers = [linear for linear in apart if linear.name in found]
    first, gain = layers[0], found[layers[0].name]
    roles = {role: sum(linear.role == role for linear in layers) for role in APART}
    counted = " and ".join(plural(count, role) for role, count in roles.items() if count)
    return Finding(
        title=f"{counted} in FP8 ({first.in_features} to {first.out_features} features) "
        f"{'is' if len(layers) == 1 else 'are'} slower than in BF16: {first.name}",
        explanation=f"{basis([gain])}: its matmuls take {gain.bf16_ms:.3f} ms in BF16 and {gain.fp8_ms:.3f} "
        f"ms in FP8, its casts {at_least([gain])}{gain.least_casts_ms:.3f} ms. FP8 rounding there goes "
        f"straight into {GOES_INTO[first.role]}.{in_step(saved)}",
        evidence={
            "layers": len(layers),
            "first": first.name,
            "role": first.role,
            "in_features": first.in_features,
            "out_features": first.out_features,
            "tokens": facts.workload.tokens,
            "bf16_gemms_ms": gain.bf16_ms,
            "fp8_gemms_ms": gain.fp8_ms,
            "casts_ms": gain.least_casts_ms,
            "timed_alone": gain.measured,
        },
        saving_ms=saving(found.values()),
        treatment=keep_in_bf16(tuple(linear.name for linear in layers), facts),
    )


def vocabulary_in_fp8(head: Linear, facts: Facts) -> Finding:
    """Report a head that can gain speed, but whose rounding goes into the loss."""
    return Finding(
        severity="info",
        title=f"The output head over {head.out_features:,} tokens is in FP8: {head.name}",
        explanation="It need not be slower, but its rounding goes straight into the loss. Recipes that are "
        "known to train well keep the head in BF16.",
        evidence={
            "first": head.name,
            "in_features": head.in_features,
            "out_features": head.out_features,
            "compiled": head.compiled is not None if recorded(head, "compiled") else None,
        },
        treatment=keep_in_bf16([head.name], facts),
    )


def _classifier(classes: int) -> Facts:
    up = float8("up", in_features=4096, flops_share_pct=50.0)
    head = float8("score", in_features=4096, out_features=classes, role="head", flops_share_pct=50.0)
    return example(linears=(up, head), batch_source="given", tokens=8192)


FIRES = _classifier(classes=16)
SILENT = _classifier(classes=32000)
