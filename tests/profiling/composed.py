"""Traces composed event by event, as kineto writes them of a GPU."""

import json
from pathlib import Path
from typing import Any

from fp8doctor.profiling.profiled_step import ProfiledStep, step_of
from fp8doctor.profiling.trace import read_trace


class Composed:
    """A composed trace, times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def add(self, category: str, name: str, start: float, end: float, thread: int, **arguments: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": end - start,
                "args": arguments,
            }
        )

    def operator(
        self, name: str, start: float, end: float, identity: int, thread: int = 10, **arguments: Any
    ) -> None:
        self.add("cpu_op", name, start, end, thread, **{"External id": identity}, **arguments)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launched: float = 0.0,
        stream: int = 7,
        operator: int | None = None,
        category: str = "kernel",
        thread: int = 10,
    ) -> None:
        self.correlation += 1
        link = {} if operator is None else {"External id": operator}
        self.add(
            "cuda_runtime",
            "cudaLaunchKernel",
            launched,
            launched + 2,
            thread,
            correlation=self.correlation,
            cbid=211,
        )
        self.add(
            category, name, start, end, stream, correlation=self.correlation, stream=stream, device=0, **link
        )

    def write(self, folder: Path, name: str = "composed.json", **document: Any) -> Path:
        path = folder / name
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": 0}
        path.write_text(json.dumps({**head, **document, "traceEvents": self.events}))
        return path

    def read(self, folder: Path) -> ProfiledStep:
        return step_of(read_trace(self.write(folder)))
