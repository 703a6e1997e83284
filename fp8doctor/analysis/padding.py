"""Sides and rows that matmul kernels cannot take: which may be padded, and the lines that pad them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from msgspec import Struct

from fp8doctor.analysis.layers import FP8_MULTIPLE
from fp8doctor.analysis.own_step import as_is
from fp8doctor.analysis.recipe_support import multiple_of, tokens_divisor
from fp8doctor.cost.gemm import MULTIPLE, step_gemms_ms
from fp8doctor.cost.matmul_counts import calls_of, gemms, is_grouped, micro_batches, rows_of, rows_seen
from fp8doctor.cost.step_cost import modelled_saving, modelled_step
from fp8doctor.facts import Facts, Linear, Network, Unrecorded, Workload
from fp8doctor.finding import Saving, Treatment
from fp8doctor.gpus import GpuSpec, modelled_gpu
from fp8doctor.wording import plural

OF_AN_MLP = re.compile(r"\bmlp\.(gate|up|down)_proj\b")
"""Layers of transformers between ``hidden_size`` and ``intermediate_size``."""

LEAST_WIDTH = 2 * FP8_MULTIPLE
"""Features from which a side may be padded: below, padding costs as much (17 to 32) as FP8 can save."""

LITTLE_WORK_PCT = 1.0
"""Percent of the matmul FLOPs below which padding does not matter: half the noise of a step (2%)."""


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def why_not_pad(facts: Facts) -> Callable[[Linear], str | None]:
    """Return a function that says why a layer's sides must not, or need not, be padded."""
    network, between_channels = facts.network, _between_channels(facts.network)

    def why(linear: Linear) -> str | None:
        k, n = linear.in_features, linear.out_features
        if linear.use == "training" and linear.role == "head" and n != network.get("vocabulary"):
            return f"do not pad its {n} classes"
        if not between_channels(linear):
            return (
                f"no norm, embedding or convolution is {k} or {n} wide; if that counts patches or tokens, do "
                "not pad it"
            )
        return f"{k} x {n} is too little work to pad for" if min(k, n) < LEAST_WIDTH else None

    return why


def _between_channels(network: Network) -> Callable[[Linear], bool]:
    """Find the Linears as wide as a norm, or leading to a Linear that is; an MLP-Mixer's run over patches.

    If few are connected like this, the widths seen are not the model's channels, and every Linear counts.
    """
    widths = {*network.get("channel_widths", ())}
    widths |= {linear.in_features for linear in network.linears if linear.role == "head"}
    sides = [frozenset((linear.in_features, linear.out_features)) for linear in network.linears]
    while new := [each for each in sides if each & widths and not each <= widths]:
        widths.update(*new)
    few = sum(each <= widths for each in sides) < len(sides) / 2
    return lambda linear: few or linear.in_features in widths


def pad_sides(padded: Sequence[Linear], kept: dict[str, str], facts: Facts) -> Treatment:
    """Pad these layers' sides; ``kept`` has the reason for each layer to leave out instead."""
    network, lines = facts.network, dict[str, None]()
    for linear in sorted(padded, key=lambda each: (each.in_features, each.out_features)):
        k, n, multiple = linear.in_features, linear.out_features, multiple_of(linear)
        named = [(_setting(side, linear, network), side) for side in (k, n) if side % multiple]
        if all(setting for setting, _ in named):
            new = {f"config.{setting} = {round_up(side, multiple)}": str(side) for setting, side in named}
        else:
            new = {f"nn.Linear({round_up(k, multiple)}, {round_up(n, multiple)})": f"nn.Linear({k}, {n})"}
        lines |= {f"{line}   # was {old}: multiples of {multiple}": None for line, old in new.items()}
    if padded[0] is network.linears[0] and not facts.workload.get("sequence_length"):
        lines[f"x = torch.nn.functional.pad(x, (0, -x.shape[-1] % {multiple_of(padded[0])}))"] = None
    lines |= {f"# {name}: {why}; leave it out of the conversion": None for name, why in kept.items()}
    return Treatment(
        name="pad-dimensions",
        summary="pad widths to the next multiple, in the configuration",
        code="\n".join(lines),
        kind="sketch",
    )


def _setting(side: int, linear: Linear, network: Network) -> str | None:
    """Name the setting that makes a side this wide; None outside transformers, or if unclear."""
    if not network.get("save_pretrained"):
        return None
    if side == network.get("vocabulary"):
        return "vocab_size"
    between = OF_AN_MLP.search(linear.name) and side != network.get("hidden_size")
    return "intermediate_size" if between else None


def refused_rows(fp8: Sequence[Linear], facts: Facts) -> dict[str, tuple[int, int]]:
    """Find the FP8 layers that multiply rows which raise in the backward -> the rows, and their multiple.

    Raises `Unrecorded` if a router decides them and nobody counted them.
    """

    def is_aligned(linear: Linear) -> bool:
        seen = rows_seen(linear, facts)
        each_has = len(seen) >= linear.gemms  # a forward on fake tensors counts the rows of all
        return each_has and any(seen) and all(rows % multiple_of(linear) == 0 for rows in seen)

    found: dict[str, tuple[int, int]] = {}
    given = [each for each in fp8 if not is_grouped(each) and facts.workload.batch_source == "given"]
    for linear in given:
        multiple, ranks = tokens_divisor(linear), sequence_ranks(linear)
        tokens = 0 if linear.role == "experts" else facts.workload.tokens or 0  # a router decides theirs
        seen = (ranks == 1 and rows_seen(linear, facts)) or (tokens,)
        multiple *= ranks if multiple > 1 else 1
        if rows := next((rows for rows in seen if rows % multiple), None):
            found[linear.name] = rows, multiple
    padded = "pad_token_groups_for_grouped_mm"
    grouped = [
        each
        for each in fp8
        if is_grouped(each) and each.features.get(padded) is not True and not is_aligned(each)
    ]
    if grouped and not found:
        raise Unrecorded(
            Workload,
            "rows",
            f"each expert's rows in {plural(len(grouped), 'weight')} (first: {grouped[0].name}); a router "
            f"decides them, and your code must pad them to multiples of {max(map(multiple_of, grouped))}",
        )
    return found


