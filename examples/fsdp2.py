"""Blocks sharded by FSDP2, which gathers their weights in FP8; as one process, or as several.

fp8doctor run fsdp2.py
torchrun --nproc-per-node 2 -m fp8doctor run fsdp2.py
torchrun --nproc-per-node 2 -m fp8doctor run --stop fsdp2.py               # rank 0 also times copies
torchrun --nproc-per-node 2 -m fp8doctor run fsdp2.py --bf16-all-gather    # DST001
torchrun --nproc-per-node 2 -m fp8doctor run fsdp2.py --no-precompute      # DST001
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def joined():
    """Join the processes that torchrun started, or be the only one; the device of this one."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16, help="of a batch, in each process")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--bf16-all-gather", action="store_true")
    parser.add_argument("--no-precompute", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--output", help="file for the trained weights of the first process")
    arguments = parser.parse_args()

    device = joined()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(arguments.deterministic)
    model = nn.Sequential(*(Block(arguments.width) for _ in range(arguments.layers)))
    model.to(device, torch.bfloat16)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=not arguments.bf16_all_gather)
    convert_to_float8_training(model, config=config)
    for block in model:
        if not arguments.no_compile:
            block.compile()
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    precompute = config.enable_fsdp_float8_all_gather and not arguments.no_precompute

    torch.manual_seed(dist.get_rank())
    for _ in range(arguments.steps):
        x = torch.randn(arguments.rows, arguments.width, device=device, dtype=torch.bfloat16)
        loss = (model(x) - x.roll(1, 1)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}")
    if arguments.output and dist.get_rank() == 0:
        torch.save([each.detach().to_local() for each in model.parameters()], arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
