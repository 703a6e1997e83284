"""ENV001 on real Accelerators, arguments, launchers and packages: who lost the request for FP8."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from torch import nn

from fp8doctor.analysis.by_accelerate import ALL_GATHER, ORDINARY
from fp8doctor.analysis.fp8_request import asked_by_environment
from fp8doctor.checks.environment.fp8_request_overridden import DEFAULTS, FIRES, PREFIX, SILENT
from fp8doctor.code_snippets import settings
from fp8doctor.examine import examine_surroundings
from fp8doctor.examine.environment import CUTEDSL
from fp8doctor.examine.fp8_support import try_import
from fp8doctor.facts import Accelerate, Environment, Facts, Gpu, Package, Target, TrainerArguments
from fp8doctor.facts.examples import float8
from fp8doctor.finding import Finding, Treatment
from fp8doctor.known_errors import known_errors
from fp8doctor.registry import discover, run
from tests import prototypes
from tests.checks.environment.live import facts_of, finding_of, launched, printed
from tests.checks.environment.live import outcome_of as whole_outcome_of
from tests.stand_ins.packages import stand_in

Look = Callable[..., Facts]

OVERRIDDEN, IDLE, MISSPELLED = (
    "fp8-request-overridden",
    "fp8-setting-without-effect",
    "fp8-backend-misspelled",
)
MISSING, HIDDEN, ACCIDENT = "fp8-backend-missing", "hidden-fp8", "backend-by-accident"
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
BACKEND = PREFIX + "BACKEND"


def found(rule: str, facts: Facts) -> Finding:
    finding = finding_of(rule, facts)
    assert finding is not None
    return finding


def outcome_of(rule: str, facts: Facts) -> str:
    return whole_outcome_of(rule, facts).outcome


def fix(rule: str, facts: Facts) -> Treatment:
    treatment = found(rule, facts).treatment
    assert treatment is not None
    return treatment


def job(variables: dict[str, str], packages: dict[str, str] | None = None, **training: Any) -> Facts:
    """SILENT with these variables, versions and fields of training."""
    versions = packages or {"accelerate": "1.15.0", "torchao": "0.18.0", "transformer_engine": "2.20.2"}
    installed = {name: Package(version=version, imported=True) for name, version in versions.items()}
    return replace(
        SILENT,
        software=replace(SILENT.software, packages=installed),
        environment=replace(SILENT.environment, variables=variables),
        training=replace(SILENT.training, **training),
    )


def here() -> Facts:
    """Facts of this very process."""
    return examine_surroundings(Target(kind="environment", name="environment"))


ARGUMENTS = """
from transformers import TrainingArguments
trainer = TrainingArguments(output_dir="out", use_cpu=True, report_to=[]{})
"""
ACCELERATOR = "from accelerate import Accelerator\nAccelerator(cpu=True{})\n"


@pytest.mark.parametrize(
    ("program", "variables", "who", "line"),
    [
        (ARGUMENTS.format(", bf16=True"), FP8, "TrainingArguments(bf16=True) made it bf16", "bf16=False"),
        (
            ARGUMENTS.format("") + 'os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"\n',
            {},
            "TrainingArguments, created before the variable was set, made it no",
            'environ["ACCELERATE_MIXED_PRECISION"] = "fp8"',
        ),
        (
            ACCELERATOR.format(', mixed_precision="bf16"'),
            FP8,
            "Accelerator() made it bf16",
            f"AORecipeKwargs(config={ORDINARY})",
        ),
        (
            ACCELERATOR.format(""),
            {"ACCELERATE_MIXED_PRECISION": "FP8"},
            "the spelling",
            f"{ALL_GATHER}=false",
        ),
        (ARGUMENTS.format(", bf16=False, fp16=False"), FP8, None, ""),
        (ACCELERATOR.format(""), FP8, None, ""),
    ],
)
def test_who_overrode_the_request(
    program: str, variables: dict[str, str], who: str | None, line: str
) -> None:
    finding = finding_of(OVERRIDDEN, facts_of(program, **variables))
    assert (finding is not None) == (who is not None)
    if finding and who:
        assert who in finding.title
        assert finding.severity == "error"
        assert finding.treatment is not None
        assert line in finding.treatment.code


@pytest.mark.parametrize(
    ("kind", "package", "who"),
    [
        ("trl.trainer.sft_config.SFTConfig", "trl", "SFTConfig(bf16=True)"),
        ("x.Args", "unsloth", "Unsloth 1.0"),
    ],
)
def test_a_library_is_named(kind: str, package: str, who: str) -> None:
    trainer = TrainerArguments(kind=kind, bf16=True, fp16=False, mixed_precision="bf16")
    assert who in found(OVERRIDDEN, job(FP8, {"transformers": "5.0", package: "1.0"}, trainer=trainer)).title


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        (("--mixed_precision", "fp8"), True),
        (("--mixed_precision", "bf16", "--fp8_backend", "te"), False),
        ((), False),
    ],
)
def test_the_launcher_is_recognized_although_its_variable_was_rewritten(
    arguments: tuple[str, ...], asks: bool
) -> None:
    """transformers up to 4.57 writes bf16 into the variable; what the launcher wrote beside it stays."""
    rewritten = launched(*arguments) | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert (asked_by_environment(rewritten) is not None) == asks
    assert asked_by_environment({"ACCELERATE_FP8_FORMAT": "E4M3"}) is None, "one variable is no launcher"


def test_what_is_no_override() -> None:
    """Accelerate's fallback on an old GPU, FP8 layers that are there, DeepSpeed's state, no Accelerator."""
    fp16 = Accelerate(mixed_precision="fp16", distributed="NO")
    fallen = replace(
        job(FP8, trainer=None, accelerate=fp16), gpus=(Gpu(name="A100", compute_capability="8.0"),)
    )
    assert outcome_of(OVERRIDDEN, fallen) == "not_applicable"
    assert outcome_of(OVERRIDDEN, replace(fallen, gpus=())) == "fires"
    in_fp8 = replace(FIRES[0], network=replace(FIRES[0].network, linears=(float8(),)))
    assert outcome_of(OVERRIDDEN, in_fp8) == "not_applicable"
    deepspeed = Accelerate(mixed_precision="no", distributed="DEEPSPEED")
    assert outcome_of(OVERRIDDEN, job(FP8, accelerate=deepspeed)) == "silent"
    assert outcome_of(OVERRIDDEN, job(FP8, accelerate=None, trainer=None)) == "not_applicable"


WRITTEN = ("te", "ao", "torchao", "", " TE", "TE", "AO", "MSAMP", "NO", "transformer_engine")


@functools.cache
def verdicts_of_accelerate() -> dict[str, str]:
    """What `Accelerator()` does with each value: the text of the ValueError, or nothing."""
    program = """
