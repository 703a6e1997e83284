"""ENV001 on real Accelerators, arguments, launchers and packages: who lost the request for FP8."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.analysis.fp8_request import ALL_GATHER, BACKEND, LAUNCHER_FINGERPRINT, LAUNCHER_SETS, ORDINARY
from fp8doctor.checks.environment.fp8_request_overridden import FIRES, FP8, SILENT
from fp8doctor.examine import examine_surroundings
from fp8doctor.facts import Accelerate, Environment, Facts, Package, Target, TrainerArguments
from fp8doctor.kit import float8
from fp8doctor.registry import discover, run
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of, settings
from tests.programs import facts_of, printed

OVERRIDDEN, IDLE, MISSPELLED = (
    "fp8-request-overridden",
    "fp8-setting-without-effect",
    "fp8-backend-misspelled",
)
MISSING, HIDDEN, ACCIDENT = "fp8-backend-missing", "hidden-fp8", "backend-by-accident"


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
from transformers import Trainer, TrainingArguments
trainer = Trainer(model, TrainingArguments(output_dir="out", use_cpu=True, report_to=[]{}))
"""
LATER = ARGUMENTS.format("") + 'os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"\n'
ACCELERATOR = "from accelerate import Accelerator\nAccelerator(cpu=True{})\n"
LAUNCHED = {**FP8, BACKEND: "AO", ALL_GATHER: "1"}
UPPER = {"ACCELERATE_MIXED_PRECISION": "FP8"}


@pytest.mark.parametrize(
    ("program", "variables", "who", "line"),
    [
        (ARGUMENTS.format(", bf16=True"), FP8, "TrainingArguments(bf16=True)", "bf16=False"),
        (ARGUMENTS.format(", bf16=True"), LAUNCHED, "TrainingArguments(bf16=True)", ALL_GATHER),
        (LATER, {}, "TrainingArguments()", 'environ["ACCELERATE_MIXED_PRECISION"] = "fp8"'),
        (ACCELERATOR.format(', mixed_precision="bf16"'), FP8, "Accelerator()", f"config={ORDINARY}"),
        (ACCELERATOR.format(""), UPPER, "the spelling", f"{ALL_GATHER}=false"),
        (ARGUMENTS.format(", bf16=False, fp16=False"), FP8, None, ""),
        (ACCELERATOR.format(""), FP8, None, ""),
    ],
)
def test_who_overrode_the_request(
    program: str, variables: dict[str, str], who: str | None, line: str
) -> None:
    facts = facts_of(program, **variables)
    finding = finding_of(OVERRIDDEN, facts)
    assert (finding and finding.evidence["overridden_by"]) == who
    if finding:
        assert finding.severity == "error"
        assert line in fix_of(OVERRIDDEN, facts).code


WITHOUT = "--fp8_enable_fsdp_float8_all_gather false"


@pytest.mark.parametrize("sets", [LAUNCHER_FINGERPRINT, LAUNCHER_SETS])
def test_what_accelerate_launch_sets_itself_is_given_to_it(sets: Iterable[str]) -> None:
    launched = job({BACKEND: "ao", ALL_GATHER: "True", **dict.fromkeys(sets, "fp8")})
    code = fix_of(MISSPELLED, launched).code
    assert (f"{ALL_GATHER}=" in code, WITHOUT in code) == (False, True)


def args(kind: str) -> TrainerArguments:
    return TrainerArguments(kind=kind, bf16=True, fp16=False, mixed_precision="bf16")


