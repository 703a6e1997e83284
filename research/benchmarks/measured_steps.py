"""Steps and GEMMs measured on an H200 (measured/), as `fp8doctor.cost` models them and as torchao's roofline
does."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fp8doctor.analysis.significance import EVEN
from fp8doctor.cost import matmuls
from fp8doctor.cost.matmuls import gemm_ms
from fp8doctor.cost.step_cost import LOSS_BYTES, logits, priced, work_of
from fp8doctor.facts import Blocks, Facts, Linear, Network, Workload
from fp8doctor.gpus import GpuSpec, gpu_spec
from tests.recordings import text_of

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "measured" / "h200_steps.json.gz"
SWEEP = HERE / "measured" / "h200_sweep.json.gz"


@dataclass(frozen=True)
class Row:
    """One measured arm, with what was modelled of it."""

    table: str
    job: str
    arm: str
    ms: float
    modelled_ms: float
    ratio: float
    """Compiled BF16 / this arm, as measured."""
    modelled_ratio: float
    torchao_ratio: float
    torchao_says_something: bool

    @property
    def is_baseline(self) -> bool:
        return self.arm == "BF16 compiled"

    @property
    def is_even(self) -> bool:
        """Within what the verdict calls even, and what the same job differs by from one day to the next."""
        return abs(self.ratio - 1) < EVEN

    @property
    def right_sign(self) -> bool:
        return (self.ratio > 1) == (self.modelled_ratio > 1)

    @property
    def time_error(self) -> float:
        return self.modelled_ms / self.ms - 1

    @property
    def error(self) -> float:
        return self.modelled_ratio / self.ratio - 1

    @property
    def torchao_error(self) -> float:
        return self.torchao_ratio / self.ratio - 1


def steps() -> list[dict[str, Any]]:
    """The rows as they are recorded."""
    found: list[dict[str, Any]] = json.loads(text_of(MEASURED))["steps"]
    return found


def facts_of(step: dict[str, Any]) -> Facts:
    """What examining the job of a row would find, as far as the cost model reads it."""
    return job(json.loads(text_of(MEASURED))["models"][step["model"]], step)


def rows() -> list[Row]:
    """Every measured step, with what was modelled of it."""
    measured = json.loads(text_of(MEASURED))
    jobs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for step in measured["steps"]:
        jobs.setdefault(
            (
                step["table"],
                step["model"],
                step["layers"],
                step["batch"],
                step["sequence"],
                step.get("lora_rank"),
            ),
            [],
        ).append(step)
    gpu = gpu_spec(measured["gpu"])
    found = []
    for (table, name, layers, batch, length, rank), steps in jobs.items():
        model = measured["models"][name]
        modelled, roofline = {}, {}
        for step in steps:
            facts = job(model, step)
            loss_bytes = LOSS_BYTES[model["loss"]] * logits(facts)
            one = priced(replace(work_of(facts), loss_bytes=loss_bytes), gpu)
            modelled[step["arm"]], roofline[step["arm"]] = one.step_ms, torchao_ms(facts)
        base = next(step for step in steps if step["arm"] == "BF16 compiled")
        label = f"{name}, {layers} layers, {batch} x {length}" + (f", LoRA {rank}" if rank else "")
        for step in steps:
            arm = step["arm"]
            found.append(
                Row(
                    table,
                    label,
                    arm,
                    step["ms"],
                    modelled[arm],
                    base["ms"] / step["ms"],
                    modelled[base["arm"]] / modelled[arm],
                    roofline[base["arm"]] / roofline[arm],
                    step["compiled"]
                    and step["fp8"] in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
                    and not step["checkpointing"],
                )
            )
    return found


def job(model: dict[str, Any], step: dict[str, Any]) -> Facts:
    """A measured step as the facts that examining its model gives, as far as the cost model reads them."""
    width, hidden, key = model["width"], model["hidden"], model["kv_heads"] * model["head_dim"]
    shapes = {
        "q_proj": (width, width),
        "k_proj": (width, key),
        "v_proj": (width, key),
        "o_proj": (width, width),
        "gate_proj": (width, hidden),
        "up_proj": (width, hidden),
        "down_proj": (hidden, width),
    }
    rank, fp8 = step.get("lora_rank"), step["fp8"]
    te = fp8 == "delayed"
    linears = []
    for layer in range(step["layers"]):
        for name, (k, n) in shapes.items():
            path = f"layers.{layer}.{name}"
            skipped = step.get("without_ends") and not linears
            common = {
                "compiled": f"layers.{layer}" if step["compiled"] else None,
                "checkpointed": f"layers.{layer}" if step["checkpointing"] else None,
            }
            common |= {"features": {}, "gemms": 1, "role": "body"}
            linears.append(
                Linear(
                    name=f"{path}.base_layer" if rank else path,
                    in_features=k,
                    out_features=n,
                    requires_grad=not rank,
                    dtype="bfloat16",
                    adapter="base" if rank else None,
                    **in_precision(None if skipped else fp8),
                    **common,
                )
            )
            for adapter, (a, b) in {"lora_A": (k, rank), "lora_B": (rank, n)}.items() if rank else ():
                linears.append(
                    Linear(
                        name=f"{path}.{adapter}.default",
                        in_features=a,
                        out_features=b,
                        requires_grad=True,
                        dtype="float32",
                        adapter="adapter",
                        **in_precision(None),
                        **common,
                    )
                )
    body = sum(linear.in_features * linear.out_features for linear in linears if linear.requires_grad)
    words = model["vocabulary"] * width
    trained = body if rank else body + words * (1 if model["tied"] else 2)
    head = Linear(
        name="lm_head",
        in_features=width,
        out_features=model["vocabulary"],
        gemms=1,
        role="head",
        requires_grad=not rank,
        dtype="bfloat16",
        adapter=None,
        compiled=None,
        checkpointed=None,
        features={},
        **in_precision(fp8 if te else None),
    )
    return Facts(
        network=Network(
            linears=(*linears, head),
            trainable_parameters=trained,
            vocabulary=model["vocabulary"],
            blocks=(Blocks(name="layers", kind=model["block"]),),
        ),
        workload=Workload(
            tokens=step["batch"] * step["sequence"], sequence_length=step["sequence"], accumulate=1
        ),
    )


def in_precision(recipe: str | None) -> dict[str, Any]:
    if recipe is None:
        return {"use": "none", "stack": "torch", "recipe": None}
    return {
        "use": "training",
        "stack": "transformer_engine" if recipe == "delayed" else "torchao",
        "recipe": recipe,
    }


def torchao_gpu() -> str:
    """torchao's H100 with the H200's bandwidth, under the H200's name."""
    from torchao.testing.training import roofline_utils as roofline

    roofline.gpu_name_to_specs.setdefault(
        "NVIDIA H200", roofline.gpu_name_to_specs["NVIDIA H100"] | {"peak_mem_bw_bytes_sec": 4.8e12}
    )
    return "NVIDIA H200"


