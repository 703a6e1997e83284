"""Time jobs of several ranks by hand, and compare the times with a trial's.

A Llama of 1B or 8B under DDP, FSDP1, FSDP2 or DeepSpeed (``zero2``, ``zero3``), in BF16 or in FP8 by torchao
or Transformer Engine. ZeRO-3's hooks recompile without end, so its blocks are not compiled. Names of jobs are
``size-wrapper-fp8``, such as ``1b-fsdp2-torchao``. FSDP2 gathers FP8 weights in FP8 (``torchao``) or in BF16
(``torchao16``); ``graphs`` is BF16 compiled with CUDA graphs.

torchrun --nproc-per-node 2 research/benchmarks/sharded.py job 1b-fsdp2-torchao   a job to watch
torchrun --nproc-per-node 2 research/benchmarks/sharded.py plain plain.json 1b-ddp-none 1b-ddp-torchao ...
python research/benchmarks/sharded.py compare FOLDER           plain.json beside the reports that lie there
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000},
    "6l": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6, "vocab_size": 32000},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
}
ROWS = {"tiny": (2, 32), "1b": (4, 2048), "6l": (2, 4096), "8b": (1, 4096)}
"""Sequences and tokens of each on a rank."""

HEAD_SIZE = {"tiny": 16, "1b": 64, "6l": 128, "8b": 128}


def joined() -> Any:
    """Join the processes that torchrun started, or be the only one; return this one's device."""
    import torch
    import torch.distributed as dist

    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def model_of(size: str, wrapper: str, fp8: str, device: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = SIZES[size]["hidden_size"] // HEAD_SIZE[size]
    config = LlamaConfig(
        use_cache=False,
        attn_implementation="sdpa",
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        **SIZES[size],
    )
    in_bf16 = wrapper in ("ddp", "zero2", "zero3") or size == "8b"
    torch.set_default_dtype(torch.bfloat16 if in_bf16 else torch.float32)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if fp8.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        converted = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_fp8(wrapper, fp8))
        convert_to_float8_training(
            model, config=converted, module_filter_fn=lambda _, name: name != "lm_head"
        )
    elif fp8 == "te":
        _to_te(model)
    if fp8 != "te" and wrapper != "zero3":
        for layer in model.model.layers:
            layer.compile(mode="reduce-overhead" if fp8 == "graphs" else None)
    return model


def gathers_fp8(wrapper: str, fp8: str) -> bool:
    return (wrapper, fp8) == ("fsdp2", "torchao")


def _to_te(model: Any) -> None:
    """Put a te.Linear in place of every Linear but the head."""
    import transformer_engine.pytorch as te
    from torch import nn

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = module.weight
            made = te.Linear(
                module.in_features,
                module.out_features,
                bias=False,
                params_dtype=weight.dtype,
                device=weight.device,
            )
            made.weight.data.copy_(weight.data)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made)


