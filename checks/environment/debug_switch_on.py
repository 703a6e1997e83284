"""A debug switch that was left on

What it finds. A variable or setting makes CUDA, torch, Triton or Transformer Engine check, log or
synchronize.

Why it matters. Such a switch helps to find an error and costs time in every step. FP8 suffers more than BF16,
because it runs more and shorter kernels. With CUDA_LAUNCH_BLOCKING, the host waits for each of them. In
deterministic mode, a separate kernel first fills every new tensor with NaN, outputs and FP8 copies included.
`transformers.enable_full_determinism` sets both.

Fix. Unset it once you have found the error.

    CUDA_LAUNCH_BLOCKING=1 python train.py  # before

    python train.py                         # after

When to ignore it. While you are looking for that error, or if you need the determinism. A switch that costs
time only during compilation is reported as information.

How it is detected, and limits. fp8doctor reads the variables (0, off and an empty value switch nothing on),
anomaly detection, deterministic algorithms and nvdlfw_inspect. TORCH_LOGS counts if a name has a plus or is
`all`; `TORCH_LOGS=recompiles,graph_breaks` does not. cuDNN's own switches concern convolutions and are left
out. The check reads settings; it does not time them.

References. https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/trainer_utils.py
https://github.com/NVIDIA/TransformerEngine/blob/02e278f/docs/envvars.rst
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, Treatment
from fp8doctor.registry import check

OFF = ("", "0", "false", "off", "no", "none", "n", "f")
"""Values that switch nothing on, in any case."""


def uses_te(facts: Facts) -> bool:
    """Whether Transformer Engine reads its variables here: it is imported, or, without a model, installed."""
    packages = facts.packages()
    return "transformer_engine" in packages and (
        packages["transformer_engine"].imported is True or not recorded(facts, "network")
    )


def logs_attention(facts: Facts) -> bool:
    return uses_te(facts) and facts.environment.variables.get("NVTE_DEBUG_LEVEL", "0") in ("1", "2")


def several_processes(facts: Facts) -> bool:
    return facts.environment.variables.get("WORLD_SIZE", "1") not in ("", "0", "1")


def always(facts: Facts) -> bool:
    return True


class Switch(NamedTuple):
    """A variable, the values that switch it on (without a pattern, all but `OFF`), and its cost."""

    name: str
    cost: str
    values: str | None = None
    each_step: bool = True
    """False when it costs only while something is compiled."""
    applies: Callable[[Facts], bool] = always


SWITCHES = (
    # CUDA C++ Programming Guide, environment variables; HIP documentation, debugging.
    Switch("CUDA_LAUNCH_BLOCKING", "the host waits for every kernel before it launches the next"),
    Switch("HIP_LAUNCH_BLOCKING", "the host waits for every kernel before it launches the next"),
    Switch("AMD_SERIALIZE_KERNEL", "the host waits before or after every kernel", values="[123]"),
    # c10/cuda/CUDACachingAllocator.cpp: for compute-sanitizer; straight to cudaMalloc.
    Switch(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor costs a cudaMalloc and a cudaFree, which synchronize"
    ),
    # torch/_inductor/config.py: nan_asserts; torch/_inductor/runtime/triton_heuristics.py.
    Switch(
        "TORCHINDUCTOR_NAN_ASSERTS",
        "compiled code checks every buffer for NaN and waits for the result",
        values="1",
    ),
    Switch(
        "TRITON_INTERPRET", "Triton's kernels run in Python, element by element", values="1|true|on|yes|y"
    ),
    # torch.distributed: every collective is preceded by a check that all ranks call the same one.
    Switch(
        "TORCH_DISTRIBUTED_DEBUG",
        "every collective is first compared across all ranks",
        values="detail",
        applies=several_processes,
    ),
    # cuBLAS and cuDNN developer guides, logging.
    Switch("CUBLASLT_LOG_LEVEL", "cuBLAS logs every matmul", values="[2345]"),
    Switch("CUDNN_LOGLEVEL_DBG", "cuDNN logs every call", values="[23]"),
    # Transformer Engine, docs/envvars.rst.
    Switch("NVTE_DEBUG", "every attention call logs its choice of backend", applies=logs_attention),
    Switch(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "attention may take only deterministic, slower algorithms",
        values="0",
        applies=uses_te,
    ),
    Switch("NVTE_BACKWARD_OVERRIDE", "gradients multiply in 16 bits", values="high.*|deq.*", applies=uses_te),
    Switch("NVTE_UNFUSED_FP8_UPDATE", "amax and scales are updated by many small kernels", applies=uses_te),
    # torch/_logging/_internal.py; torch/_inductor/config.py; torch/compiler/config.py; Triton's
    # documentation.
    Switch(
        "TORCH_LOGS",
        "compilation writes its debug log",
        values=r"(?:.*,)?\s*(?:\+(?!help).*|all(?:,.*)?)",
        each_step=False,
    ),
    Switch(
        "TORCH_COMPILE_OVERRIDE_BACKENDS",  # torch 2.11 and newer, pytorch#172411
        "graphs run with another backend than the one that the code names",
        values=r".*eager.*",
    ),
    Switch(
        "TORCH_COMPILE_DEBUG",
        "compilation writes every graph and kernel to a folder",
        values="1",
        each_step=False,
    ),
    Switch(
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "every start compiles everything again",
        values="1",
        each_step=False,
    ),
    Switch(
        "TRITON_ALWAYS_COMPILE",
        "every start compiles all Triton kernels again",
        values="1|true|on|yes|y",
        each_step=False,
    ),
)


class On(NamedTuple):
    """A switch that is on, as a user would say and undo it."""

    said: str
    cost: str
    undo: str
    each_step: bool


@check("ENV006", "debug-switch-on", area="environment", severity="warning")
def debug_switch_on(facts: Facts) -> Finding | None:
    on = [*variables_on(facts), *calls_on(facts.environment.debug_switches)]
    if not on:
        return None
    slow = any(each.each_step for each in on)
    return Finding(
        severity=None if slow else "info",
        title=f"{len(on)} debug {'switch is' if len(on) == 1 else 'switches are'} on: "
        f"{', '.join(each.said for each in on)}",
        explanation=" ".join(f"{each.said}: {each.cost}." for each in on)
        + ("" if slow else " This costs time during compilation, not in a step."),
        evidence={
            "switches": tuple(each.said for each in on),
            "in_each_step": tuple(each.said for each in on if each.each_step),
        },
        treatment=Treatment(
            name="switches-off",
            summary="switch the debug switches off",
            code="\n".join(lines_that_undo(on)),
        ),
    )


def lines_that_undo(on: list[On]) -> list[str]:
    """List the distinct lines; among calls of Python, those for the shell are comments."""
    lines = list(dict.fromkeys(each.undo for each in on))
    if all(line.startswith("unset ") for line in lines):
        return lines
    return [f"# in the shell: {line}" if line.startswith("unset ") else line for line in lines]


def variables_on(facts: Facts) -> Iterator[On]:
    for switch in SWITCHES:
        value = facts.environment.variables.get(switch.name)
        if value is not None and is_on(switch, value) and switch.applies(facts):
            yield On(f"{switch.name}={value}", switch.cost, f"unset {switch.name}", switch.each_step)


def is_on(switch: Switch, value: str) -> bool:
    value = value.strip().lower()
    return value not in OFF if switch.values is None else re.fullmatch(switch.values, value) is not None


def calls_on(switches: dict[str, bool]) -> Iterator[On]:
    if switches.get("anomaly_detection"):
        cost = "every forward operation keeps its Python stack, and every gradient is checked for NaN"
        yield On("autograd anomaly detection", cost, "torch.autograd.set_detect_anomaly(False)", True)
    if switches.get("deterministic_algorithms"):
        fills = switches.get("fill_uninitialized_memory", True)
        cost = "only deterministic kernels may run" + (
            ", and every new tensor is filled with NaN first" if fills else ""
        )
        undo = "torch.use_deterministic_algorithms(False)" + (
            "   # or torch.utils.deterministic.fill_uninitialized_memory = False" if fills else ""
        )
        yield On("deterministic algorithms", cost, undo, True)
    if switches.get("nvdlfw_inspect"):
        cost = "Transformer Engine's layers inspect every tensor, and te.Linear breaks compiled graphs"
        yield On("nvdlfw_inspect", cost, "# remove nvdlfw_inspect.api.initialize(...)", True)


def _switched(value: str) -> Facts:
    return example(variables={"CUDA_LAUNCH_BLOCKING": value}, debug_switches={"anomaly_detection": False})


FIRES = _switched("1")
SILENT = _switched("0")
