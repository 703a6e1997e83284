"""What is concluded from the rows that each layer was seen to multiply: a diffusion transformer whose
conditioning sees one row a sample, and stays in BF16 on purpose."""

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training

from fp8doctor.analysis.layers import flops_share_pct
from fp8doctor.checks.engagement.partial_conversion import partial_conversion
from fp8doctor.cost.step_cost import modelled_step
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Linear, Target, Trial, Workload
from fp8doctor.loading.job import Job

SAMPLES, TOKENS, WIDTH = 4, 4096, 2048


class Block(nn.Module):
    """A block of a DiT: the sizes are those that matter here."""

    def __init__(self) -> None:
        super().__init__()
        self.adaln = nn.Linear(WIDTH, 6 * WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)


def dit() -> Facts:
    with torch.device("meta"):
        model = nn.ModuleList(Block() for _ in range(2)).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: "adaln" not in name)
    work = Workload(
        batch_source="given", batch_size=SAMPLES, tokens=TOKENS, sequence_length=None, accumulate=1
    )
    return examine(Job(model=model, target=Target(kind="live", name="DiT"), workload=work))


def conditioning(linear: Linear) -> bool:
    return linear.name.endswith("adaln")


def counted(facts: Facts, fact: str = "trial") -> Facts:
    rows = {each.name: (SAMPLES if conditioning(each) else TOKENS,) for each in facts.linears()}
    if fact == "workload":
        return replace(facts, workload=replace(facts.workload, rows=rows))
    return replace(facts, trial=Trial(device="cuda", gpu=None, arms=(), rows=rows))


@pytest.mark.parametrize("fact", ["trial", "workload"])
def test_conditioning_in_bf16_is_not_missing_and_takes_little_time(fact: str) -> None:
    facts = counted(dit(), fact)
    assert partial_conversion(facts) is None
    share = flops_share_pct(filter(conditioning, facts.linears()), facts)
    assert share == pytest.approx(100 / (1 + TOKENS / SAMPLES * 2), rel=1e-6)
    assert flops_share_pct(facts.linears(), facts) == pytest.approx(100)
    by_tokens, by_rows = modelled_step(dit()), modelled_step(facts)
    assert by_tokens is not None
    assert by_rows is not None
    assert by_rows.families_ms["gemm_fp8"] == by_tokens.families_ms["gemm_fp8"]
    assert by_rows.families_ms["gemm_16bit"] < by_tokens.families_ms["gemm_16bit"] / 5
