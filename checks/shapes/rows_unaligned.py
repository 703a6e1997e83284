"""Rows that the FP8 GEMM of a layer cannot take

Looks at: the rows that each FP8 layer was seen to multiply in one forward, where they are not the
tokens of the batch; the tokens themselves are SHP001's.

Why it matters. The inner side of a weight gradient's GEMM is the rows, and FP8 kernels want it to
be a multiple of 16 (MX formats 32, torchao's blockwise 128; Transformer Engine 8 where the weight
is frozen). The conditioning of a diffusion model (time embedding, AdaLN) and the head over a
pooled token see one row a sample: a batch of 4 samples is 4 rows, however long they are. The
forward works, and the backward raises: "Expected self.size(1) to be divisible by 16, but got
self.size(1)=4". A CPU computes any number of rows, so that it shows first on a GPU.

What to do. Leave these layers out of the conversion: with so few rows they have nothing to gain.

    convert_to_float8_training(model)                                                  # before
    keep = {"time_embedding.linear_1", "time_embedding.linear_2"}                      # after
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name not in keep)

Experts whose weights torchao multiplies in one grouped GEMM want the same of the rows of each
expert, which a router decides. They are padded only on request:

    MXFP8TrainingOpConfig()                                        # before: nothing pads
    MXFP8TrainingOpConfig(pad_token_groups_for_grouped_mm=True)    # after

If your own code may pad, or te.GroupedLinear multiplies, this is unknown.

`pad_inner_dim=True` pads these rows, at the price of a copy, and is not told. Nor is a step that
was timed on a GPU, which has proved that it runs.

Evidence: run on torch's meta device (torch 2.13, torchao 0.18), whose kernel of `_scaled_mm` asks
the same of its operands: a Float8Linear raises in the backward with 4 rows and not with 16.
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
https://github.com/NVIDIA/TransformerEngine/issues/1422
"""

from __future__ import annotations

