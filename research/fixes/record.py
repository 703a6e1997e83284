"""Record on a GPU what printed fixes do there: ``python -m research.fixes.record FILE.json``.

Each script and each fix runs in a process of its own. CI replays the file: what is printed
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
from research.fixes.effect import defects, effect, printed
from research.fixes.scripts import EXPLORED, ON_A_GPU, Script, wrapped

AT_ONCE = 8
"""Scripts that run beside each other on the GPU. Nothing is timed."""

LONGEST_S = 300
"""Seconds that one fix may take, compilation included."""

PACKAGES = ("torch", "torchao", "transformer-engine", "transformers", "peft", "accelerate")


def one(case: tuple[str, str]) -> dict[str, Any]:
    """Return what is printed for a script, and what each fix does."""
    name, how = case
    script = wrapped(ON_A_GPU[name], how)
    said = in_a_process("printed", name, how)
    for fix in said.get("fixes", ()):
        if not (fix["explored"] or (fix["kind"] == "python" and {*fix["for"]} & {*script.codes})):
            continue
        codes = [code for code in fix["for"] if code in script.codes]
        fix["effect"] = in_a_process("effect", name, how, fix["name"], fix["code"])
        fix["defects"] = defects(fix["effect"], codes, said)
    return {"script": name, "wrapped": how, **said}


def in_a_process(*order: str) -> dict[str, Any]:
    """Carry out an order in a process of its own; one that has a GPU cannot be forked."""
    command = [sys.executable, "-m", "research.fixes.record", *order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    last = (done.stdout.splitlines() or [""])[-1]
    return json.loads(last) if last.startswith("{") else {"raised": done.stderr[-2000:]}


def carried_out(what: str, name: str, how: str, *fix: str) -> dict[str, Any]:
    """Return what `in_a_process` asks for."""
    script = wrapped(ON_A_GPU[name], how)
    if what == "printed":
        return printed(script, EXPLORED.get(name, ()))
    return effect(script, Treatment(name=fix[0], summary="s", code=fix[1]))


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cases() -> list[tuple[str, str]]:
    each: list[tuple[str, Script]] = list(ON_A_GPU.items())
    return [(name, how) for name, script in each for how in script.wrappings[:3]]


def main(file: str) -> None:
    """Write what every fix does on this machine's GPU."""
    import torch

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(one, cases()))
    recording = {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "packages": {each: installed(each) for each in PACKAGES},
        "rows": rows,
    }
    Path(file).write_text(json.dumps(recording, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(carried_out(*sys.argv[1:])))
    else:
        main(sys.argv[1])