import json, os, sys
from accelerate import Accelerator
from accelerate.state import AcceleratorState
said = {}
for written in json.loads(sys.argv[1]):
    os.environ["ACCELERATE_FP8_BACKEND"] = written
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        Accelerator(cpu=True)
        said[written] = ""
    except ValueError as error:
        said[written] = str(error)
print(json.dumps(said))
"""
    said: dict[str, str] = json.loads(printed(program, json.dumps(WRITTEN)).splitlines()[-1])
    return said


@pytest.mark.parametrize("written", WRITTEN)
def test_the_check_and_accelerate_agree_on_a_backends_name(written: str) -> None:
    finding, said = finding_of(MISSPELLED, job({BACKEND: written})), verdicts_of_accelerate()[written]
    assert bool(finding) == bool(said)
    if finding:
        assert said in finding.explanation


def test_the_line_names_the_backend_that_was_meant() -> None:
    for written, right in (
        ("ao", "AO"),
        (" TE ", "TE"),
        ("ms-amp", "MSAMP"),
        ("none", "NO"),
        ("cutlass", "AO"),
    ):
        assert settings(fix(MISSPELLED, job({BACKEND: written})).code)[BACKEND] == right
    by_launcher = launched("--mixed_precision", "fp8", "--fp8_backend", "te")
    assert "accelerate launch --fp8_backend te sets" in found(MISSPELLED, job(by_launcher)).explanation


@pytest.mark.parametrize(
    ("version", "outcome"), [("1.8.1", "not_applicable"), ("1.9.0", "fires"), ("main", "fires")]
)
def test_only_an_accelerate_that_reads_the_variable_minds(version: str, outcome: str) -> None:
    assert outcome_of(MISSPELLED, job({BACKEND: "te"}, {"accelerate": version})) == outcome
    prepared = Accelerate(mixed_precision="fp8", prepared=True)
    assert outcome_of(MISSPELLED, job({BACKEND: "te"}, accelerate=prepared)) == "not_applicable"


def idle(facts: Facts) -> tuple[str, ...]:
    finding = finding_of(IDLE, facts)
    settings: Any = finding.evidence["settings"] if finding else ()
    return tuple(each.partition("=")[0] for each in settings)


def test_the_variables_of_llama_factory_are_read_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8_BACKEND", "te")
    monkeypatch.setenv("FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "true")
    assert fix(IDLE, here()).code.splitlines() == [
        "unset FP8_BACKEND   # or, to train with TE: export ACCELERATE_FP8_BACKEND=TE",
        "unset FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER",
    ]
    kept = {"FP8_BACKEND": "torchao", "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false"}
    assert fix(IDLE, job(kept, {"torchao": "0.18.0"})).code.splitlines()[1::2] == [
        "export ACCELERATE_FP8_BACKEND=AO",
        "export ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false",
    ]
    assert idle(job({f"ACCELERATE_{name}": value for name, value in kept.items()})) == ()


def test_a_real_deepspeed_configuration_with_an_fp8_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ds_config.json"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp8": {"enabled": True}}))
    assert idle(here()) == ('deepspeed "fp8" section',)
    path.write_text("no configuration")
    monkeypatch.setenv("FP8_BACKEND", "te")
    assert idle(here()) == ("FP8_BACKEND",)


@pytest.mark.parametrize("backend", [None, "TE", "AO", "MSAMP"])
@pytest.mark.parametrize("distributed", ["NO", "DEEPSPEED"])
def test_what_the_launcher_writes_by_itself_is_never_reported(backend: str | None, distributed: str) -> None:
    variables = launched("--mixed_precision", "fp8") | ({BACKEND: backend} if backend else {})
    accelerate = Accelerate(mixed_precision="fp8", distributed=distributed)
    for packages in (None, {"torchao": "0.18.0"}, {"transformer_engine": "2.20.2"}, {"torch": "2.13.0"}):
        assert idle(job(variables, packages, accelerate=accelerate)) == ()
    old = variables | {PREFIX + "FORMAT": "E4M3"}
    assert idle(job(old, {"accelerate": "1.7.0", "torchao": "0.18.0"}, accelerate=accelerate)) == ()


@pytest.mark.parametrize("owner", sorted(DEFAULTS))
def test_every_variable_of_a_backend_is_idle_under_another(owner: str) -> None:
    old = {"accelerate": "1.15.0", "transformer_engine": "1.13.0"}
    for suffix, default in DEFAULTS[owner].items():
        changed = "false" if default == "true" else "true" if default == "false" else default + "1"
        for backend in DEFAULTS:
            said = idle(job({PREFIX + suffix: changed, BACKEND: backend}, old))
            assert said == (() if backend == owner else (PREFIX + suffix,)), (suffix, backend)
    assert idle(job({PREFIX + "PAD_INNER_DIM": "yes", PREFIX + "MARGIN": "0", BACKEND: "MSAMP"})) == ()


@pytest.mark.parametrize(
    ("suffix", "value", "dropped_in", "kept_until"),
    [
        ("OVERRIDE_DGRAD", "true", "2.0.0", "1.13.0"),
        ("INTERVAL", "4", "2.2.0", "2.1.0"),
        ("AMAX_COMPUTE_ALGO", "most_recent", "2.20.2", None),
    ],
)
def test_what_does_not_reach_transformer_engine(
    suffix: str, value: str, dropped_in: str, kept_until: str | None
) -> None:
    variables = {BACKEND: "TE", PREFIX + suffix: value}
    assert idle(job(variables, {"transformer_engine": dropped_in})) == (PREFIX + suffix,)
    assert not kept_until or idle(job(variables, {"transformer_engine": kept_until})) == ()
    history = {BACKEND: "TE", PREFIX + "AMAX_HISTORY_LEN": "16"}
    deepspeed = Accelerate(mixed_precision="fp8", distributed="DEEPSPEED")
    assert (idle(job(history)), len(idle(job(history, accelerate=deepspeed)))) == ((), 1)


SYMBOL = "libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version 13"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A transformer_engine 2.14.1 whose torch part cannot be imported; the empty torch beside it saves its
    import."""
    folder = tmp_path / "transformer_engine" / "pytorch"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text(
        "try:\n    from . import pytorch\nexcept ImportError:\n    pass"
    )
    (folder / "__init__.py").write_text(f"raise ImportError({SYMBOL!r})")
    (tmp_path / "torch.py").touch()
    metadata = tmp_path / "transformer_engine-2.14.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.14.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(BACKEND, "TE")
    return folder / "__init__.py"