from fp8doctor.analysis.expected_fp8_gemms import multiplied_in_fp8
from fp8doctor.analysis.recipe_support import multiple_of, tokens_divisor
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost import rows_seen
from fp8doctor.diagnosis.treatments import keep_in_bf16
from fp8doctor.facts import Facts, Linear, Network, Trial, Unrecorded, Workload, recorded
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
    may_raise=True,
)
def rows_unaligned(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = multiplied_in_fp8(facts.network.linears)
    if not fp8:
        return NotApplicable(reason="no FP8 layer in the model")
    if ran_on_a_gpu(facts):
        return None
    if groups := [linear for linear in fp8 if is_unpadded_group(linear) and not are_aligned(linear, facts)]:
        return of_groups(groups, fp8, facts)
    in_te = [linear for linear in fp8 if is_grouped_in_te(linear)]
    if facts.workload.batch_source != "given":
        if in_te:
            raise Unrecorded(Workload, "rows", rows_in_te(in_te))
        return NotApplicable(reason="the batch is not the user's")
    rows = {linear.name: unaligned(linear, facts) for linear in fp8}
    found = [linear for linear in fp8 if rows[linear.name]]
    if not found:
        if in_te:
            raise Unrecorded(Workload, "rows", rows_in_te(in_te))
        routed = [linear for linear in fp8 if is_routed(linear)]
        if routed and not recorded(facts, "trial.rows") and not recorded(facts, "workload.rows"):
            raise Unrecorded(
                Workload,
                "rows",
                f"the rows of {plural(len(routed), 'expert layer')} ({routed[0].name} first), which a router "
                f"decides and which have to be multiples of {max(map(multiple_of, routed))}",
            )
        return None
    first = found[0]
    seen, multiple = rows[first.name] or 0, tokens_divisor(first)
    most = max(rows[linear.name] or 0 for linear in found)
    counted = plural(seen, "row") if most == seen else f"{min(filter(None, rows.values()))} to {most} rows"
    return Finding(
        title=f"{plural(len(found), 'FP8 layer')} of {len(fp8)} "
        f"{'sees' if len(found) == 1 else 'see'} {counted}, on which the step raises on a GPU",
        explanation=f"{first.name} multiplies {plural(seen, 'row')} and not the {facts.workload.tokens} of "
        f"the batch; the GEMM of its weight gradient wants a multiple of {multiple}. Counted in one forward.",
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


def is_routed(linear: Linear) -> bool:
    """Whether a router decides how many rows this layer of torchao's sees, and nothing pads them."""
    padded = recipe_of(linear).pads_tokens or linear.features.get("pad_inner_dim")
    return linear.role == "experts" and linear.stack == "torchao" and linear.gemms == 1 and not padded


def is_unpadded_group(linear: Linear) -> bool:
    """Whether a grouped GEMM of torchao's takes these experts' rows as the router gives them."""
    pads = linear.features.get("pad_token_groups_for_grouped_mm")
    return linear.role == "experts" and linear.stack == "torchao" and pads is False


def are_aligned(linear: Linear, facts: Facts) -> bool:
    """Whether the rows of each expert were counted, and its GEMM takes all of them."""
    seen = rows_seen(linear, facts)
    return any(seen) and all(rows % multiple_of(linear) == 0 for rows in seen)


def is_grouped_in_te(linear: Linear) -> bool:
    """Whether this is Transformer Engine's grouped GEMM, which pads nothing."""
    return linear.stack == "transformer_engine" and linear.kind.endswith(".GroupedLinear")


def rows_in_te(layers: list[Linear]) -> str:
    """Say what is not known of Transformer Engine's grouped GEMMs."""
    multiple = max(map(multiple_of, layers))
    return (
        f"the rows of each expert of {plural(len(layers), 'te.GroupedLinear')} ({layers[0].name} first), "
        f"which a router decides: they have to be a multiple of {multiple}, and te.Fp8Padding has to pad them"
    )


def of_groups(groups: list[Linear], fp8: list[Linear], facts: Facts) -> Finding:
    """Tell of grouped experts whose rows nothing pads. Raises `Unrecorded` where the user's code may."""
    first, multiple = groups[0], max(map(multiple_of, groups))
    routed = any(linear.role == "router" for linear in facts.network.linears)
    counted = any(any(rows_seen(each, facts)) for each in groups)
    if not routed and not counted:
        raise Unrecorded(
            Workload,
            "rows",
            f"whether the rows of each expert of {first.name} are a multiple of {multiple}: no router was "
            "found that decides",
        )
    if not counted and any(each.features.get("code_may_pad_rows") is not False for each in groups):
        raise Unrecorded(
            Workload,
            "rows",
            f"whether your code pads the rows of each expert of {first.name} to a multiple of {multiple}",
        )
    return Finding(
        title=f"Each expert's rows must be a multiple of {multiple}, and nothing pads them in "
        f"{plural(len(groups), 'expert weight')} of {plural(len(fp8), 'FP8 layer')}",
        explanation=f"A router decides how many rows each expert of {first.name or 'the model'} multiplies. "
        f"Its FP8 grouped GEMM takes multiples of {multiple} alone, and pad_token_groups_for_grouped_mm is "
        "False: on a GPU the step raises, or stops with a device-side assert.",
        evidence={
            "layers": len(groups),
            "fp8_layers": len(fp8),
            "first": first.name,
            "multiple": multiple,
        },
        treatment=Treatment(
            name="pad-token-groups",
            summary="let torchao pad the rows of each expert",
            code=pad_lines(first),
        ),
        breaks="step_raises",
    )


def pad_lines(linear: Linear) -> str:
    """Write the lines that convert the experts with padding."""
    config = "MXFP8TrainingOpConfig" if "mx" in (linear.recipe or "") else "Float8TrainingOpConfig"
    return (
        f"from torchao.prototype.moe_training.config import {config}   # torchao 0.17 or newer\n"
        f"config = {config}(pad_token_groups_for_grouped_mm=True)\n"
        "quantize_(model, config, filter_fn=filter_fn)   # your own filter, in place of the config before"
    )


def unaligned(linear: Linear, facts: Facts) -> int | None:
    """Find a call whose rows, beside the tokens, its FP8 GEMM cannot take."""
    tokens, divisor = facts.workload.tokens, tokens_divisor(linear)
    return next((rows for rows in rows_seen(linear, facts) if rows != tokens and rows % divisor), None)


def _conditioned(samples: int) -> Facts:
    """A block of a diffusion model, and the layer of its time embedding, which sees a row a sample."""

    def linear(name: str) -> Linear:
        return Linear(
            name=name,
            kind="torchao.float8.float8_linear.Float8Linear",
            stack="torchao",
            use="training",
            recipe="tensorwise",
            features={"pad_inner_dim": False},
            weight_class=None,
            in_features=1024,
            out_features=1024,
            requires_grad=True,
            role="body",
            adapter=None,
        )

    names = ("time_embedding", "blocks.0.up")
    return Facts(
        network=Network(linears=tuple(map(linear, names))),
        workload=Workload(batch_source="given", batch_size=samples, tokens=samples * 4096),
        trial=Trial(device="cpu", rows={"time_embedding": (samples,), "blocks.0.up": (samples * 4096,)}),
    )


SICK = _conditioned(samples=4)
HEALTHY = _conditioned(samples=16)