IN_FP16 = Accelerate(mixed_precision="fp16", distributed="NO")
DEEPSPEED = Accelerate(mixed_precision="no", distributed="DEEPSPEED")
IN_FP8 = Accelerate(mixed_precision="fp8", prepared=True)
IN_FP8_LAYERS = replace(FIRES[0], network=replace(FIRES[0].network, linears=(float8(),)))
FACTORY = {"FP8_BACKEND": "te", "FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "true"}
READ = {f"ACCELERATE_{name}": value for name, value in FACTORY.items()}
ABSENT = "ModuleNotFoundError: No module named 'transformer_engine'"


def tried(error: str, **fields: Any) -> Facts:
    environment = Environment(variables={}, backend_imports={"TE": error})
    return replace(SILENT, environment=environment, **fields)


def hidden(**variables: str) -> Facts:
    return replace(FIRES[-1], environment=replace(FIRES[-1].environment, variables=variables))


@pytest.mark.parametrize(
    ("rule", "facts", "said"),
    [
        (OVERRIDDEN, job(FP8, {"unsloth": "1.0"}, trainer=args("x.Args")), "error"),
        (OVERRIDDEN, job(FP8, trainer=None, accelerate=IN_FP16), "error"),
        (OVERRIDDEN, IN_FP8_LAYERS, "not_applicable"),
        (OVERRIDDEN, job(FP8, accelerate=DEEPSPEED), "silent"),
        (OVERRIDDEN, job(FP8, accelerate=None, trainer=None), "not_applicable"),
        (MISSPELLED, job({BACKEND: "te"}, {"accelerate": "1.8.1"}), "not_applicable"),
        (MISSPELLED, job({BACKEND: "te"}, {"accelerate": "1.9.0"}), "error"),
        (MISSPELLED, job({BACKEND: "te"}, accelerate=IN_FP8), "not_applicable"),
        (IDLE, job(FACTORY), "warning"),
        (IDLE, job(FACTORY | READ), "silent"),
        (IDLE, job(READ), "not_applicable"),
        (MISSING, tried(ABSENT, gpus=()), "warning"),
        (MISSING, tried(ABSENT), "error"),
        (HIDDEN, FIRES[-1], "error"),
        (HIDDEN, hidden(**{BACKEND: "TE"}, **FP8), "warning"),
        (HIDDEN, hidden(), "not_applicable"),
    ],
)
def test_each_rule_from_facts(rule: str, facts: Facts, said: str) -> None:
    finding = finding_of(rule, facts)
    assert (finding.severity if finding else outcome_of(rule, facts)) == said


def test_fp8_layers_in_spite_of_the_precision_are_told_once() -> None:
    rules = [each for each in discover() if each.code == "ENV001"]
    assert [each.name for each in run(rules, FIRES[-1])[0]] == [HIDDEN]


WRITTEN = {"te": "TE", "ao": "AO", "torchao": "AO", "": "AO", " TE": "TE", "ms-amp": "MSAMP", "none": "NO"}
WRITTEN |= {"TE": "", "AO": "", "MSAMP": "", "NO": "", "transformer_engine": "TE", "cutlass": "AO"}
"""Value of the variable -> the backend that was meant, empty for one that is right."""


def test_the_check_and_accelerate_agree_on_a_backends_name() -> None:
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
    for written, said in json.loads(printed(program, json.dumps([*WRITTEN])).splitlines()[-1]).items():
        facts = job({BACKEND: written})
        assert bool(finding_of(MISSPELLED, facts)) == bool(said), written
        if said:
            assert said in found_by(MISSPELLED, facts).explanation
            assert settings(fix_of(MISSPELLED, facts).code)[BACKEND] == WRITTEN[written]


BROKEN = {
    "OSError: libcudnn_cnn.so.9: undefined symbol: _ZN5cudnn7backend, version libcudnn_graph.so.9": (
        "LD_LIBRARY_PATH"
    ),
    "ImportError: libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal": (
        'install --no-build-isolation "transformer-engine[pytorch]>=2.17'
    ),
    "RuntimeError: Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.10.": (
        "nvidia-cudnn-cu12"
    ),
    "ZeroDivisionError: division by zero": "transformer-engine[pytorch]",
}


def test_known_ways_of_being_broken_have_their_line() -> None:
    for error, line in BROKEN.items():
        assert line in fix_of(MISSING, tried(error)).code


def four() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.mark.parametrize(
    ("backend", "line"),
    [("AO", f"accelerate launch --mixed_precision fp8 {WITHOUT}"), ("TE", f"unset {BACKEND}")],
)
def test_a_backend_without_fp8(
    monkeypatch: pytest.MonkeyPatch, look: Look, backend: str, line: str, forget_accelerate: None
) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv(BACKEND, backend)
    assert outcome_of(ACCIDENT, look(four())) == "not_applicable", "nothing has decided the precision"
    Accelerator(mixed_precision="bf16", cpu=True)
    assert found_by(ACCIDENT, look(four())).severity == "error"
    assert fix_of(ACCIDENT, look(four())).code.startswith(line)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert (outcome_of(ACCIDENT, look(four())), outcome_of(OVERRIDDEN, look(four()))) == ("silent", "fires")


def test_two_backends_and_none_named(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    model = four()
    model = Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    alone = look(model)
    packages = alone.software.packages | {"transformer_engine": Package(version="2.20.2", imported=False)}
    facts = replace(alone, software=replace(alone.software, packages=packages))
    assert found_by(ACCIDENT, facts).severity == "warning", "AORecipeKwargs may have been passed"
    assert fix_of(ACCIDENT, facts).code.startswith(f"export {BACKEND}=AO "), "naming it does not change it"
    trainer = TrainerArguments(kind="x.TrainingArguments", bf16=False, fp16=False, mixed_precision="fp8")
    trained = replace(facts, training=replace(facts.training, trainer=trainer))
    assert found_by(ACCIDENT, trained).severity == "error", "a Trainer passes no recipe"
    named = replace(facts.environment, variables=FP8 | {BACKEND: "AO"})
    model.compile()
    compiled = replace(look(model), software=facts.software)
    for other in (alone, replace(facts, environment=named), compiled):
        assert outcome_of(ACCIDENT, other) == "silent"
