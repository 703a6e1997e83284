"""The time of what stands between the Linears: norms, activations, rotary embeddings, residuals, transposes."""

from __future__ import annotations

from fp8doctor.cost.gpus import GpuSpec, memory_ms
from fp8doctor.facts import Facts, Linear, recorded

BETWEEN_BYTES = {"eager": 11.2, "eager transformers": 32.0, "compiled": 6.9}
"""Effective bytes per input and output element of the Linears beside it, forward and backward: kernel time of two decoders
without GEMMs, attention, optimizer and loss, uncompiled 24.0 ms at width 1024 and 7.5 at 4096, compiled 12.9 at width 1024 and 19.1
in a Llama 8B. Uncompiled blocks of transformers compute norms and rotary embeddings in fp32, op by op: 8.5 and 16.2 ms more than
compiled in Llamas of 4 layers of width 4096 and 8 of 2048. One H200, torch 2.11, transformers 5.17, November 2026."""


def between_ms(linear: Linear, tokens: int, gpu: GpuSpec, how: str) -> float:
    """The share of one Linear in one micro-batch; ``how`` is a key of `BETWEEN_BYTES`."""
    if linear.role == "head":
        return 0.0
    wide = 2 if linear.dtype == "float32" else 1
    return wide * memory_ms(BETWEEN_BYTES[how] * tokens * (linear.in_features + linear.out_features), gpu)


def uncompiled(facts: Facts) -> str:
    """How it is computed where nothing is compiled."""
    blocks = facts.network.blocks if recorded(facts.network) and recorded(facts.network.blocks) else ()
    return "eager transformers" if any(recorded(each.kind) and each.kind.startswith("transformers.") for each in blocks) else "eager"