def test_a_half_installed_backend_gives_the_real_reason(package: Path) -> None:
    finding = found(MISSING, here())
    assert finding.evidence["error"] == f"ImportError: {SYMBOL}"
    assert finding.title == "The FP8 backend transformer_engine 2.14.1 cannot be imported"
    assert 'install --no-build-isolation "transformer-engine[pytorch]>=2.17' in fix(MISSING, here()).code
    try_import.cache_clear()
    package.write_text("")
    assert outcome_of(MISSING, here()) == "silent"


def tried(error: str, **fields: Any) -> Facts:
    environment = Environment(variables={}, backend_imports={"TE": error})
    return replace(SILENT, environment=environment, **fields)


@pytest.mark.parametrize(
    ("error", "said", "line"),
    [
        (
            "OSError: libcudnn_cnn.so.9: undefined symbol: _ZN5cudnn7backend, version libcudnn_graph.so.9",
            "two cuDNN versions",
            "LD_LIBRARY_PATH",
        ),
        (
            "RuntimeError: Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.10.",
            "need cuDNN 9.12",
            "nvidia-cudnn-cu12",
        ),
        ("ZeroDivisionError: division by zero", "ZeroDivisionError", "transformer-engine[pytorch]"),
    ],
)
def test_known_ways_of_being_broken_are_explained(error: str, said: str, line: str) -> None:
    assert said in found(MISSING, tried(error)).explanation
    assert line in fix(MISSING, tried(error)).code


