"""The jobs of ``tests/benchmarks/trial_jobs.py`` build small and train without fp8doctor, and its table tells
what is held from what is missed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import pytest
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.render.box import answer
from tests.benchmarks import held_to_plain, plain_step
from tests.recordings import files, name_of, text_of
from tests.render.every_format import hold_every_format
from tests.stand_ins.accelerate_state import forget
from tests.waiting import LONGEST_S, wait_for

JOBS = Path(plain_step.__file__).parent / "jobs"
NAMES = sorted(path.stem for path in JOBS.glob("*.py") if path.stem != "plain")
NEEDS = {"vit_h14": "timm", "te_decoder": "transformer_engine"}
VERDICTS = {
    "h100-bert_large_accelerate": "layers_do_not_learn",
    "h100-disturbed_host": "too_noisy",
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
    "h200-flux_like": "too_noisy",
    "h200-gemma2_2b_eager_attention": "fp8_slower",
    "h200-gpt_124m_whole": "fp8_slower",
    "h200-llama_3b_bf16": "no_fp8",
    "h200-llama_8b_compiled": "fp8_faster",
    "h200-llama_8b_eager": "fp8_slower",
    "h200-moe": "fp8_slower",
    "h200-qwen2_3b_lora_checkpointing": "fp8_slower",
    "h200-qwen3_1_7b_whole_rowwise": "fp8_slower",
    "h200-t5_large": "fp8_slower",
    "h200-te_decoder": "fp8_faster",
    "h200-vit_h14": "fp8_slower",
    "h200-whisper_medium": "fp8_slower",
}
"""Of each report; `disturbed_gpu` is the patient decoder_468m_compiled beside another process that multiplied
on the same GPU half of the time, `disturbed_host` the job flux_like on a host that ran at half its pace."""
REPORTS = Path(plain_step.__file__).parent / "recorded"
RECORDED = Path(__file__).parent / "patients" / "recorded" / "h200-llama_8b_float8.json.gz"


def test_every_report_of_a_job_is_held() -> None:
    assert set(map(name_of, files(REPORTS))) == set(VERDICTS)


@pytest.mark.parametrize("name", VERDICTS)
def test_a_report_of_a_job_replays_as_the_plain_scripts_say(name: str) -> None:
    report = load_report(REPORTS / f"{name}.json.gz")
    assert report.verdict.status == VERDICTS[name]
    assert not [each for each in report.outcomes if each.outcome == "crashed"]
    hold_every_format(report)


def test_a_neighbour_on_the_gpu_is_told_and_turns_no_sign() -> None:
    report = load_report(REPORTS / "h200-disturbed_gpu.json.gz")
    assert "GPU004" in {finding.code for finding in report.findings}
    assert "other processes used up to 54 % of the GPU" in report.verdict.summary
    quiet = load_report(RECORDED.with_name("h200-decoder_468m_compiled.json.gz"))
    assert report.verdict.status == quiet.verdict.status


def test_a_slow_host_is_told_and_turns_no_sign() -> None:
    """30 rounds of FP8 took 68 to 115 ms and those of BF16 70 to 74: 0.96x, and 1.04x by plain scripts."""
    report = load_report(REPORTS / "h100-disturbed_host.json.gz")
    assert "STP009" in {finding.code for finding in report.findings}
    assert "the GPU waited for a busy CPU" in report.verdict.summary
    assert "stay-in-bf16" not in {step.treatment.name for step in report.prescription}
    assert not [finding.title for finding in report.findings if "0.96x" in finding.title]


def test_the_answer_tells_a_cause_once_and_no_seconds_of_compilation_for_a_slow_step() -> None:
    gpt, qwen = (
        answer(load_report(REPORTS / f"{name}.json.gz"))
        for name in ("h100-gpt_124m_whole", "h200-qwen3_1_7b_whole_rowwise")
    )
    assert gpt.why == ("FP8 casts cost 8.1 ms/step; the FP8 matmuls save 5.2.",)
    assert gpt.fix == ("Leave FP8 off.",)
    assert qwen.why == ("FP8 casts cost 38.9 ms/step; the FP8 matmuls save 20.7.",)


def test_the_answer_holds_noisy_changes_to_bf16_without_calling_the_two_close() -> None:
    report = load_report(REPORTS / "h100-bert_large_accelerate.json.gz")
    told = "With the fixes that were timed: 64.7 ms, within noise of BF16 (66.2 ms)."
    assert answer(report).then.sentence == f"With this fix the layers train. {told}"


def test_a_quiet_host_is_no_change_of_the_job() -> None:
    told = answer(load_report(REPORTS / "h200-flux_like.json.gz")).then
    assert told.sentence == "As it is: 62.8 ms, within noise of compiled BF16 (65.5 ms)."


def test_a_recipe_that_crashed_its_process_is_named_with_the_reason() -> None:
    """A kernel that torch 2.11 makes of rowwise casts beside a concatenation reads where it may not."""
    arms = load_report(REPORTS / "h200-flux_like.json.gz").facts.trial.arms
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


def folder_of_a_job(out: Path, times: dict[str, float]) -> Path:
    report = json.loads(text_of(RECORDED))
    folder = out / "job"
    folder.mkdir()
    plain: dict[str, Any] = {
        name: {
            "step_ms": arm["step_ms"] * times.get(name, 1.0),
            "peak_gib": arm["peak_gib"],
            "idle_share": 0.02,
        }
        for name, arm in held_to_plain.arms_of(report).items()
        if arm["tried"]
    }
    (folder / "cold.json").write_text(json.dumps(report))
    (folder / "plain.json").write_text(json.dumps(plain))
    (folder / "runs.json").write_text(json.dumps({"cold": {"seconds": 90.0, "error": None}}))
    return folder


def test_plain_scripts_that_agree_miss_nothing(tmp_path: Path) -> None:
    held = held_to_plain.hold(folder_of_a_job(tmp_path, {}), {})
    assert "right" in held.summary[0]
    assert max(held.errors) == max(held.memory_errors) == 0
    assert not [each for each in held.missed if "not asked" not in each]


def test_a_plain_script_that_is_faster_is_told_by_its_arm_and_can_turn_the_sign(tmp_path: Path) -> None:
    held = held_to_plain.hold(folder_of_a_job(tmp_path, {"as_is": 0.25}), {"COLD_S": 10.0})
    assert "WRONG" in held.summary[0]
    assert "job cold: sign WRONG" in held.missed
    assert "job cold | as_is: time 300.0 %" in held.missed
    assert "job cold: 51 s" in held.missed


def test_a_verdict_that_calls_its_times_too_noisy_has_no_sign_to_be_wrong(tmp_path: Path) -> None:
    folder = folder_of_a_job(tmp_path, {"as_is": 0.25})
    report = json.loads((folder / "cold.json").read_text())
    report["verdict"]["status"] = "too_noisy"
    (folder / "cold.json").write_text(json.dumps(report))
    held = held_to_plain.hold(folder, {"COLD_S": 10.0})
    assert "| not told |" in held.summary[0]
    assert {"job cold: sign not told", "job cold: verdict too_noisy"} <= set(held.missed)


@pytest.mark.parametrize("reliable", [True, False])
def test_times_that_a_trial_relies_on_are_told_apart(reliable: bool, tmp_path: Path) -> None:
    folder = folder_of_a_job(tmp_path, {"as_is": 0.25})
    report = json.loads((folder / "cold.json").read_text())
    report["facts"]["trial"]["reliable"] = reliable
    (folder / "cold.json").write_text(json.dumps(report))
    held = held_to_plain.hold(folder, {})
    assert max(held.errors) == 3.0
    assert held.relied_on == (held.errors if reliable else [])
    told = f"median 0.0 %, worst 300.0 % of {len(held.errors)}" if reliable else "nothing to compare"
    text, _ = held_to_plain.table(tmp_path, {folder.name: {}})
    assert f"In trials that call their times reliable: {told}." in text


@pytest.mark.parametrize(
    ("half", "closely", "holds"), [(0.02, True, False), (0.5, False, True), (None, False, False)]
)
def test_times_that_the_trial_tells_closely_are_told_apart(
    half: float | None, closely: bool, holds: bool, tmp_path: Path
) -> None:
    folder = folder_of_a_job(tmp_path, {"as_is": 0.8})
    report = json.loads((folder / "cold.json").read_text())
    for arm in report["facts"]["trial"]["arms"]:
        for end, away in (("low_ms", -1), ("high_ms", 1)):
            arm[end] = arm["step_ms"] * (1 + away * half) if half and arm["name"] == "as_is" else None
    (folder / "cold.json").write_text(json.dumps(report))
    held = held_to_plain.hold(folder, {})
    assert held.told_closely == ([pytest.approx(0.25)] if closely else [])
    assert held.in_interval == ([holds] if half else [])
    text, _ = held_to_plain.table(tmp_path, {folder.name: {}})
    assert (" ± " in text) == (half is not None)
    assert f"; {int(holds)} of {len(held.in_interval)} intervals hold the plain time." in text


def test_a_timing_that_two_names_tell_counts_once(tmp_path: Path) -> None:
    folder = folder_of_a_job(tmp_path, {"prescribed": 0.5})
    before = held_to_plain.hold(folder, {})
    report, plain = (json.loads((folder / name).read_text()) for name in ("cold.json", "plain.json"))
    prescribed = next(arm for arm in report["facts"]["trial"]["arms"] if arm["name"] == "prescribed")
    report["facts"]["trial"]["arms"].append(prescribed | {"name": "compile-blocks"})
    for name in ("prescribed", "compile-blocks"):
        plain[name] = plain["prescribed"] | {"changes": ["compile-blocks"]}
    (folder / "cold.json").write_text(json.dumps(report))
    (folder / "plain.json").write_text(json.dumps(plain))
    held = held_to_plain.hold(folder, {})
    assert len(held.variants) == len(before.variants) + 1
    assert (held.errors, held.memory_errors, held.missed) == (
        before.errors,
        before.memory_errors,
        before.missed,
    )


def test_a_job_whose_trial_failed_is_missed_and_keeps_its_plain_times(tmp_path: Path) -> None:
    folder = folder_of_a_job(tmp_path, {})
    (folder / "cold.json").unlink()
    (folder / "runs.json").write_text(json.dumps({"cold": {"seconds": 9.0, "error": "exit 2: no such file"}}))
    held = held_to_plain.hold(folder, {})
    assert "exit 2: no such file" in held.summary[0]
    assert held.missed == ["job cold: no trial"]
    assert len(held.variants) == 4


def test_an_arm_is_made_by_hand_from_its_treatments(tmp_path: Path) -> None:
    report = json.loads(text_of(RECORDED))
    assert held_to_plain.changes_of("prescribed", report) == ["compile-blocks"]
    recipe = next(arm for arm in held_to_plain.arms_of(report).values() if arm["name"] == "prescribed")
    report["facts"]["trial"]["arms"].append(
        recipe | {"name": "recipe-rowwise", "treatments": ["recipe-rowwise"], "base": "prescribed"}
    )
    assert held_to_plain.changes_of("recipe-rowwise", report) == ["compile-blocks", "recipe-rowwise"]
    assert held_to_plain.wanted(report, ["as_is", "bf16", "compile-blocks"]) == {
        "as_is": [],
        "bf16": ["bf16"],
        "prescribed": ["compile-blocks"],
    }


def test_an_arm_whose_base_is_no_answer_itself_has_the_changes_of_that_base_too() -> None:
    report = json.loads(text_of(RECORDED))
    arms = report["facts"]["trial"]["arms"]
    prescribed = next(arm for arm in arms if arm["name"] == "prescribed")
    arms.append(prescribed | {"name": "prescribed_first"})
    recipe = {"name": "recipe-rowwise", "treatments": ["recipe-rowwise"]}
    arms.append(prescribed | recipe | {"base": "prescribed_first"})
    assert "prescribed_first" not in held_to_plain.arms_of(report)
    assert held_to_plain.changes_of("recipe-rowwise", report) == ["compile-blocks", "recipe-rowwise"]
    arms[-1]["base"] = "lost"
    assert held_to_plain.changes_of("recipe-rowwise", report) is None


def test_what_tells_the_sign_is_timed_first() -> None:
    report = json.loads(text_of(RECORDED))
    report["facts"]["trial"]["arms"].reverse()
    first = list(held_to_plain.wanted(report, ["compile-blocks", *held_to_plain.BF16]))[:4]
    assert first == ["as_is", *held_to_plain.BF16]


@pytest.fixture
def trial_jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(JOBS.parent)
    return importlib.import_module("trial_jobs")


LASTS = "import time; time.sleep(60)"
PLAIN_SCRIPT = """
import json, sys, time
print('["bf16", "bf16_compiled", "bf16_as_compiled"]', flush=True)
changes = json.loads(sys.stdin.readline())
print("ready", flush=True)
sys.stdin.readline()
if changes == ["bf16"]:
    print("begun", flush=True)
    time.sleep(60)
