"""Record on a GPU what printed fixes do there: ``python -m tests.fixes.record FILE.json``.

Each script runs in a process of its own that forks for every fix. CI replays the file: what is printed
today has to be what was applied.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fp8doctor.finding import Treatment
from tests.fixes.scripts import EXPLORED, ON_A_GPU, Script, wrapped

AT_ONCE = 6
"""Scripts that run beside each other on the GPU. Nothing is timed."""

PACKAGES = ("torch", "torchao", "transformer-engine", "transformers", "peft", "accelerate")


def one(name: str, how: str) -> dict[str, Any]:
    """Return what is printed for a script, and what each fix does."""
    import peft  # noqa: F401
    import torchao.float8  # noqa: F401

    from tests.fixes.effect import defects, effect, forked, printed

    script = wrapped(ON_A_GPU[name], how)
    assert script is not None
    said = forked(printed, script, EXPLORED.get(name, ()))
    for fix in said.get("fixes", ()):
        if fix["kind"] != "python" or not (fix["explored"] or {*fix["for"]} & {*script.codes}):
            continue
        treatment = Treatment(name=fix["name"], summary="s", code=fix["code"])
        fix["effect"] = forked(effect, script, treatment)
        fix["defects"] = defects(fix["effect"], [c for c in fix["for"] if c in script.codes], said["frozen"])
    return {"script": name, "wrapped": how, **said}


def started(case: tuple[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixes.record", "--one", *case], capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return {"script": case[0], "wrapped": case[1], "raised": done.stderr[-2000:]}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cases() -> list[tuple[str, str]]:
    each: list[tuple[str, Script]] = list(ON_A_GPU.items())
    return [(name, how) for name, script in each for how in script.wrappings]


def main(file: str) -> None:
    """Write what every fix does on this machine's GPU."""
    import torch

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(started, cases()))
    recording = {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "packages": {each: installed(each) for each in PACKAGES},
        "rows": rows,
    }
    Path(file).write_text(json.dumps(recording, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(one(*sys.argv[2:4])))
    else:
        main(sys.argv[1])
