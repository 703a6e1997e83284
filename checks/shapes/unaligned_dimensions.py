"""Sides that FP8 matmuls cannot take

What it finds. A layer's in or out features, or the batch's tokens, are not a multiple of 16. The step raises,
or the layer cannot be converted.

Why it matters. FP8 kernels need every side to be a multiple of 16 (MX formats 32; torchao's blockwise scaling
and NVFP4 128). The weight gradient's matmul has the tokens as its inner side, so in, out and tokens all
count. Other layers raise on a GPU ("divisible by 16"), or a converter skips them.

Fix. Pad to the next multiple: widths in the configuration, tokens in the collator. Leave a head's classes,
and layers across patches or tokens, out of the conversion. `pad_inner_dim=True` (Accelerate's default for
torchao) pads the tokens at the price of a copy, but not in and out. With sequence parallelism over TP ranks,
pad the packed batch to 16 x TP tokens (MXFP8 32 x TP), and mask what you add.

    collator = DataCollatorWithPadding(tokenizer)                         # before: 1003 tokens

    from transformers import DataCollatorWithPadding
    collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)  # after: 1008 tokens

When to ignore it. If only the output head is unaligned and stays in 16 bits: it is not reported.

How it is detected, and limits. fp8doctor checks every FP8 layer's sides, the tokens if the batch is yours,
and Linears that a converter must skip. A layer across patches or tokens has sides that no norm, embedding,
convolution or head has. If it is as wide as the channels (gMixer), fp8doctor advises padding.

References. torch (`_check_scaled_mm_sizes`), torchao 0.18 (`float8_ops.py`), Transformer Engine 2.20
(`assert_dim_for_fp8_exec`). https://github.com/pytorch/ao/issues/571
https://github.com/pytorch/ao/issues/3111 https://github.com/NVIDIA/TransformerEngine/issues/1422
https://github.com/modelscope/ms-swift/issues/9723 https://github.com/NVIDIA/TransformerEngine/issues/2892
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from fp8doctor.analysis.expected_fp8_gemms import multiplied_in_fp8
from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.analysis.layers import FP8_MULTIPLE, counted_work, flops_share_pct, would_be_converted
from fp8doctor.analysis.recipe_support import multiple_of, tokens_divisor, unaligned
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost import rows_seen
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import NOT_RECORDED, Facts, Linear, Network, Workload, recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

WORTH_MENTIONING_PCT = 1.0
"""Percent of the matmul FLOPs below which skipped layers do not matter: half the noise of a step (2%)."""

OF_AN_MLP = re.compile(r"\bmlp\.(gate|up|down)_proj\b")
"""Layers of transformers between ``hidden_size`` and ``intermediate_size``."""

LEAST_WIDTH = 2 * FP8_MULTIPLE
"""Features from which a side may be padded: below, padding costs as much (17 to 32) as FP8 can save."""


@check(
    "SHP001",
    "unaligned-dimensions",
    area="shapes",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def unaligned_dimensions(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = multiplied_in_fp8(facts.network.linears)
    if not fp8 and fp8_was_asked_for(facts) is None:
        return NotApplicable(reason="the model has no FP8 layer, and nothing asks for FP8")
    raising = [linear for linear in fp8 if unaligned(linear)]
    skipped, channels = skipped_by_converters(facts), on_channels(facts.network)
    hardly_counts = little_work(facts)
    tokens = facts.workload.tokens if facts.workload.batch_source == "given" else None
    ranks = max((int(each.features.get("sequence_ranks") or 1) for each in fp8), default=1)
    of_tokens = (each for each in fp8 if ranks > 1 or tokens in (rows_seen(each, facts) or (tokens,)))
    tokens_multiple = max(map(tokens_divisor, of_tokens), default=1)
    tokens_multiple *= ranks if tokens_multiple > 1 else 1
    ragged = tokens is not None and tokens % tokens_multiple != 0
    if not (raising or skipped or ragged):
        return None
    offenders = raising + skipped
    classifiers = [linear for linear in raising if counts_classes(linear, facts.network)]
    across = [linear for linear in raising if not channels(linear)]
    kept = {each.name for each in (*classifiers, *across)}
    small = [each for each in raising if hardly_counts(each) and each.name not in kept]
    kept |= {each.name for each in small}
    padded = [linear for linear in offenders if linear.name not in kept]
    causes, changes = [], [*widened(padded, facts.network), *left_as_they_are(classifiers, across, small)]
    if raising:
        first = raising[0]
        more = f" (and {len(raising) - 1} more of {len(fp8)} FP8 layers)" if len(raising) > 1 else ""
        causes.append(
            f"{first.name} is {first.in_features} x {first.out_features}{more}: FP8 matmuls need multiples "
            f"of {multiple_of(first)}, and torch raises on a GPU"
        )
    if skipped:
        first = skipped[0]
        causes.append(
            f"{plural(len(skipped), 'Linear')} ({flops_share_pct(skipped, facts):.0f}% of the matmul FLOPs) "
            f"cannot be converted, as {first.name} with {first.in_features} x {first.out_features}"
        )
    if ragged:
        causes.append(f"{tokens} {of_a_batch(facts.workload)}/step are not a multiple of {tokens_multiple}")
        if ranks > 1:
            causes[-1] += f", {tokens_multiple // ranks} for each of {ranks} ranks of sequence parallelism"
            changes.append("# pad the packed batch as a whole, and mask the added tokens")
        enters = padded and padded[0] is facts.network.linears[0]  # whose columns are those of the batch
        changes.append(
            pad_the_batch(facts.workload, tokens_multiple, multiple_of(padded[0]) if enters else 1)
        )
    raises = bool(raising or ragged) and not ran_on_a_gpu(facts)
    return Finding(
        severity="error" if raises else "warning",
        breaks="step_raises" if raises else NOT_RECORDED,
        title="; ".join(causes),
        explanation=what_it_means(raising, offenders),
        evidence={
            "raising_layers": len(raising),
            "skipped_layers": len(skipped),
            "fp8_layers": len(fp8),
            "tokens": tokens,
            "first": offenders[0].name if offenders else None,
            "in_features": offenders[0].in_features if offenders else None,
            "out_features": offenders[0].out_features if offenders else None,
        },
        treatment=keep_in_bf16([each.name for each in (*classifiers, *across, *small)], facts)
        if (classifiers or across or small) and not (padded or ragged)
        else Treatment(
            name="pad-dimensions" if offenders else "pad-tokens",
            summary="pad to the next multiple: "
            + ", ".join(
                [
                    *(["widths in the configuration"] if padded else []),
                    *([f"{of_a_batch(facts.workload)} in the collator"] if ragged else []),
                ]
            ),
            code="\n".join(changes),
            kind="sketch",
        ),
    )


def of_a_batch(workload: Workload) -> str:
    """Name what a batch consists of: tokens if it holds sequences."""
    return "tokens" if workload.sequence_length else "rows"


def pad_the_batch(workload: Workload, multiple: int, columns: int) -> str:
    """Write the line that pads the batch: a collator's for sequences, of a matrix its first dimension."""
    padded = f"{workload.tokens} to {padded_tokens(workload, multiple)} {of_a_batch(workload)}"
    if workload.sequence_length:
        return f"collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of={multiple})   # {padded}"
    to = f"(0, {f'-x.shape[-1] % {columns}' if columns > 1 else 0}, 0, -len(x) % {multiple})"
    return f"x = torch.nn.functional.pad(x, {to})   # {padded}"


