"""Reports written down by hand, one for each screen that must keep its shape."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec.structs import replace

from fp8doctor.answer.verdict import Verdict
from fp8doctor.diagnosis.document import Tool
from fp8doctor.diagnosis.prescription import prescribe
from fp8doctor.facts import (
    Blocks,
    Breakdown,
    Checkpointing,
    Environment,
    Facts,
    Gpu,
    Linear,
    Network,
    Observation,
    Package,
    Software,
    Target,
    Training,
)
from fp8doctor.finding import Finding, Outcome, Saving, Treatment
from fp8doctor.gpus import modelled_gpu_name
from fp8doctor.report import Report
from tests.facts_of import DECODER_468M

AREA_OF = {
    "ENV": "environment",
    "GPU": "device",
    "MOD": "engagement",
    "SHP": "shapes",
    "CMP": "compilation",
    "CKP": "checkpointing",
    "LOR": "lora",
    "MEM": "memory",
}
"""The area of a code by how it begins, whatever checks are installed."""

H200 = Gpu(name="NVIDIA H200", vendor="nvidia", compute_capability="9.0", memory_gib=139.8, visible=True)

EAGER = Finding(
    code="CMP001",
    name="eager-float8",
    area="compilation",
    severity="warning",
    title="168 of 168 FP8 Linears are not compiled",
    explanation="Each of them casts its input, weight and gradient in about 83 kernels per step; "
    "compiled, it takes about 9.",
    evidence={"eager_linears": 168},
    saving_ms=Saving(low=250.4, high=330.2, basis="modelled", gpu="H100"),
    treatment=Treatment(
        name="compile-blocks",
        summary="compile block by block, after the conversion to FP8",
        code="for block in model.blocks:\n    block.compile()",
    ),
)
ONLY_LINEARS = Finding(
    code="CMP004",
    name="only-linears-compiled",
    area="compilation",
    severity="warning",
    title="24 compiled regions hold a Linear and nothing else",
    explanation="The casts cannot be fused with the norm before them.",
    treatment=EAGER.treatment,
)
OVERRIDDEN = Finding(
    code="ENV001",
    name="fp8-request-overridden",
    area="environment",
    severity="error",
    title="TrainingArguments(bf16=True) overrides ACCELERATE_MIXED_PRECISION=fp8",
    explanation="The launcher asked for FP8; transformers 5.23 takes bf16 from its own "
    "arguments and "
    "says nothing.",
    evidence={"variable": "ACCELERATE_MIXED_PRECISION"},
    treatment=Treatment(
        name="no-bf16",
        summary="leave the precision to the launcher",
        code="TrainingArguments(..., bf16=False, fp16=False)",
    ),
)
UNALIGNED = Finding(
    code="SHP001",
    name="unaligned-dimensions",
    area="shapes",
    severity="warning",
    title="1 of 169 Linears has a side that 16 does not divide: head, 1024 x 50257",
    explanation="torchao leaves it in BF16: 11.5% of the matmul FLOPs.",
    saving_ms=Saving(low=0.4, high=3.1, basis="measured", gpu="NVIDIA H200"),
    treatment=Treatment(
        name="pad-vocabulary",
        summary="pad the vocabulary to a multiple of 16",
        code="model.resize_token_embeddings(pad_to_multiple_of=16)",
    ),
)
NO_GPU = Finding(
    code="GPU005",
    name="no-gpu",
    area="device",
    severity="info",
    title="no GPU is visible to this process",
    explanation="Costs are modelled for an H100 SXM; --assume-gpu takes another one. "
    "Nothing can be "
    "timed here.",
)


def report(
    facts: Facts,
    summary: str,
    findings: tuple[Finding, ...] = (),
    status: Any = "not_measured",
    **outcomes: Any,
) -> Report:
    """A report with these findings; ``outcomes`` are the other checks: code -> outcome, or ``outcome:
    reason``."""
    others = [(code, *text.partition(": ")[::2]) for code, text in outcomes.items()]
    return Report(
        tool=Tool(version="0.1.0"),
        created_at="2026-11-20T10:00:00+00:00",
        facts=facts,
        verdict=Verdict(status=status, summary=summary),
        findings=findings,
        prescription=prescribe(findings),
        outcomes=(
            *(Outcome(code=finding.code, outcome="sick", area=finding.area) for finding in findings),
            *(
                Outcome(
                    code=code,
                    outcome=outcome,  # type: ignore[arg-type]
                    reason=reason or None,
                    area=AREA_OF[code[:3]],
                    missing=re.split(": | was", reason)[0] if outcome == "unknown" else msgspec.UNSET,
                )
                for code, outcome, reason in others
            ),
        ),
        modelled_gpu=modelled_gpu_name(facts),
    )


EAGER_DECODER = report(
    replace(DECODER_468M, gaps={"gpus": "no GPU"}),
    "FP8 is set up in 168 of 169 Linears (92% of the matmul FLOPs). Whether it is faster "
    "than BF16 was "
    "not measured.",
    (EAGER,),
    ENV001="healthy",
    GPU001="unknown: gpus: no GPU",
    MOD001="healthy",
    MOD002="unknown: network.linears.engaged was not recorded",
    SHP001="healthy",
    CMP002="not_applicable: nothing asks for torch.compile",
    LORA002="not_applicable: no adapter in the model",
)

COMPILED_DECODER = report(
    replace(
        DECODER_468M,
        gpus=(H200, H200),
        network=replace(
            DECODER_468M.network,
            linears=tuple(
                replace(linear, compiled=linear.name.rpartition(".")[0])
                for linear in DECODER_468M.network.linears[:-1]
            )
            + DECODER_468M.network.linears[-1:],
            blocks=(Blocks(name="blocks", kind="decoder.Block", count=24, compiled=24, checkpointed=0),),
        ),
    ),
    "FP8 is set up in 168 of 169 Linears (92% of the matmul FLOPs). Whether it is faster "
    "than BF16 was "
    "not measured.",
    ENV001="healthy",
    GPU001="healthy",
    MOD001="healthy",
    SHP001="healthy",
    CMP001="healthy",
    CMP002="healthy",
    CKP002="not_applicable: no checkpointing",
    LORA002="not_applicable: no adapter in the model",
)


def _adapted(name: str, kind: str, adapter: Any, share: float) -> Linear:
    return Linear(
        name=name,
        kind=kind,
        stack="torchao" if adapter == "base" else "torch",
        use="training" if adapter == "base" else "none",
        weight_class=None,
        adapter=adapter,
        compiled=None,
        flops_share_pct=share,
    )


LORA = report(
    Facts(
        target=Target(kind="file", name="lora.py", attribute="model"),
        software=Software(
            torch="2.13.0+cpu",
            packages={
                "torchao": Package(version="0.18.0"),
                "transformer_engine": Package(version="2.20.2"),
                "peft": Package(version="0.21.0"),
            },
        ),
        gpus=(H200,),
        assumed_gpu="B200",
        network=Network(
            kind="peft.PeftModelForCausalLM",
            parameters=8_030_261_248 + 83_886_080,
            adapter_parameters=83_886_080,
            linears=tuple(
                linear
                for i in range(32)
                for linear in (
                    _adapted(
                        f"layers.{i}.q.base_layer", "torchao.float8.float8_linear.Float8Linear", "base", 2.9
                    ),
                    _adapted(f"layers.{i}.q.lora_A", "torch.nn.modules.linear.Linear", "adapter", 0.04),
                    _adapted(f"layers.{i}.q.lora_B", "torch.nn.modules.linear.Linear", "adapter", 0.03),
                )
            ),
            blocks=(
                Blocks(
                    name="layers",
                    kind="transformers.models.llama.modeling_llama.LlamaDecoderLayer",
                    count=32,
                    compiled=16,
                    checkpointed=0,
                ),
            ),
        ),
        training=Training(
            checkpointing=(Checkpointing(name="layers.0", form="called_in_forward", active=None),)
        ),
        workload=replace(
            DECODER_468M.workload, batch_source="made up", batch_size=1, sequence_length=512, tokens=512
        ),
    ),
    "FP8 is set up in 32 of 96 Linears (93% of the matmul FLOPs). Whether it is faster "
    "than BF16 was "
    "not measured.",
    (
        replace(
            EAGER,
            title="16 of 32 FP8 Linears are not compiled",
            saving_ms=Saving(low=40.0, high=62.0, basis="modelled", gpu="B200"),
        ),
        ONLY_LINEARS,
    ),
    MOD001="healthy",
    LORA002="healthy",
)

NO_FP8 = report(
    replace(
        DECODER_468M,
        target=Target(kind="live", name="GPT", attribute=None),
        network=replace(
            DECODER_468M.network,
            linears=tuple(
                replace(linear, kind="torch.nn.modules.linear.Linear", stack="torch", use="none")
                for linear in DECODER_468M.network.linears
            ),
        ),
        training=replace(
            DECODER_468M.training, checkpointing=(Checkpointing(name="", form="huggingface", active=True),)
        ),
        workload=replace(
            DECODER_468M.workload, batch_source=None, batch_size=None, sequence_length=None, tokens=None
        ),
    ),
    "This model uses no FP8, and none was asked for.",
    (NO_GPU,),
    status="no_fp8",
    MOD001="not_applicable: nobody asked for FP8",
    SHP001="not_applicable: no FP8 Linear in the model",
    CMP001="not_applicable: no torchao FP8 Linear in the model",
)

ENVIRONMENT = report(
    Facts(
        target=Target(kind="environment", name="environment", attribute=None),
        software=Software(torch="2.11.0+cu130", packages={"accelerate": Package(version="1.15.0")}),
        environment=Environment(variables={"ACCELERATE_MIXED_PRECISION": "fp8"}),
        gpus=(H200, replace(H200, visible=False)),
        gaps={"network": "only the environment was asked for"},
    ),
    "No model was examined: only the environment was asked for",
    (OVERRIDDEN,),
    GPU001="healthy",
    MOD001="unknown: network: only the environment was asked for",
    SHP001="unknown: network: only the environment was asked for",
    CMP001="unknown: network: only the environment was asked for",
)

ON_A_GPU = report(
    replace(DECODER_468M, gpus=(H200,)),
    "FP8 was asked for and does not run: "
    "TrainingArguments(bf16=True) overrides "
    "ACCELERATE_MIXED_PRECISION=fp8.",
    (
        OVERRIDDEN,
        UNALIGNED,
        replace(EAGER, saving_ms=Saving(low=278.1, high=278.3, basis="measured", gpu="NVIDIA H200")),
        ONLY_LINEARS,
    ),
    status="fp8_not_engaged",
    GPU001="healthy",
    MOD001="healthy",
    CKP002="not_applicable: no checkpointing",
)

BROKEN = report(
    Facts(
        target=Target(kind="file", name="train.py", attribute=None),
        software=Software(torch="2.13.0", packages={}),
        gpus=(),
        gaps={
            "network": "the worker was killed by SIGKILL (out of memory?) while loading train.py",
            "software.driver": "NVML is not installed",
        },
    ),
    "No model was examined: the worker was killed by SIGKILL (out of memory?) while loading train.py",
    ENV001="crashed: KeyError: 'bf16'",
    GPU001="not_applicable: no GPU",
    **{
        f"MOD{i:03}": "unknown: network: the worker was killed by SIGKILL (out of "
        "memory?) while "
        "loading train.py"
        for i in range(1, 15)
    },
)

WATCHED = report(
    replace(
        DECODER_468M,
        target=Target(kind="script", name="train.py", attribute=None),
        observed=Observation(
            steps_ms=(412.3, 420.8, 409.1),
            clock="cuda",
            warmup=5,
            data_ms=(55.0, 61.2, 58.4),
            before_forward_ms=None,
            behind_ms=None,
            peak_gib=31.4,
            fp8_gemms=1008,
            graphs_run=0,
            host_copies_ms=0.4,
            breakdown=Breakdown(
                families_ms={"gemm_fp8": 25.2, "gemm_16bit": 4.2, "cast": 273.6, "pointwise": 39.4},
                idle_ms=69.9,
                host_wait_pct=80.0,
                busy_ms=342.4,
                scale=1.0,
                reliable=True,
                kernels=20000,
                unclassified_pct=0.0,
                groups=(),
                modules=(),
            ),
        ),
    ),
    "The step waits for its data 58.4 of 412.3 ms (14%). FP8 does not shorten that. Fix it first. FP8 is "
    "set up in 168 of 169 Linears (92% of the matmul FLOPs). Whether it is faster than BF16 was not "
    "measured.",
    (EAGER,),
    MOD001="healthy",
)

FAILED_EARLY = report(
    replace(
        ENVIRONMENT.facts,
        target=Target(kind="script", name="train.py", attribute=None),
        gpus=(H200,),
        gaps={"network": "the script failed before its first step"},
        script_error="RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 "
        "shape: (1003x64)",
    ),
    "The script failed before its first step: RuntimeError: Expected trailing dimension of mat1 to be "
    "divisible by 16 but got mat1 shape: (1003x64).",
    GPU001="healthy",
    MOD001="unknown: network: the script failed before its first step",
    SHP001="unknown: network: the script failed before its first step",
    CMP001="unknown: network: the script failed before its first step",
)

SCREENS = {
    "failed_early": FAILED_EARLY,
    "eager_decoder": EAGER_DECODER,
    "compiled_decoder": COMPILED_DECODER,
    "lora": LORA,
    "no_fp8": NO_FP8,
    "environment": ENVIRONMENT,
    "on_a_gpu": ON_A_GPU,
    "watched": WATCHED,
    "broken": BROKEN,
}
