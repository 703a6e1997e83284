"""Twenty-four threads about all stacks, each with its truth and its job: ``python -m research.complaints.unseen_mixed``
writes the results.

Keys: `says`, what the user saw; `cause`, what a maintainer or a measurement settled; `must`, words that the first screen
has to contain; `codes`, the findings that may name it; `first`, the first run's outcome, and `why` a miss was one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from accelerate.utils.ao import filter_first_and_last_linear_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Gpu
from fp8doctor.render.text import render
from fp8doctor.report import Report
from research.complaints import unseen_adapters_jobs as adapters
from research.complaints.parts import MoeBlock, mlp, rows
from research.complaints.replay import codes_in_order
from research.complaints.unseen import MARK, asked, misses, name_of, section
from research.complaints.unseen_adapters import OUTCOMES, SELDOM
from research.complaints.unseen_adapters import outcome as outcome_of
from research.complaints.unseen_engines_jobs import SHARDED, Block, Gpt
from research.complaints.unseen_jobs import installed, on_meta, processes, ran
from research.recipes.parts import tokens
from tests import prototypes
from tests.looked import looked
from tests.stand_ins import transformer_engine as te

PAGE = Path(__file__).parent / "unseen_mixed.md"
THREADS: list[dict[str, Any]] = []
BF16 = torch.bfloat16


class Job(NamedTuple):
    """What fp8doctor is given."""

    model: Any
    batch: Any = None
    optimizer: Any = None
    autocast: torch.dtype | None = None
    accumulate: int = 1


def thread(repository: str, number: int, says: str, cause: str, must: str, codes: str, **more: Any) -> Any:
    """Add a thread to the table; what it decorates builds its job."""
    url = f"https://github.com/{repository}/issues/{number}"
    told = {
        "url": url,
        "says": says,
        "cause": cause,
        "must": must,
        "codes": codes.split(),
        "first": "",
        **more,
    }
    THREADS.append(told)

    def keep(build: Callable[[pytest.MonkeyPatch], Job]) -> Callable[[pytest.MonkeyPatch], Job]:
        told["build"] = build
        return build

    return keep


def answer(told: dict[str, Any]) -> tuple[str, str, str]:
    """What is printed, the codes in the order of reading, and the outcome."""
    if "text" in told:
        text, found = asked("explain", "-", text=told["text"]), ()
    elif "plan" in told:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.json"
            config.write_text(json.dumps(adapters.CONFIGS[told["config"]]), encoding="utf-8")
            text, found = asked("plan", str(config), *told["plan"]), ()
    else:
        report = _report(told)
        text, found = render(report), codes_in_order(report)
    now = outcome_of(told, text)
    if now == "right" and told["codes"] and (not found or found[0] not in told["codes"]):
        now = "not first"
    return text, " ".join(filter(None, found)) or "none", now


def _report(told: dict[str, Any]) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        job = told["build"](patch)
        try:
            report = looked(*job[:2], assume_gpu=told.get("gpu"), **dict(list(job._asdict().items())[2:]))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    if "card" in told:  # as NVML would describe it
        gpu = Gpu(**told["card"], **SELDOM)
        return Report.of(diagnose(msgspec.structs.replace(report.facts, gpus=(gpu,))))
    return report


def row(told: dict[str, Any]) -> tuple[str, ...]:
    _, found, now = answer(told)
    return (f"[{name_of(told)}]({told['url']})", told["cause"], found, told["first"], now)


def llama(layers: int = 16, width: int = 2048, hidden: int = 8192, **more: Any) -> LlamaForCausalLM:
    settings = {"num_attention_heads": width // 128, "num_key_value_heads": 8, "use_cache": False} | more
    config = LlamaConfig(hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, **settings)
    return on_meta(lambda: LlamaForCausalLM(config))


def float8(
    model: nn.Module, keep: Callable[[nn.Module, str], bool], recipe: str = "tensorwise", **more: Any
) -> Any:
    """The model with torchao's Linears, its blocks compiled."""
    config = Float8LinearConfig(**more) if more else Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, module_filter_fn=keep, config=config)
    adapters.compile_blocks(model.model.layers)
    return model


