"""The jobs of ``unseen_late.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import quantize_

from research.complaints import unseen_engines_jobs as engines
from research.complaints.parts import MoeBlock, mlp, rows
from research.complaints.unseen_engines_jobs import Block, Gpt
from research.complaints.unseen_jobs import installed, on_meta, processes, ran, weights_in_fp8
from research.complaints.unseen_mixed_jobs import Job, in_fp8
from tests import prototypes
from tests.stand_ins import transformer_engine as te
from tests.stand_ins.packages import stand_in

BF16 = torch.bfloat16


def hidden(tokens: int, width: int) -> Tensor:
    return torch.empty(1, tokens, width, dtype=BF16, device="meta")


def mxfp8_llama_on_5090(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.5.0", "fp8")
    model = on_meta(lambda: nn.Sequential(*(Block(te.Linear, 4096, 11008, 32, 32) for _ in range(4))))
    return Job(in_fp8(model, hidden(2048, 4096), te.MXFP8BlockScaling()), hidden(2048, 4096))


def linears_compiled_alone(patch: pytest.MonkeyPatch) -> Job:
    """Llama 3 8B, a quarter of its blocks, all recomputed."""
    stand_in(patch, torchao="0.7.0")
    model = on_meta(
        lambda: nn.Sequential(*(engines.Recomputed(Block(nn.Linear, 4096, 14336, 32, 8)) for _ in range(8)))
    )
    convert_to_float8_training(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.compile()
    return Job(model, hidden(8192, 4096))


def te_of_2048_on_grace(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.5.0", "fp8")
    return Job(ran(on_meta(lambda: mlp(te.Linear, 2048, 16)), 2048), rows(8192, 2048))


def te_in_fp32(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.12.0", "fp8")
    with torch.device("meta"):
        model = nn.Sequential(*(Block(te.Linear, 4096, 11008, 32, 32) for _ in range(8)))
    return Job(in_fp8(model, hidden(4096, 4096).float()), hidden(4096, 4096).float())


def te_weights_in_16_bits(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.8.0", "fp8")
    batch = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    return Job(in_fp8(on_meta(lambda: Gpt(te.Linear, 32, 2560, 32, 32000)), batch), batch)


def experts_beside_float8_linears(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: nn.Sequential(*(MoeBlock(2048, 16, 1408) for _ in range(8))))
    convert_to_float8_training(model, module_filter_fn=lambda _, name: "router" not in name)
    for block in model:  # type: ignore[attr-defined]
        block.compile()
    return Job(model, rows(32768, 2048))


def mxfp8_linears_in_eager(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: nn.Sequential(*(Block(nn.Linear, 4096, 14336, 32, 8) for _ in range(8))))
    quantize_(model, prototypes.mxfp8("MXFP8_RCEIL"), filter_fn=lambda each, _: isinstance(each, nn.Linear))
    return Job(model, hidden(8192, 4096))


def vocabulary_of_8(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: Gpt(nn.Linear, 2, 16, 4, 8))
    convert_to_float8_training(model)
    return Job(model, torch.zeros(4, 16, dtype=torch.long, device="meta"))


def frozen_te_in_eval_on_8_ranks(patch: pytest.MonkeyPatch) -> Job:
    processes(8)
    rebuilt = engines.frozen_base_in_eval(patch)
    return Job(rebuilt.model, rebuilt.batch)


def blockwise_weights_from_a_checkpoint(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.15.0", "quantization", megatron_core="0.17.0")
    model = on_meta(lambda: nn.Sequential(*(Block(te.Linear, 4096, 14336, 32, 8) for _ in range(4))))
    return Job(weights_in_fp8(in_fp8(model, hidden(4096, 4096), te.Float8BlockScaling())), hidden(4096, 4096))


def te_checkpoint(function: Any, **tensors: Tensor) -> Any:
    """Transformer Engine's, whose autograd function would see positional tensors alone."""
    return function(**tensors)


te_checkpoint.__module__ = "transformer_engine.pytorch.distributed"


class PredictsMore(nn.Module):
    """Megatron's layer of this kind: it recomputes its block, whose hidden states it passes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = te.Linear(8192, 4096, bias=False)
        self.block = Block(te.Linear, 4096, 14336, 32, 8)

    def inner(self, hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
        return self.block(self.joined(torch.cat((decoder_input, hidden_states), dim=-1)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return te_checkpoint(self.inner, hidden_states=x, decoder_input=x)  # type: ignore[no-any-return]


def hidden_states_by_name(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.13.0", "quantization", megatron_core="0.17.0")
    model = on_meta(
        lambda: nn.Sequential(*(Block(te.Linear, 4096, 14336, 32, 8) for _ in range(4)), PredictsMore())
    )
    return Job(in_fp8(model, hidden(8192, 4096), te.MXFP8BlockScaling()), hidden(8192, 4096))