def test_a_backend_that_needs_a_gpu_is_a_warning_on_a_machine_without_one() -> None:
    absent = "ModuleNotFoundError: No module named 'transformer_engine'"
    severities = [found(MISSING, tried(absent, gpus=gpus)).severity for gpus in ((), (Gpu(name="H200"),))]
    assert severities == ["warning", "error"]
    alone = job(FP8, {"accelerate": "1.15.0"}, accelerate=None)
    alone = replace(alone, environment=replace(alone.environment, backend_imports={}))
    assert found(MISSING, alone).title == "FP8 was asked for, but no FP8 backend is installed"


OLD, NEW = "9.10.2.21", "9.12.0.46"
"""cuDNN of torch 2.8 to 2.10, and one that Transformer Engine 2.20 takes."""


@pytest.mark.parametrize(("cudnn", "newest"), [(OLD, False), (None, False), (NEW, True)])
def test_the_version_of_transformer_engine_fits_cudnn(cudnn: str | None, newest: bool) -> None:
    facts = tried("ZeroDivisionError: division by zero", software=replace(SILENT.software, cudnn=cudnn))
    (bounds,) = REQUIREMENT.findall(fix(MISSING, facts).code)
    releases = ("2.20.2", "2.19.0", "2.16.1")  # the last misses a symbol in the cuBLAS of torch 2.11
    assert [SpecifierSet(bounds).contains(each) for each in releases] == [newest, True, False]


REQUIREMENT = re.compile(r"transformer-engine\[pytorch\]([^\"`]*)\"")


def printed_installs() -> Iterator[str]:
    for check in discover():
        held = check.module.FIRES
        for facts in (held,) if isinstance(held, Facts) else held:
            yield from (each.treatment.code for each in run([check], facts)[0] if each.treatment)
    yield from (known.lines for known in known_errors())


def test_no_line_installs_a_version_that_refuses_cudnn_without_saying_so() -> None:
    lines = [line for text in printed_installs() for line in text.splitlines()]
    installs = [line for line in lines if re.match(r"pip install.*transformer-engine\[", line)]
    assert len(installs) > 3
    for line in installs:
        (bounds, *_) = REQUIREMENT.findall(line)
        assert "cuDNN" in line or not SpecifierSet(bounds).contains("2.20.2"), line


