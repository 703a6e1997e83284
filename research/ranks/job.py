"""A training script for several ranks, misconfigured as its arguments say; it prints its losses and weights.

It runs under torchrun or accelerate launch, on GPUs with NCCL or on a CPU with gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    """A residual block of two Linears."""

    def __init__(self, width: int, linear: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = linear(width, 4 * width, bias=False), linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=("ddp", "fsdp1", "fsdp2"), default="ddp")
    parser.add_argument("--fp8", choices=("none", "torchao", "te"), default="torchao")
    parser.add_argument("--all-gather", action="store_true", help="in FP8")
    parser.add_argument("--precompute", action="store_true", help="the scales of that")
    parser.add_argument("--compile", choices=("blocks", "model"))
    parser.add_argument("--own-amax", action="store_true", help="each rank scales by its own")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that rank 1 sleeps in each step")
    parser.add_argument("--fewer", type=int, default=0, help="steps that rank 1 takes less, each on its own")
    parser.add_argument("--raises", type=int, help="step before which rank 1 raises")
    parser.add_argument("--killed", type=int, help="step before which rank 1 is killed")
    return parser.parse_args()


def built(arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model in FP8, wrapped for all ranks."""
    linear: Any = nn.Linear
    if arguments.fp8 == "te":
        import transformer_engine.pytorch as te

        linear = te.Linear
    with torch.device(device):
        model = nn.Sequential(*(Block(arguments.width, linear) for _ in range(arguments.blocks)))
    model = model.to(device=device, dtype=torch.bfloat16)
    if arguments.fp8 == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=arguments.all_gather)
        convert_to_float8_training(model, config=config)
    if arguments.compile == "blocks":
        for block in model:
            block.compile()
    return wrapped(arguments, model, device)


def wrapped(arguments: argparse.Namespace, model: nn.Sequential, device: torch.device) -> nn.Module:
    if arguments.wrap == "ddp":
        whole: nn.Module = nn.parallel.DistributedDataParallel(model)
    elif arguments.wrap == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        whole = FullyShardedDataParallel(model, use_orig_params=True, device_id=device)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        whole = fully_shard(model)
    return torch.compile(whole) if arguments.compile == "model" else whole


def in_fp8(arguments: argparse.Namespace) -> Any:
    """What a forward runs in."""
    if arguments.fp8 != "te":
        return contextlib.nullcontext()
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    recipe = DelayedScaling(reduce_amax=not arguments.own_amax)
    opened = getattr(te, "autocast", None)
    return opened(enabled=True, recipe=recipe) if opened else te.fp8_autocast(True, fp8_recipe=recipe)


def hinder(arguments: argparse.Namespace, step: int) -> None:
    """What rank 1 is hindered by."""
    if arguments.slow:
        time.sleep(arguments.slow)
    if step == arguments.raises:
        raise ValueError("planted")
    if step == arguments.killed:
        os.kill(os.getpid(), signal.SIGKILL)


def digest(model: nn.Module) -> str:
    """Of all weights that this rank holds."""
    whole = hashlib.sha256()
    for each in model.parameters():
        local = each.to_local() if hasattr(each, "to_local") else each
        local = getattr(local, "_tensor", local)  # torchao's, which an all-gather in FP8 casts
        whole.update(local.detach().float().cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def main() -> None:
    arguments = parsed()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.backends.mkldnn.set_flags(False)  # its FP8 GEMMs are slower than torch's own emulation
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = built(arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(rank)
    alone = arguments.fewer and hasattr(model, "no_sync")
    losses = []
    for step in range(arguments.steps - (arguments.fewer if rank == 1 else 0)):
        if rank == 1:
            hinder(arguments, step)
        x = torch.randn(arguments.rows, arguments.width, device=device, dtype=torch.bfloat16)
        with model.no_sync() if alone else contextlib.nullcontext():
            with in_fp8(arguments):
                output = model(x)
            loss = (output - x.roll(1, 1)).float().pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if arguments.precompute:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.detach())
    if cuda:
        torch.cuda.synchronize()
    state = torch.get_rng_state().sum().item() + (torch.cuda.get_rng_state().sum().item() if cuda else 0)
    text = [f"{each.item():.9g}" for each in losses]
    print(f"rank {rank}: {' '.join(text)} weights {digest(model)} random {state}\n", end="", flush=True)
    dist.destroy_process_group()
    sys.last_model = model  # kept: its end waits for gloo's thread under the GIL, for which that may wait


if __name__ == "__main__":
    main()