def in_fp8(model: nn.Module, batch: Any, recipe: Any = None) -> nn.Module:
    with te.autocast(enabled=True, recipe=recipe or te.DelayedScaling()):
        model(**batch) if isinstance(batch, dict) else model(batch)
    return model


def te_linears(model: nn.Module) -> None:
    """Put te.Linear in the place of every Linear, as Accelerate does."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(
                    parent, name, te.Linear(child.in_features, child.out_features, child.bias is not None)
                )


def bert() -> BertForSequenceClassification:
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(attn_implementation="sdpa"))
        te_linears(model)
    return model


@thread(
    "pytorch/ao",
    3356,
    "NaN from the first step of LoRA over Float8Tensor weights with rowwise scales",
    "a row of zeros gives a scale of zero; activation_value_lb=1e-12 cures it",
    gpu="H100",
    must="activation_value_lb|lower bound|NaN",
    codes="NUM001 NUM003 ENV005",
)
def nan_over_float8_rows(patch: pytest.MonkeyPatch) -> Job:
    patch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda *_: None)
    model = llama(4)
    quantize_(model.model.layers, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    lora = adapters.with_peft(model, 32, "all-linear", autocast_adapter_dtype=False)
    return Job(lora, tokens(4, 2048))


@thread(
    "pytorch/ao",
    3004,
    "Llama 4's widths on B200: MXFP8 on the dense layers gives 1.05x, on the experts too 1.27x",
    "the experts hold most of the matmuls and are still in BF16",
    gpu="B200",
    must="expert",
    codes="MOD004",
)
def mxfp8_on_dense_layers_only(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: nn.Sequential(*(MoeBlock(5120, 2, 8192) for _ in range(2))))
    config = prototypes.mxfp8("MXFP8_RCEIL")
    quantize_(
        model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and "router" not in name
    )
    for block in model:
        block.compile()
    return Job(model, rows(32768, 5120))


@thread(
    "WalkingMeatAxolotl/AnimaLoraStudio",
    436,
    "LoRA over Krea 2 stored in FP8 takes more memory than over BF16 weights",
    "without checkpointing, autograd keeps the BF16 copy of every weight",
    gpu="RTX5090",
    must="checkpoint",
    codes="MEM001 MOD003",
)
def stored_without_checkpointing(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(adapters.Flux)
    adapters.scaled(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 32), adapters.flux_batch(1024, 256), autocast=BF16)


@thread(
    "NVIDIA/TransformerEngine",
    2863,
    "Float8BlockScaling gains little on Blackwell",
    "on Blackwell it is emulated with MXFP8's matmuls: the recipe is meant for Hopper",
    gpu="B200",
    must="MXFP8",
    codes="SHP005 GPU002",
)
def block_scaling_on_blackwell(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.13.0", "quantization")
    model = on_meta(lambda: nn.Sequential(*(Block(te.Linear, 4096, 16384, 32, 32) for _ in range(4))))
    batch = torch.empty(31, 512, 4096, dtype=BF16, device="meta")
    return Job(in_fp8(model, batch, te.Float8BlockScaling()), batch)


@thread(
    "huggingface/accelerate",
    2655,
    "nlp_example.py takes 2,448 MB in FP8, and 2,109 MB with this change",
    "all but the FP8 layers runs in fp32: autocast to bfloat16 around it",
    gpu="H100",
    must="fp32|float32|autocast",
    codes="STP004",
)
def fp32_around_te(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "1.5.0", "fp8")
    model, batch = bert(), tokens(16, 128, labels=False)
    model.classifier = nn.Linear(768, 2, device="meta")
    return Job(in_fp8(model, batch), batch)


@thread(
    "huggingface/accelerate",
    4147,
    "convert_model_to_fp8_ao converts the first and the last Linear, which it says it leaves out",
    "its filter looks at the layer in place of the model, so the head is in FP8",
    gpu="H100",
    must="lm_head|the head|last layer",
    codes="NUM003 SHP002 SHP005",
)
def first_and_last_in_float8(patch: pytest.MonkeyPatch) -> Job:
    return Job(float8(llama(), filter_first_and_last_linear_layers), tokens(4, 4096))


@thread(
    "huggingface/accelerate",
    1188,
    "In FP8, the classification head of an example fails",
    "its weight has 2 rows, and Transformer Engine takes multiples of 16: leave it out",
    gpu="H100",
    must="classifier",
    codes="SHP001",
)
def head_of_two_classes(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.6.0", "fp8")
    batch = tokens(16, 128, labels=False)
    return Job(in_fp8(bert(), batch), batch, autocast=BF16)


@thread(
    "Nerogar/OneTrainer",
    1034,
    "LoRA over weights in Float8 is slow; W8A8 and compiled blocks are twice as fast",
    "Float8 is storage: each layer casts its weight and multiplies in 16 bits",
    gpu="RTX4090",
    must="compil|stored in FP8|storage|nothing computes",
    codes="MOD003 CMP001",
)
def float8_in_onetrainer(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    adapters.stored(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 16, BF16), adapters.flux_batch(1024, 512), autocast=BF16)


@thread(
    "mosaicml/llm-foundry",
    271,
    "MPT-3B: 29.4k tokens/s with te.Linear in FP8, 23.7k without",
    "that is 1.24x",
    gpu="H100",
    must=r"\b1\.(1[5-9]|2\d|3[0-3])x",
    codes="",
)
def mpt_3b(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.9.0", "fp8")
    model, batch = (
        on_meta(lambda: Gpt(te.Linear, 32, 2560, 20, 50368)),
        torch.zeros(4, 2048, dtype=torch.long).to("meta"),
    )
    return Job(in_fp8(model, batch), batch)


@thread(
    "NVIDIA/Megatron-LM",
    629,
    "Every micro-batch casts all weights again; 5% with the fix",
    "MCore does not pass is_first_microbatch",
    gpu="H100",
    must="micro-batch|is_first_microbatch",
    codes="STP008",
)
def micro_batches_in_mcore(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "1.1.0", "fp8", megatron_core="0.4.0")
    return Job(ran(on_meta(lambda: mlp(te.Linear, 4096, 8)), 4096), rows(2048, 4096), accumulate=8)


@thread(
    "bghira/SimpleTuner",
    1184,
    "FLUX in fp8-quanto with LoRA of rank 1 on a 4090: 4.25 s a step",
    "every block is checkpointed; 3.00 s with every second one",
    gpu="RTX4090",
    must="checkpoint",
    codes="CKP001",
)
def every_block_checkpointed(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    adapters.stored(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 1, BF16), adapters.flux_batch(4096, 512), autocast=BF16)


@thread(
    "huggingface/transformers",
    42865,
    "A model from a configuration with FP8 in its quantization_config is in fp32, without a word",
    "from_config ignores quantization_config",
    gpu="H100",
    must="No FP8|no layer",
    codes="",
)
def fp8_in_the_configuration(patch: pytest.MonkeyPatch) -> Job:
    config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, use_cache=False)
    config.quantization_config = FineGrainedFP8Config()
    with torch.device("meta"):
        return Job(AutoModelForCausalLM.from_config(config), tokens(4, 2048))


@thread(
    "NVIDIA-NeMo/RL",
    2744,
    "Packed sequences over 2 tensor-parallel ranks fail with dims=[2044, 2048]",
    "a rank's tokens have to be a multiple of 8: pad the packed length to 8 times the ranks",
    gpu="H100",
    must=r"2,?044|multiple of (8|16)|divis",
    codes="SHP001",
)
def packed_rows_of_a_rank(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.13.0", "quantization", megatron_core="0.17.0")
    model = on_meta(lambda: mlp(te.Linear, 2048, 8))
    return Job(in_fp8(model, rows(2048, 2048), te.Float8BlockScaling()), rows(2044, 2048))


thread(
    "NVIDIA-NeMo/Megatron-Bridge",
    1409,
    "Llama 3.1 8B on 4 GB200: 11.65 s a step in BF16, 8.57 s in FP8, 8.63 s in MXFP8",
    "that is 1.36x and 1.35x",
    config="Llama-3-8B",
    plan=["--gpu", "GB200", "--batch", "2", "--seq", "8192", "--dp", "4"],
    must=r"\b1\.(29|3\d|4[0-2])x",
    codes="",
)


@thread(
    "pytorch/torchtitan",
    3109,
    "Rowwise FP8 with TP 2 gives NaN from the third step",
    "ColwiseParallel(use_local_output=False) hands torchao's layer a DTensor, whose scales then differ by rank",
    gpu="H100",
    must="NaN|use_local_output",
    codes="NUM001 NUM003 ENV005",
)
def nan_under_tensor_parallelism(patch: pytest.MonkeyPatch) -> Job:
    processes(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = on_meta(lambda: nn.Sequential(*(Block(nn.Linear, 2048, 6144, 32, 4) for _ in range(4))))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
    names = {name.removeprefix("block."): type(style) for name, style in SHARDED.items()}
    plan = {
        n: ColwiseParallel(use_local_output=False) if s is ColwiseParallel else RowwiseParallel()
        for n, s in names.items()
    }
    for block in model:
        parallelize_module(block, mesh["tp"], {n: s for n, s in plan.items() if n in ("w1", "w3", "w2")})
        block.compile()
    return Job(model, torch.empty(2, 4096, 2048, dtype=BF16, device="meta"))


@thread(
    "pytorch/torchtitan",
    1214,
    "--float8.emulate on H100: far fewer tokens/s than without",
    "emulation casts to FP8 and back and multiplies in high precision: it is for tests",
    gpu="H100",
    must="emulat",
    codes="MOD002 MOD003 GPU002 ENV006",
)
def emulated(patch: pytest.MonkeyPatch) -> Job:
    return Job(float8(llama(), lambda module, name: name != "lm_head", emulate=True), tokens(1, 8192))


@thread(
    "MakazhanAlpamys/Soup",
    835,
    "quantization_aware: fp8 checks no hardware: on Ampere it fails at the first forward",
    "FP8 matmuls need compute capability 8.9",
    card={"name": "NVIDIA GeForce RTX 3090", "compute_capability": "8.6", "memory_gib": 24.0},
    must=r"cannot run|has no FP8|8\.9|no FP8 (tensor|matmul)",
    codes="GPU002",
)
def float8_on_ampere(patch: pytest.MonkeyPatch) -> Job:
    return Job(
        convert_to_float8_training(llama(4), module_filter_fn=lambda module, name: name != "lm_head"),
        tokens(1, 1024),
    )


class Autocasting(nn.Module):
    """A block that opens an autocast of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        with te.autocast(enabled=True, recipe=te.DelayedScaling()):
            return self.block(x)  # type: ignore[no-any-return]


