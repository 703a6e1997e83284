"""Rows that a layer's FP8 matmul cannot take

What it finds. An FP8 layer multiplies a number of rows for which the step raises on a GPU (tokens: SHP001).

Why it matters. The inner side of a weight gradient's matmul is the rows. FP8 kernels need a multiple of 16
(MX formats 32, torchao's blockwise 128; Transformer Engine 8 if the weight is frozen). A diffusion model's
conditioning (time embedding, AdaLN) and a head over a pooled token see one row per sample. A batch of 4
samples is 4 rows. The forward works and the backward raises: "Expected self.size(1) to be divisible by 16,
but got self.size(1)=4". A CPU computes any number of rows, so it first fails on a GPU.

Fix. Leave these layers out: with so few rows they gain nothing. For experts, let torchao pad:
`MXFP8TrainingOpConfig(pad_token_groups_for_grouped_mm=True)` (0.17 or newer) in grouped matmuls,
`Float8LinearConfig(pad_inner_dim=True)` if each expert is a Linear.

    convert_to_float8_training(model)  # before

    from torchao.float8 import convert_to_float8_training
    few = {"time_embedding.linear_1", "time_embedding.linear_2"}
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name not in few)  # after

When to ignore it. If your real batches have other sizes that are multiples of 16.

How it is detected, and limits. fp8doctor counts each layer's rows in one forward with your batch. Layers with
`pad_inner_dim=True`, and steps already timed on a GPU, are not reported. A router decides each expert's rows:
if your code may pad them, or te.GroupedLinear multiplies them, the answer is unknown.

References. On torch's meta device (torch 2.13, torchao 0.18), a Float8Linear raises in the backward with 4
rows and not with 16. https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
https://github.com/NVIDIA/TransformerEngine/issues/1422
"""

from __future__ import annotations

from fp8doctor.analysis.expected_fp8_gemms import multiplied_in_fp8
from fp8doctor.analysis.layers import named
from fp8doctor.analysis.recipe_support import multiple_of, tokens_divisor
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost import rows_seen
from fp8doctor.diagnosis.treatments import convert_again, keep_in_bf16
from fp8doctor.facts import Facts, Linear, Trial, Unrecorded, Workload
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import recipe_of
from fp8doctor.registry import check
from fp8doctor.wording import plural


