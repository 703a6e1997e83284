"""Describe the environment: variables that are set, versions that are installed.

Only listed variables are read, none that may hold a secret or a path; of a path in a value only the last part
is kept. Packages are looked up by metadata, because importing Unsloth or Transformer Engine changes a
process. Another process tries if Accelerate's backend imports.
"""

import functools
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any

from fp8doctor.examine.nvml_gpus import installed_torch
from fp8doctor.facts import NOT_RECORDED, Environment, Package, Software
from fp8doctor.facts.scrub import scrub

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

BACKENDS = {"AO": "torchao.float8", "TE": "transformer_engine.pytorch", "MSAMP": "msamp"}
"""Backend -> module that Accelerate imports, in its order of preference. Source: ``Accelerator.__init__`` and
``utils/``, accelerate 1.4 to 1.15."""

TIME_LIMIT_S = 120.0
"""Seconds. Importing torch and a backend takes 5 s, or a minute from a cold network disk."""

SAID = "fp8doctor: "
"""Prefix of the answer, because libraries print other lines."""

TRY = f"""
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[2])
try:
    import torch
    importlib.import_module(sys.argv[1])
    said = None
except BaseException as error:
    said = type(error).__name__ + ": " + " ".join(str(error).split())
print("\\n{SAID}" + json.dumps(said))
"""


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
    if sum(map(str.isdigit, piece)) > 12:  # longer ones may be private
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
        triton=version_of(("triton", "pytorch_triton", "pytorch_triton_rocm", "triton_windows")),
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
            # metadata.version would parse it all, which took half an examination's time
            if version := re.search(r"^Version:[ \t]*(\S+)", next(filter(None, texts), ""), re.MULTILINE):
                return version[1]
    return None


def debug_switches() -> dict[str, bool]:
    if (torch := installed_torch()) is None:
        return {}
    return {
        "anomaly_detection": torch.is_anomaly_enabled(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
    }


def try_backends(variables: dict[str, str], gaps: dict[str, str]) -> Any:
    """Map each backend to its import error, or None; ``gaps`` has unfinished tries."""
    backend = backend_to_come(variables)
    if backend is None:
        return {}
    module = BACKENDS[backend]
    try:
        return {backend: None if module in sys.modules else try_import(module, tuple(sys.path))}
    except (OSError, subprocess.SubprocessError) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        why = f"it took more than {TIME_LIMIT_S:g} s" if late else str(error)
        gaps["environment.backend_imports"] = scrub(f"trying to import {module} did not end: {why}")
    return NOT_RECORDED


def backend_to_come(variables: dict[str, str]) -> str | None:
    """Return the backend that Accelerate will use, named or the first installed.

    ``prepare`` takes a named one even without FP8 (accelerate 1.9 to 1.15).
    """
    if not _is_installed("accelerate"):
        return None
    named = variables.get("ACCELERATE_FP8_BACKEND", "NO")
    if named in BACKENDS:
        return named
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: dict[str, Any] = getattr(state, "_shared_state", {})
    precision = shared.get("_mixed_precision", variables.get("ACCELERATE_MIXED_PRECISION"))
    if named != "NO" or str(precision) != "fp8":
        return None
    installed = (each for each, module in BACKENDS.items() if _is_installed(module.partition(".")[0]))
    return next(installed, None)


def _is_installed(package: str) -> bool:
    return package in sys.modules or spec_of(package) is not None


def spec_of(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


@functools.cache
def try_import(module: str, path: tuple[str, ...]) -> str | None:
    """Return the error of an import in a new process, in a line, or None."""
    if not _is_installed(module.partition(".")[0]):
        return f"ModuleNotFoundError: No module named {module.partition('.')[0]!r}"
    done = subprocess.run(
        [sys.executable, "-B", "-c", TRY, module, json.dumps(path)],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=TIME_LIMIT_S,
    )
    answers = [line.removeprefix(SAID) for line in done.stdout.splitlines() if line.startswith(SAID)]
    if not answers:
        return f"the process that imported it ended with code {done.returncode}"
    said = json.loads(answers[-1])
    return None if said is None else scrub(said)


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
