"""The plan as one record: rows, the answer in a line, and how to set it up in each framework.

That is of torchao 0.18, accelerate 1.15, transformers 5.24, torchtitan b5bcd76 and v0.2.2, axolotl 067b021,
TRL 1.16, Transformer Engine d0067d0 (2.20), Megatron-LM d98e8a6."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import replace

from fp8doctor.analysis.compile_coverage import compile_treatment
from fp8doctor.analysis.conversion import convert, quantize_mxfp8
from fp8doctor.analysis.fp8_request import ALL_GATHER
from fp8doctor.analysis.layers import would_be_converted
from fp8doctor.analysis.modelled_speedup import gpu_class
from fp8doctor.analysis.significance import EVEN
from fp8doctor.code_snippets import with_imports
from fp8doctor.cost.matmuls import is_grouped
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.diagnosis.dialects import torchtitan_converter
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.record import Record, Unrecorded, encode, to_builtins
from fp8doctor.gpus import gpu_spec
from fp8doctor.planning.estimates import Row, measured_bf16_ms, rows
from fp8doctor.planning.form import gathers_fp8
from fp8doctor.planning.job_options import Options, options_for
from fp8doctor.version import VERSION

SCHEMA_VERSION = 1

MOST_TOKENS = 1 << 16
"""Tokens of a micro-batch that is assumed. A convention: with more of them the speedup hardly changes."""


class Setup(Record, frozen=True, kw_only=True):
    """The lines that train one row in one framework."""

    framework: str
    stack: str
    recipe: str
    code: str


class PlanDocument(Record, frozen=True, kw_only=True):
    """The estimates for one model."""

    schema_version: int = SCHEMA_VERSION
    tool: dict[str, str] = msgspec.field(default_factory=lambda: {"name": "fp8doctor", "version": VERSION})
    name: str
    model: str
    """Class of the model."""
    parameters: int
    options: Options
    rows: tuple[Row, ...]
    answer: str
    setups: tuple[Setup, ...] = ()
    """Of the fastest row of each stack that fits and gains, on the first GPU that has one."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return to_builtins(self)

    def to_json(self) -> str:
        return encode(self).decode()


def plan_document(facts: Facts, gpus: str | Sequence[str], given: Mapping[str, Any]) -> PlanDocument:
    """Plan the job of these facts with these `Options`. Raises `UserError` for what cannot be planned."""
    if not recorded(facts, "network.linears"):
        raise UserError(f"{facts.target.get('name', 'this')} has no model, so there is nothing to plan")
    options = options_for(facts, given)
    try:
        found = rows(facts, gpus, options)
        if assumed := assumed_batch(facts, found, given):
            options = replace(options, batch=assumed)
            found = rows(facts, gpus, options)
    except Unrecorded as error:
        why = f"an older fp8doctor wrote this report, without what a plan needs ({error})"
        raise UserError(why) from None
    if not any(each.fits or each.bf16_fits for each in found):
        least = min(found, key=lambda each: (each.bf16_memory_gib or 0.0) / each.gpu_memory_gib)
        raise UserError(
            f"a micro-batch of {options.batch:,} x {options.seq:,} tokens fits on no GPU: BF16 needs "
            f"{least.bf16_memory_gib:,.0f} GiB, and {least.gpu} has {least.gpu_memory_gib:g}. Use more GPUs "
            "(--dp or --tp), --checkpointing full, --fused-loss or a smaller --batch"
        )
    by_gpu = [list(of_gpu) for _, of_gpu in groupby(found, lambda each: each.gpu)]
    gaining = next(filter(None, (list(best_of_stacks(of_gpu)) for of_gpu in by_gpu)), [])
    return PlanDocument(
        name=facts.target.get("name", ""),
        model=facts.network.kind.rpartition(".")[2],
        parameters=facts.network.parameters,
        options=options,
        rows=found,
        answer=" ".join(answer(of_gpu, options) for of_gpu in by_gpu),
        setups=tuple(
            Setup(framework=name, stack=row.stack, recipe=row.recipe, code=code)
            for row in gaining
            for name, code in setups(facts, row, options).items()
        ),
        notes=tuple(notes(facts, found, options, assumed)),
    )