def torchao_ms(facts: Facts) -> float:
    """The GEMMs and casts of all Linears as torchao's roofline estimates them."""
    return sum(
        torchao_layer_ms(
            facts.workload.tokens,
            linear.in_features,
            linear.out_features,
            linear.recipe,
            linear.compiled is not None,
        )
        for linear in facts.network.linears
    )


@functools.cache
def torchao_layer_ms(tokens: int, inner: int, outer: int, recipe: str | None, fused: bool) -> float:
    """The GEMMs and casts of one Linear, in 2 ms of sympy."""
    import torch
    from torchao.testing.training import roofline_utils as roofline

    gpu, shape = torchao_gpu(), (tokens, inner, outer)
    dtype = torch.float8_e4m3fn if recipe else torch.bfloat16
    recipe = "tensorwise" if recipe == "delayed" else recipe
    seconds = float(roofline.get_gemm_time_sympy(*shape, dtype, recipe, None, gpu))
    if recipe:
        seconds += float(roofline.get_float8_mem_sympy(*shape, recipe, None, fused, gpu))
    return 1e3 * seconds


def swept() -> dict[str, Any]:
    """The recorded sweep of `gemm_sweep.py`."""
    sweep: dict[str, Any] = json.loads(text_of(SWEEP))
    return sweep


def gemm_rows(sweep: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, int, int], float]]:
    """Kind, role, (M, K, N) of the GEMM itself, and ms, of every GEMM that was swept."""
    for kind, role, m, k, n, ms in sweep["gemms"]:
        yield (
            kind,
            role,
            {"output": (m, k, n), "input_gradient": (m, n, k), "weight_gradient": (k, m, n)}[role],
            ms,
        )


def gemm_errors(sweep: dict[str, Any], gpu: GpuSpec) -> list[tuple[str, int, float, float]]:
    """What they are, how many, and the mean error of the model's time and of torchao's."""
    import torch
    from torchao.testing.training import roofline_utils as roofline

    errors: dict[str, list[tuple[float, float]]] = {}
    for kind, role, shape, ms in gemm_rows(sweep):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
        theirs = 1e3 * float(roofline.get_individual_gemm_time_sympy(*shape, dtype, None, torchao_gpu()))
        ours = gemm_ms(*shape, gpu, fp8=kind != "bf16", pace=matmuls.BACK_TO_BACK)
        size = "narrow" if min(shape) < 256 else "under 0.05 ms" if ms < 0.05 else "larger"
        pair = abs(ours / ms - 1), abs(theirs / ms - 1)
        for label in (f"{kind}, {size}", f"{kind}, {role}", "all"):
            errors.setdefault(label, []).append(pair)
    return [
        (label, len(pairs), *(statistics.mean(each) for each in zip(*pairs, strict=True)))
        for label, pairs in sorted(errors.items())
    ]
