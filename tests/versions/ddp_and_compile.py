"""Whether FP8 layers of torchao survive DDP's splitting of graphs: ``python -m tests.versions.ddp_and_compile
FOLDER``

Makes a virtual environment with torch 2.8, the oldest that torchao 0.10 to 0.14 run in, under FOLDER (several
GB), puts each wheel of torchao in front of it and trains two steps below DDP on a CPU, in one process. Writes
ddp_and_compile.md beside this file, and what fp8doctor sees of ddp_model.py to recorded/. An environment that
is there already is used again. The network is used here and in no test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import venv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

from tests.versions.known_versions import unpacked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = Path(__file__).with_suffix(".md")
MODEL = HERE / "ddp_model.py"

TORCH = "2.8.0"
TORCHAO = ("0.10.0", "0.12.0", "0.13.0", "0.14.1")
EXAMINED = ("0.12.0", "0.13.0")
"""The last that raises and the first that does not; their reports are kept."""

NEEDED = ("click", "jinja2", "msgspec", "nvidia-ml-py", "numpy", "packaging", "rich", "tabulate", "tqdm")

CASES = (
    "around it",
    "around it, no residuals",
    "around it, not split",
    "blocks",
    "around it, backend eager",
    "around it, 0.25 MiB",
    "around it, frozen beside adapters",
    "around it, MX layers",
    "around it, errors suppressed",
)

TRAIN = """
import sys
sys.path.insert(0, {here!r})
import torch
import ddp_model
case = {case!r}
torch._dynamo.config.optimize_ddp = case != "around it, not split"
torch._dynamo.config.suppress_errors = "suppressed" in case
width = 64 if "MiB" in case else ddp_model.WIDTH
model = ddp_model.mx_decoder(width) if "MX" in case else ddp_model.decoder(width, emulate=True)
if "adapters" in case:
    model.requires_grad_(False)
    for block in model:
        block.up, block.down = ddp_model.Lora(block.up), ddp_model.Lora(block.down)
if "residuals" in case:
    model = torch.nn.Sequential(*(layer for block in model for layer in (block.norm, block.up, block.down)))
backend = "eager" if "eager" in case else "aot_eager"
if case == "blocks":
    for block in model:
        block.compile(backend=backend)
model = torch.nn.parallel.DistributedDataParallel(model)
if case != "blocks":
    model = torch.compile(model, backend=backend)
try:
    for _ in range(2):
        model(torch.randn(64, width).bfloat16()).float().square().mean().backward()
    said = "ran"
except Exception as error:
    said = f"{{type(error).__name__}}: {{' '.join(str(error).split())[:60]}}"
print("said:", said, flush=True)
"""


def python_of(folder: Path) -> Path:
    """Return the interpreter of the environment, which is made when it is not there."""
    home = folder / f"torch-{TORCH}"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, f"torch=={TORCH}", *NEEDED], check=True, timeout=3600)
    return python


def environment(*folders: Path) -> dict[str, str]:
    found = os.pathsep.join(map(str, (*folders, ROOT)))
    return os.environ | {"PYTHONPATH": found, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def rows(python: Path, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Train in every case with every torchao."""
    for version in TORCHAO:
        wheel = unpacked(folder, f"torchao=={version}")
        for case in CASES:
            program = TRAIN.format(here=str(HERE), case=case)
            done = subprocess.run(
                [python, "-c", program],
                env=environment(wheel),
                capture_output=True,
                text=True,
                check=False,
                timeout=3600,
            )
            yield version, case, done.stdout.rpartition("said: ")[2].strip() or done.stderr.strip()[-200:]


def examine(python: Path, folder: Path) -> None:
    """Keep what fp8doctor sees with the torchao that raises and with the one that does not."""
    (HERE / "recorded").mkdir(exist_ok=True)
    for version in EXAMINED:
        report = HERE / "recorded" / f"cpu-ddp-torchao-{version}.json"
        command = [python, "-m", "fp8doctor", MODEL.name, "--no-trial", "--fail-on", "never"]
        subprocess.run(
            [*command, "--save", report],
            cwd=HERE,
            env=environment(unpacked(folder, f"torchao=={version}")),
            check=True,
            timeout=3600,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = python_of(folder)
    examine(python, folder)
    table = tabulate(
        rows(python, folder),
        headers=("torchao", "torch.compile", "two steps"),
        tablefmt="github",
        disable_numparse=True,
    )
    said = (
        f"Made by `python -m tests.versions.ddp_and_compile FOLDER`, {datetime.now(UTC):%Y-%m-%d}, on a CPU "
        f"with torch {TORCH}: four blocks of two FP8 Linears, 512 wide, in DDP "
        "with buckets of 25 MiB, the first of 1."
    )
    TABLE.write_text(f"# FP8 layers of torchao where DDP splits graphs\n\n{said}\n\n{table}\n", "utf-8")
    print(table)


if __name__ == "__main__":
    main()