def sequence_ranks(linear: Linear) -> int:
    return int(linear.features.get("sequence_ranks") or 1)


def pad_batch(workload: Workload, multiple: int, linear: Linear) -> Treatment:
    """Pad the batch for this layer: sequences in the collator, of a matrix its first dimension."""
    tokens, length = workload.tokens or 0, workload.sequence_length
    if length:
        padded, what = (workload.batch_size or 1) * round_up(length, multiple), "tokens"
        line = f"collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of={multiple})"
    else:
        padded, what = round_up(tokens, multiple), "rows"
        line = f"x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % {multiple}))"
    line += f"   # {tokens} to {padded} {what}"
    if (ranks := sequence_ranks(linear)) > 1:
        line += (
            f"\n# {multiple // ranks} for each of {ranks} ranks: pad the packed batch, and mask what you add"
        )
    return Treatment(
        name="pad-tokens",
        summary=f"pad the batch to a multiple of {multiple} {what}",
        code=line,
        kind="sketch",
    )


PADDED = 64
"""Elements to pad a 16-bit side to: 128 bytes, as NVIDIA asks on an A100; 8 are enough elsewhere."""


class Slow(Struct, frozen=True):
    """16-bit layers whose rows do not begin at 16 bytes, and their matmuls' times in a step."""

    layers: list[Linear]
    now_ms: float
    padded_ms: float
    saving: Saving
    step_ms: float
    profiled_ms: float | None
    """All 16-bit matmuls of the profiled step; None if it was not profiled."""


def slow_in_16_bits(facts: Facts) -> Slow | None:
    """Find layers whose padding saves time; None if neither step nor GPU are known.

    The saving is modelled, and at most what the profile leaves. Without a profile no compiled layer counts:
    Inductor may pad it.
    """
    gpu, timed, linears = modelled_gpu(facts), as_is(facts), facts.network.linears
    step_ms = timed.get("step_ms") if timed else None
    breakdown = timed.get("breakdown") if timed and step_ms and facts.trial.device != "cpu" else None
    profiled = breakdown.families_ms.get("gemm_16bit", 0.0) if breakdown else None
    if profiled is None:
        step_ms = modelled.step_ms if (modelled := modelled_step(facts)) else None
    if step_ms is None:
        _ = [each.flops_per_token for each in linears if each.get("role") == "experts"]  # unknown without
    if gpu is None or step_ms is None or facts.workload.tokens is None:
        return None
    in_16_bits = [each for each in linears if each.use == "none"]
    slow = [
        each
        for each in in_16_bits
        if (each.in_features % MULTIPLE or each.out_features % MULTIPLE)
        and each.dtype in ("bfloat16", "float16")
        and each.role != "experts"
        and (profiled is not None or each.compiled is None)
    ]
    now, padded = (_gemms_ms(slow, facts, gpu, pad=pad) for pad in (False, True))
    most = now - padded
    if profiled is not None:
        most = min(most, profiled - _gemms_ms(in_16_bits, facts, gpu, pad=True))
    return Slow(slow, now, padded, modelled_saving(most, gpu.name), step_ms, profiled)


def _gemms_ms(linears: Sequence[Linear], facts: Facts, gpu: GpuSpec, *, pad: bool) -> float:
    total = 0.0
    for linear in linears:
        sides = (rows_of(linear, facts) or 0, linear.in_features, linear.out_features)
        m, k, n = map(_padded, sides) if pad else sides
        once = step_gemms_ms(m, k, n, gpu, fp8=False, weight_gradient=linear.requires_grad is not False)
        total += (once or 0.0) * gemms(linear) * calls_of(linear, facts) * micro_batches(facts)
    return total


def _padded(side: int) -> int:
    return side if side % MULTIPLE == 0 else round_up(side, PADDED)


def pad_in_16_bits(linear: Linear, network: Network) -> Treatment:
    """Pad the vocabulary if the layer is its head, else the layer."""
    sides, vocabulary = (linear.in_features, linear.out_features), network.get("vocabulary")
    if linear.role == "head" and vocabulary and vocabulary in sides:
        wide = _padded(vocabulary)
        resize = f"model.resize_token_embeddings(pad_to_multiple_of={PADDED}, mean_resizing=False)"
        return Treatment(
            name="pad-vocabulary",
            summary=f"pad the model's vocabulary from {vocabulary} to {wide}, not the tokenizer's",
            code=f"{resize}   # {vocabulary} -> {wide}"
            if network.get("kind", "").startswith("transformers.")
            else f"vocab_size = {wide}   # not {vocabulary}: for embedding and head",
        )
    return Treatment(
        name="pad-dimensions",
        summary=f"pad the layer's sides to multiples of {PADDED}",
        code=f"nn.Linear{sides}  ->  nn.Linear{tuple(map(_padded, sides))}   # {linear.name}",
    )