def skipped_by_converters(facts: Facts) -> list[Linear]:
    """List the Linears that only their sides keep in 16 bits; none if they hardly count."""
    channels, hardly_counts = on_channels(facts.network), little_work(facts)
    skipped = [
        each
        for each in facts.network.linears
        if would_be_converted(each, rewritten=True, padded=True) and unaligned(each) and channels(each)
        if not hardly_counts(each)
    ]
    return skipped if flops_share_pct(skipped, facts) >= WORTH_MENTIONING_PCT else []


def little_work(facts: Facts) -> Callable[[Linear], bool]:
    """Return whether a layer is too narrow, or has too little work in the step, to be worth padding."""
    alike: dict[tuple[int, int], list[Linear]] = {}
    for each in facts.network.linears:
        alike.setdefault((each.in_features, each.out_features), []).append(each)

    @functools.cache
    def hardly_counts(sides: tuple[int, int]) -> bool:
        known = all(recorded(each, "flops_share_pct") for each in alike[sides])
        counted = known or bool(counted_work(facts))
        return min(sides) < LEAST_WIDTH or (
            counted and flops_share_pct(alike[sides], facts) < WORTH_MENTIONING_PCT
        )

    return lambda linear: hardly_counts((linear.in_features, linear.out_features))


def what_it_means(raising: list[Linear], offenders: list[Linear]) -> str:
    """Explain the rule, and what does not get around it here."""
    pads = raising and all(linear.features.get("pad_inner_dim") for linear in raising)
    return (
        "Every side of an FP8 matmul must be a multiple of 16 (MX 32, torchao's blockwise and NVFP4 128). "
        "Otherwise a converted layer raises in the step, and a converter's filter leaves it in 16 bits."
        + (" Do not pad a side that counts classes or patches." if offenders else "")
        + (" pad_inner_dim is on: it pads the tokens, not in and out." if pads else "")
    )


