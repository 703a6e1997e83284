"""Printed lines of fixes: Python runs as it stands, the rest is marked, and none contradicts another."""

import ast
import copy
import importlib
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import Llama4ForCausalLM, Llama4TextConfig

from fp8doctor import inspect_model
from fp8doctor.analysis.conversion import keep_in_bf16
from fp8doctor.analysis.recipe_support import transformer_engine_line
from fp8doctor.analysis.training_bugs import training_bugs
from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.code_snippets import IMPORTS, MODULES, OF_THE_SCRIPT, free_names
from fp8doctor.diagnosis.treatments import describe, stay_in_bf16
from fp8doctor.facts import Accelerate, Environment, Facts, Software, TrainerArguments, Training
from fp8doctor.finding import Treatment
from fp8doctor.known_errors import known_errors
from fp8doctor.recipes import BY_TREATMENT, RECIPES, Recipe
from fp8doctor.registry import discover, run
from tests.checks.engagement import accelerated
from tests.examine.models import llama
from tests.stand_ins.accelerate_state import forget
from tests.stand_ins.transformer_engine import autocast

PACKAGES = "accelerate functools lightning math peft torchao transformer_engine transformers trl unsloth te"
IN_A_CHAIN = re.compile(rf"(?<!import )(?<!from )(?<![\w./\"'-])({PACKAGES.replace(' ', '|')})\.\w+")
"""A package before a dot, as in ``transformer_engine.common.recipe``."""

PLACEHOLDERS = set(
    "BATCH NAMES STEPS a b base batch_size block build_model compute_loss config "
    "dataset folder function hidden_size hook key layer loss micro_batches name next_block offsets operand "
    "parameters query recipe sample sample_args scale self shape tensor tensor_parallel_size tp_size value "
    "weight x".split()
)
"""What a sketch leaves to the reader, who sees that it is left out; never a package."""


def unresolved(code: str) -> set[str]:
    """Names that Python lines have from nowhere; of lines that are no Python, packages before a dot."""
    try:
        return set(free_names(ast.parse(code))) - OF_THE_SCRIPT - PLACEHOLDERS
    except SyntaxError:
        imported = set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.M))
        lines = (line.partition("#")[0] for line in code.splitlines())
        return {match[1] for line in lines for match in IN_A_CHAIN.finditer(line)} - imported


