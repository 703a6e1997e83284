"""What a treatment prints as Python runs as it stands, in a script that has its model and little else. What
does not is marked."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import Llama4ForCausalLM, Llama4TextConfig

from fp8doctor import inspect_model
from fp8doctor.analysis.treatment_table import TREATMENTS
from fp8doctor.code_snippets import OF_THE_SCRIPT, free_names
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.diagnosis.treatments import describe, keep_in_bf16
from fp8doctor.facts import Accelerate, Environment, Facts, Training
from fp8doctor.finding import Treatment
from fp8doctor.recipes import RECIPES
from fp8doctor.registry import Check, run
from tests.examine.models import llama
from tests.test_catalogue import RULES, cases

LATER = {"accelerator", "batch", "tokenizer"}
"""Names of a script that no live model here comes with: lines that use them are compiled, not run."""


def treatment(code: str) -> Treatment:
    return Treatment(name="t", summary="s", code=code)


def prescribed(rules: tuple[Check, ...]) -> list[Treatment]:
    findings = [each for case in cases(rules, "FIRES") for each in run(rules, case)[0]]
    return [finding.treatment for finding in findings if finding.treatment]


def test_python_is_complete_and_the_rest_is_marked() -> None:
    treatments = [each for rules in RULES.values() for each in prescribed(rules)]
    python = {each.name: ast.parse(each.code) for each in treatments if each.kind == "python"}
    assert len(python) > 20
    for name, tree in python.items():
        assert set(free_names(tree)) <= OF_THE_SCRIPT
        compile(tree, name, "exec")
    shell = [each.code for each in treatments if each.kind == "shell"]
    assert [each for each in shell if each.startswith(("from ", "import "))] == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("model.compile()", "python"),
        ("unset NVTE_FLASH_ATTN", "shell"),
        ("# or this\npip install torchao", "shell"),
        ("# leave out checkpoint_wrapper()", "sketch"),
        ("nn.Linear(1000, 8)  ->  nn.Linear(1008, 8)", "sketch"),
        ("args = TrainingArguments(..., bf16=True)", "sketch"),
        ("y = self.project(x)", "sketch"),
        ("hidden_size = 16 * math.ceil(hidden_size / 16)", "sketch"),
        ("unset A\ntorch.autograd.set_detect_anomaly(False)", "sketch"),
        ("export A=1   # said\n# more", "shell"),
        ("", "sketch"),
        ("layers = 18   # 354M parameters", "sketch"),
        ("batch_size = 16\naccumulate = 2", "sketch"),
        ('config = Float8LinearConfig.from_recipe_name("tensorwise")', "sketch"),
        ("keep = {'a'}\nkeep |= {'b'}\n# build these as torch.nn.Linear, not as te.Linear", "sketch"),
        ('accelerator = Accelerator(mixed_precision="bf16")', "python"),
        ("model.config.use_cache = False", "python"),
        ("\0", "sketch"),
        ("(" * 100000, "sketch"),
        ("keep = {f'b.{i}.{l}' for i in range(2) for l in ('a',)}\nkeep |= {'c'}\nprint(keep)", "python"),
        ("for block in model.layers:\n    block.compile()", "python"),
        ("quantize_(model, filter_fn=lambda module, name: isinstance(module, nn.Linear))", "python"),
    ],
)
def test_kinds(code: str, kind: str) -> None:
    assert treatment(code).kind == kind


def test_imports_stand_above_once_and_nowhere_else() -> None:
    once = treatment("config = Float8LinearConfig()\nconvert_to_float8_training(model, config=config)")
    assert once.code.splitlines()[0] == (
        "from torchao.float8 import Float8LinearConfig, convert_to_float8_training"
    )
    assert treatment(once.code) == once
    assert treatment("pip install peft   # LoraConfig").code == "pip install peft   # LoraConfig"


def test_a_kind_that_the_author_gives_stays() -> None:
    assert Treatment(name="t", summary="s", code="model.compile()", kind="sketch").kind == "sketch"


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
@pytest.mark.parametrize(
    ("name", "kind", "asks_accelerate"),
    [
        ("te-delayed", "DelayedScaling", True),
        ("te-current", "Float8CurrentScaling", False),
        ("te-block", "Float8BlockScaling", False),
        ("te-mxfp8", "MXFP8BlockScaling", True),
    ],
)
def test_another_recipe_of_transformer_engine_is_asked_of_whoever_opens_the_autocast(
    name: str, kind: str, asks_accelerate: bool, prepared: bool
) -> None:
    accelerate = Accelerate(mixed_precision="fp8", distributed="NO", prepared=prepared)
    printed = describe(name, Facts(training=Training(accelerate=accelerate)))
    assert printed is not None
    assert printed.kind == "python"
    compile(printed.code, name, "exec")
    by_kwargs = prepared and asks_accelerate
    assert (f"recipe={kind}()" in printed.code) is not by_kwargs
    assert ("kwargs_handlers=[TERecipeKwargs(use_mxfp8_block_scaling=" in printed.code) is by_kwargs
    assert ("convert_model(model)" in printed.code) is (prepared and not asks_accelerate)


def test_to_stay_in_bf16_says_who_asked_for_fp8() -> None:
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8"}
    launched = stay_in_bf16(Facts(environment=Environment(variables=variables))).code
    assert "--mixed_precision bf16" in launched
    assert "ACCELERATE_FP8_BACKEND" not in launched
    named = Environment(variables={**variables, "ACCELERATE_FP8_BACKEND": "AO"})
    assert "without ACCELERATE_FP8_BACKEND" in stay_in_bf16(Facts(environment=named)).code
    assert "ACCELERATE" not in stay_in_bf16(Facts()).code


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
