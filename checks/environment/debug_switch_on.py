"""A debug switch that was left on

A variable or setting makes CUDA, torch, Triton or Transformer Engine check, log or synchronize. Such a switch
helps to find an error and costs time in every step. FP8 suffers more than BF16, because it runs more and
shorter kernels. With CUDA_LAUNCH_BLOCKING the host waits for each of them; in deterministic mode a separate
kernel first fills every new tensor with NaN. `transformers.enable_full_determinism` sets both. A setting that
Megatron needs is listed too: under FSDP, CUDA_DEVICE_MAX_CONNECTIONS=1 ends the overlap of communication.

    CUDA_LAUNCH_BLOCKING=1 python train.py  # before

    python train.py                         # after

Ignore it while you are looking for that error, or if you need the determinism. Switches that cost time only
during compilation are not reported. fp8doctor reads the settings and does not time them.
https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
https://github.com/NVIDIA/TransformerEngine/blob/02e278f/docs/envvars.rst
https://github.com/pytorch/torchtitan/issues/1147
"""

import re
from typing import NamedTuple

from fp8doctor import kit

OFF = ("", "0", "false", "off", "no", "none", "n", "f")
"""Values that switch nothing on, in any case."""


class Switch(NamedTuple):
    """A variable, its cost, and the values that switch it on (without a pattern, all but `OFF`)."""

    name: str
    cost: str
    values: str | None = None
    under: str = ""
    """How the name of the wrapper begins under which it costs time."""


SWITCHES = (
    # CUDA C++ Programming Guide, environment variables.
    Switch("CUDA_LAUNCH_BLOCKING", "the host waits for every kernel before it launches the next"),
    # c10/cuda/CUDACachingAllocator.cpp: for compute-sanitizer; straight to cudaMalloc.
    Switch("PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor costs a cudaMalloc and a cudaFree"),
    # torch/_inductor/config.py: nan_asserts; torch/_inductor/runtime/triton_heuristics.py.
    Switch("TORCHINDUCTOR_NAN_ASSERTS", "compiled code checks every buffer for NaN and waits for it", "1"),
    Switch("TRITON_INTERPRET", "Triton's kernels run in Python, element by element", "1|true|on|yes|y"),
    # torch.distributed: every collective is preceded by a check that all ranks call the same one.
    Switch("TORCH_DISTRIBUTED_DEBUG", "every collective is first compared across all ranks", "detail"),
    # pytorch/torchtitan#1147: Megatron's tensor parallelism wants it; its arguments refuse it with FSDP.
    Switch(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "FSDP's communication waits for computation, and computation for it",
        "1",
        under="FSDP",
    ),
    # cuBLAS and cuDNN developer guides, logging.
    Switch("CUBLASLT_LOG_LEVEL", "cuBLAS logs every matmul", "[2345]"),
    Switch("CUDNN_LOGLEVEL_DBG", "cuDNN logs every call", "[23]"),
    # Transformer Engine, docs/envvars.rst.
    Switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "attention takes only deterministic, slower algorithms", "0"),
    Switch("NVTE_BACKWARD_OVERRIDE", "gradients multiply in 16 bits", "high.*|deq.*"),
    Switch("NVTE_UNFUSED_FP8_UPDATE", "amax and scales are updated by many small kernels"),
    # torch/compiler/config.py.
    Switch("TORCH_COMPILE_OVERRIDE_BACKENDS", "graphs run with another backend than named", ".*eager.*"),
)

FILLS = ", and every new tensor is filled with NaN first"

CALLS = {
    "anomaly_detection": (
        "every forward operation keeps its Python stack, and every gradient is checked for NaN",
        "torch.autograd.set_detect_anomaly(False)",
    ),
    "deterministic_algorithms": (
        f"only deterministic kernels may run{FILLS}",
        "torch.use_deterministic_algorithms(False)   # or "
        "torch.utils.deterministic.fill_uninitialized_memory = False",
    ),
}
"""Switches that are a call: the fact -> the cost, and the line that undoes it."""


@kit.check("ENV006", "debug-switch-on", severity="warning")
def debug_switch_on(facts: kit.Facts) -> kit.Finding | None:
    switches, variables = facts.environment.debug_switches, facts.environment.variables
    set_here = [each for each in SWITCHES if each.name in variables and is_on(each, facts)]
    called = {name.replace("_", " "): told for name, told in CALLS.items() if switches.get(name)}
    said = {f"{each.name}={variables[each.name]}": each.cost for each in set_here}
    unfilled = FILLS if switches.get("fill_uninitialized_memory") is False else "."
    said |= {name: cost.removesuffix(unfilled) for name, (cost, _) in called.items()}
    if not said:
        return None
    in_shell = "# in the shell: " if called else ""
    lines = [f"{in_shell}unset {each.name}" for each in set_here] + [line for _, line in called.values()]
    return kit.Finding(
        title=f"{len(said)} debug {'switch is' if len(said) == 1 else 'switches are'} on: {', '.join(said)}",
        explanation=" ".join(f"{name}: {cost}." for name, cost in said.items()),
        evidence={"switches": tuple(said)},
        treatment=kit.Treatment(
            name="switches-off", summary="switch the debug switches off", code="\n".join(lines)
        ),
    )


def is_on(switch: Switch, facts: kit.Facts) -> bool:
    """Whether the value switches something on that several ranks, or a loaded Transformer Engine, read."""
    variables, te = facts.environment.variables, facts.packages().get("transformer_engine")
    value = variables[switch.name].strip().lower()
    if not str(facts.get("training.distributed.wrapper") or "").startswith(switch.under):
        return False
    if switch.name.startswith("TORCH_DISTRIBUTED") and variables.get("WORLD_SIZE", "1") in ("", "0", "1"):
        return False
    if switch.name.startswith("NVTE_") and not (te and (te.imported or not kit.recorded(facts, "network"))):
        return False
    return value not in OFF if switch.values is None else re.fullmatch(switch.values, value) is not None


def _switched(value: str) -> kit.Facts:
    return kit.example(variables={"CUDA_LAUNCH_BLOCKING": value}, debug_switches={"anomaly_detection": False})


FIRES = _switched("1")
SILENT = _switched("0")
