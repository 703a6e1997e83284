"""A debug switch that was left on

A variable or setting makes CUDA, torch, Triton or Transformer Engine check, log or synchronize. Such a switch
helps to find an error and costs time in every step. FP8 suffers more than BF16, because it runs more and
shorter kernels. With CUDA_LAUNCH_BLOCKING the host waits for each of them; in deterministic mode a separate
kernel first fills every new tensor with NaN. `transformers.enable_full_determinism` sets both.

    CUDA_LAUNCH_BLOCKING=1 python train.py  # before

    python train.py                         # after

Ignore it while you are looking for that error, or if you need the determinism. A switch that costs time only
during compilation is information. fp8doctor reads the settings and does not time them. An empty value, 0 and
off switch nothing on, and TORCH_LOGS counts if a name has a plus or is `all`.
https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
https://github.com/NVIDIA/TransformerEngine/blob/02e278f/docs/envvars.rst
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fp8doctor import kit

OFF = ("", "0", "false", "off", "no", "none", "n", "f")
"""Values that switch nothing on, in any case."""


class Switch(NamedTuple):
    """A variable, the values that switch it on (without a pattern, all but `OFF`), and its cost."""

    name: str
    cost: str
    values: str | None = None
    each_step: bool = True
    """False when it costs only while something is compiled."""
    only_for: str = ""
    """What reads it: ``ranks``, ``te``, ``te log``; empty if nothing special does."""


ON = "1|true|on|yes|y"

SWITCHES = (
    # CUDA C++ Programming Guide, environment variables; HIP documentation, debugging.
    Switch("CUDA_LAUNCH_BLOCKING", "the host waits for every kernel before it launches the next"),
    Switch("HIP_LAUNCH_BLOCKING", "the host waits for every kernel before it launches the next"),
    Switch("AMD_SERIALIZE_KERNEL", "the host waits before or after every kernel", "[123]"),
    # c10/cuda/CUDACachingAllocator.cpp: for compute-sanitizer; straight to cudaMalloc.
    Switch(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor costs a cudaMalloc and a cudaFree, which synchronize"
    ),
    # torch/_inductor/config.py: nan_asserts; torch/_inductor/runtime/triton_heuristics.py.
    Switch(
        "TORCHINDUCTOR_NAN_ASSERTS", "compiled code checks every buffer for NaN and waits for the result", "1"
    ),
    Switch("TRITON_INTERPRET", "Triton's kernels run in Python, element by element", ON),
    # torch.distributed: every collective is preceded by a check that all ranks call the same one.
    Switch(
        "TORCH_DISTRIBUTED_DEBUG",
        "every collective is first compared across all ranks",
        "detail",
        only_for="ranks",
    ),
    # cuBLAS and cuDNN developer guides, logging.
    Switch("CUBLASLT_LOG_LEVEL", "cuBLAS logs every matmul", "[2345]"),
    Switch("CUDNN_LOGLEVEL_DBG", "cuDNN logs every call", "[23]"),
    # Transformer Engine, docs/envvars.rst.
    Switch("NVTE_DEBUG", "every attention call logs its choice of backend", only_for="te log"),
    Switch(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "attention may take only deterministic, slower algorithms",
        "0",
        only_for="te",
    ),
    Switch("NVTE_BACKWARD_OVERRIDE", "gradients multiply in 16 bits", "high.*|deq.*", only_for="te"),
    Switch("NVTE_UNFUSED_FP8_UPDATE", "amax and scales are updated by many small kernels", only_for="te"),
    # torch/_logging/_internal.py; torch/_inductor/config.py; torch/compiler/config.py; Triton's docs.
    Switch(
        "TORCH_LOGS",
        "compilation writes its debug log",
        r"(?:.*,)?\s*(?:\+(?!help).*|all(?:,.*)?)",
        each_step=False,
    ),
    Switch(
        "TORCH_COMPILE_OVERRIDE_BACKENDS",  # torch 2.11 and newer, pytorch#172411
        "graphs run with another backend than the one that the code names",
        ".*eager.*",
    ),
    Switch(
        "TORCH_COMPILE_DEBUG", "compilation writes every graph and kernel to a folder", "1", each_step=False
    ),
    Switch(
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "every start compiles everything again", "1", each_step=False
    ),
    Switch("TRITON_ALWAYS_COMPILE", "every start compiles all Triton kernels again", ON, each_step=False),
)

STACKS = "every forward operation keeps its Python stack, and every gradient is checked for NaN"
FILLS = ", and every new tensor is filled with NaN first"

CALLS = (
    ("anomaly_detection", "autograd anomaly detection", STACKS, "torch.autograd.set_detect_anomaly(False)"),
    (
        "deterministic_algorithms",
        "deterministic algorithms",
        f"only deterministic kernels may run{FILLS}",
        "torch.use_deterministic_algorithms(False)   # or "
        "torch.utils.deterministic.fill_uninitialized_memory = False",
    ),
    (
        "nvdlfw_inspect",
        "nvdlfw_inspect",
        "Transformer Engine's layers inspect every tensor, and te.Linear breaks compiled graphs",
        "# remove nvdlfw_inspect.api.initialize(...)",
    ),
)
"""Switches that are a call: the fact, what a user says, the cost, and the line that undoes it."""


@kit.check("ENV006", "debug-switch-on", area="environment", severity="warning")
def debug_switch_on(facts: kit.Facts) -> kit.Finding | None:
    switches, variables = facts.environment.debug_switches, facts.environment.variables
    on = [
        (f"{each.name}={variables[each.name]}", each.cost, f"unset {each.name}", each.each_step)
        for each in SWITCHES
        if each.name in variables and is_on(each, variables[each.name]) and is_read(each, facts)
    ]
    unfilled = FILLS if switches.get("fill_uninitialized_memory") is False else "."
    on += [
        (said, cost.removesuffix(unfilled), undo, True)
        for name, said, cost, undo in CALLS
        if switches.get(name)
    ]
    if not on:
        return None
    slow = any(each_step for *_, each_step in on)
    names, lines = [said for said, *_ in on], dict.fromkeys(undo for _, _, undo, _ in on)
    in_shell = all(line.startswith("unset ") for line in lines)
    return kit.Finding(
        severity=None if slow else "info",
        title=f"{len(on)} debug {'switch is' if len(on) == 1 else 'switches are'} on: {', '.join(names)}",
        explanation=" ".join(f"{said}: {cost}." for said, cost, *_ in on)
        + ("" if slow else " This costs time during compilation, not in a step."),
        evidence={
            "switches": tuple(names),
            "in_each_step": tuple(said for said, *_, each_step in on if each_step),
        },
        treatment=kit.Treatment(
            name="switches-off",
            summary="switch the debug switches off",
            code="\n".join(
                f"# in the shell: {line}" if line.startswith("unset ") and not in_shell else line
                for line in lines
            ),
        ),
    )


def is_on(switch: Switch, value: str) -> bool:
    value = value.strip().lower()
    return value not in OFF if switch.values is None else re.fullmatch(switch.values, value) is not None


def is_read(switch: Switch, facts: kit.Facts) -> bool:
    """Whether something reads it: several ranks, or Transformer Engine, imported or yet to come."""
    te, variables = facts.packages().get("transformer_engine"), facts.environment.variables
    if switch.only_for == "ranks":
        return variables.get("WORLD_SIZE", "1") not in ("", "0", "1")
    if switch.only_for == "te log" and variables.get("NVTE_DEBUG_LEVEL", "0") not in ("1", "2"):
        return False
    loaded = te is not None and (te.imported is True or not kit.recorded(facts, "network"))
    return loaded or not switch.only_for


def _switched(value: str) -> kit.Facts:
    return kit.example(variables={"CUDA_LAUNCH_BLOCKING": value}, debug_switches={"anomaly_detection": False})


FIRES = _switched("1")
SILENT = _switched("0")
