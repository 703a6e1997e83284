"""What Accelerate prepares: fp32 weights under its autocast, and FP8 all-gathers on one GPU; and in a real
process group of one."""

from __future__ import annotations

import pytest

from tests.checks.rules import found_by, outcome_of
from tests.programs import facts_of

FLAG, PARAMETERS = "fp8-all-gather-off", "fp32-parameters"

PREPARED = """
from accelerate import Accelerator
model = Accelerator(mixed_precision="fp8").prepare(model)
"""

GLOO = """
from tests.checks.distributed.sharded import float8, shard
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = shard(float8(all_gather=False))
"""


def test_accelerate_on_one_gpu_and_one_real_process() -> None:
    finding = found_by(FLAG, facts_of(PREPARED, ACCELERATE_FP8_BACKEND="AO"))
    assert (finding.severity, finding.evidence["wrapped"]) == ("warning", 2)
    name, _, value = finding.treatment.code.removeprefix("export ").split()[0].partition("=")
    facts = facts_of(PREPARED, ACCELERATE_FP8_BACKEND="AO", **{name: value})
    assert outcome_of(FLAG, facts) == "not_applicable"
    facts = facts_of(GLOO)
    assert (facts.training.distributed.world_size, facts.training.distributed.shards) == (1, 1)
    assert found_by(FLAG, facts).severity == "info", "one process sends nothing"


ANNOUNCED = """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
"""
IN_BF16 = f"{ANNOUNCED}model = accelerator.prepare(model)\n"
CONVERTED = "from torchao.float8 import convert_to_float8_training\nconvert_to_float8_training(model)"


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (IN_BF16, "silent"),
        (IN_BF16 + "model.forward = model._original_forward", "fires"),
        (ANNOUNCED + CONVERTED, "not_applicable"),
    ],
    ids=["prepared", "its autocast taken off", "converted and not prepared yet"],
)
def test_what_accelerate_prepared(program: str, outcome: str) -> None:
    assert outcome_of(PARAMETERS, facts_of(program)) == outcome