def test_mx_layers_without_torchaos_kernels(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch loads none of torchao's libraries; a CUDA build is stood in for by its version."""
    from torchao.quantization import quantize_

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.ops, "loaded_libraries", set())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    quantize_(model, prototypes.mxfp8(), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    facts = look(model)
    assert found(MISSING, facts).title.startswith("2 MX layers cannot run")
    loaded = replace(facts, software=replace(facts.software, torchao_libraries=2))
    assert outcome_of(MISSING, loaded) == "not_applicable"
    nvfp4 = prototypes.module("nvfp4_training.nvfp4_training").NVFP4Linear  # its kernels are Triton's
    assert outcome_of(MISSING, look(nn.Sequential(nvfp4(128, 128)))) == "not_applicable"


def titans_experts() -> nn.Module:
    """As torchtitan tells its experts to multiply in MXFP8."""
    experts = type("GroupedExperts", (nn.Module,), {"_mxfp8_op_config": prototypes.mxfp8()})()
    experts.top_k = 2
    experts.w1 = nn.Parameter(torch.zeros(4, 64, 32))
    return nn.Sequential(experts)


@pytest.mark.parametrize("present", [(), ("cuda_bindings",), ("cuda_python", "apache_tvm_ffi")])
def test_mxfp8_experts_without_the_packages_of_their_casts(
    present: tuple[str, ...], look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchao 0.18 is here; a B200, a CUDA build and the packages are stood in for."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    names = (each for alternatives in CUTEDSL.values() for each in alternatives)
    stand_in(monkeypatch, **{name: "1.0" if name in present else None for name in names})
    gpu = Gpu(name="NVIDIA B200", vendor="nvidia", compute_capability="10.0", visible=True)
    facts = replace(look(titans_experts()), gpus=(gpu,))
    finding = found(MISSING, facts)
    assert (finding.severity, finding.breaks) == ("error", "step_raises")
    assert fix(MISSING, facts).code.startswith("pip install nvidia-cutlass-dsl==")
    assert ("cuda-python" in finding.title) == (not present)
    hopper = replace(facts, gpus=(replace(gpu, compute_capability="9.0"),))
    assert (finding := finding_of(MISSING, hopper)) is None or finding.severity == "warning"


def four() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.mark.parametrize("backend", ["AO", "TE"])
def test_a_backend_without_fp8(
    monkeypatch: pytest.MonkeyPatch, look: Look, backend: str, forget_accelerate: None
) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv(BACKEND, backend)
    assert outcome_of(ACCIDENT, look(four())) == "not_applicable", "nothing has decided the precision"
    model = four()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    if backend == "AO":
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'config'"):
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finding = found(ACCIDENT, look(four()))
    assert finding.severity == "error"
    assert finding.title.startswith(f"{BACKEND}={backend} is set, but the precision is bf16: none of ")
    asks = f"{BACKEND}=AO accelerate launch --mixed_precision fp8"
    assert fix(ACCIDENT, look(four())).code.startswith(asks if backend == "AO" else f"unset {BACKEND}")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert (outcome_of(ACCIDENT, look(four())), outcome_of(OVERRIDDEN, look(four()))) == ("silent", "fires")


def test_fp8_layers_in_spite_of_the_precision() -> None:
    in_fp8 = FIRES[-1]
    assert found(HIDDEN, in_fp8).severity == "error"
    rules = [each for each in discover() if each.code == "ENV001"]
    assert [each.name for each in run(rules, in_fp8)[0]] == [HIDDEN], "one says it"
    asked = replace(in_fp8, environment=replace(in_fp8.environment, variables={BACKEND: "TE", **FP8}))
    assert found(HIDDEN, asked).severity == "warning"
    own = replace(in_fp8, environment=replace(in_fp8.environment, variables={}))
    assert outcome_of(HIDDEN, own) == "not_applicable", "the script made its layers itself"


def test_two_backends_and_none_named(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    import torchao.float8
    from accelerate import Accelerator

    assert torchao.float8
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    model = four()
    model = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]

    def facts() -> Facts:
        seen = look(model)
        both = seen.software.packages | {"transformer_engine": Package(version="2.20.2", imported=False)}
        return replace(seen, software=replace(seen.software, packages=both))

    assert found(ACCIDENT, facts()).severity == "warning", "AORecipeKwargs may have been passed"
    backend, launch = fix(ACCIDENT, facts()).code.splitlines()
    assert backend.startswith(f"export {BACKEND}=AO "), "naming it does not change it"
    assert "--dynamo_use_regional_compilation" in launch
    trainer = TrainerArguments(kind="x.TrainingArguments", bf16=False, fp16=False, mixed_precision="fp8")
    trained = replace(facts(), training=replace(facts().training, trainer=trainer))
    assert found(ACCIDENT, trained).severity == "error", "a Trainer passes no recipe"
    assert outcome_of(ACCIDENT, look(model)) == "silent", "one backend alone"
    monkeypatch.setenv(BACKEND, "AO")
    assert outcome_of(ACCIDENT, facts()) == "silent"
    monkeypatch.delenv(BACKEND)
    model.compile()
    assert outcome_of(ACCIDENT, facts()) == "silent"