def assigned(lines: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """What a shell sets by these lines; None stands for a variable that is unset. Comments are left out: an
    alternative after ``# or`` is the reader's choice."""
    for line in lines:
        if not re.match(r"\s*(export|unset|[A-Z0-9_]+=)", line):
            continue
        command, *rest = shlex.split(line.strip(), comments=True)
        if command == "unset":
            yield from ((name, None) for name in rest)
        else:
            words = rest if command == "export" else (word for word in (command, *rest) if "=" in word)
            yield from ((name, value) for name, _, value in (each.partition("=") for each in words))


def contradictions(lines: Iterable[str]) -> dict[str, set[str | None]]:
    values: dict[str, set[str | None]] = {}
    for name, value in assigned(lines):
        values.setdefault(name, set()).add(value)
    return {name: each for name, each in values.items() if len(each) > 1}


def treatments_in(values: Any) -> Iterator[Treatment]:
    if isinstance(values, Treatment):
        yield values
    elif isinstance(values, dict):
        yield from treatments_in([each for key, each in values.items() if key != "__builtins__"])
    elif isinstance(values, (list, tuple)):
        yield from (found for each in values for found in treatments_in(each))
    elif isinstance(getattr(values, "treatment", None), Treatment):
        yield values.treatment


def of_the_checks() -> Iterator[Treatment]:
    """Yield the treatments in the tables of each check, and those of the facts that it ends with."""
    for check in discover():
        held = check.module.FIRES
        cases = (held,) if isinstance(held, Facts) else held
        yield from treatments_in([vars(check.module), *(run([check], case)[0] for case in cases)])


@pytest.mark.slow
def test_every_name_is_imported_or_is_one_of_a_script() -> None:
    snippets = {each.name: each.code for each in of_the_checks()}
    assert len(snippets) > 40
    snippets |= {error.says: error.lines for error in known_errors()}
    lost = {name: names for name, code in snippets.items() if (names := unresolved(code))}
    assert lost == {}, "import it in fp8doctor/code_snippets.py, or add it to PLACEHOLDERS"
    pages = {check.code: re.findall(r"^    ([^#\n]*)", check.page, re.M) for check in discover()}
    chains = [
        (code, match) for code, lines in pages.items() for match in IN_A_CHAIN.finditer("\n".join(lines))
    ]
    assert [(code, match[0]) for code, match in chains if match[1] not in MODULES] == []
    there = [name for name in IMPORTS if importlib.util.find_spec(name.partition(".")[0])]
    assert there
    missing = [
        (name, each)
        for name in there
        for each in IMPORTS[name].split()
        if not hasattr(importlib.import_module(name), each)
    ]
    assert missing == []


TE = re.compile(
    r"(?<![\w/-])transformer[-_]engine(?!\.)(?P<part>\[[\w,]+\]|[-_](?:torch|cu\d+)\b)?(?P<bounds>[<>=][^\"'\s]*)?"
)
"""A requirement of Transformer Engine: without a part it is a package that holds nothing."""


def bad_installs(code: str, cudnn: str | None = None) -> list[str]:
    """Lines of pip whose Transformer Engine this cuDNN cannot load, or that replace torch beside it."""
    fits = "nvidia-cudnn" in code or (cudnn is not None and Version(cudnn) >= Version("9.12"))
    return [
        line
        for line in code.splitlines()
        for found in TE.finditer(line.partition("pip install")[2])
        if not found["part"]
        or ("pytorch" in found["part"] and "--force-reinstall" in line)
        or not (fits or "2.20.2" not in SpecifierSet(found["bounds"] or ""))
    ]


@pytest.mark.parametrize("cudnn", [None, "9.10.2.21", "9.19.0.56"])
def test_a_fixed_release_is_one_that_loads_here(cudnn: str | None) -> None:
    facts = Facts(software=Software(cudnn=cudnn, cuda="12.8"))
    written = {bug.name: bug.written(facts) for bug in training_bugs()}
    assert sum("transformer-engine[pytorch]" in each for each in written.values()) > 10
    newest = transformer_engine_line(facts, Version("2.20"))
    assert ("nvidia-cudnn-cu12" in newest) is (cudnn != "9.19.0.56")
    assert {
        name: bad for name, each in (*written.items(), ("", newest)) if (bad := bad_installs(each, cudnn))
    } == {}


@pytest.mark.slow
def test_no_printed_line_installs_a_transformer_engine_that_does_not_load() -> None:
    codes = {f"message: {each.says}": each.lines for each in known_errors()}
    codes |= {f"page: {each.code}": each.page for each in discover()}
    codes |= {f"treatment: {each.name}": each.code for each in of_the_checks()}
    assert sum("transformer-engine[" in each for each in codes.values()) > 20
    assert {name: bad for name, each in codes.items() if (bad := bad_installs(each))} == {}


def treatment(code: str) -> Treatment:
    return Treatment(name="t", summary="s", code=code)


KINDS = {
    "python": [
        "model.compile()",
        'accelerator = Accelerator(mixed_precision="bf16")',
        "model.config.use_cache = False",
        "for block in model.layers:\n    block.compile()",
        "quantize_(model, filter_fn=lambda module, name: isinstance(module, nn.Linear))",
    ],
    "shell": ["unset NVTE_FLASH_ATTN", "# or this\npip install torchao", "export A=1   # said\n# more"],
    "sketch": [
        "# leave out checkpoint_wrapper()",
        "nn.Linear(1000, 8)  ->  nn.Linear(1008, 8)",
        "hidden_size = 16 * math.ceil(hidden_size / 16)",
        "unset A\ntorch.autograd.set_detect_anomaly(False)",
        "",
        'config = Float8LinearConfig.from_recipe_name("tensorwise")',
        "keep = {'a'}\nkeep |= {'b'}\n# build these as torch.nn.Linear, not as te.Linear",
        "\0",
        "(" * 100000,
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    assert {code[:40]: treatment(code).kind for code in KINDS[kind]} == dict.fromkeys(
        (code[:40] for code in KINDS[kind]), kind
    )
    assert Treatment(name="t", summary="s", code="model.compile()", kind="sketch").kind == "sketch"


def test_imports_stand_above_once_and_nowhere_else() -> None:
    once = treatment("config = Float8LinearConfig()\nconvert_to_float8_training(model, config=config)")
    first, *_ = once.code.splitlines()
    assert first == "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
    assert treatment(once.code) == once
    assert treatment("pip install peft   # LoraConfig").code == "pip install peft   # LoraConfig"


LATER = {"accelerator", "batch", "tokenizer"}
"""Names of a script that no live model here comes with: lines that use them are compiled, not run."""


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(64, 64))
        self.add_module("proj-out", nn.Linear(64, 64))
        self.add_module("class", nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.children():
            for part in each if isinstance(each, nn.ModuleList) else [each]:
                x = part(x)
        return x


LIVE = {
    "llama": llama,
    "llama, converted": lambda: convert_to_float8_training(llama().bfloat16()),
    "oddly named": lambda: convert_to_float8_training(Named().bfloat16()),
    "a Sequential": lambda: convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))),
}


