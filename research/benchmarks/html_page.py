"""How large the HTML of a 70B model is, and how long it takes. Bounds: 1 MB, and 0.5 s of CPU for the first
page of a process: ``python research/benchmarks/html_page.py``.

Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor.report import Report
from research.benchmarks.machine import machine
from tests.render.test_html import llama_70b

BOUND_S = 0.5
BOUND_BYTES = 1_000_000


def main() -> int:
    report = llama_70b()
    rows, sizes, seconds = [], [], []
    for name, write in (
        ("page, the first", Report.to_html),
        ("page", Report.to_html),
        ("fragment", Report._repr_html_),
    ):
        began = time.process_time()
        written = write(report)
        seconds.append(time.process_time() - began)
        sizes.append(len(written.encode()))
        rows.append((name, f"{sizes[-1] / 1000:.0f}", f"{1000 * seconds[-1]:.0f}"))
    print(machine(("jinja2",)), end="\n\n")
    print(tabulate(rows, headers=("Llama, 561 Linears", "kB", "CPU ms"), tablefmt="github"))
    return int(max(seconds) > BOUND_S or max(sizes) > BOUND_BYTES)


if __name__ == "__main__":
    sys.exit(main())