@check(
    "SHP007",
    "rows-unaligned",
    area="shapes",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def rows_unaligned(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = multiplied_in_fp8(facts.network.linears)
    if not fp8:
        return NotApplicable(reason="no FP8 layer in the model")
    if ran_on_a_gpu(facts):
        return None
    if groups := [linear for linear in fp8 if is_unpadded(linear) and not are_aligned(linear, facts)]:
        return of_groups(groups, fp8, facts)
    in_te = [
        each for each in fp8 if each.stack == "transformer_engine" and each.kind.endswith(".GroupedLinear")
    ]
    if facts.workload.batch_source != "given":
        if in_te:
            raise Unrecorded(Workload, "rows", rows_in_te(in_te))
        return NotApplicable(reason="the batch is not the user's")
    rows = {linear.name: unaligned(linear, facts) for linear in fp8}
    found = [linear for linear in fp8 if rows[linear.name]]
    if not found:
        if in_te:
            raise Unrecorded(Workload, "rows", rows_in_te(in_te))
        return None
    first = found[0]
    seen, multiple = rows[first.name] or 0, tokens_divisor(first)
    most = max(rows[linear.name] or 0 for linear in found)
    counted = plural(seen, "row") if most == seen else f"{min(filter(None, rows.values()))} to {most} rows"
    return Finding(
        title=f"{plural(len(found), 'FP8 layer')} of {len(fp8)} "
        f"{'multiplies' if len(found) == 1 else 'multiply'} {counted}: the step raises on a GPU"
        f"{named(found, len(fp8))}",
        explanation=f"In one forward, {first.name} multiplies {plural(seen, 'row')}, not the batch's "
        f"{facts.workload.tokens}. Its weight gradient's matmul needs a multiple of {multiple}.",
        evidence={
            "layers": len(found),
            "fp8_layers": len(fp8),
            "first": first.name,
            "rows": seen,
            "multiple": multiple,
            "tokens": facts.workload.tokens,
        },
        treatment=keep_in_bf16([linear.name for linear in found], facts),
        breaks="step_raises",
    )


def is_unpadded(linear: Linear) -> bool:
    """Whether torchao multiplies an expert's rows as the router gives them."""
    grouped = linear.features.get("pad_token_groups_for_grouped_mm")
    pads = linear.features.get("pad_inner_dim") if grouped is None else grouped
    return (
        linear.role == "experts"
        and linear.stack == "torchao"
        and pads is False
        and not recipe_of(linear).pads_tokens
    )


def are_aligned(linear: Linear, facts: Facts) -> bool:
    """Whether each expert's rows were counted, and its matmul takes them."""
    seen = rows_seen(linear, facts)
    return any(seen) and all(rows % multiple_of(linear) == 0 for rows in seen)


def rows_in_te(layers: list[Linear]) -> str:
    """Say what is unknown about Transformer Engine's grouped matmuls."""
    multiple = max(map(multiple_of, layers))
    return (
        f"the rows of each expert in {plural(len(layers), 'te.GroupedLinear')} (first: {layers[0].name}); a "
        f"router decides them, they must be multiples of {multiple}, and te.Fp8Padding must pad them"
    )


def of_groups(groups: list[Linear], fp8: list[Linear], facts: Facts) -> Finding:
    """Report grouped experts whose rows nothing pads. Raises `Unrecorded` if the user's code may."""
    first, multiple = groups[0], max(map(multiple_of, groups))
    routed = any(linear.role == "router" for linear in facts.network.linears)
    counted = any(any(rows_seen(each, facts)) for each in groups)
    if not routed and not counted:
        raise Unrecorded(
            Workload,
            "rows",
            f"whether each expert's rows in {first.name} are a multiple of {multiple}: fp8doctor found no "
            "router that decides them",
        )
    if not counted and any(each.features.get("code_may_pad_rows") is not False for each in groups):
        raise Unrecorded(
            Workload,
            "rows",
            f"whether your code pads each expert's rows in {first.name} to a multiple of {multiple}",
        )
    flag = "pad_inner_dim" if "pad_inner_dim" in first.features else "pad_token_groups_for_grouped_mm"
    return Finding(
        title=f"Nothing pads each expert's rows to a multiple of {multiple} in "
        f"{plural(len(groups), 'expert weight')} of {plural(len(fp8), 'FP8 layer')}",
        explanation=f"A router decides how many rows each expert of {first.name or 'the model'} multiplies. "
        f"Its FP8 matmul takes only multiples of {multiple}, and {flag} is False: on a GPU the step "
        "raises, or stops with a device-side assert.",
        evidence={"layers": len(groups), "fp8_layers": len(fp8), "first": first.name, "multiple": multiple},
        treatment=Treatment(
            name="pad-token-groups",
            summary="let torchao pad the rows of each expert",
            code=pad_lines(first, facts, alone=flag == "pad_inner_dim"),
        ),
        breaks="step_raises",
    )


def pad_lines(linear: Linear, facts: Facts, *, alone: bool) -> str:
    """Write the lines that convert the experts with padding; ``alone``: each is a Float8Linear."""
    if alone:
        config = f"config = dataclasses.replace({recipe_of(linear).config}, pad_inner_dim=True)"
        return f"import dataclasses\n{config}\n{convert_again(facts, config='config')}"
    config = "MXFP8TrainingOpConfig" if "mx" in (linear.recipe or "") else "Float8TrainingOpConfig"
    return (
        f"from torchao.prototype.moe_training.config import {config}   # torchao 0.17 or newer\n"
        f"config = {config}(pad_token_groups_for_grouped_mm=True)\n"
        "quantize_(model, config, filter_fn=filter_fn)   # with your own filter, instead of the old config"
    )


def unaligned(linear: Linear, facts: Facts) -> int | None:
    """Find a call with rows, other than the tokens, that its FP8 matmul cannot take."""
    tokens, divisor = facts.workload.tokens, tokens_divisor(linear)
    return next((rows for rows in rows_seen(linear, facts) if rows != tokens and rows % divisor), None)


def _conditioned(samples: int) -> Facts:
    """A diffusion model's block, and its time embedding, which sees one row per sample."""
    rows: dict[str, tuple[int, ...]] = {"time_embedding": (samples,), "blocks.0.up": (samples * 4096,)}
    linears = tuple(float8(name, features={"pad_inner_dim": False}) for name in rows)
    batch = {"batch_source": "given", "batch_size": samples, "tokens": samples * 4096}
    return example(linears=linears, **batch, trial=Trial(device="cpu", rows=rows))


FIRES = _conditioned(samples=4)
SILENT = _conditioned(samples=16)
