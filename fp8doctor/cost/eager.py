"""Cost of uncompiled casts, and the saving of compiling their layers, modelled."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.cost.layer import calls_ms, uncompiled
from fp8doctor.cost.matmul_counts import micro_batches
from fp8doctor.cost.step_cost import call_of, in_plain_bf16
from fp8doctor.facts import Facts, Linear
from fp8doctor.finding import Saving
from fp8doctor.gpus import modelled_gpu

UNCERTAINTY = 0.25
"""Half-width of the interval around a modelled saving. Of 12 measured savings of 32 to 621 ms 11 lie inside
it; one with adapters in FP32 saves 6% more. One H200, research/benchmarks/measured/h200_steps.json.gz."""


class Balance(Struct, frozen=True):
    """Cost and gain of FP8 in one step of these layers, uncompiled, modelled."""

    casts_ms: float
    """Time of the GPU."""
    gemms_saved_ms: float
    gpu: str
    host_ms: float
    """Time of the host for launching the casts meanwhile."""
    saving: Saving
    """What compiling the layers and the work between them saves. The uncompiled casts keep the GPU busy, or,
    with few tokens, the host: the longer of the two counts."""


def eager_balance(facts: Facts, eager: Iterable[Linear]) -> Balance | None:
    """Weigh these layers' uncompiled casts against their matmuls' saving.

    None if tokens or GPU are unknown, the tokens are too many, or a recipe was not measured.
    """
    gpu, calls = modelled_gpu(facts), [call_of(each, facts) for each in eager]
    if gpu is None or gpu.fp8_tflops is None or not all(each.rows for each in calls):
        return None
    now = [replace(each, linear=replace(each.linear, compiled=None)) for each in calls]
    compiled = [replace(each, linear=replace(each.linear, compiled="")) for each in now]
    plain = [replace(each, linear=in_plain_bf16(each.linear)) for each in now]
    autocast = facts.get("training.autocast") == "bfloat16"
    of_now, of_compiled, of_plain = (
        calls_ms(form, gpu, uncompiled(facts), autocast=autocast) for form in (now, compiled, plain)
    )
    if of_now is None or of_compiled is None or of_plain is None:
        return None
    times = micro_batches(facts)
    host_saved, busy_saved = of_now.host - of_compiled.host, of_now.busy - of_compiled.busy
    return Balance(
        times * of_now.of("cast"),
        times * (of_plain.of("gemm_16bit") - of_now.of("gemm_fp8") - of_now.of("gemm_16bit")),
        gpu.name,
        times * (of_now.host - of_plain.host),
        modelled_saving(times * max(busy_saved, host_saved), gpu.name),
    )


def modelled_saving(ms: float, gpu: str) -> Saving:
    return Saving(low=ms * (1 - UNCERTAINTY), high=ms * (1 + UNCERTAINTY), basis="modelled", gpu=gpu)
