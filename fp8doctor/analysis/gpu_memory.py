"""How much of a GPU's memory a step may fill."""

from __future__ import annotations

USABLE = 0.9
"""Share of the memory that a step may fill. The rest is for the CUDA context (about 0.5 GiB), for fragments
of the allocator and for workspaces. A convention of this tool, on the safe side."""