@pytest.mark.slow
@pytest.mark.parametrize("build", LIVE.values(), ids=LIVE)
def test_python_runs_on_the_model_that_it_is_for(build: Callable[[], nn.Module]) -> None:
    model = build()
    report = inspect_model(model, trial=False)
    treatments = [finding.treatment for finding in report.findings if finding.treatment]
    names = {name for name in TREATMENTS if report.facts.training.use_cache or name != "cache-off"}
    treatments += [each for each in (describe(name, report.facts) for name in names) if each]
    ran = 0
    for each in treatments:
        if each.kind == "python" and not LATER & set(free_names(ast.parse(each.code))):
            script = {"model": copy.deepcopy(model), "torch": torch}
            script["optimizer"] = torch.optim.SGD(script["model"].parameters())
            exec(each.code, script)
            ran += 1
    assert ran > 3


def blocks_in_place(model: nn.Module) -> nn.Module:
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    return model


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [in_place, blocks_in_place])
def test_lines_give_a_compilation_without_kernels_the_default_backend(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    """All of these compile the same. Of a wrapped model fp8doctor asks you to change your own call."""
    model = compiled(llama().bfloat16())
    report = inspect_model(model, trial=False)
    (of_check,) = (each.treatment for each in report.findings if each.code == "CMP002")
    names = ("stay-in-bf16", "compile-model", "compile-blocks")
    for each in (of_check, *(describe(name, report.facts) for name in names)):
        script = {"model": compiled(llama().bfloat16()), "torch": torch}
        assert each.kind == "python"
        exec(each.code, script)
        facts = inspect_model(script["model"], trial=False).facts
        assert {mark.backend for mark in facts.training.compile_marks} == {"inductor"}, each.code
        blocks = [each for each in facts.network.linears if "layers" in each.name]
        assert all(linear.compiled is not None for linear in blocks)


@pytest.mark.parametrize("name", [each.treatment for each in RECIPES.values() if each.operands])
def test_another_recipe_leaves_out_what_is_left_out_now(name: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    model = convert_to_float8_training(build(), module_filter_fn=lambda layer, name: name != "1")
    printed = describe(name, inspect_model(model, trial=False).facts)
    assert printed is not None
    script = {"model": build()}
    exec(printed.code, script)
    assert [type(layer) is nn.Linear for layer in script["model"]] == [False, True, False]


@pytest.mark.parametrize("prepared", [False, True], ids=["own script", "Accelerate"])
@pytest.mark.parametrize("recipe", [each for each in RECIPES.values() if each.treatment.startswith("te-")])
def test_another_recipe_of_transformer_engine_is_asked_of_whoever_opens_the_autocast(
    recipe: Recipe, prepared: bool
) -> None:
    """Accelerate knows two of them by itself."""
    accelerate = Accelerate(mixed_precision="fp8", distributed="NO", prepared=prepared)
    printed = describe(recipe.treatment, Facts(training=Training(accelerate=accelerate)))
    assert printed is not None
    assert printed.kind == "python"
    by_kwargs = prepared and recipe.name in ("delayed", "mxfp8")
    assert (f"recipe={recipe.config}" in printed.code) is not by_kwargs
    assert ("TERecipeKwargs(use_mxfp8_block_scaling=" in printed.code) is by_kwargs


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.mark.parametrize("trainer", [None, TrainerArguments(kind="transformers.TrainingArguments")])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("name", ["te-current", "te-block"])
def test_a_recipe_that_accelerate_does_not_know_is_the_one_that_layers_see(
    monkeypatch: pytest.MonkeyPatch,
    no_accelerator: None,
    name: str,
    precision: str,
    trainer: TrainerArguments | None,
) -> None:
    """``prepare`` opens an autocast with delayed scaling if this variable is set, whatever the precision."""
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    environment = Environment(variables={"ACCELERATE_FP8_BACKEND": "TE"})
    accelerate = Accelerate(mixed_precision=precision, distributed="NO", prepared=True)
    training = Training(accelerate=accelerate, trainer=trainer)
    printed = describe(name, Facts(environment=environment, training=training))
    accelerated.install(monkeypatch)
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], "autocast", autocast, raising=False)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    signature = inspect.signature(model.forward)
    exec(printed.code, {"model": model})
    assert inspect.signature(model.forward) == signature, "a Trainer keeps the columns that it names"
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model(torch.ones(4, 32))
    recipes = [type(each.fp8_meta["recipe"]).__name__ for each in model]
    assert {f"{each}()" for each in recipes} == {BY_TREATMENT[name].config}
    model.eval()(torch.ones(4, 32))
    assert not any(each.fp8 for each in model), "Accelerate evaluates without FP8"


