"""What a step takes of the host, which is what limits it with few tokens. One machine with an H200, torch 2.11, Llama of 57
Linears, 256 tokens, November 2026; another CPU differs, and is not asked."""

HOST_MS = {"eager": 0.39, "compiled": 0.23}
"""Host time of a step / its Linears, everything around them included: 22.2 and 12.9 ms."""

FP8_HOST_MS = {"eager": 1.65, "compiled": 0.14, "transformer_engine": 0.39}
"""What an FP8 Linear adds to it: (113.5 - 22.7) / 55 and (20.85 - 12.93) / 55 with torchao 0.18, uncompiled and compiled,
(44.7 - 22.2) / 57 with Transformer Engine 2.20."""
