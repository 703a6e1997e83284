"""What versions of libraries that are not installed here do or did."""

from __future__ import annotations

import enum
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.stacks.test_torchao import only
from tests.waiting import LONGEST_S


def test_many_threads_may_read_the_first_document_at_once() -> None:
    """msgspec 0.22.0 alone crashed the process in 39 of 40 runs of this program."""
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from fp8doctor.facts import "
        "Facts; sys.setswitchinterval(1e-6)\n"
        "from fp8doctor.worker.parent import Message; from fp8doctor.facts.record import decoder\n"
        "read = lambda i: decoder(Message) if i % 2 else Facts.from_dict({'network': {'parameters': 1}})\n"
        "with ThreadPoolExecutor(8) as pool: list(pool.map(read, range(64)))"
    )
    ended = [
        subprocess.run([sys.executable, "-c", program], timeout=LONGEST_S, check=False).returncode
        for _ in range(5)
    ]
    assert ended == [0] * 5


@pytest.mark.parametrize(("name", "recipe"), [("FP8_ROWWISE", "rowwise"), ("MXFP8", "mxfp8")])
def test_grouped_weights_of_0_12_to_0_16(name: str, recipe: str) -> None:
    """A stand-in: the tensor was renamed in 0.17."""
    scaling = enum.Enum("MoEScalingType", {"FP8_ROWWISE": "fp8_rowwise", "MXFP8": "mxfp8"})
    kind = type(
        "ScaledGroupedMMTensor", (torch.Tensor,), {"__module__": "torchao.prototype.moe_training.tensor"}
    )
    weight = torch.zeros(4, 64, 32).as_subclass(kind)
    weight.scaling_type = scaling[name]
    multiplies = {"forward": lambda self, x: torch._grouped_mm(x, self.w1)}
    experts = type("GroupedExperts", (nn.Module,), multiplies)()
    experts.top_k = 2
    experts.w1 = nn.Parameter(weight)
    experts._parameters["w1"].scaling_type = scaling[name]
    layer = only(experts)
    assert (layer.stack, layer.use, layer.recipe) == ("torchao", "training", recipe)
    assert (layer.gemms, layer.role) == (4, "experts")
