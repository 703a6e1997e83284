"""Switches that a call sets and no variable shows; each makes every step slower until it is set back."""

from __future__ import annotations

import sys


def debug_switches() -> dict[str, bool]:
    """Read each switch of this process, without cuDNN's: it concerns convolutions, and FP8 has none."""
    import torch

    inspect = sys.modules.get("nvdlfw_inspect.api")
    return {
        "anomaly_detection": torch.is_anomaly_enabled(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized_memory": bool(
            getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        ),
        "nvdlfw_inspect": getattr(inspect, "DEBUG_MANAGER", None)
        is not None,  # nvdlfw_inspect 0.2.2: None until initialize()
    }