print('{"step_ms": 9.0}')
"""


def test_plain_scripts_that_the_end_of_the_run_came_before_are_told_as_not_run(
    tmp_path: Path, trial_jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(job: Any) -> Any:
        number = len(job.bench.runs)
        return job.started([sys.executable, "-c", PLAIN_SCRIPT], f"plain-{number}.log")

    monkeypatch.setattr(trial_jobs.JobRun, "examine", lambda job, kind: None)
    monkeypatch.setattr(trial_jobs.JobRun, "plain", plain)
    arguments = Namespace(tiny=True, te=None, warm=False)
    bench = trial_jobs.Bench(tmp_path, {"job": {}, "next": {}}, arguments, threading.Lock())
    names: SimpleQueue[str] = SimpleQueue()
    names.put("job")
    names.put("next")
    lane = threading.Thread(target=trial_jobs.worker, args=(bench, names, "", os.sched_getaffinity(0)))
    lane.start()
    wait_for(
        "the second plain script",
        lambda: not lane.is_alive() or any("begun" in run.lines() for run in bench.runs),
    )
    bench.end()
    lane.join(LONGEST_S)
    assert not lane.is_alive()
    assert not (tmp_path / "next").exists()
    assert all(run.process.poll() is not None for run in bench.runs)
    known, held = held_to_plain.read(tmp_path / "job" / "plain.json"), held_to_plain.Held()
    for name in ("as_is", *held_to_plain.BF16):
        held_to_plain.hold_arm(held, name, {"tried": True, "step_ms": 9.0}, known[name])
    assert ["not run" in line for line in held.variants] == [False, True, True, True]


FAILS_TO_BUILD = PLAIN_SCRIPT.replace(
    'print("ready"', 'if changes == ["bf16_compiled"]:\n    sys.exit("no such layer")\nprint("ready"'
).replace("time.sleep(60)", "")


@pytest.mark.parametrize("gpu_gib", [80.0, 0.0], ids=["side by side", "one after the other"])
def test_a_variant_that_fails_to_build_costs_only_itself(
    tmp_path: Path, trial_jobs: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu_gib: float
) -> None:
    def plain(job: Any) -> Any:
        return job.started([sys.executable, "-c", FAILS_TO_BUILD], f"plain-{len(job.bench.runs)}.log")

    monkeypatch.setattr(trial_jobs.JobRun, "examine", lambda job, kind: None)
    monkeypatch.setattr(trial_jobs.JobRun, "plain", plain)
    monkeypatch.setattr(trial_jobs.JobRun, "gpu_gib", lambda job: gpu_gib)
    monkeypatch.setattr(
        trial_jobs.JobRun, "peaks_gib", lambda job, of: {tuple(each): 9.0 for each in of.values()}
    )
    bench = trial_jobs.Bench(
        tmp_path, {"job": {}}, Namespace(tiny=True, te=None, warm=False), threading.Lock()
    )
    trial_jobs.JobRun(bench, "job", "", tmp_path).all()
    known = held_to_plain.read(tmp_path / "job" / "plain.json")
    assert known["bf16_compiled"]["error"] == "exit 1: no such layer"
    assert {name: each.get("step_ms") for name, each in known.items() if "error" not in each} == {
        "as_is": 9.0,
        "bf16": 9.0,
        "bf16_as_compiled": 9.0,
    }
    assert all(run.process.poll() is not None for run in bench.runs)


def test_what_a_job_that_breaks_off_has_started_is_ended_before_the_next(
    tmp_path: Path, trial_jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(job: Any, idle: list[Any]) -> None:
        idle.pop()
        raise ValueError("no JSON")

    def plain(job: Any) -> Any:
        return job.started([sys.executable, "-c", PLAIN_SCRIPT], f"plain-{len(job.bench.runs)}.log")

    monkeypatch.setattr(trial_jobs.JobRun, "examine", lambda job, kind: None)
    monkeypatch.setattr(trial_jobs.JobRun, "plain", plain)
    monkeypatch.setattr(trial_jobs.JobRun, "time_plainly", breaks_off)
    bench = trial_jobs.Bench(
        tmp_path, {"job": {}}, Namespace(tiny=True, te=None, warm=False), threading.Lock()
    )
    with pytest.raises(ValueError, match="no JSON"):
        trial_jobs.JobRun(bench, "job", "", tmp_path).all()
    assert len(bench.runs) == trial_jobs.AT_ONCE
    assert all(run.process.poll() is not None for run in bench.runs)


def test_what_a_job_prints_is_no_answer_of_its_plain_script(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import torch\nprint('imported')\nVARIANTS = {'bf16': lambda model: model}\n"
        "def build_model():\n    print('built')\n    return torch.nn.Linear(4, 4)\n"
        "def example_batch():\n    return torch.ones(2, 4)\n"
        "def loss(output, batch):\n    print('a step')\n    return output.sum()\n"
    )
    done = subprocess.run(
        [sys.executable, plain_step.__file__, str(job)],
        input='["bf16"]\n\n',
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_S,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    variants, ready, times = done.stdout.splitlines()
    assert (json.loads(variants), ready) == (["bf16"], "ready")
    assert json.loads(times)["step_ms"] > 0
    assert "imported" in done.stderr


@pytest.mark.parametrize(
    ("peaks_gib", "gpu_gib", "split"),
    [
        ([20, 20, 20, 17, 9], 80, [[0, 1, 2], [3, 4]]),
        ([60, 60], 80, [[0], [1]]),
        ([9, None, 9], 80, [[0], [1], [2]]),
        ([1, 1], 0, [[0], [1]]),
    ],
)
def test_plain_scripts_compile_side_by_side_as_far_as_the_gpu_holds_them(
    peaks_gib: list[float | None], gpu_gib: float, split: list[list[int]], trial_jobs: ModuleType
) -> None:
    named = {(str(number),): peak for number, peak in enumerate(peaks_gib)}
    assert trial_jobs.side_by_side(named, gpu_gib) == [[(str(each),) for each in group] for group in split]


@pytest.mark.parametrize(
    ("count", "split"), [(1, [{0, 1, 4, 5, 8}]), (2, [{0, 1}, {4, 5}]), (6, [{0, 1, 4, 5, 8}] * 6)]
)
def test_jobs_side_by_side_have_cores_of_their_own(
    count: int, split: list[set[int]], trial_jobs: ModuleType
) -> None:
    assert trial_jobs.shares([8, 0, 1, 5, 4], count) == split


def test_what_is_started_while_the_run_ends_is_ended_too(
    tmp_path: Path, trial_jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = trial_jobs.Bench(
        tmp_path, {"job": {}}, Namespace(tiny=True, te=None, warm=False), threading.Lock()
    )
    started = trial_jobs.Run.started

    def late(*arguments: Any) -> Any:
        bench.end()
        return started(*arguments)

    monkeypatch.setattr(trial_jobs.Run, "started", late)
    job = trial_jobs.JobRun(bench, "job", "", tmp_path)
    with pytest.raises(trial_jobs.Interrupted):
        job.started([sys.executable, "-c", LASTS], "plain.log")
    (run,) = bench.runs
    assert run.process.poll() is not None


@pytest.mark.parametrize(("given", "named"), [(None, ["0", "1"]), ("5,GPU-a", ["5", "GPU-a"]), ("3", ["3"])])
def test_only_gpus_that_are_visible_are_used(
    given: str | None, named: list[str], trial_jobs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert trial_jobs.visible(2) == named
