"""The trial in a worker: an arm that takes the process down costs that arm, and a device that is not there is
said."""

from pathlib import Path

import pytest

from fp8doctor.errors import UserError
from fp8doctor.facts import Arm, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.stages import Doing, Stage
from fp8doctor.worker import TrialRequest
from fp8doctor.worker.parent import Examination, examine_in_worker
from tests.worker.forked import hang, late_while_it_grows

pytestmark = pytest.mark.slow

MODEL = """
import os
import torch
from torch import nn

torch.backends.mkldnn.set_flags(False)  # `_fp8_gemms_past_onednn` of tests/conftest.py

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
    def forward(self, x):
        return torch.relu(self.linear(x))
    def compile(self, *arguments, **options):
        {compile}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build_model():
    return Model().bfloat16()

def example_batch():
    return torch.ones(16, 32, dtype=torch.bfloat16)
"""


FP8_MODEL = MODEL.replace("{compile}", "super().compile(*arguments, backend='eager')").replace(
    "return Model().bfloat16()",
    "from torchao.float8 import convert_to_float8_training\n"
    "    return convert_to_float8_training(Model().bfloat16())",
)


def tried(
    folder: Path, compile: str, budget_s: float = 180.0
) -> tuple[Examination, dict[str, Arm], list[str]]:
    (folder / "model.py").write_text(MODEL.replace("{compile}", compile))
    said: list[Doing] = []
    examination = examine_in_worker(
        str(folder / "model.py"), trial=TrialRequest(budget_s, "cpu"), progress=said.append
    )
    arms = {arm.name: arm for arm in examination.facts.trial.arms}
    return examination, arms, [each.text for each in said]


def test_every_arm_of_a_model_without_fp8(tmp_path: Path) -> None:
    examination, arms, said = tried(tmp_path, "super().compile(*arguments, backend='eager')")
    assert examination.problem is None
    names = ("as_is", "bf16_compiled", "float8_tensorwise", "float8_rowwise_with_gw_hp")
    assert {name: arm.tried for name, arm in arms.items()} == dict.fromkeys(names, True)
    assert arms["float8_tensorwise"].fp8_gemms == 2 * 3
    assert "building the step as you run it" in said
    assert "building FP8 rowwise with BF16 weight gradients compiled" in said
    assert [each for each in said if each in list(Stage)] == list(Stage)[2:]


@pytest.mark.usefixtures("forked")
def test_an_arm_that_ends_the_process_is_left_out_of_the_next(tmp_path: Path) -> None:
    examination, arms, said = tried(tmp_path, "os._exit(7)")
    assert examination.problem is None
    assert arms["as_is"].tried
    assert arms["as_is"].breakdown is not None
    assert arms["bf16_compiled"].reason == "the process ended with exit code 7"
    assert arms["bf16_compiled"].why is Reason.TOOK_PROCESS_DOWN
    assert any("starting again without it" in line for line in said)
    assert {name for name, arm in arms.items() if not arm.tried} == {
        "bf16_compiled",
        "float8_tensorwise",
        "float8_rowwise_with_gw_hp",
    }


@pytest.mark.usefixtures("forked")
def test_a_child_that_overstays_in_an_arm_is_ended_and_what_it_sent_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was timed yet, and no other child begins again: the time is over."""
    once = tmp_path / "hung"
    late_while_it_grows(once, monkeypatch)
    examination, arms, said = tried(tmp_path, hang(once))
    assert examination.problem is None
    assert not arms
    trial = examination.facts.trial
    assert (trial.why, trial.device, trial.reason) == (
        Reason.NO_TIME_LEFT,
        "cpu",
        "the budget of 180 s was used up while fp8doctor was building FP8 tensorwise compiled",
    )
    assert recorded(examination.facts, "workload.rows")
    assert not any("starting again" in line for line in said)


@pytest.mark.usefixtures("forked")
def test_a_child_that_overstays_after_its_rounds_keeps_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile of T5 large in FP8, not compiled, took longer than the time that was left (H200)."""
    once = tmp_path / "hung"
    late_while_it_grows(once, monkeypatch)
    (tmp_path / "model.py").write_text(f"""{FP8_MODEL}
from fp8doctor.trial.measure import results

results.profiled = lambda *of, **how: {hang(once)}
""")
    trial = examine_in_worker(
        str(tmp_path / "model.py"), trial=TrialRequest(180.0, "cpu"), progress=lambda text: None
    ).facts.trial
    as_is, bf16 = (next(arm for arm in trial.arms if arm.name == name) for name in ("as_is", "bf16"))
    assert as_is.tried
    assert bf16.tried
    assert as_is.breakdown is None
    assert not recorded(as_is, "graphs_run"), "no step was counted"
    assert not recorded(as_is, "fp8_gemms")
    assert "was used up while fp8doctor was profiling" in trial.gaps["trial.arms.breakdown"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("cuda", "torch sees no CUDA device"),
        ("tpu", "is not a device"),
        ("meta", "cannot be timed on"),
    ],
)
def test_a_device_that_is_not_there_is_the_users_mistake(tmp_path: Path, device: str, sentence: str) -> None:
    import torch

    if torch.cuda.is_available() and device == "cuda":
        device, sentence = "cuda:99", "CUDA devices here"
    (tmp_path / "model.py").write_text(MODEL.replace("{compile}", "pass"))
    with pytest.raises(UserError, match=sentence):
        examine_in_worker(
            str(tmp_path / "model.py"), trial=TrialRequest(5.0, device), progress=lambda text: None
        )