@thread(
    "NVIDIA-NeMo/Speech",
    4833,
    "fp8_autocast is entered for each layer",
    "each autocast reduces amaxes over all ranks: enter it once around the micro-batch",
    gpu="H100",
    must="amax|autocast",
    codes="DST001 DST004 STP001 STP008",
)
def autocast_for_each_layer(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.6.0", "fp8")
    processes(64)
    model = on_meta(
        lambda: nn.Sequential(*(Autocasting(Block(te.Linear, 4096, 16384, 32, 32)) for _ in range(8)))
    )
    batch = torch.empty(4, 2048, 4096, dtype=BF16, device="meta")
    model(batch)
    return Job(model, batch)


class ConvBlock(Block):
    """The block with convolutions over the sequence before it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(te.Linear, width, hidden, width // 64, width // 64)
        self.conv1, self.conv2 = (nn.Conv1d(width, width, 9, padding=4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.conv1(x.transpose(1, 2)))
        return super().forward(x + self.conv2(y).transpose(1, 2))


@thread(
    "NVIDIA/TransformerEngine",
    481,
    "Convolutions among te.Linear: do they hurt FP8's speed?",
    "they run as before, in 16 bits: FP8 speeds up the Linears, and the more they are the more it gives",
    gpu="H100",
    must="[Cc]onv",
    codes="MOD004",
)
def convolutions_among_te(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.12.0", "fp8")
    batch = torch.empty(16, 1024, 1024, dtype=BF16, device="meta")
    return Job(
        in_fp8(on_meta(lambda: nn.Sequential(*(ConvBlock(1024, 4096) for _ in range(12)))), batch), batch
    )


@thread(
    "NVIDIA-NeMo/Automodel",
    1459,
    "LoRA on a checkpoint that is stored in FP8 (Ministral 3) fails",
    "its FP8 Linears are for inference: load with dequantize=True",
    gpu="H100",
    must="dequantize",
    codes="MOD003 MOD007 ENV005",
)
def lora_on_an_fp8_checkpoint(patch: pytest.MonkeyPatch) -> Job:
    base = llama(4, 3072, 9216)
    with torch.device("meta"):
        base = replace_with_fp8_linear(
            base, modules_to_not_convert=["lm_head"], quantization_config=FineGrainedFP8Config()
        )
    return Job(
        adapters.with_peft(base, 16, ["q_proj", "v_proj"], autocast_adapter_dtype=False), tokens(4, 2048)
    )


thread(
    "pytorch/pytorch",
    192707,
    "Rowwise scales fail on an RTX PRO 5000 (compute capability 12.0)",
    "cuBLASLt has no rowwise FP8 matmul there; one scale a tensor works",
    text="""torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16)
RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( ltHandle, \
computeDesc.descriptor(), Adesc.descriptor(), Bdesc.descriptor(), Cdesc.descriptor(), Ddesc.descriptor())`""",
    must="tensorwise|per-tensor|PerTensor",
    codes="",
)


@thread(
    "pytorch/pytorch",
    130359,
    "Rowwise FP8 does not work on an L4",
    "its kernel needed compute capability 9.0, until torch 2.7",
    gpu="L4",
    must=r"tensorwise|torch ?>=|torch 2\.7",
    codes="GPU002 ENV005",
)
def rowwise_on_l4(patch: pytest.MonkeyPatch) -> Job:
    model = float8(llama(4), lambda module, name: name != "lm_head", "rowwise")
    patch.setattr(torch, "__version__", "2.5.1+cu124")
    return Job(model, tokens(1, 4096))


@thread(
    "kohya-ss/sd-scripts",
    1571,
    "avr_loss=nan: FLUX LoRA with --fp8_base and --mixed_precision fp16",
    "FLUX overflows float16 (#1707): train in bfloat16",
    card={"name": "Tesla T4", "compute_capability": "7.5", "memory_gib": 15.0},
    must="bfloat16|bf16|float16|overflow",
    codes="NUM001 NUM003",
)
def flux_in_float16(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True)).half()
    adapters.stored(adapters.linears(model))
    batch = {name: each.half() for name, each in adapters.flux_batch(1024, 512).items()}
    return Job(adapters.Trained(model, 64), batch, autocast=torch.float16)


@thread(
    "pytorch/torchtitan",
    4008,
    "filter_fqns of llama3 and deepseek_v3 lists output, and the head is called lm_head",
    "the name matches nothing, so the head is in FP8 too",
    gpu="H100",
    must="lm_head|the head",
    codes="NUM003 SHP002 SHP005",
)
def filter_that_matches_nothing(patch: pytest.MonkeyPatch) -> Job:
    model = llama(4, 4096, 14336, vocab_size=128256)
    return Job(float8(model, lambda module, name: name != "output", "rowwise"), tokens(1, 8192))


if __name__ == "__main__":
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(rule + section(list(map(row, THREADS)), OUTCOMES) + misses(THREADS), encoding="utf-8")
