"""A stand-in for CUDA's caching allocator on a machine without a GPU: how many devices there are and what
each counted."""

from typing import Any

import pytest
import torch


def install(
    monkeypatch: pytest.MonkeyPatch, *stats: dict[str, int] | Exception, backend: str = "native"
) -> None:
    """CUDA is initialized, with one device for each of ``stats``; an exception is raised when it is asked
    for."""

    def memory_stats(device: int) -> Any:
        answer = stats[device]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(stats))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
