"""How to turn a recipe on in each framework: torchao 0.18, accelerate 1.15, transformers 5.24, torchtitan
b5bcd76 and v0.2.2, axolotl 067b021, TRL 1.16, Transformer Engine d0067d0 (2.20), Megatron-LM d98e8a6."""

from collections.abc import Iterator

from fp8doctor.analysis.compile_coverage import compile_treatment
from fp8doctor.analysis.conversion import convert, quantize_mxfp8
from fp8doctor.analysis.fp8_request import ALL_GATHER
from fp8doctor.analysis.layers import would_be_converted
from fp8doctor.code_snippets import with_imports
from fp8doctor.cost.matmul_counts import is_grouped
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.diagnosis.dialects import torchtitan_converter
from fp8doctor.facts import Facts
from fp8doctor.planning.estimates import Row
from fp8doctor.planning.form import gathers_fp8
from fp8doctor.planning.job_options import Options

ACCELERATE = """\
from accelerate.utils import TorchDynamoPlugin
recipe = AORecipeKwargs(config={config})
compiled = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], dynamo_plugin=compiled)"""

BASE = 'lambda layer, name: "lora_" not in name and "lm_head" not in name'
"""Accelerate's filter that leaves out LoRA's matrices, which it sees after get_peft_model."""

TRL = """\
export ACCELERATE_MIXED_PRECISION=fp8 ACCELERATE_FP8_BACKEND=AO{}
# accelerate launch sets all but the backend itself: give it --mixed_precision fp8{}
# and SFTConfig(bf16=False, fp16=False, torch_compile=True): with its default, bf16, nothing is converted"""

TORCHTITAN_EXPERTS = """
from torchtitan.components.quantization import MXFP8GroupedExpertsConverter
# after it in the same list:
MXFP8GroupedExpertsConverter.Config(model_compile_enabled=True)"""

MEGATRON = {
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "current": "--fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
}
"""Recipe of Transformer Engine -> arguments of Megatron."""


def setups(facts: Facts, row: Row, options: Options) -> dict[str, str]:
    facts = in_bf16(facts)  # as the rows are estimated: a recipe of now is another one
    if row.stack == "te":
        found = dict(_transformer_engine(row, experts=any(map(is_grouped, facts.network.linears))))
        return {name: code for name, code in found.items() if name != "accelerate" or not options.lora}
    found = dict(_mxfp8(facts) if row.recipe == "mxfp8" else _float8(facts, row, options))
    if options.lora:  # the others convert its matrices too
        before = {"pytorch": f"# before get_peft_model\n{found['pytorch']}"}
        return before | {"accelerate": found["accelerate"]} if "accelerate" in found else before
    return found


def _float8(facts: Facts, row: Row, options: Options) -> Iterator[tuple[str, str]]:
    name, gathers = row.recipe, gathers_fp8(row.of, options)
    layers = [each for each in facts.network.linears if would_be_converted(each)]
    converts = convert(facts, name, {each.name for each in layers}, before_own=False).code
    lines = [converts, compile_treatment(facts, layers).code]
    config = row.of.config
    if gathers:
        config = "Float8LinearConfig(enable_fsdp_float8_all_gather=True)"
        lines[0] = converts.replace("(model", f"(model, config={config}", 1)
        lines += ["# after every optimizer.step():", "precompute_float8_dynamic_scale_for_fsdp(model)"]
    yield "pytorch", with_imports("\n".join(lines))
    base = f",\n    module_filter_func={BASE}" if options.lora else ""
    yield "accelerate", with_imports(ACCELERATE.format(config=config + base))
    if row.of.config != f'Float8LinearConfig.from_recipe_name("{name}")':  # torchao does not name it
        return
    if name == "tensorwise":
        flags = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
        gather = "".join(f" --quantize.linear.float8.{each}" for each in flags if gathers)
        yield "torchtitan", torchtitan_converter(name, (), gather)
        off = (f" {ALL_GATHER}=false", " --fp8_enable_fsdp_float8_all_gather false")
        yield "trl", TRL.format(*(("", "") if gathers else off))
        gather = "\nfp8_enable_fsdp_float8_all_gather: true\nfsdp_version: 2" if gathers else ""
        yield "axolotl", f"fp8: true{gather}\ntorch_compile: true"
    else:
        yield "torchtitan", torchtitan_converter(name, ("lm_head",))


def _mxfp8(facts: Facts) -> Iterator[tuple[str, str]]:
    layers = [each for each in facts.network.linears if would_be_converted(each)]
    experts = [each for each in facts.network.linears if is_grouped(each)]
    lines = quantize_mxfp8([*layers, *experts])
    yield "pytorch", with_imports(f"{lines}\n{compile_treatment(facts, layers).code}")
    yield "torchtitan", torchtitan_converter("mxfp8", ()) + (TORCHTITAN_EXPERTS if experts else "")


def _transformer_engine(row: Row, *, experts: bool) -> Iterator[tuple[str, str]]:
    """Write the lines of Transformer Engine, whose layers the model is built of."""
    if config := row.of.config:
        layers = "# te.Linear, te.LayerNormLinear or te.TransformerLayer in the model;\n"
        layers += "# te.GroupedLinear for its experts;\n" if experts else ""
        autocast = f"with te.autocast(enabled=True, recipe={config}):\n    output = model(**batch)"
        yield "te", with_imports(f"{layers}# te.fp8_autocast before Transformer Engine 2.9\n{autocast}")
    if row.recipe in ("delayed", "mxfp8") and not experts:  # it converts Linears only
        recipe = f"TERecipeKwargs(use_mxfp8_block_scaling={row.recipe == 'mxfp8'})"
        line = f'accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[{recipe}])'
        beside = "# with the model and its optimizer in one call of accelerator.prepare()"
        yield "accelerate", with_imports(f"{line}\n{beside}")
    if flags := MEGATRON.get(row.recipe):
        grouped = " --moe-grouped-gemm" if experts else ""
        yield "megatron", f"--transformer-impl transformer_engine --bf16 {flags}{grouped}"