def assumed_batch(facts: Facts, found: Sequence[Row], given: Mapping[str, Any]) -> int | None:
    """Return the samples that fit in BF16, the job of today; None if the user has a batch, or a step's time.

    A recipe that needs more memory then does not fit; with its batch the others would leave the GPU idle.
    """
    timed = given.get("step_ms") or measured_bf16_ms(facts)
    if given.get("batch") or timed or facts.workload.get("batch_source") != "made up":
        return None
    options = options_for(facts, given)
    in_bf16 = [each.bf16_largest_batch for each in found if each.bf16_largest_batch]
    fitting = min(in_bf16 or [each.largest_batch for each in found if each.largest_batch], default=1)
    return max(1, min(fitting, MOST_TOKENS // options.seq))


def best_of_stacks(found: Sequence[Row]) -> Iterator[Row]:
    """Find the fastest row of each stack that fits on a GPU and gains, the fastest first."""
    gains = [each for each in found if each.fits and (each.speedup or 0.0) >= 1 + EVEN]
    gains.sort(key=lambda each: (each.is_doubtful(gains), each.step_ms or 0.0))
    fastest: dict[str, Row] = {}
    for each in gains:
        fastest.setdefault(each.stack, each)
    yield from fastest.values()


def answer(found: Sequence[Row], options: Options) -> str:
    """Say in a line what to use on one GPU, with the range, the others and the memory."""
    first = found[0]
    on = f"On {options.gpus} x {first.gpu}" if options.gpus > 1 else f"On {first.gpu}"
    timed = [each for each in found if each.speedup is not None]
    fitting = [each for each in timed if each.fits]
    needs = [each.memory_gib for each in found if each.memory_gib is not None]
    if first.bf16_fits and not timed:
        return f"{on} there is no estimate of FP8: {first.why}."
    if not fitting:
        so = "stay in BF16" if first.bf16_fits else "this job does not fit"
        in_fp8 = f", FP8 {min(needs):,.0f}" if needs else ""
        bf16 = f"BF16 needs {first.bf16_memory_gib:,.0f} GiB"
        return f"{on} {so}: {bf16}{in_fp8}, of {first.gpu_memory_gib:g}."
    best = min(fitting, key=lambda each: (each.is_doubtful(fitting), each.step_ms or 0.0))
    how = f"{best.words}, compiled"
    if best.gains_nothing:
        return f"{on} stay in BF16: the best recipe, {how}, gives {best.gives}."
    if (best.speedup_low or 0.0) <= 1:
        return f"{on} FP8 is open: the best recipe, {how}, gives {best.gives}. Time it before you decide."
    return " ".join((f"{on} use {how}: {best.gives}.", *_remarks(best, fitting)))


def _remarks(best: Row, fitting: Sequence[Row]) -> Iterator[str]:
    own = [each for each in fitting if each.stack == "torchao" != best.stack and not each.gains_nothing]
    if own:
        simpler = min(own, key=lambda each: each.step_ms or 0.0)
        told = f"torchao's {simpler.words} gives {simpler.speedup:.2f}x in yours"
        yield f"It needs a model of its own layers; {told}."
    faster = next((each for each in fitting if (each.step_ms or 0.0) < (best.step_ms or 0.0)), None)
    if faster:
        yield f"{faster.words} gives {faster.gives}: less exact, and not surely faster."
    yield f"It takes {best.memory_gib:,.1f} GiB, BF16 {best.bf16_memory_gib:,.1f}."


def notes(facts: Facts, found: Sequence[Row], options: Options, assumed: int | None) -> Iterator[str]:
    if assumed:
        yield (
            f"fp8doctor assumes --batch {assumed:,}, which fits in BF16 on each of these GPUs, "
            f"and --seq {options.seq:,}."
        )
    if unmeasured := {each.gpu for each in found if gpu_class(gpu_spec(each.gpu)) != "Hopper"}:
        named = " and ".join(sorted(unmeasured))
        yield f"fp8doctor measured nothing on {named}: those times rest on datasheets and published tables."
    if any(each.recipe == "nvfp4" and each.step_ms for each in found):
        yield "NVFP4 can harm the loss unless the last blocks stay in BF16, as NVIDIA trains with it."
    if options.lora:
        yield (
            "fp8doctor assumes BF16 for LoRA's adapters. PEFT makes them fp32 unless you pass "
            "autocast_adapter_dtype=False."
        )
        yield "FP8 training keeps the frozen base in 16 bits."
    if any(each.get("role") == "experts" for each in facts.network.linears):
        yield "fp8doctor assumes that all experts get equal shares of the tokens."
    if step_ms := options.step_ms or measured_bf16_ms(facts):
        gpu = found[0].gpu if options.step_ms else facts.trial.gpu
        yield f"All times are scaled to your BF16 step of {step_ms:,.1f} ms on {gpu}."


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
