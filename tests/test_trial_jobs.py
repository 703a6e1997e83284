"""Reports of the jobs of ``research/benchmarks/jobs`` replay, and the jobs build small and train without
fp8doctor."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import load_report
from research.benchmarks import plain_step
from tests.recordings import files, name_of
from tests.render.every_format import hold_every_format
from tests.stand_ins.accelerate_state import forget

JOBS = Path(plain_step.__file__).parent / "jobs"
NAMES = sorted(path.stem for path in JOBS.glob("*.py") if path.stem != "plain")
NEEDS = {
    "vit_h14": "timm",
    "te_decoder": "transformer_engine",
    "te_modules_compiled": "transformer_engine",
}
VERDICTS = {
    "h100-dinov2_large_rowwise": "fp8_slower",
    "h100-dit_xl": "fp8_slower",
    "h100-gemma_2b_lora": "fp8_slower",
    "h100-hubert_large_layerdrop": "fp8_slower",
    "h100-phi3_mini_bf16": "no_fp8",
    "h100-pythia_70m_whole": "fp8_slower",
    "h100-t5_large": "fp8_slower",
    "h100-te_modules_compiled": "fp8_faster",
    "h100-unet": "fp8_slower",
    "h100-xlm_roberta_embeddings": "fp8_slower",
    "h100-bert_large_accelerate": "layers_do_not_learn",
    "h100-disturbed_host": "open",
    "h100-flux_like": "fp8_even",
    "h100-gemma2_2b_eager_attention": "fp8_slower",
    "h100-gpt_124m_whole": "fp8_slower",
    "h100-llama_3b_bf16": "no_fp8",
    "h100-llama_8b_compiled": "fp8_slower",
    "h100-llama_8b_eager": "fp8_slower",
    "h100-moe": "fp8_slower",
    "h100-qwen2_3b_lora_checkpointing": "fp8_slower",
    "h100-te_decoder": "fp8_faster",
    "h100-vit_h14": "fp8_slower",
    "h100-whisper_medium": "fp8_slower",
    "h200-bert_large_accelerate": "layers_do_not_learn",
    "h200-disturbed_gpu": "fp8_faster",
    "h200-flux_like": "open",
    "h200-gemma2_2b_eager_attention": "fp8_slower",
    "h200-gpt_124m_whole": "fp8_slower",
    "h200-llama_3b_bf16": "no_fp8",
    "h200-llama_8b_compiled": "fp8_faster",
    "h200-llama_8b_eager": "fp8_slower",
    "h200-modernbert_large_rowwise": "fp8_slower",
    "h200-moe": "fp8_slower",
    "h200-olmo2_1b_compiled": "fp8_faster",
    "h200-qwen2_3b_lora_checkpointing": "fp8_slower",
    "h200-qwen3_1_7b_whole_rowwise": "fp8_slower",
    "h200-qwen3_4b_bf16": "no_fp8",
    "h200-siglip_so400m_whole": "fp8_slower",
    "h200-t5_large": "fp8_slower",
    "h200-te_decoder": "fp8_faster",
    "h200-vit_h14": "fp8_slower",
    "h200-whisper_medium": "fp8_slower",
}
"""Of each report; `disturbed_gpu` is the patient decoder_468m_compiled beside another process that multiplied
on the same GPU half of the time, `disturbed_host` the job flux_like on a host that ran at half its pace."""
REPORTS = Path(plain_step.__file__).parent / "recorded"
RECORDED = Path(__file__).parent / "patients" / "recorded" / "h200-llama_8b_float8.json.gz"


replayed = functools.cache(load_report)


def test_every_report_of_a_job_is_held() -> None:
    assert set(map(name_of, files(REPORTS))) == set(VERDICTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", VERDICTS)
def test_a_report_of_a_job_replays_as_the_plain_scripts_say(name: str) -> None:
    report = replayed(REPORTS / f"{name}.json.gz")
    assert report.verdict.status == VERDICTS[name]
    assert not [each for each in report.outcomes if each.outcome == "crashed"]


@pytest.mark.slow
@pytest.mark.gate("h100-flux_like", "h200-llama_8b_eager", "h200-moe", "h200-te_decoder")
@pytest.mark.parametrize("name", VERDICTS)
def test_a_report_of_a_job_is_sound_in_every_format(name: str) -> None:
    hold_every_format(replayed(REPORTS / f"{name}.json.gz"))


def test_a_neighbour_on_the_gpu_is_told_and_turns_no_sign() -> None:
    report = replayed(REPORTS / "h200-disturbed_gpu.json.gz")
    assert [each for each in report.answer.doubts if "other processes used up to 54 % of the GPU" in each]
    quiet = load_report(RECORDED.with_name("h200-decoder_468m_compiled.json.gz"))
    assert report.verdict.status == quiet.verdict.status


def test_a_slow_host_is_told_and_turns_no_sign() -> None:
    """30 rounds of FP8 took 68 to 115 ms and those of BF16 70 to 74: 0.96x, and 1.04x by plain scripts."""
    report = replayed(REPORTS / "h100-disturbed_host.json.gz")
    assert report.verdict.status == "open"
    assert [each for each in report.answer.doubts if each.startswith("the CPU was busy")]
    assert "stay-in-bf16" not in {step.treatment.name for step in report.prescription}
    assert not [finding.title for finding in report.findings if "0.96x" in finding.title]


def test_a_quiet_host_is_no_change_of_the_job() -> None:
    assert list(replayed(REPORTS / "h200-flux_like.json.gz").prescription) == []


def test_a_recipe_that_crashed_its_process_is_named_with_the_reason() -> None:
    """A kernel that torch 2.11 makes of rowwise casts beside a concatenation reads where it may not."""
    arms = replayed(REPORTS / "h200-flux_like.json.gz").facts.trial.arms
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
    steps = replayed(REPORTS / f"{gpu}-{name}.json.gz").prescription
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
    assert len(kinds) >= 2
    assert "Float8Linear" not in {type(module).__name__ for module in model.modules()}
    assert {type(weight) for weight in model.parameters()} == {torch.nn.Parameter}
