"""Record every patient again on this machine's GPU: ``python research/record_patients.py FOLDER``

Runs the real ``fp8doctor`` command on each model file of tests/patients and research/patients and saves its
report under FOLDER, one JSON file per patient, named after the GPU and the patient. Recordings are never
edited by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMED = (
    "decoder_468m",
    "decoder_454m",
    "decoder_468m_compiled",
    "llama_8b",
    "llama_8b_float8",
    "lora",
    "gpt2_conv1d",
    "te_autocast",
    "te_without_autocast",
    "te_fused",
    "accelerate_te",
    "rowwise_narrow",
    "checkpointed_needlessly",
    "llama_8b_lora_r8",
    "llama_8b_lora_r32",
    "llama_kv_cache",
    "vit",
    "encoder_decoder",
    "few_tokens",
    "llama_eager_attention",
    "multi_query",
    "narrow_head",
    "cannot_be_saved",
    "lora_fp32",
    "cast_heavy_layer",
    "fp32_matmul",
    "trained_decoder",
    "trained_outlier",
    "static_scale",
    "graph_breaks",
    "te_transformer",
    "vit_large",
    "accelerate_te_wide",
    "accelerate_torchao",
    "accelerate_torchao_eager",
    "busy_neighbours",
    "checkpointed_of_need",
    "decoder_compiled_whole",
    "foreach_adamw",
    "rotated",
    "te_checkpointed_inside",
    "te_frozen",
    "te_llama_7b",
    "te_lora",
    "te_not_reentrant",
    "te_own_checkpoint",
    "te_tiny",
    "wide_head",
)
"""Patients whose recording holds a trial; the others are examined only."""

LIMIT_S = 300
"""Longest time one patient may take, s."""


def patients() -> list[Path]:
    """List the patients that run anywhere, then those that need a GPU."""
    folders = (ROOT / "tests" / "patients", ROOT / "research" / "patients")
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def gpu_slug() -> str:
    import torch

    if not torch.cuda.is_available():
        sys.exit("record.py needs a CUDA GPU: what it writes are facts of one.")
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_").removeprefix("nvidia_")


def record(path: Path, target: Path) -> bool:
    """Run the command on one patient; whether its report was saved. What it prints is shown."""
    command = [
        sys.executable,
        "-m",
        "fp8doctor",
        str(path),
        "--save",
        str(target),
        "--fail-on",
        "never",
        *(() if path.stem in TIMED else ("--no-trial",)),
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_COLOR": "1"}, timeout=LIMIT_S, check=False)
    return done.returncode == 0 and target.is_file()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of patients")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    slug, failed = gpu_slug(), []
    for path in patients():
        if arguments.only and path.stem not in arguments.only:
            continue
        print(f"=== {path.stem}", flush=True)
        if not record(path, arguments.folder / f"{slug}-{path.stem}.json"):
            failed.append(path.stem)
    print(f"{len(failed)} failed: {' '.join(failed)}" if failed else "all recorded", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