def test_to_stay_in_bf16_says_who_asked_for_fp8() -> None:
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8"}
    network = inspect_model(nn.Linear(64, 64), trial=False).facts.network
    launched = stay_in_bf16(Facts(network=network, environment=Environment(variables=variables))).code
    assert "--mixed_precision bf16" in launched
    assert "ACCELERATE_FP8_BACKEND" not in launched
    named = Environment(variables={**variables, "ACCELERATE_FP8_BACKEND": "AO"})
    assert "without ACCELERATE_FP8_BACKEND" in stay_in_bf16(Facts(network=network, environment=named)).code
    assert "ACCELERATE" not in stay_in_bf16(Facts(network=network)).code


@pytest.mark.slow
def test_a_router_that_derives_from_a_linear_stays_out() -> None:
    """Llama 4's returns scores and logits; converted it would return one tensor."""

    def build() -> nn.Module:
        settings = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
        config = Llama4TextConfig(num_local_experts=16, vocab_size=64, num_attention_heads=4, **settings)
        with torch.device("meta"):
            return Llama4ForCausalLM(config).bfloat16()

    model = convert_to_float8_training(build(), module_filter_fn=lambda layer, name: type(layer) is nn.Linear)
    facts = inspect_model(model, trial=False).facts
    script = {"model": build()}
    exec(keep_in_bf16(["lm_head"], facts).code, script)
    kinds = {name.rpartition(".")[2]: type(module) for name, module in script["model"].named_modules()}
    assert (kinds["router"].__name__, kinds["lm_head"]) == ("Llama4Router", nn.Linear)
    assert kinds["q_proj"] is not nn.Linear
