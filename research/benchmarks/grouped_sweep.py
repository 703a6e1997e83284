"""Time grouped matmuls of experts on this GPU, in BF16 and FP8: ``python research/benchmarks/grouped_sweep.py
OUT.json``

Needs torch, one GPU and under 4 minutes; torchao and Transformer Engine if they are there. ``--dry`` runs
tiny shapes on a CPU. Writes one JSON: forward and backward of one expert weight, by CUDA events in rounds of
all forms in turn, its time on the host, and the kernels of one call. `grouped.py` reads it. What fails leaves
its error and costs nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

import torch

DRY = "--dry" in sys.argv or not torch.cuda.is_available()
DEVICE = "cpu" if DRY else "cuda"
OUT = next((each for each in sys.argv[1:] if not each.startswith("-")), None)
BUDGET_S = 270
ROUNDS, CALLS, WARM = (1, 1, 1) if DRY else (3, 10, 4)

SHAPES = {
    "mixtral-8x7b gate": (4096, 14336, 8, 16384),
    "qwen3-30b gate_up": (2048, 1536, 128, 65536),
    "qwen3-30b down": (768, 2048, 128, 65536),
    "qwen3-30b gate_up, ep 8": (2048, 1536, 16, 65536),
    "deepseek-v2-lite gate_up": (2048, 2816, 64, 49152),
    "llama4-scout gate_up": (5120, 16384, 16, 16384),
}
if DRY:
    SHAPES = {name: (64, 32, e, 16 * e) for name, (_, _, e, _) in SHAPES.items()}

"""Name -> in, out, experts, rows of all experts."""

started = time.perf_counter()
result = {"versions": {"torch": torch.__version__, "cuda": torch.version.cuda}, "times": [], "errors": []}
if not DRY:
    result["gpu"] = torch.cuda.get_device_name()
    result["cublas"] = None


def wrong(where):
    result["errors"].append({"where": where, "error": traceback.format_exc(limit=-2)[-700:]})


def sync():
    if not DRY:
        torch.cuda.synchronize()


def timed(step, calls):
    """GPU and host time of one call, in ms."""
    sync()
    if DRY:
        begin = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - begin) / calls * 1e3, 0.0
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin = time.perf_counter()
    a.record()
    for _ in range(calls):
        step()
    b.record()
    host = (time.perf_counter() - begin) / calls * 1e3
    sync()
    return a.elapsed_time(b) / calls, host


def kernels(step):
    """Kernel time by name, and the time in which any kernel ran, in ms, of one call."""
    if DRY:
        return {}
    from torch.profiler import ProfilerActivity, profile

    sync()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        sync()
    found, spans = {}, []
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            ms, count = found.get(event.name[:110], (0.0, 0))
            length = event.time_range.end - event.time_range.start
            found[event.name[:110]] = (ms + length / 1e3, count + 1)
            spans.append((event.time_range.start, event.time_range.end))
    busy, until = 0.0, 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    top = sorted(found.items(), key=lambda each: -each[1][0])[:14]
    return {
        "busy_ms": round(busy / 1e3, 4),
        "sum_ms": round(sum(ms for ms, _ in found.values()), 4),
        "kernels": sum(count for _, count in found.values()),
        "top": [[name, round(ms, 4), count] for name, (ms, count) in top],
    }


def torch_steps(k, n, experts, rows, sizes):
    offs = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
    x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(experts, n, k, device=DEVICE, dtype=torch.bfloat16) * 0.02).requires_grad_()
    grad = torch.randn(rows, n, device=DEVICE, dtype=torch.bfloat16)

    def step(multiply):
        multiply(x, weight.transpose(-2, -1)).backward(grad)
        x.grad = weight.grad = None

    steps = {"torch bf16": lambda: step(lambda a, b: torch._grouped_mm(a, b, offs=offs))}
    try:
        import torchao
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as f

        result["versions"]["torchao"] = torchao.__version__
        steps["torchao rowwise"] = lambda: step(
            lambda a, b: f(a, b, offs, pad_token_groups_for_grouped_mm=False)
        )
    except Exception:
        wrong("import torchao")
    return steps


def te_steps(k, n, experts, rows, sizes):
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as r
    except Exception:
        wrong("import transformer_engine")
        return {}
    result["versions"]["transformer_engine"] = transformer_engine.__version__
    try:
        import transformer_engine_torch as tex

        result["cublas"] = tex.get_cublasLt_version()
    except Exception:
        pass
    x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, n, device=DEVICE, dtype=torch.bfloat16)
    splits = torch.tensor(sizes, dtype=torch.int64)
    recipes = {"bf16": None, "delayed": r.DelayedScaling(), "current": r.Float8CurrentScaling()}
    recipes["blockwise"] = r.Float8BlockScaling()
    layers, steps = {}, {}

    one = x.detach()[: sizes[0]].clone().requires_grad_()

    def step(make, recipe, *args):
        key = make, id(recipe)
        if key not in layers:
            layers[key] = make()
        module = layers[key]
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = module(*args)
        (out[0] if isinstance(out, tuple) else out).backward(grad[: args[0].shape[0]])
        assert bool(module.fp8) is (recipe is not None), "FP8 did not run"
        x.grad = one.grad = None
        for parameter in module.parameters():
            parameter.grad = None

    def group():
        return te.GroupedLinear(experts, k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")

    def dense():
        return te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")

    for name, recipe in recipes.items():
        steps[f"te.GroupedLinear {name}"] = lambda recipe=recipe: step(group, recipe, x, splits)
    for name in ("bf16", "current", "delayed"):  # one expert alone: experts * this is the estimate
        steps[f"te.Linear {name}, one expert"] = lambda recipe=recipes[name]: step(dense, recipe, one)
    return steps


def equal(experts, rows):
    return [rows // experts] * experts


def skewed(experts, rows):
    """A few experts get most rows: 1/rank, in multiples of 16."""
    total = sum(1 / (i + 1) for i in range(experts))
    sizes = [max(16, round(rows / total / (i + 1) / 16) * 16) for i in range(experts)]
    sizes[0] += rows - sum(sizes)
    return sizes


def measure(shape, k, n, experts, rows, sizes, how):
    for steps_of in (torch_steps, te_steps):
        try:
            steps = steps_of(k, n, experts, rows, sizes)
        except Exception:
            wrong(f"{shape}: {steps_of.__name__}")
            continue
        times, works = {}, []
        for name, step in steps.items():
            if how != "equal" and "one expert" in name:
                continue
            try:
                for _ in range(WARM):
                    step()
                sync()
                works.append(name)
            except Exception:
                wrong(f"{shape}, {how}: {name}")
        for _ in range(ROUNDS):  # in turns, so that the clock is the same
            for name in works:
                try:
                    times.setdefault(name, []).append(timed(steps[name], CALLS))
                except Exception:
                    wrong(f"{shape}, {how}: timing {name}")
        for name in works:
            row = {
                "shape": shape,
                "k": k,
                "n": n,
                "experts": experts,
                "rows": rows,
                "split": how,
                "what": name,
                "ms": [round(gpu, 4) for gpu, _ in times[name]],
                "host_ms": [round(host, 4) for _, host in times[name]],
            }
            try:
                row |= kernels(steps[name])
            except Exception:
                wrong(f"{shape}: kernels of {name}")
            result["times"].append(row)
        del steps
        if not DRY:
            torch.cuda.empty_cache()


try:
    for shape, (k, n, experts, rows) in SHAPES.items():
        if time.perf_counter() - started < BUDGET_S:
            measure(shape, k, n, experts, rows, equal(experts, rows), "equal")
    for shape in ("qwen3-30b gate_up", "mixtral-8x7b gate"):
        k, n, experts, rows = SHAPES[shape]
        if time.perf_counter() - started < BUDGET_S:
            measure(shape, k, n, experts, rows, skewed(experts, rows), "skewed")
except Exception:
    wrong("main")
result["took_s"] = round(time.perf_counter() - started, 1)
text = json.dumps(result)
if OUT:
    os.makedirs(os.path.dirname(os.path.abspath(OUT)), exist_ok=True)
    with open(OUT, "w") as file:
        file.write(text)
for row in result["times"]:
    print(
        row["shape"],
        row["split"],
        row["what"],
        row["ms"],
        row["host_ms"],
        row.get("busy_ms"),
        row.get("sum_ms"),
        row.get("kernels"),
        file=sys.stderr,
    )
for error in result["errors"]:
    print(error["where"], error["error"].strip().splitlines()[-1][:200], file=sys.stderr)
print(text)
