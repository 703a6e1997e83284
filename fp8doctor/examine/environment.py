"""Describe the environment: variables that are set, versions that are installed.

Only listed variables are read, none that may hold a secret or a path; of a path in a value only the last part
is kept. Packages are looked up by metadata, because importing Unsloth or Transformer Engine changes a process
(see `fp8doctor.examine.fp8_support`).
"""

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from email.parser import HeaderParser
from functools import lru_cache
from importlib import metadata

from fp8doctor.examine.fp8_support import spec_of, try_backends
from fp8doctor.examine.nvml_gpus import installed_torch
from fp8doctor.facts import Environment, Package, Software
from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED

VARIABLES = frozenset(
    """
    ACCELERATE_DEEPSPEED_CONFIG_FILE FP8_BACKEND FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER UNSLOTH_IS_PRESENT
    UNSLOTH_ZOO_IS_PRESENT UNSLOTH_COMPILE_DISABLE UNSLOTH_COMPILE_MAXIMUM UNSLOTH_FULLGRAPH
    UNSLOTH_FORCE_FLOAT32 UNSLOTH_MIXED_PRECISION UNSLOTH_ENABLE_FULL_FINETUNING UNSLOTH_RETURN_LOGITS
    UNSLOTH_FSDP2 CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_MODULE_LOADING HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HSA_OVERRIDE_GFX_VERSION
    AMD_SERIALIZE_KERNEL HIP_LAUNCH_BLOCKING NVIDIA_TF32_OVERRIDE CUBLAS_WORKSPACE_CONFIG CUBLASLT_LOG_LEVEL
    CUDNN_LOGLEVEL_DBG WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE OMP_NUM_THREADS NCCL_DEBUG NCCL_ALGO
    NCCL_PROTO NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE
    """.split()
)
"""Variables that decide if and how fast FP8 runs."""

PREFIXES = (
    *("ACCELERATE_", "FSDP_", "NVTE_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCHAO_"),
    *("PYTORCH_", "TRITON_"),
)
"""Families of variables that are switches and numbers."""

PRIVATE = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY|_(DIR|PATH|ROOT|HOME|URL|FILE)$|_REMOTE_")
"""Names in those families that may hold more than a switch."""

WORDS = frozenset(
    """
    true false yes no on off none null auto all any default enable enabled disable disabled dynamic static
    fp bf float bfloat int uint nv mx tf half single mixed precision e m x v k b mb gb kb ms gfx sm
    te ao msamp transformer engine torchao torch accelerate deepspeed fsdp ddp megatron cutlass triton aten
    cpp ck cudnn cublas cublaslt flash fused unfused native cudamallocasync inductor eager aot dynamo
    cudagraphs cudagraph ipex tensorrt onnx onnxrt nvfuser ofi tvm openxla xla gaudi hpu ts dynamite
    reduce overhead max autotune autotuning gemm no hybrid delayed current block blockwise tensor tensorwise
    row rowwise recent most compute algo forward backward fwd bwd
    full shard grad op strategy zero param params optimizer device cpu cuda gpu mig nvme xpu npu mps
    fastest first pci bus id lazy info warn warning error fatal trace debug detail version critical
    ring tree simple ll nvls nvlstree collnet direct chain pat
    expandable segments split size garbage collection threshold roundup power divisions backend pinned
    reserve host register num threads background release lock per process memory fraction graph capture
    private pools max min non large
    logs output code graph breaks recompiles verbose cache caches compile compilation config json yaml yml
    ds log traces txt out tmp
    """.split()
)
"""Words in values of these variables. Other words may be private and are not recorded."""

SET = "(set)"
"""In place of an unrecorded part of a value."""

MOST_DIGITS = 12
"""Digits in one piece of a value; longer ones may be private."""

PACKAGES = {
    name: (name,)
    for name in """
    torchao accelerate transformers peft trl unsloth unsloth_zoo deepspeed bitsandbytes flash_attn
    nvdlfw_inspect liger_kernel xformers compressed_tensors vllm llamafactory axolotl
    """.split()
} | {
    "transformer_engine": ("transformer_engine", "transformer_engine_cu12", "transformer_engine_cu13"),
    "flash_attn_interface": ("flash_attn_3",),
    "fbgemm_gpu": ("fbgemm_gpu", "fbgemm_gpu_genai", "fbgemm_gpu_nightly"),
    "modelopt": ("nvidia_modelopt",),
    "msamp": ("ms_amp", "msamp"),
    "megatron": ("megatron_core",),
    "lightning": ("lightning", "pytorch_lightning"),
}
"""Import name -> distributions that may contain it, in order of trying."""

