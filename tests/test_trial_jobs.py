"""Jobs of ``research/benchmarks/jobs``: reports of disturbed machines, plans applied to them; they build
small."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.render import text
from fp8doctor.report import Report
from research.benchmarks import plain_step
from tests.replays import of
from tests.stand_ins.accelerate_state import forget

JOBS = Path(plain_step.__file__).parent / "jobs"
NAMES = sorted(path.stem for path in JOBS.glob("*.py") if path.stem != "plain")
NEEDS = {
    name: needed
    for needed in ("timm", "torchvision", "transformer_engine")
    for name in NAMES
    if needed in (JOBS / f"{name}.py").read_text()
}


def replayed(name: str) -> Report:
    return of("benchmarks", name).report


def in_a_line(report: Report) -> str:
    """The page with all details, in one line."""
    return " ".join(text.render(report, verbose=True).split())


def test_a_neighbour_on_the_gpu_is_told_and_turns_no_sign() -> None:
    report = replayed("h200-disturbed_gpu")
    assert "the GPU was slowed or shared" in report.answer.doubts
    assert "other processes used up to 54% of the GPU" in in_a_line(report)
    quiet = of("patients", "h200-decoder_468m_compiled").report
    assert report.verdict.status == quiet.verdict.status


def test_a_slow_host_is_told_and_turns_no_sign() -> None:
    """30 rounds of FP8 took 68 to 115 ms and those of BF16 70 to 74: 0.96x, and 1.04x by plain scripts."""
    report = replayed("h100-disturbed_host")
    assert report.verdict.status == "open"
    assert "the host was busy" in report.answer.doubts
    assert "Python ran 2.0 times as long as at its best" in in_a_line(report)
    assert "stay-in-bf16" not in {step.treatment.name for step in report.prescription}
    assert not [finding.title for finding in report.findings if "0.96x" in finding.title]


def test_a_quiet_host_is_no_change_of_the_job() -> None:
    assert list(replayed("h200-flux_like").prescription) == []


def test_a_recipe_that_crashed_its_process_is_named_with_the_reason() -> None:
    """A kernel that torch 2.11 makes of rowwise casts beside a concatenation reads where it may not."""
    arms = replayed("h200-flux_like").facts.trial.arms
    lost = {arm.name: arm.why for arm in arms if not arm.tried}
    assert lost == dict.fromkeys(("recipe-rowwise-with-gw-hp", "recipe-rowwise"), "took_process_down")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setenv("TRIAL_JOBS_TINY", "1")
    monkeypatch.setattr(sys, "path", [str(JOBS), *sys.path])
    yield
    forget()
    for name in {"plain", *NAMES} - before:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("tiny")
def test_the_plain_bf16_takes_the_wrapper_of_the_all_gather_off_and_leaves_frozen_what_is() -> None:
    plain = plain_step.loaded(JOBS / "plain.py")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    model[0].requires_grad_(False)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    weights = [each.weight for each in plain.in_bf16(convert_to_float8_training(model, config=config))]
    assert [(type(each), each.requires_grad) for each in weights] == [
        (torch.nn.Parameter, False),
        (torch.nn.Parameter, True),
    ]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("gpu", "name", "executed", "in_fp8", "compiled"),
    [
        ("h100", "llama_3b_bf16", ["convert-tensorwise", "compile-blocks"], True, ["LlamaDecoderLayer"] * 2),
        ("h200", "qwen3_1_7b_whole_rowwise", ["stay-in-bf16"], False, ["Qwen3DecoderLayer"] * 2),
        ("h100", "gpt_124m_whole", ["stay-in-bf16"], False, []),
    ],
)
def test_a_printed_plan_is_applied_line_by_line(
    gpu: str, name: str, executed: list[str], in_fp8: bool, compiled: list[str], tmp_path: Path
) -> None:
    steps = replayed(f"{gpu}-{name}").prescription
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode({"prescription": steps}))
    job = plain_step.loaded(JOBS / f"{name}.py")
    model = plain_step.changed(job, job.build_model(), [f"plan={path}"])
    assert job.applied_plan == {"executed": executed, "by_hand": [], "skipped": []}
    kinds = [type(module).__name__ for module in model.modules()]
    assert ("Float8Linear" in kinds) is in_fp8
    assert [type(module).__name__ for module in model.modules() if module._compiled_call_impl] == compiled
    assert (kinds[0] == "OptimizedModule") is (not compiled)


@pytest.mark.nightly
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", NAMES)
def test_a_job_builds_small_and_trains_in_plain_pytorch(name: str) -> None:
    if name in NEEDS and not importlib.util.find_spec(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed")
    job = plain_step.loaded(JOBS / f"{name}.py")
    assert plain_step.training_step(job, ["bf16"])().isfinite()
    made = job.build_model()
    model = plain_step.changed(job, made[0] if isinstance(made, tuple) else made, ["bf16_compiled"])
    kinds = [type(module).__name__ for module in model.modules() if module._compiled_call_impl]
    assert len(kinds) >= 2 or kinds == [type(model).__name__]  # block by block, or as a whole
    assert "Float8Linear" not in {type(module).__name__ for module in model.modules()}
    assert {type(weight) for weight in model.parameters()} == {torch.nn.Parameter}
