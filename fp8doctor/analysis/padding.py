"""Sides and rows that matmul kernels cannot take: which may be padded, and the lines that pad them."""

from collections.abc import Sequence

from fp8doctor.analysis.own_step import as_is
from fp8doctor.analysis.recipe_support import multiple_of, tokens_divisor
from fp8doctor.analysis.treatment_table import PAD_VOCABULARY
from fp8doctor.cost.matmuls import MULTIPLE, is_grouped, padded_side, rows_seen
from fp8doctor.facts import Facts, Linear, Network, Unrecorded, Workload
from fp8doctor.finding import Treatment
from fp8doctor.wording import plural


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pad_sides(padded: Sequence[Linear]) -> Treatment:
    lines = dict[str, None]()
    for linear in sorted(padded, key=lambda each: (each.in_features, each.out_features)):
        k, n, multiple = linear.in_features, linear.out_features, multiple_of(linear)
        new = f"nn.Linear({round_up(k, multiple)}, {round_up(n, multiple)})"
        lines[f"{new}   # was nn.Linear({k}, {n}): multiples of {multiple}"] = None
    return Treatment(
        name="pad-dimensions",
        summary="pad widths, and data of these widths, to the next multiple",
        code="\n".join(lines),
        kind="sketch",
    )


def refused_rows(fp8: Sequence[Linear], facts: Facts) -> dict[str, tuple[int, int]]:
    """Find the FP8 layers that multiply rows which raise in the backward -> the rows, and their multiple.

    Raises `Unrecorded` if a router decides them and nobody counted them.
    """
    found, unknown = dict[str, tuple[int, int]](), []
    for linear in fp8:
        seen = rows_seen(linear, facts)
        if is_grouped(linear):  # a forward on fake tensors counts the rows of all experts together
            each_has = len(seen) >= linear.gemms and any(seen)
            aligned = each_has and all(rows % multiple_of(linear) == 0 for rows in seen)
            if not aligned and linear.features.get("pad_token_groups_for_grouped_mm") is not True:
                unknown.append(linear)
        elif facts.workload.batch_source == "given" and (multiple := tokens_divisor(linear)) > 1:
            tokens, ranks = facts.workload.tokens or 0, int(linear.features.get("sequence_ranks") or 1)
            multiple *= ranks
            if linear.role == "experts" and not seen:
                unknown.append(linear)
            elif rows := next((rows for rows in (ranks == 1 and seen) or (tokens,) if rows % multiple), None):
                found[linear.name] = rows, multiple
    if unknown and not found:
        raise Unrecorded(
            Workload,
            "rows",
            f"each expert's rows in {plural(len(unknown), 'weight')} (first: {unknown[0].name}); a router "
            f"decides them, and your code must pad them to multiples of {max(map(multiple_of, unknown))}",
        )
    return found


def pad_batch(workload: Workload, multiple: int) -> Treatment:
    """Pad the batch: sequences in the collator, of a matrix its first dimension, of all else its samples."""
    size = round_up(workload.batch_size or 1, multiple)
    what = "samples"
    line = f"loader = DataLoader(..., batch_size={size}, drop_last=True)   # or torchao's pad_inner_dim=True"
    if workload.sequence_length:
        collator = "DataCollatorWithPadding" if workload.tokens else "DataCollatorForSeq2Seq"  # labels too
        what, line = "tokens", f"collator = {collator}(tokenizer, pad_to_multiple_of={multiple})"
    elif workload.tokens:
        what, line = "rows", f"x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % {multiple}))"
    summary = f"pad the batch to a multiple of {multiple} {what}"
    return Treatment(name="pad-tokens", summary=summary, code=line, kind="sketch")


def odd_head(facts: Facts) -> Linear | None:
    """Find the head over an odd vocabulary in 16 bits whose rows do not begin at 16 bytes; None without one.

    Without a profile no compiled layer counts: Inductor may pad it.
    """
    timed, vocabulary = as_is(facts), facts.network.get("vocabulary")
    profiled = timed is not None and facts.trial.device != "cpu" and timed.get("breakdown") is not None
    heads = [each for each in facts.network.linears if each.use == "none" and each.role == "head"]
    odd = [each for each in heads if each.out_features == vocabulary and each.out_features % MULTIPLE]
    known = (each for each in odd if each.dtype in ("bfloat16", "float16"))
    return next((each for each in known if profiled or each.compiled is None), None)


def pad_vocabulary(vocabulary: int, network: Network) -> Treatment:
    padded = padded_side(vocabulary)
    code = f"vocab_size = {padded}   # not {vocabulary}: for embedding and head"
    if network.get("kind", "").startswith("transformers."):
        code = f"model.resize_token_embeddings({padded}, mean_resizing=False)   # from {vocabulary}"
    summary = f"pad the model's vocabulary from {vocabulary} to {padded}, not the tokenizer's"
    return Treatment(name=PAD_VOCABULARY, summary=summary, code=code)