PARTS = ("transformer_engine_cu12", "transformer_engine_cu13", "transformer_engine_torch")
"""Distributions of Transformer Engine without a package; all have one version."""

TRITON = ("triton", "pytorch_triton", "pytorch_triton_rocm", "triton_windows")


def examine_environment(gaps: dict[str, str]) -> tuple[Software, Environment]:
    """Describe software and environment; ``gaps`` has what cannot be read."""
    variables = allowed(os.environ.items())
    imports, switches = try_backends(variables, gaps), debug_switches()
    return examine_software(), Environment(
        variables=variables, backend_imports=imports, debug_switches=switches
    )


def allowed(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the variables that may be recorded, without folders and devices."""
    return {
        name: _public(value)
        for name, value in sorted(variables)
        if name in VARIABLES or (name.startswith(PREFIXES) and not PRIVATE.search(name))
    }


def _public(value: str) -> str:
    value = re.sub(r"\b(GPU|MIG)-[\w/-]+", r"\1-…", value)
    value = scrub(re.sub(r"[^\s,;='\"]*[\\/]", "…/", value))
    return re.sub(r"(?<![^\s,;|=])[^\s,;|=<]+(?![^\s,;|=])", lambda piece: _known(piece[0]), value)


def _known(piece: str) -> str:
    """Return a piece of a value if its words are known or misspelled, else `SET`."""
    if sum(map(str.isdigit, piece)) > MOST_DIGITS:
        return SET
    for word in re.findall(r"[^\W\d_]+", piece.lower()):
        if word not in WORDS and not (len(word) > 4 and get_close_matches(word, WORDS, 1, 0.8)):
            return SET
    return piece


def examine_software() -> Software:
    torch = installed_torch()
    cuda = torch.version.cuda if torch else NOT_RECORDED
    major = str(cuda).partition(".")[0] if torch and cuda else None
    return Software(
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.machine()}",
        torch=str(torch.__version__) if torch else None,
        cuda=cuda,
        hip=torch.version.hip if torch else NOT_RECORDED,
        cublaslt=version_of((f"nvidia_cublas_cu{major}", "nvidia_cublas")) if major else None,
        cudnn=version_of((f"nvidia_cudnn_cu{major}", "nvidia_cudnn")) if major else None,
        triton=version_of(TRITON),
        packages=installed_packages(),
    )


def installed_packages() -> dict[str, Package]:
    """Describe the packages that ``import`` would find; a folder alone is none."""
    found = {}
    for name, distributions in PACKAGES.items():
        version, spec = version_of(distributions), spec_of(name)
        if name in sys.modules or (spec and (spec.origin is not None or version is not None)):
            found[name] = version
    found |= {name: version for name in PARTS if (version := version_of((name,))) is not None}
    return {name: Package(version=version, imported=name in sys.modules) for name, version in found.items()}


def version_of(distributions: Iterable[str]) -> str | None:
    """Return the version of the first distribution with readable metadata, or None."""
    for name in distributions:
        with suppress(Exception):  # not installed, or half: KeyError, UnicodeDecodeError, OSError ...
            found = metadata.distribution(name)
            texts = (found.read_text(file) for file in ("METADATA", "PKG-INFO", ""))  # wheels, eggs, old eggs
            if version := _version_in(next(filter(None, texts), "")):
                return version
    return None


@lru_cache
def _version_in(text: str) -> str | None:
    """Parse a text once: the eight of a process took half an examination's time."""
    return HeaderParser().parsestr(text)["Version"]


def debug_switches() -> dict[str, bool]:
    if (torch := installed_torch()) is None:
        return {}
    return {
        "anomaly_detection": torch.is_anomaly_enabled(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
    }


@contextmanager
def variables_put_back() -> Iterator[None]:
    """Restore the variables: importing torch's compiler sets one."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
