"""Fixes in the words of axolotl, Unsloth and torchtitan."""

import ast
from fnmatch import filter as matching

import pytest
import yaml
from msgspec.structs import replace

from fp8doctor import load_report
from fp8doctor.analysis.treatment_table import LIGHTER, STAY_IN_BF16, TREATMENTS
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.dialects import from_table, tables
from fp8doctor.facts import Facts, Package
from fp8doctor.finding import Treatment
from fp8doctor.recipes import BY_TREATMENT
from tests.test_recorded import RECORDED
from tests.treatment_names import all_names

DECIDED_BY_NAME = {"let-fp8-through", *LIGHTER.split()}
"""Treatments whose name is a constant of their check."""


def under(facts: Facts, library: str) -> Facts:
    packages = {**facts.packages(), library: Package(version="0.1", imported=True)}
    return replace(facts, software=replace(facts.software, packages=packages))


def lines(facts: Facts) -> dict[str, str]:
    return {each.treatment.name: each.treatment.code for each in diagnose(facts).prescription}


def test_axolotl_reads_yaml() -> None:
    facts = load_report(RECORDED / "h200-decoder_468m.json.gz").facts
    (compiles,) = [each for each in diagnose(under(facts, "axolotl")).prescription if each.code == "CMP001"]
    assert (compiles.treatment.code, compiles.treatment.kind) == ("torch_compile: true", "yaml")
    assert "block.compile()" in lines(facts)["compile-blocks"]


def test_unsloth_has_no_fp8_training_for_lora() -> None:
    facts = load_report(RECORDED / "h200-unsloth_load_in_fp8.json.gz").facts
    code = lines(facts)["stay-in-bf16"]
    assert "load_in_16bit=True" in code
    assert "convert_to_float8_training" not in code
    whole = replace(facts, network=replace(facts.network, adapter_parameters=0))
    assert "full_finetuning=True, float8_training=Float8LinearConfig())" in lines(whole)["train-in-fp8"]


def test_sizes_get_axolotls_names_and_what_no_table_knows_stays() -> None:
    code = "SFTConfig(..., per_device_train_batch_size=8, gradient_accumulation_steps=4)"
    changed = from_table("axolotl", Treatment(name="larger-batch", summary="more", code=code), Facts()).code
    assert yaml.safe_load(changed) == {"micro_batch_size": 8, "gradient_accumulation_steps": 4}
    unknown = Treatment(name="freeze-again", summary="freeze", code="model.requires_grad_(False)")
    assert from_table("axolotl", unknown, Facts()) is unknown


def test_torchtitan_gets_no_line_that_changes_the_model() -> None:
    """It quantizes its configuration."""
    facts = load_report(RECORDED / "h200-decoder_468m.json.gz").facts
    titan = replace(facts, network=replace(facts.network, kind="torchtitan.models.llama3.model.Llama3Model"))
    (compiles,) = lines(titan).values()
    assert "--compile.enable" in compiles
    first, *_ = (each.name for each in facts.network.linears)
    keep = Treatment(name="keep-in-bf16", summary="s", code="c", layers=(first,))
    kept = from_table("torchtitan", keep, titan).code
    assert first in kept
    assert "convert_to_float8_training" not in kept


@pytest.mark.parametrize("name", tables())
def test_each_row_is_of_a_treatment_and_is_whole(name: str) -> None:
    known = {*TREATMENTS, *BY_TREATMENT, *all_names(), *DECIDED_BY_NAME}
    for ends_in_bf16 in tables()[name].get("in_bf16", {}):
        told = from_table(name, Treatment(name=ends_in_bf16, summary="convert", code="pass"), Facts())
        assert told.name == STAY_IN_BF16
    for pattern, code in tables()[name]["lines"].items():
        assert matching(known, pattern), pattern
        if name == "axolotl":
            assert all(isinstance(key, str) for key in yaml.safe_load(code))
        elif name != "torchtitan" and not code.splitlines()[-1].startswith("unset"):
            ast.parse(code)


def test_torchtitans_converter_leaves_out_what_the_user_does() -> None:
    facts = load_report(RECORDED / "h200-decoder_468m.json.gz").facts
    first = facts.network.fp8[0]
    own = tuple(replace(each, use="none") if each is first else each for each in facts.network.linears)
    facts = replace(facts, network=replace(facts.network, linears=own))
    for recipe, option in (("rowwise", "filter_fqns=["), ("tensorwise", "float8.filter_fqns=")):
        told = Treatment(name=f"recipe-{recipe}", summary="", code="")
        _, _, named = from_table("torchtitan", told, facts).code.partition(option)
        assert first.name in named