def widened(linears: list[Linear], network: Network) -> list[str]:
    """Write each width at the next multiple: as a setting of transformers, else by distinct layers."""
    lines: dict[str, None] = {}
    for linear in sorted(linears, key=lambda each: (each.in_features, each.out_features)):
        k, n, multiple = linear.in_features, linear.out_features, multiple_of(linear)
        settings = {side: setting(side, linear, network) for side in (k, n) if side % multiple}
        new = {f"config.{name} = {round_up(side, multiple)}": f"{side}" for side, name in settings.items()}
        if not all(settings.values()):
            wide = f"nn.Linear({round_up(k, multiple)}, {round_up(n, multiple)})"
            new = {wide: f"nn.Linear({k}, {n})"}
        lines |= {f"{line}   # was {old}: multiples of {multiple}": None for line, old in new.items()}
    return list(lines)


def setting(side: int, linear: Linear, network: Network) -> str | None:
    """Name the setting that makes a side this wide; None outside transformers, or if unclear."""
    if not network.get("save_pretrained"):
        return None
    if side == network.get("vocabulary"):
        return "vocab_size"
    between = OF_AN_MLP.search(linear.name) and side != network.get("hidden_size")
    return "intermediate_size" if between else None


def counts_classes(linear: Linear, network: Network) -> bool:
    """Whether the width of this layer's output is a number of classes; a vocabulary can be padded."""
    return linear.role == "head" and linear.out_features != network.get("vocabulary")


def on_channels(network: Network) -> Callable[[Linear], bool]:
    """Find the Linears between channels: as wide as a norm, or leading to a Linear that is.

    A Linear of an MLP-Mixer runs over patches, and only its own kind is as wide. If few are connected like
    this, the widths seen are not the model's channels, and every Linear may lie between channels.
    """
    widths: set[int] = set(network.get("channel_widths", ()))
    widths |= {linear.in_features for linear in network.linears if linear.role == "head"}
    sides = [frozenset((linear.in_features, linear.out_features)) for linear in network.linears]
    while new := [each for each in sides if each & widths and not each <= widths]:
        widths.update(*new)
    few = sum(each <= widths for each in sides) < len(sides) / 2
    return lambda linear: few or linear.in_features in widths


def left_as_they_are(classifiers: list[Linear], across: list[Linear], small: list[Linear]) -> list[str]:
    """Write a line for each layer not to pad: heads, shapes across the channels, and little work."""
    shapes = {(each.in_features, each.out_features): each.name for each in reversed(across)}
    return (
        [
            f"# {each.name}: do not pad its {each.out_features} classes; leave it out of the conversion"
            for each in classifiers
        ]
        + [
            f"# {name}: no norm, embedding or convolution is {k} or {n} wide; if that counts patches or "
            "tokens, do not pad it: leave it out of the conversion"
            for (k, n), name in sorted(shapes.items())
        ]
        + [
            f"# {name}: {k} x {n} is too little work to pad for; leave it out of the conversion"
            for (k, n), name in {(each.in_features, each.out_features): each.name for each in small}.items()
        ]
    )


def round_up(size: int, multiple: int) -> int:
    """Return the next multiple that is not smaller."""
    return -(-size // multiple) * multiple


def padded_tokens(workload: Workload, multiple: int) -> int:
    """Count the step's tokens after its sequence, or its batch if it has no sequence, is padded."""
    if workload.sequence_length and workload.batch_size:
        return workload.batch_size * round_up(workload.sequence_length, multiple)
    return round_up(workload.tokens or 0, multiple)


def _mlp(in_features: int, tokens: int) -> Facts:
    layer = float8("up", in_features=in_features, features={"pad_inner_dim": False})
    batch = {"batch_source": "given", "batch_size": 1, "sequence_length": tokens, "tokens": tokens}
    return example(variables={}, linears=(layer,), **batch)


FIRES = _mlp(in_features=1000, tokens=1003)
SILENT = _mlp(in_features=1024, tokens=1024)