def wrapped(model: Any, wrapper: str, device: Any) -> Any:
    import torch
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
        MixedPrecisionPolicy,
        fully_shard,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(
            model,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            device_id=device,
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def in_fp8(fp8: str) -> Callable[[], Any]:
    """Return the context of a forward."""
    if fp8 != "te":
        return contextlib.nullcontext
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    return lambda: te.autocast(enabled=True, recipe=DelayedScaling())


def built(name: str, device: Any) -> tuple[Any, Callable[[], Any]]:
    """Build a job's model and its step."""
    import torch
    import torch.distributed as dist

    size, wrapper, fp8 = name.split("-")
    model = model_of(size, wrapper, fp8, device)
    if not wrapper.startswith("zero"):
        model = wrapped(model, wrapper, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    engine = by_deepspeed(model, optimizer, size, wrapper) if wrapper.startswith("zero") else None
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(0, SIZES[size]["vocab_size"], ROWS[size], device=device)
    precompute = gathers_fp8(wrapper, fp8)
    autocast = in_fp8(fp8)

    def step() -> Any:
        if engine is not None:
            with autocast():
                loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()
        with autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        if precompute:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()
        return loss.detach()

    return engine or model, step


def by_deepspeed(model: Any, optimizer: Any, size: str, stage: str) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": ROWS[size][0],
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(stage.removeprefix("zero"))},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def timed(step: Callable[[], Any], device: Any, count: int) -> list[float]:
    """Return ``count`` steps' times in ms, by the GPU's clock if there is one."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - began))
        return times
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(marks)]


def plain(path: Path, names: list[str], turns: int) -> None:
    """Time the jobs in turns, and write the file after each."""
    import torch
    import torch.distributed as dist

    device = joined()
    cuda = device.type == "cuda"
    found: dict[str, list[Any]] = {}
    for turn in range(turns):
        for name in names:
            began = time.time()
            try:
                _, step = built(name, device)
                timed(step, device, 3 if turn or not cuda else 6)
                times = timed(step, device, 20 if cuda else 3)
                gib = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
                result: Any = {
                    "ms": statistics.median(times),
                    "low": min(times),
                    "high": max(times),
                    "gib": gib,
                }
            except Exception as error:
                result = repr(error)[:500]
            found.setdefault(name, []).append(result)
            step = None  # type: ignore[assignment]
            torch._dynamo.reset()  # else jobs make each other's code run uncompiled
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if dist.get_rank() == 0:
                print(name, result, f"{time.time() - began:.0f} s", flush=True)
                path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    dist.destroy_process_group()


def job(name: str, steps: int, *, deterministic: bool, traceml: bool) -> None:
    """Train, and print the last losses' digest and the median of the last 20 steps."""
    import torch
    import torch.distributed as dist

    device = joined()
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in any order
        torch.backends.cuda.enable_cudnn_sdp(False)
    model, step = built(name, device)
    losses = []
    within: Callable[[Any], Any] = contextlib.nullcontext
    if traceml:
        import traceml_ai

        traceml_ai.init()
        within = traceml_ai.trace_step

    def kept() -> None:
        with within(model):
            losses.append(step())

    timed(kept, device, steps - 20 if steps > 20 else 1)
    times = timed(kept, device, 20)
    if dist.get_rank() == 0:
        values = [f"{each.item():.9g}" for each in losses]
        digest = hashlib.sha256(" ".join(values).encode()).hexdigest()[:12]
        print(f"last20 {statistics.median(times):.3f} ms, loss {values[-1]}, losses {digest}", flush=True)
    dist.destroy_process_group()


def compare(folder: Path) -> None:
    """Print each report's verdict beside the plain times."""
    found = json.loads((folder / "plain.json").read_text(encoding="utf-8"))

    def least(name: str) -> float | None:
        times = [each["ms"] for each in found.get(name, ()) if isinstance(each, dict)]
        return statistics.median(times) if times else None

    for path in sorted(folder.glob("*-*-*.json")):
        size, wrapper, fp8 = path.stem.split("-")
        saved = json.loads(path.read_text(encoding="utf-8"))
        kind = "torchao" if fp8 == "none" else fp8
        fast, slow = least(f"{size}-{wrapper}-{kind}"), least(f"{size}-{wrapper}-none")
        ratio = slow / fast if fast and slow else None
        watched = (saved["facts"].get("observed") or {}).get("steps_ms") or [0.0]
        print(f"== {path.stem}: plain BF16 {slow}, FP8 {fast}, ratio {ratio}")
        print(f"   watched {statistics.median(watched):.2f} ms; {saved['verdict']['summary']}")
        trial = saved["facts"].get("trial") or {}
        print(
            f"   trial: {trial.get('reason')} self-check {trial.get('self_check_ratio')} {trial.get('harm')}"
        )
        for arm in trial.get("arms", ()):
            print(f"   {arm['name']:34} {arm.get('step_ms')} {arm.get('reason') or ''}")


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("job")
    one.add_argument("name")
    one.add_argument("--steps", type=int, default=60)
    one.add_argument("--deterministic", action="store_true")
    one.add_argument("--traceml", action="store_true")
    many = kinds.add_parser("plain")
    many.add_argument("path", type=Path)
    many.add_argument("names", nargs="+")
    many.add_argument("--turns", type=int, default=2)
    kinds.add_parser("compare").add_argument("folder", type=Path)
    asked = parser.parse_args()
    if any(name.endswith("-te") for name in sys.argv):
        import transformer_engine.pytorch  # noqa: F401  (before torch loads a cuDNN of its own)
    if asked.kind == "job":
        job(asked.name, asked.steps, deterministic=asked.deterministic, traceml=asked.traceml)
    elif asked.kind == "plain":
        plain(asked.path, asked.names, asked.turns)
    else:
        compare(asked.folder)


if __name__ == "__main__":
    sys.exit(main())
