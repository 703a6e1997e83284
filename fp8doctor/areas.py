"""The areas of the checks, the severities of findings, and the codes of withdrawn checks."""

from typing import Literal

Severity = Literal["info", "warning", "error"]

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""Ascending."""

AREAS = (
    "environment",
    "device",
    "engagement",
    "shapes",
    "compilation",
    "checkpointing",
    "memory",
    "numerics",
    "distributed",
    "step",
)
"""Folders of ``checks/``, in the order in which the report shows them."""

RETIRED = {
    "CKP003": "what recomputation costs FP8 more than BF16 is in the line Why and in the table of variants",
    "CMP007": "every speedup is over the best BF16, compiled or not; the table of variants has all of them",
    "CMP006": "the table of variants has the step compiled block by block, without its seconds to compile",
    "ENV007": "STP001 names an old Transformer Engine where the host sets the pace",
    "GPU003": "GPU002 says that the GPU has no FP8",
    "GPU004": "a slowed or shared GPU is named in the line Sure",
    "GPU005": "without a GPU every number is called estimated; 'fp8doctor env' says why torch sees none",
    "LORA001": "the row LoRA has the adapters' share; the table of variants has the step without them",
    "LORA004": "the cost model counts no weight gradient of a frozen layer, so the estimate holds it",
    "NUM002": "'fp8doctor health' has the error of every layer's casts over a run",
    "SHP006": "the first line of the report has the number of parameters",
    "STP002": "the line Why has the casts' cost and what the matmuls save",
    "STP003": "the bound of the speedup is in the details (-v)",
    "STP005": "the first line says by how much FP8 is faster",
    "STP006": "the line Why has the parts of the difference, with what no part explains",
    "STP009": "a busy host is named in the line Sure",
}
"""Withdrawn code, which --select, --ignore and explain take -> what says it now, without its full stop."""
